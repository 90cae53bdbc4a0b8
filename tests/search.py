"""Search the bytes of a file or of a process's memory for a model, by exact comparison and by correlation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

Numbers = NDArray[Any]

CHANCE = 0.01  # greatest |correlation| of a model with unrelated values
KINDS = ("<f4", "<f8", "<i8")  # number types that weights may have in memory
SMALLEST, LARGEST = 1e-10, 100.0  # range that contains the absolute values of nearly all weights
HALF, FEW = 0.5, 0.2
STRETCH = 1 << 21  # how many numbers one search window contains
LEAST_SPREAD = 1e-8  # a part with a smaller fraction of a window's energy is rounding noise
PAGE = 4096
OUTLIER = 3  # number of standard deviations beyond which a value is an outlier
# for the exact search: how many pieces of a model are searched, and how many numbers each piece has
PIECES, PIECE = 24, 4


def strange_part(model: Numbers, *known: Numbers) -> Numbers:
    """Return a model's weights minus the projection on known values, scaled to mean 0 and norm 1.

    All frequencies get the same amplitude, and outliers are clipped, because slow trends and single large weights would
    also correlate with unrelated values.
    """
    basis, _ = np.linalg.qr(np.stack([np.ones_like(model), *known], axis=1))
    waves = fft.rfft(model - basis @ (basis.T @ model))
    left = fft.irfft(waves / np.maximum(np.abs(waves), 1e-9 * np.abs(waves).max()), len(model))
    left = np.clip(left, -OUTLIER * left.std(), OUTLIER * left.std())
    left -= basis @ (basis.T @ left)
    return left / float(np.linalg.norm(left))


def segments(content: bytes, before: bytes = b"") -> Iterator[bytes]:
    """Yield the memory regions that are not empty and differ from `before`, the memory before any model arrived."""
    pages, base = (_pages(each) for each in (content, before.ljust(len(content), b"\0")[: len(content)]))
    changed = (pages != 0).any(axis=1) & (pages != base).any(axis=1)
    yield from (content[start:end] for start, end in _runs(changed))


def _pages(content: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(content + bytes(-len(content) % PAGE), np.uint64).reshape(-1, PAGE // 8)


def _runs(pages: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], pages, [False]]).astype(np.int8))) * PAGE
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def vectors(content: bytes, kind: str, size: int, known: Numbers) -> Iterator[Numbers]:
    """Yield the memory regions that can contain `size` values of this type, together with adjacent pages.

    The search ignores the public values `known`, such as the initial weights, which have single precision.
    """
    width = int(kind[-1])
    raw = _pages(content).view(kind)
    if kind.startswith("<i"):
        below = (raw < 0).mean(axis=1)
        like = (below > FEW) & (below < 1 - FEW)
    else:
        with np.errstate(invalid="ignore"):
            like = ((np.abs(raw) > SMALLEST) & (np.abs(raw) <= LARGEST)).mean(axis=1) > HALF
    wide = like.copy()
    wide[1:] |= like[:-1]
    wide[:-1] |= like[1:]
    for start, end in _runs(wide):
        if end - start >= size * width:
            found = raw.reshape(-1)[start // width : end // width]
            if width == 4:
                found = np.where(np.isin(found.view("<u4"), known.astype("<f4").view("<u4")), np.float32(0), found)
            yield _as_numbers(found)


def _as_numbers(raw: Numbers) -> Numbers:
    """Return the values in double precision; values that cannot be weights become 0, and integers are compressed by
    asinh.
    """
    # the scale of integers is unknown, and a few large integers would hide all smaller integers
    if raw.dtype.kind == "i":
        return np.arcsinh(raw.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(np.abs(raw) <= LARGEST, raw, 0).astype(np.float64)


def most_alike(contents: Iterable[bytes], wanted: Sequence[Numbers], known: Numbers) -> float:
    """Return the largest |correlation| of a model with any equally long run of adjacent values in memory."""
    size = len(wanted[0])
    length = fft.next_fast_len(STRETCH, real=True)
    turned = [np.conj(fft.rfft(each, length)) for each in wanted]
    most = 0.0
    for content in contents:
        for kind in KINDS:
            for numbers in vectors(content, kind, size, known):
                for start in range(0, len(numbers) - size + 1, length - size + 1):
                    most = max(most, _most_in(numbers[start : start + length], turned, size, length))
    return most


def _most_in(numbers: Numbers, turned: Sequence[NDArray[np.complex128]], size: int, length: int) -> float:
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (numbers, numbers**2))
    spread = squares[size:] - squares[:-size] - (sums[size:] - sums[:-size]) ** 2 / size
    width = np.sqrt(np.where(spread > LEAST_SPREAD * squares[-1], spread, np.inf))
    seen = fft.rfft(numbers, length)
    return max(float(np.max(np.abs(fft.irfft(seen * each, length)[: len(width)]) / width)) for each in turned)


def pieces_of(model: Numbers, initial: Numbers) -> list[bytes]:
    single, before = model.astype("<f4"), initial.astype("<f4")
    found = []
    for start in np.linspace(0, len(single) - 1000, PIECES).astype(int):
        changed = (single[start : start + 1000] != before[start : start + 1000]) & (single[start : start + 1000] != 0)
        runs = np.convolve(changed, np.ones(PIECE, int), "valid") == PIECE
        if runs.any():
            place = start + int(np.argmax(runs))
            found.append(single[place : place + PIECE].tobytes())
    return found


def found_pieces(contents: Iterable[bytes], pieces: Mapping[str, Sequence[bytes]]) -> set[str]:
    owners = {piece: name for name, own in pieces.items() for piece in own}
    first = np.array([int.from_bytes(piece[:4], "little") for piece in owners], np.uint32)
    likely = np.zeros(1 << 16, bool)
    likely[first >> 16] = True
    found: set[str] = set()
    for content in contents:
        for offset in range(min(4, len(content) // 8)):
            words = np.frombuffer(content, "<u4", (len(content) - offset) // 4, offset)
            places = np.flatnonzero(likely[words >> 16])
            for place in places[np.isin(words[places], first)].tolist():
                start = offset + 4 * place
                found.add(owners.get(content[start : start + 4 * PIECE], ""))
    return found - {""}
