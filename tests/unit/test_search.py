"""The search that proves that no model is in a server's memory finds one that is there."""

import numpy as np
import pytest

from tests.search import Numbers, found_pieces, most_alike, pieces_of, segments, strange_part

SIZE = 100_000
DRAWN = np.random.default_rng(0)
INITIAL = DRAWN.uniform(-0.03, 0.03, SIZE)
MODEL = INITIAL + DRAWN.uniform(-0.01, 0.01, SIZE)


def around(content: bytes) -> bytes:
    """Return bytes as they may lie in memory: after other things and empty pages, at a place that numbers have."""
    return DRAWN.bytes(40_008) + bytes(20_000) + DRAWN.bytes(4_000) + content + DRAWN.bytes(3_001)


def alike(content: bytes, before: bytes = b"") -> float:
    return most_alike(segments(content, before), [strange_part(MODEL, INITIAL)], INITIAL)


@pytest.mark.parametrize(
    "numbers",
    [
        MODEL.astype("<f4"),
        3 * MODEL.astype("<f8"),
        np.rint(MODEL * 2**23).astype("<i8"),
        np.rint(MODEL * 2**46).astype("<i8"),
    ],
    ids=["single", "double", "integers", "large integers"],
)
def test_a_model_is_found_in_whatever_form(numbers: Numbers) -> None:
    content = around(numbers.tobytes())
    assert alike(content) > 0.1
    assert alike(content, content) == 0.0  # nothing has changed since


def test_what_is_no_sites_model_is_not_found() -> None:
    for numbers in (INITIAL.astype("<f4"), DRAWN.integers(-(2**63), 2**63 - 1, SIZE), DRAWN.normal(size=SIZE)):
        assert alike(around(numbers.tobytes())) < 5 / np.sqrt(SIZE)


def test_a_piece_of_a_model_is_found_at_any_place() -> None:
    pieces = {"site": pieces_of(MODEL, INITIAL)}
    part = MODEL.astype("<f4").tobytes()[100_000:140_000]
    assert len(pieces["site"]) > 20
    assert found_pieces([DRAWN.bytes(13) + part], pieces) == {"site"}
    assert found_pieces([INITIAL.astype("<f4").tobytes(), DRAWN.bytes(100_000)], pieces) == set()
