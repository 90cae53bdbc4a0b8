"""Encode numbers as integers modulo 2^64, so that a sum does not depend on the order of the additions."""

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

# number of zeros after the encoded numbers; if masks are removed wrongly, these integers are no longer zero
CHECK = 4
CHUNK = 1 << 15
MOST_ROUNDED = 128.0  # maximum rounding error of a sum over 256 sites, in units of the last place
USED = 0.999  # fraction of the integers' range that sums may use; the remaining fraction is for rounding errors

BITS = 64
WORD, SIGNED = np.dtype("<u8"), np.dtype("<i8")
CARRIER = torch.int64


@dataclass(frozen=True)
class FixedPoint:
    """Encodes numbers as integers with a fixed scale.

    Args:
        bound: The largest absolute value that a site may send.
        weights: The largest sum of all sites' weights. In a plain sum, each site has the weight 1.
        one: The largest weight of a site. Before rounding, numbers are multiplied by the site's weight divided by the
            largest weight, so that large weights cost no precision.
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
        """The factor by which a site with the largest weight multiplies its numbers: the largest power of two with
        which no sum overflows.
        """
        most = USED * 2.0 ** (BITS - 1) / self.weights * self.one
        return 2.0 ** math.floor(math.log2(most / self.bound))

    def check(self, name: str, values: Tensor) -> None:
        """Raise Refused with the tensor's name, unless all values are finite and within the bound."""
        if not values.numel():
            return
        low, high = (float(value) for value in torch.aminmax(values))
        if math.isnan(low) or math.isnan(high):
            raise Refused(f"{name} contains NaN and was not sent")
        if max(-low, high) > self.bound:
            raise Refused(
                f"{name} holds {low if -low > high else high:.6g}, beyond the bound of {self.bound:g}, so nothing "
                f"was sent; raise secure_aggregation.clip, or lower training.learning_rate"
            )

    def encode(self, values: Tensor, words: Words, weight: int) -> None:
        flat = values.detach().reshape(-1)
        given = (flat if flat.dtype == torch.float64 else flat.float()).cpu().numpy()
        room = np.empty(min(CHUNK, len(given)), np.float64)
        signed, unit = words.view(SIGNED), self.scale * weight / self.one
        for start in range(0, len(given), CHUNK):
            part = given[start : start + CHUNK]
            scaled = np.multiply(part, unit, out=room[: len(part)], dtype=np.float64)
            signed[start : start + len(part)] = np.rint(scaled, out=scaled)

    def decode(self, words: Words, divisor: int, values: Tensor) -> None:
        flat = values.reshape(-1).numpy()
        signed, unit = words.view(SIGNED), self.scale * divisor / self.one
        for start in range(0, len(flat), CHUNK):
            part = signed[start : start + CHUNK]
            flat[start : start + CHUNK] = np.divide(part, unit, dtype=np.float64)

    def within(self, words: Words, weight: int) -> bool:
        """Return True if the integers can be a weighted sum of numbers within the bound."""
        signed = words.view(SIGNED)
        most = weight / self.one * self.bound * self.scale + MOST_ROUNDED
        return not len(signed) or bool(-most <= signed.min() and signed.max() <= most)


@dataclass(frozen=True)
class Flat:
    """The order in which named tensors are stored in one sequence of 64-bit integers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Flat":
        """Return the order of tensors in the sequence of integers; raise MedsiloError unless all tensors contain
        floating point numbers.
        """
        for name, tensor in sorted(tensors.items()):
            if not tensor.is_floating_point():
                raise MedsiloError(
                    f"{name} has the type {tensor.dtype}; secure aggregation adds floating point numbers only"
                )
        names = tuple(sorted(tensors))
        return cls(names, tuple(tuple(tensors[n].shape) for n in names), tuple(tensors[n].dtype for n in names))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def words(self) -> int:
        return sum(self.sizes) + CHECK

    def encode(self, tensors: Mapping[str, Tensor], fixed: FixedPoint, weight: int = 1) -> Words:
        """Multiply tensors by an integer weight and encode them as 64-bit integers; raise Refused if a tensor is
        missing or out of range.
        """
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
        """Decode a sum, and divide the decoded numbers by the divisor; raise Refused if the integers cannot be a sum
        of encoded numbers.

        Args:
            weight: The sum of the weights of all sites in the sum.
        """
        if words[-CHECK:].any() or not fixed.within(words[:-CHECK], weight):
            raise Refused(
                "a sum cannot be unmasked: some hospital's numbers, shares or keys do not belong to this round"
            )
        tensors, start = {}, 0
        for name, shape, size, dtype in zip(self.names, self.shapes, self.sizes, self.dtypes, strict=True):
            wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
            tensor = torch.empty(shape, dtype=wide)
            fixed.decode(words[start : start + size], divisor, tensor)
            tensors[name] = tensor.to(dtype)
            start += size
        return tensors


def as_tensor(words: Words) -> Tensor:
    """Return unsigned integers as a tensor of signed integers for sending; both share their memory."""
    return torch.from_numpy(words.view(SIGNED))


def as_words(sender: str, tensor: object, count: int) -> Words:
    """Return a received tensor as unsigned integers, if possible without a copy. If the tensor has a wrong type or
    shape, raise Refused with the sender's name.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype != CARRIER or tensor.layout != torch.strided:
        raise Refused(f"{sender}: its masked numbers are not a tensor of {BITS}-bit integers")
    if tuple(tensor.shape) != (count,):
        raise Refused(f"{sender}: its masked numbers have the shape {list(tensor.shape)}, expected [{count}]")
    return tensor.cpu().contiguous().numpy().view(WORD)
