"""Divide the tensors of a group into blocks, which the server processes one after another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
# One number for all averaged tensors, or a mapping from each averaged tensor's name to a number or to a tensor of equal
# shape.
Numbers = float | Mapping[str, float | Tensor]

# Number of values in a block: few enough for a processor's cache in double precision, and enough that calls of torch
# take little time.
BLOCK = 1 << 18
# number of columns that are read at once from every site; the more sites, the smaller the number
WIDEST, NARROWEST = 16 << 10, 4 << 10


@dataclass(frozen=True)
class Piece:
    name: str
    start: int
    stop: int
    whole: bool

    def of(self, tensors: Tensors) -> Tensor:
        tensor = tensors[self.name]
        flat = tensor if tensor.ndim == 1 else tensor.view(-1)
        return flat if self.whole else flat[self.start : self.stop]


class Block:
    """A block: consecutive values of a section, either from many small tensors or from a part of a long tensor."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.sizes = [piece.stop - piece.start for piece in pieces]
        self.size = sum(self.sizes)

    def of(self, tensors: Tensors) -> list[Tensor]:
        """Return the block's tensors; if a tensor extends over several blocks, return a view of the block's values."""
        return [tensors[piece.name] if piece.whole else piece.of(tensors) for piece in self.pieces]

    def flat(self, tensors: Tensors) -> list[Tensor]:
        return [piece.of(tensors) for piece in self.pieces]

    def read(self, tensors: Tensors, into: Tensor) -> None:
        torch._foreach_copy_(into.split(self.sizes), self.flat(tensors))

    def write(self, numbers: Tensor, tensors: Tensors) -> None:
        torch._foreach_copy_(self.flat(tensors), numbers.split(self.sizes))

    def subtract(self, tensors: Tensors, of: Tensor) -> None:
        """Subtract the block's values from a tensor, which may have a wider data type than the block."""
        torch._foreach_sub_(of.split(self.sizes), self.flat(tensors))


class TypeSection:
    """All tensors of one floating-point type, joined to one long vector."""

    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, torch.Size]) -> None:
        self.dtype = dtype
        self.kept = torch.promote_types(dtype, torch.float32)  # single precision at least
        # Names are sorted. The last bit of a sum depends on the order of the tensors, and this order must not depend on
        # the order of answers.
        self.names = sorted(shapes)
        self.shapes = {name: shapes[name] for name in self.names}
        self.size = sum(shape.numel() for shape in shapes.values())
        self.blocks = self.cut(BLOCK)
        self.widest = max((block.size for block in self.blocks), default=0)

    def cut(self, width: int) -> list[Block]:
        """Cut the section into blocks: neighbouring small tensors share a block, and long tensors are divided."""
        blocks: list[list[Piece]] = []
        room = 0
        for name in self.names:
            size = self.shapes[name].numel()
            for start in range(0, size, width):
                stop = min(start + width, size)
                if stop - start > room:
                    blocks.append([])
                    room = width
                blocks[-1].append(Piece(name, start, stop, whole=stop - start == size))
                room -= stop - start
        return [Block(pieces) for pieces in blocks]

    def side_by_side(self, rows: Sequence[Tensors]) -> Iterator[tuple[Block, Tensor]]:
        for block in self.cut(max(NARROWEST, min(WIDEST, BLOCK // len(rows)))):
            yield block, torch.stack([torch.cat(block.flat(row)) for row in rows]).double()


class Layout:
    def __init__(self, tensors: Tensors) -> None:
        self.signature = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        shapes: dict[torch.dtype, dict[str, torch.Size]] = {}
        for name, (shape, dtype) in self.signature.items():
            if dtype.is_floating_point:
                shapes.setdefault(dtype, {})[name] = shape
        self.sections = [TypeSection(dtype, shapes[dtype]) for dtype in sorted(shapes, key=str)]
        self.averaged = [name for section in self.sections for name in section.names]
        self.carried = sorted(self.signature.keys() - set(self.averaged))

    def rooms(self) -> dict[str, Tensor]:
        """Return uninitialised tensors for all values that are averaged, in at least single precision."""
        return {
            name: torch.empty(shape, dtype=section.kept)
            for section in self.sections
            for name, shape in section.shapes.items()
        }

    def narrowed(self, wide: dict[str, Tensor], carried: Tensors) -> dict[str, Tensor]:
        """Convert averaged tensors to the data types that they had before averaging, and add the tensors that are not
        averaged.

        A tensor that already has its original data type is not copied. Averaged tensors are removed from the mapping
        that the caller gives.
        """
        kinds = self.signature.items()
        return {name: wide.pop(name).to(kind) if name in wide else carried[name] for name, (_, kind) in kinds}


def spread(numbers: Numbers, layout: Layout) -> dict[str, Tensor]:
    given = numbers if isinstance(numbers, Mapping) else dict.fromkeys(layout.averaged, numbers)
    of = {name: given[name] for name in layout.averaged}
    return {
        name: own.contiguous() if isinstance(own, Tensor) else torch.tensor(own, dtype=torch.float64)
        for name, own in of.items()
    }


def numbers_of(block: Block, spread: Tensors) -> Tensor:
    into = torch.empty(block.size, dtype=torch.float64)
    for piece, part in zip(block.pieces, into.split(block.sizes), strict=True):
        value = spread[piece.name]
        part.copy_(piece.of(spread) if value.ndim else value)
    return into
