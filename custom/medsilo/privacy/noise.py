"""Cryptographically secure random numbers for noise and for sampling.

ChaCha20 generates the random bits from a key of 32 bytes, which the operating system provides. Every attempt at an
answer uses a new key that is never stored, because equal noise on two sums would cancel in the sums'
difference.

If floating-point noise is added to a floating-point sum, the low digits reveal the sum (Mironov 2012 for Laplace noise,
Jin et al. 2022 for normal noise). To hide the low digits, the sum is rounded to a grid whose cells are 2^-40 of the
noise's standard deviation. The noise is an integer number of cells, sampled from the discrete Gaussian by rejection
(after Canonne, Kamath and Steinke 2020). The noisy sums lie on a grid, and this grid does not depend on the exact sum.
If floating-point numbers are too imprecise to decide whether to accept a sample, 192-bit arithmetic decides. Rounding d
values to the grid changes the vector of these values by at most √d cells. Rounding to the grid changes a vector by less
than 1e-6 of the clipping bound if √d times the noise multiplier is below 10^6. The clipping in learning/private.py
reserves a margin for the change by rounding. With cells of 2^-40 standard deviations, the discrete Gaussian has the
same privacy loss as the normal distribution, which the privacy account uses.
"""

import hashlib
import secrets
from decimal import Context, Decimal, localcontext
from typing import Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

CHUNK = 1 << 16  # number of values that are generated at once, and that fit into the processor's cache
EXACT = 2.0**-53
BITS = 40
CELLS = 2.0**BITS  # number of cells of the grid in one standard deviation
LARGEST = 20  # limit of the noise in standard deviations; a sample beyond this limit has a probability of 1e-88
DOUBT = 2.0**-42  # bound on the relative floating-point error of exp(-e) for e ≤ 200
LONG = 192  # bits of the random numbers with which exact arithmetic decides whether to accept a sample
EXACTLY = Context(prec=80, Emin=-99999)

Floats = NDArray[np.float64]


class NoiseSource:
    """A stream of secret random numbers, which returns each number once.

    Every attempt at an answer needs a new stream of random numbers.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Start a stream with a new random key, or with a key of 32 bytes, which the caller must keep secret."""
        drawn = secrets.token_bytes(32) if key is None else key
        self._stream = Cipher(algorithms.ChaCha20(drawn, bytes(16)), None).encryptor()

    @classmethod
    def from_seed(cls, seed: int, *purpose: str | int) -> Self:
        said = "\x1f".join(map(str, ("medsilo noise 1", seed, *purpose)))
        return cls(hashlib.sha256(said.encode()).digest())

    # ------------------------------------------------------------------ uniform
    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def uniform(self, count: int) -> Floats:
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * EXACT

    def poisson_sample(self, count: int, rate: float) -> list[int]:
        return np.flatnonzero(self.uniform(count) <= rate).tolist() if rate < 1 else list(range(count))

    # ------------------------------------------------------------------ noise
    def whole_normal(self, count: int, bits: int = BITS) -> Floats:
        """Return random integers k with P(k) ∝ exp(-k² / 2σ²), where σ = 2^bits."""
        made, missing = [np.empty(0)], count
        while missing > 0:
            tries = min(CHUNK, int(2.1 * missing) + 64)
            tried = accepted(self.words(tries), self.words(tries), bits, self)
            made.append(tried[np.isfinite(tried)])
            missing -= len(made[-1])
        return np.concatenate(made)[:count]

    def with_normal(self, exact: torch.Tensor, deviation: float) -> torch.Tensor:
        """Add normal noise to a tensor; the result has the data type and the device of the tensor."""
        if not deviation:
            return exact.detach().clone()
        cell, noise = deviation / CELLS, torch.from_numpy(self.whole_normal(exact.numel())).view(exact.shape)
        # The noise is in pinned memory, because a copy from unpinned memory would wait for the GPU.
        noise = noise.pin_memory() if exact.device.type == "cuda" else noise
        # The GPU may add the noise, because a GPU gives the same results as a CPU when it rounds, adds or multiplies.
        there = noise.to(exact.device, non_blocking=True)
        return (((exact.detach().double() / cell).round() + there) * cell).to(exact.dtype)

    def geometric(self, scale: float) -> int:
        """Return a random integer k with P(k) ∝ exp(-|k| / scale)."""
        return self._failures(scale) - self._failures(scale)

    def _failures(self, scale: float) -> int:
        """Return a random integer k with P(k) = (1 - q) q^k, where q = exp(-1 / scale)."""
        with localcontext(EXACTLY):
            return int(-self.long_uniform().ln() * Decimal(scale))

    def long_uniform(self, first: int | None = None) -> Decimal:
        """Return a random number of 192 bits in (0, 1), whose first 64 bits may be given."""
        words = [*([] if first is None else [first]), *self.words(LONG // 64).tolist()][: LONG // 64]
        whole = (words[0] << 128) + (words[1] << 64) + words[2]
        with localcontext(EXACTLY):
            return Decimal(2 * whole + 1) / 2 ** (LONG + 1)


def accepted(numbers: NDArray[np.uint64], second: NDArray[np.uint64], bits: int, more: NoiseSource) -> Floats:
    """Convert random integers of 64 bits to integers that follow the discrete Gaussian with σ = 2^bits; rejected
    proposals become NaN.

    The proposal is |k| = v σ + u with a random sign, where P(v) = 2^-(v+1) and u is uniform below σ. A proposal is
    accepted with probability 13/16 · 2^v · exp(-k² / 2σ²), which is at most 0.986.

    Args:
        more: a source of further random bits, for cases that floating point can't decide
    """
    coins = (numbers >> np.uint64(BITS)) & np.uint64((1 << LARGEST) - 1) | np.uint64(1 << LARGEST)
    # number of tails before the first head in a series of coin tosses
    blocks = np.frexp((coins & (~coins + np.uint64(1))).astype(np.float64))[1] - 1.0
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
