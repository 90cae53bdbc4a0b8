"""Random numbers that nobody can guess: for noise that protects, and for who is drawn.

The bits are ChaCha20's, under a key of 32 bytes from the operating system that is made anew for every attempt of an
answer and written nowhere: noise that is used for two different sums cancels in their difference.

What floating-point numbers leave open: the theory is about real numbers. A normal number in float64 cannot take every
value, and which values it can take depends a little on the sum that it is added to (Mironov 2012 for Laplace, Jin et
al. 2022 for the normal). Each number here is the mean of four independent ones times two (Holohan and Braghin 2021),
noise is added in float64 and only the result is rounded, which makes the known attacks infeasible; it is no proof. One
uniform number has 53 bits, so a single normal number ends at 8.6 standard deviations (probability 1e-17).
"""

import hashlib
import math
import secrets
from typing import Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

KEY = 32  # bytes
CHUNK = 1 << 16  # numbers that are made at once: they stay in the processor's cache
SUMMED = 4  # normal numbers that make one
EXACT = 2.0**-53
FROM_SEED = "no promise: the noise is from the plan's seed, which everybody knows"

Floats = NDArray[np.float64]


class NoiseSource:
    """A stream of secret random numbers. Make a new one for every attempt of an answer; a number is given once."""

    def __init__(self, key: bytes | None = None) -> None:
        """Begin a stream with a fresh key; with a given one it is secret only as far as the key is."""
        self.fresh = key is None
        drawn = secrets.token_bytes(KEY) if key is None else key
        if len(drawn) != KEY:
            raise ValueError(f"a key has {KEY} bytes, not {len(drawn)}")
        self._stream = Cipher(algorithms.ChaCha20(drawn, bytes(16)), None).encryptor()

    @classmethod
    def from_seed(cls, seed: int, *purpose: str | int) -> Self:
        """Return the stream for one purpose under a plan's seed: for synthetic data, so that engines agree."""
        said = "\x1f".join(map(str, ("medsilo noise 1", seed, *purpose)))
        return cls(hashlib.sha256(said.encode()).digest())

    @property
    def said(self) -> str | None:
        """Return what a record must say of this noise; None where it protects."""
        return None if self.fresh else FROM_SEED

    # ------------------------------------------------------------------ uniform
    def words(self, count: int) -> NDArray[np.uint64]:
        """Return whole numbers of 64 random bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def uniform(self, count: int) -> Floats:
        """Return numbers in (0, 1], each of 53 bits."""
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * EXACT

    def drawn(self, count: int, rate: float) -> list[int]:
        """Return which of so many are in a Poisson sample: each by itself with this chance."""
        return np.flatnonzero(self.uniform(count) <= rate).tolist() if rate < 1 else list(range(count))

    # ------------------------------------------------------------------ noise
    def standard_normal(self, count: int) -> Floats:
        """Return normal numbers of mean 0 and standard deviation 1 (Box and Muller, then a sum of four)."""
        made = np.empty(count)
        for start in range(0, count, CHUNK):
            part = made[start : start + CHUNK]
            part[:] = sum(self._pairs(len(part)) for _ in range(SUMMED)) / math.sqrt(SUMMED)
        return made

    def _pairs(self, count: int) -> Floats:
        half = (count + 1) // 2
        radius, angle = np.sqrt(-2.0 * np.log(self.uniform(half))), 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def with_normal(self, exact: torch.Tensor, deviation: float) -> torch.Tensor:
        """Return the tensor with normal noise of this standard deviation, in its own type, on its own device."""
        noise = torch.from_numpy(self.standard_normal(exact.numel())).view(exact.shape)
        return (exact.detach().double().cpu() + deviation * noise).to(exact.dtype).to(exact.device)

    def laplace(self, count: int) -> Floats:
        """Return Laplace numbers of scale 1."""
        words = self.words(count)
        size = -np.log(((words >> np.uint64(11)).astype(np.float64) + 1.0) * EXACT)
        return np.where(words & np.uint64(1), size, -size)

    def geometric(self, scale: float) -> int:
        """Return a whole number k with P(k) ∝ exp(-|k| / scale)."""
        return self._failures(scale) - self._failures(scale)

    def _failures(self, scale: float) -> int:
        """Return a geometric number: P(k) = (1 - q) q^k with q = exp(-1 / scale)."""
        return math.floor(-math.log(float(self.uniform(1)[0])) * scale)
