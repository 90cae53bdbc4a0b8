"""Numbers as integers modulo 2^64, whose sum is the same in every order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, PlanError, Refused
from medsilo.core.tensors import Tensors
from medsilo_secagg.streams import Words

CHECK = 4  # words behind the numbers that are zero: a mask that was not taken off right shows in them
CHUNK = 1 << 15  # numbers that are converted at once
MOST_ROUNDED = 128.0  # units by which the numbers of 256 sites are rounded together, at most
USED = 0.999  # share of the integers' range; the rest is room for rounding

BITS = 64  # of a word
WORD, SIGNED = np.dtype("<u8"), np.dtype("<i8")
CARRIER = torch.int64  # as which words travel


@dataclass(frozen=True)
class FixedPoint:
    """A coding of numbers as integers.

    bound: no number that a site sends may be larger, whatever its sign.
    weights: the largest sum of weights that numbers may be added with; the number of sites for a plain sum.
    one: the largest weight. Numbers are multiplied by their share of it and then rounded, so that weights of 300,000
        cases leave as many digits as those of three.
    """

    bound: float
    weights: int
    one: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0) or not 1 <= self.weights < 1 << 52:
            raise PlanError(
                f"secure aggregation: clip {self.bound!r} must be positive, and the weights' sum "
                f"{self.weights!r} from 1 to 2^52"
            )

    @cached_property
    def scale(self) -> float:
        """Integers per 1 that has the largest weight: the largest power of two with which no sum leaves the range of
        the integers."""
        most = USED * 2.0 ** (BITS - 1) / self.weights * self.one
        return 2.0 ** math.floor(math.log2(most / self.bound))

    def check(self, name: str, values: Tensor) -> None:
        """Raise Refused, with the tensor's name, unless all values are finite and within the bound."""
        if not values.numel():
            return
        low, high = (float(value) for value in torch.aminmax(values))
        if math.isnan(low) or math.isnan(high):
            raise Refused(f"{name} holds NaN; nothing of it was sent")
        if max(-low, high) > self.bound:
            raise Refused(
                f"{name} holds {low if -low > high else high:.6g}, beyond the bound of {self.bound:g}, so nothing "
                f"was sent; raise secure_aggregation.clip, or lower training.learning_rate"
            )

    def encode(self, values: Tensor, words: Words, weight: int) -> None:
        """Write checked values, times their weight, into words."""
        flat = values.detach().reshape(-1)
        given = (flat if flat.dtype == torch.float64 else flat.float()).cpu().numpy()
        room = np.empty(min(CHUNK, len(given)), np.float64)
        signed, unit = words.view(SIGNED), self.scale * weight / self.one
        for start in range(0, len(given), CHUNK):
            part = given[start : start + CHUNK]
            scaled = np.multiply(part, unit, out=room[: len(part)], dtype=np.float64)
            signed[start : start + len(part)] = np.rint(scaled, out=scaled)

    def decode(self, words: Words, divisor: int, values: Tensor) -> None:
        """Write the sum in the words, divided, into a tensor of floats."""
        flat = values.reshape(-1).numpy()
        signed, unit = words.view(SIGNED), self.scale * divisor / self.one
        for start in range(0, len(flat), CHUNK):
            part = signed[start : start + CHUNK]
            flat[start : start + CHUNK] = np.divide(part, unit, dtype=np.float64)

    def within(self, words: Words, weight: int) -> bool:
        """Return whether the words may be a sum of numbers within the bound whose weights add up to so much."""
        signed = words.view(SIGNED)
        most = weight / self.one * self.bound * self.scale + MOST_ROUNDED
        return not len(signed) or bool(-most <= signed.min() and signed.max() <= most)


@dataclass(frozen=True)
class Flat:
    """The order in which named tensors lie in one row of words."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Flat":
        """Return the order for tensors like these; raises MedsiloError where a tensor has no floating point numbers."""
        for name, tensor in sorted(tensors.items()):
            if not tensor.is_floating_point():
                raise MedsiloError(
                    f"{name} has the type {tensor.dtype}; secure aggregation adds floating point numbers only"
                )
        names = tuple(sorted(tensors))
        return cls(names, tuple(tuple(tensors[n].shape) for n in names), tuple(tensors[n].dtype for n in names))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def words(self) -> int:
        """The words of all tensors and of the check behind them."""
        return sum(self.sizes) + CHECK

    def encode(self, tensors: Mapping[str, Tensor], fixed: FixedPoint, weight: int = 1) -> Words:
        """Return the tensors as words, times an integer weight; raises Refused before anything is made of them."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise Refused(f"{name} is missing or has another shape than the hospitals agreed on")
            fixed.check(name, tensors[name])
        if not 0 <= weight <= fixed.one:
            raise Refused(f"the weight {weight} is not from 0 to {fixed.one}, for which the range was chosen")
        words = np.zeros(self.words, WORD)
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            fixed.encode(tensors[name], words[start : start + size], weight)
            start += size
        return words

    def decode(self, words: Words, fixed: FixedPoint, weight: int, divisor: int) -> Tensors:
        """Return the sum in the words, divided.

        weight: what the addends' weights add up to. Raises Refused when the words are not such a sum.
        """
        if words[-CHECK:].any() or not fixed.within(words[:-CHECK], weight):
            raise Refused("a sum does not open: some hospital's numbers, shares or keys are not of this round")
        tensors, start = {}, 0
        for name, shape, size, dtype in zip(self.names, self.shapes, self.sizes, self.dtypes, strict=True):
            wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
            tensor = torch.empty(shape, dtype=wide)
            fixed.decode(words[start : start + size], divisor, tensor)
            tensors[name] = tensor.to(dtype)
            start += size
        return tensors


def as_tensor(words: Words) -> Tensor:
    """Return the words as they travel: a tensor of integers, not copied."""
    return torch.from_numpy(words.view(SIGNED))


def as_words(sender: str, tensor: object, count: int) -> Words:
    """Return the words of a tensor that came, not copied; raises Refused, naming the sender, where it does not fit."""
    if not isinstance(tensor, Tensor) or tensor.dtype != CARRIER or tensor.layout != torch.strided:
        raise Refused(f"{sender}: its masked numbers are not a tensor of {BITS}-bit integers")
    if tuple(tensor.shape) != (count,):
        raise Refused(f"{sender}: its masked numbers have the shape {list(tensor.shape)}, expected [{count}]")
    return tensor.cpu().contiguous().numpy().view(WORD)
