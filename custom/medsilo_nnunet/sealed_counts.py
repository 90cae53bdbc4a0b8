"""A fingerprint as counts in places that all hospitals have in common, so that sealed sums can be taken of it.

Intensities have places that need no agreement: each number with 13 binary digits that float32 can hold. Sizes have one
for each number of voxels. Spacings are any real numbers, so the hospitals first tell which of them they have, without
counts. Of the share that cropping leaves, nnU-Net's planner asks only on which side of 3/4 the median lies.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from medsilo.extend import Message, Refused, Tensors
from medsilo_nnunet.fingerprint import AXES, SAMPLES, Fingerprint
from medsilo_nnunet.fingerprint_message import MOST_CASES, Spacing, check_order
from medsilo_nnunet.float_bins import DIGITS, Counts, FloatHistogram, Values

LOWEST, HIGHEST = -148, 129  # binary exponents of numbers that float32 holds
STEPS = 1 << DIGITS - 1  # numbers of 13 digits with one exponent
ZERO = (HIGHEST - LOWEST + 1) * STEPS  # the place of 0; negative numbers are before it
INTENSITIES = 2 * ZERO + 1
SHARES = 1 << 12
LARGEST = (256, 1024, 4096, 16_384, 65_536)  # voxels along an axis: a hospital tells the first that is enough
CASES_SHAPE: dict[str, tuple[int, ...]] = {"cases": ()}  # of the number of cases, summed by itself
MOST = float(SAMPLES)  # no count is above it
MOST_PLACES = 1 << 24  # of spacings and sizes
EXTENTS, SHARE, CHANNEL = "extents-{}", "shares", "channel-{:02}"


class Grid(Message):
    """The spacings (mm) that occur along each axis, and what no size is above; of one hospital or of all."""

    spacings: Annotated[
        list[Annotated[list[Spacing], Field(min_length=1, max_length=MOST_CASES)]],
        Field(min_length=AXES, max_length=AXES),
    ]
    sizes: Literal[LARGEST]  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        for axis in self.spacings:
            check_order("spacings", axis)
        if self.sizes * sum(map(len, self.spacings)) > MOST_PLACES:
            raise ValueError("it has too many different spacings to seal them; collect without --sealed")
        return self

    @classmethod
    def of(cls, own: Fingerprint) -> Self:
        """Return a hospital's."""
        largest = max(size for axis in own.extents for _, size in axis)
        return cls(
            spacings=[sorted({spacing for spacing, _ in axis}) for axis in own.extents],
            sizes=next(most for most in LARGEST if largest <= most),
        )

    @classmethod
    def joined(cls, several: Iterable["Grid"]) -> Self:
        """Return that of all hospitals."""
        known = list(several)
        axes = [sorted(set().union(*axis)) for axis in zip(*(one.spacings for one in known), strict=True)]
        return cls(spacings=axes, sizes=max(one.sizes for one in known))

    def counts(self, own: Fingerprint) -> Tensors:
        """Return a hospital's counts; raises Refused where it has what no place is for."""
        found = {SHARE: np.zeros(SHARES)}
        for number, (axis, spacings) in enumerate(zip(own.extents, self.spacings, strict=True)):
            rows = {spacing: row for row, spacing in enumerate(spacings)}
            table = found[EXTENTS.format(number)] = np.zeros((len(spacings), self.sizes))
            for (spacing, size), cases in axis.items():
                if spacing not in rows or size > self.sizes:
                    raise Refused("the server: it has no place for a spacing or a size of this hospital")
                table[rows[spacing], size - 1] = cases
        for share, cases in own.shares.items():
            found[SHARE][min(int(share * SHARES), SHARES - 1)] += cases
        for number, channel in enumerate(own.channels):
            row = found[CHANNEL.format(number)] = np.zeros(INTENSITIES)
            row[places_of(channel.values)] = channel.counts
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def fingerprint(self, samples: int, sums: Tensors) -> Fingerprint:
        """Return the fingerprint of all hospitals together from the sums of their counts; raises Refused."""
        whole = {name: _whole(tensor) for name, tensor in sums.items()}
        extents = []
        for number, spacings in enumerate(self.spacings):
            table = whole[EXTENTS.format(number)]
            pairs = zip(*map(np.ndarray.tolist, table.nonzero()), strict=True)
            extents.append(Counter({(spacings[row], place + 1): int(table[row, place]) for row, place in pairs}))
        shares = Counter({(place + 0.5) / SHARES: int(n) for place, n in enumerate(whole[SHARE]) if n})
        channels = []
        for name in sorted(name for name in whole if name.startswith(CHANNEL[:-5])):
            (places,) = whole[name].nonzero()
            channels.append(FloatHistogram.of_bins(numbers_at(places), whole[name][places]))
        return Fingerprint(samples, tuple(extents), shares, tuple(channels))

    def shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the counts."""
        shapes = {EXTENTS.format(number): (len(own), self.sizes) for number, own in enumerate(self.spacings)}
        rows = {CHANNEL.format(number): (INTENSITIES,) for number in range(channels)}
        return {**shapes, SHARE: (SHARES,), **rows}


def cases_told(cases: int) -> Tensors:
    """Return a hospital's number of cases."""
    return {"cases": torch.tensor(float(cases), dtype=torch.float64)}


def cases_of(sums: Tensors) -> int:
    """Return the cases of all hospitals from their sum; raises Refused."""
    return int(_whole(sums["cases"]))


def places_of(values: Values) -> NDArray[np.int64]:
    """Return the place of each number of 13 binary digits; raises Refused for one that float32 can't hold."""
    mantissa, exponent = np.frexp(np.abs(values))
    if (values != 0)[(exponent < LOWEST) | (exponent > HIGHEST)].any():
        raise Refused("an image has intensities that are no numbers of 32 bits; correct it")
    above = np.ldexp(mantissa, DIGITS).astype(np.int64) - STEPS + 1
    rank = np.where(values == 0, 0, (exponent.astype(np.int64) - LOWEST) * STEPS + above)
    return ZERO + np.sign(values).astype(np.int64) * rank


def numbers_at(places: NDArray[np.int64]) -> Values:
    """Return the number of each place."""
    rank = np.abs(places - ZERO)
    exponent, above = np.divmod(rank - 1, STEPS)
    size = np.ldexp((above + STEPS).astype(np.float64), exponent + LOWEST - DIGITS)
    return np.where(rank == 0, 0.0, np.sign(places - ZERO) * size)


def _whole(sums: Tensor) -> Counts:
    values = sums.numpy()
    if (values < 0).any() or (values != np.rint(values)).any():
        raise Refused("the hospitals' counts do not add up to whole numbers; one of them sent none: begin anew")
    return values.astype(np.int64)
