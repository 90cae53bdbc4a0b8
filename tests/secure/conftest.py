"""One federation for all tests over mutual TLS: two teaching hospitals and, between them, a strict one; and a pair."""

from collections.abc import Iterator

import pytest

from tests.conftest import SITES
from tests.secure.consortium import Consortium

POLICIES = dict(zip(SITES, ["teaching-hospital", "strict-hospital", "teaching-hospital"], strict=True))


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    consortium = Consortium(tmp_path_factory.mktemp("consortium"), POLICIES)
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Another federation, of a teaching and a strict hospital, for tests that kill its servers and cut its lines."""
    pair = Consortium(tmp_path_factory.mktemp("pair"), {site: POLICIES[site] for site in SITES[:2]})
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()
