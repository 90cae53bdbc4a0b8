"""Lay the tensors of one group one after another, so that mathematics runs over a few long vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

# Numbers that are handled at once: few enough for a processor's cache in double precision, many enough that the
# cost of calling torch does not show.
BLOCK = 1 << 18


@dataclass(frozen=True)
class Piece:
    """A tensor, or a stretch of a long one."""

    name: str
    start: int
    stop: int
    whole: bool

    def of(self, tensors: Tensors) -> Tensor:
        """The piece's numbers, in one dimension, without a copy."""
        flat = _flat(tensors[self.name])
        return flat if self.whole else flat[self.start : self.stop]


@dataclass(frozen=True)
class Block:
    """At most BLOCK numbers that follow each other in a section: many small tensors, or a part of a long one."""

    start: int
    size: int
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]

    def read(self, tensors: Tensors, into: Tensor) -> None:
        """Copies the block's numbers to `into` [size], which may be of a wider type."""
        copy_stretches([piece.of(tensors) for piece in self.pieces], into)

    def write(self, numbers: Tensor, tensors: Tensors) -> None:
        """Put numbers [size], which may be of a wider type, where the block's tensors have theirs."""
        torch._foreach_copy_([piece.of(tensors) for piece in self.pieces], numbers.split(self.sizes))

    def subtract(self, tensors: Tensors, of: Tensor) -> None:
        """Takes the block's numbers off those of `of` [size], which may be of a wider type."""
        torch._foreach_sub_(of.split(self.sizes), [piece.of(tensors) for piece in self.pieces])


class TypeSection:
    """All tensors of one floating-point type, thought of as one vector."""

    def __init__(self, dtype: torch.dtype, shapes: dict[str, torch.Size], offset: int) -> None:
        self.dtype = dtype
        self.wide = torch.complex128 if dtype.is_complex else torch.float64
        self.kept = torch.promote_types(dtype, torch.float32)  # single precision at least
        self.names = sorted(shapes)  # the same places whoever came first: even the last bit may depend on the place
        self.shapes = [shapes[name] for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self.sizes)
        self.offset = offset  # in bytes, from the beginning of the parcel
        self.blocks = _blocks(self.names, self.sizes)
        self.widths = [block.size for block in self.blocks]

    def cut(self, width: int) -> list[Block]:
        """Return blocks of at most so many numbers, for whoever reads several sites' at once."""
        return _blocks(self.names, self.sizes, width)

    def room(self) -> Tensor:
        """Memory for all numbers of the section in single precision at least, not yet filled."""
        return torch.empty(self.size, dtype=self.kept)

    def scratch(self, widest: int) -> tuple[Tensor, Tensor]:
        """Memory for two times so many numbers in double precision, or the whole section if it has less."""
        widest = min(widest, self.size)
        return torch.empty(widest, dtype=self.wide), torch.empty(widest, dtype=self.wide)

    def flatten(self, tensors: Tensors) -> Tensor:
        """A new vector [size] with all tensors of the section."""
        if not self.names:
            return torch.empty(0, dtype=self.dtype)
        return torch.cat([_flat(tensors[name]) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """New tensors in the section's own type and shapes, each with its own memory (they are sent one by one)."""
        parts: Sequence[Tensor]
        if vector.dtype == self.dtype:
            parts = torch.split_with_sizes_copy(vector, self.sizes)  # type: ignore[func-returns-value, assignment]
        else:
            parts = [part.to(self.dtype) for part in vector.split(self.sizes)]
        named = zip(self.names, parts, self.shapes, strict=True)
        return {name: part if len(shape) == 1 else part.view(shape) for name, part, shape in named}


class Layout:
    """The make-up of a group: names, shapes and types, and the sections that are averaged."""

    def __init__(self, tensors: Tensors) -> None:
        self.names = list(tensors)
        self.signature = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.carried = [name for name, (_, dtype) in self.signature.items() if not _is_averaged(dtype)]
        shapes: dict[torch.dtype, dict[str, torch.Size]] = {}
        for name, (shape, dtype) in self.signature.items():
            if _is_averaged(dtype):
                shapes.setdefault(dtype, {})[name] = shape
        self.sections: list[TypeSection] = []
        self.bytes = 0
        for dtype in sorted(shapes, key=str):
            section = TypeSection(dtype, shapes[dtype], self.bytes)
            self.sections.append(section)
            self.bytes += section.size * dtype.itemsize

    def difference(self, tensors: Tensors) -> str | None:
        """The first key in which `tensors` differ from this layout and how, or None."""
        for name, tensor in tensors.items():
            expected = self.signature.get(name)
            if expected is None:
                return f"{name}: no other site sent it"
            if tensor.shape != expected[0]:
                return f"{name}: shape {list(tensor.shape)}, expected {list(expected[0])}"
            if tensor.dtype != expected[1]:
                return f"{name}: type {tensor.dtype}, expected {expected[1]}"
        if len(tensors) < len(self.signature):
            return f"{next(name for name in self.names if name not in tensors)}: missing"
        return None

    def rooms(self) -> dict[str, Tensor]:
        """Return tensors for all numbers that are averaged, in single precision at least, not yet filled."""
        return {
            name: torch.empty(shape, dtype=section.kept)
            for section in self.sections
            for name, shape in zip(section.names, section.shapes, strict=True)
        }

    def narrowed(self, wide: dict[str, Tensor], carried: Tensors) -> dict[str, Tensor]:
        """Return tensors in their own types, in the order in which they came, with those that are not averaged.

        `wide` is emptied on the way; a tensor that is of its own type already is returned itself.
        """
        kinds = self.signature.items()
        return {name: wide.pop(name).to(kind) if name in wide else carried[name] for name, (_, kind) in kinds}

    def restore(self, vectors: list[Tensor], carried: Tensors) -> dict[str, Tensor]:
        """New tensors, in the order in which they came, from one vector per section.

        `vectors` is emptied on the way: each vector goes as soon as its tensors exist.
        """
        tensors = dict(carried)
        for section in self.sections:
            tensors |= section.unflatten(vectors.pop(0))
        return {name: tensors[name] for name in self.names}


def copy_stretches(stretches: list[Tensor], into: Tensor) -> None:
    """Copy the numbers of all stretches, one after the other, to `into`, which may be of a wider type."""
    if len(stretches) == 1:
        into.copy_(stretches[0])
    else:
        torch._foreach_copy_(into.split_with_sizes([len(stretch) for stretch in stretches]), stretches)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor.view(-1)


def _is_averaged(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _blocks(names: list[str], sizes: list[int], width: int = BLOCK) -> list[Block]:
    """Cuts the row of tensors into blocks: small neighbours together, long tensors in parts."""
    blocks: list[Block] = []
    pieces: list[Piece] = []
    begin = filled = 0

    def close() -> None:
        nonlocal begin, filled
        if pieces:
            blocks.append(Block(begin, filled, tuple(pieces), tuple(piece.stop - piece.start for piece in pieces)))
        begin, filled = begin + filled, 0
        pieces.clear()

    for name, size in zip(names, sizes, strict=True):
        for start in range(0, size, width):
            stop = min(start + width, size)
            if filled + stop - start > width:
                close()
            pieces.append(Piece(name, start, stop, whole=stop - start == size))
            filled += stop - start
    close()
    return blocks
