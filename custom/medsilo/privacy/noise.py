"""Random numbers that nobody can guess, for noise and for sampling.

The bits are ChaCha20's, under a key of 32 bytes from the operating system. The key is made for every attempt of an
answer and never written, because noise in two different sums would cancel in their difference.

Floating-point noise on a floating-point sum shows the sum in its low digits (Mironov 2012 for Laplace, Jin et al. 2022
for the normal). So a sum is rounded to a grid of 2^-40 of the noise's standard deviation. The noise is a whole number
of its cells, drawn from the discrete Gaussian by rejection (after Canonne, Kamath and Steinke 2020). The results are
points of a grid that does not depend on the sum. Decisions that floating point leaves in doubt are made with 192 bits.
A small error remains: rounding d numbers to the grid moves a sum by at most √d cells more. This is below 1e-6 of the
bound as long as √d times the noise multiplier is below 10^6, and the bound has room for it (learning/private.py). With
so many cells, the discrete Gaussian's loss is that of the normal distribution that the account counts.
"""

import hashlib
import secrets
from decimal import Context, Decimal, localcontext
from typing import Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

CHUNK = 1 << 16  # numbers that are made at once: they stay in the processor's cache
EXACT = 2.0**-53
BITS = 40
CELLS = 2.0**BITS  # cells of the grid in one standard deviation
LARGEST = 20  # standard deviations: more has a probability of 1e-88
DOUBT = 2.0**-42  # relative error of exp(-e) and e ≤ 200 in floating point, with room to spare
LONG = 192  # bits of an exact decision
EXACTLY = Context(prec=80, Emin=-99999)

Floats = NDArray[np.float64]


class NoiseSource:
    """A stream of secret random numbers.

    Make a new source for every attempt of an answer; it gives each number once.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Begin a stream with a fresh key; with a given one of 32 bytes it is secret only as far as the key is."""
        drawn = secrets.token_bytes(32) if key is None else key
        self._stream = Cipher(algorithms.ChaCha20(drawn, bytes(16)), None).encryptor()

    @classmethod
    def from_seed(cls, seed: int, *purpose: str | int) -> Self:
        """Return a reproducible stream for synthetic data, from a plan's seed and a purpose."""
        said = "\x1f".join(map(str, ("medsilo noise 1", seed, *purpose)))
        return cls(hashlib.sha256(said.encode()).digest())

    # ------------------------------------------------------------------ uniform
    def words(self, count: int) -> NDArray[np.uint64]:
        """Return whole numbers of 64 random bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def uniform(self, count: int) -> Floats:
        """Return numbers in (0, 1], each of 53 bits."""
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * EXACT

    def poisson_sample(self, count: int, rate: float) -> list[int]:
        """The members of a Poisson sample: each is drawn independently with this chance."""
        return np.flatnonzero(self.uniform(count) <= rate).tolist() if rate < 1 else list(range(count))

    # ------------------------------------------------------------------ noise
    def whole_normal(self, count: int, bits: int = BITS) -> Floats:
        """Return whole numbers k with P(k) ∝ exp(-k² / 2σ²), σ = 2^bits."""
        made, missing = [np.empty(0)], count
        while missing > 0:
            tries = min(CHUNK, int(2.1 * missing) + 64)
            tried = accepted(self.words(tries), self.words(tries), bits, self)
            made.append(tried[np.isfinite(tried)])
            missing -= len(made[-1])
        return np.concatenate(made)[:count]

    def with_normal(self, exact: torch.Tensor, deviation: float) -> torch.Tensor:
        """Return the tensor with normal noise of this standard deviation, in its own type, on its own device."""
        if not deviation:
            return exact.detach().clone()
        cell, noise = deviation / CELLS, torch.from_numpy(self.whole_normal(exact.numel())).view(exact.shape)
        noise = noise.pin_memory() if exact.device.type == "cuda" else noise  # else the copy waits for the card
        there = noise.to(exact.device, non_blocking=True)  # a card rounds, adds and multiplies as a processor does
        return (((exact.detach().double() / cell).round() + there) * cell).to(exact.dtype)

    def geometric(self, scale: float) -> int:
        """Return a whole number k with P(k) ∝ exp(-|k| / scale)."""
        return self._failures(scale) - self._failures(scale)

    def _failures(self, scale: float) -> int:
        """Return a geometric number: P(k) = (1 - q) q^k with q = exp(-1 / scale)."""
        with localcontext(EXACTLY):
            return int(-self.long_uniform().ln() * Decimal(scale))

    def long_uniform(self, first: int | None = None) -> Decimal:
        """Return a number in (0, 1) of 192 bits. first: the first 64, where they are drawn already."""
        words = [*([] if first is None else [first]), *self.words(LONG // 64).tolist()][: LONG // 64]
        whole = (words[0] << 128) + (words[1] << 64) + words[2]
        with localcontext(EXACTLY):
            return Decimal(2 * whole + 1) / 2 ** (LONG + 1)


def accepted(numbers: NDArray[np.uint64], second: NDArray[np.uint64], bits: int, more: NoiseSource) -> Floats:
    """Make integers of the discrete Gaussian with σ = 2^bits from random words; NaN where a proposal is rejected.

    The proposal is |k| = v σ + u with P(v) = 2^-(v+1) and u uniform below σ, and either sign; it is accepted with
    probability
    13/16 · 2^v · exp(-k² / 2σ²), which is at most 0.986. more: random bits, for cases that floating point can't decide.
    """
    coins = (numbers >> np.uint64(BITS)) & np.uint64((1 << LARGEST) - 1) | np.uint64(1 << LARGEST)
    blocks = np.frexp((coins & (~coins + np.uint64(1))).astype(np.float64))[1] - 1.0  # tails before the first head
    size = blocks * 2.0**bits + (numbers & np.uint64((1 << bits) - 1)).astype(np.float64)
    minus = (numbers >> np.uint64(63)).astype(bool)
    chance = np.ldexp(13 / 16 * np.exp(-np.square(size / 2.0**bits) / 2), blocks.astype(np.int64))
    drawn = (second >> np.uint64(11)).astype(np.float64) * EXACT
    taken = drawn < chance
    for place in np.flatnonzero(np.abs(drawn - chance) <= chance * DOUBT + EXACT):
        with localcontext(EXACTLY):
            exact = (Decimal(-(int(size[place]) ** 2)) / 2 ** (2 * bits + 1)).exp() * 13 * 2 ** int(blocks[place]) / 16
            taken[place] = more.long_uniform(int(second[place])) < exact
    taken &= (blocks < LARGEST) & ~(minus & (size == 0))
    return np.where(taken, np.where(minus, -size, size), np.nan)
