"""One federation for all tests over mutual TLS: two teaching hospitals and, between them, a strict one; and a pair.

Teaching hospitals train in their job's own process, the strict one in another, which is the default.
"""

from collections.abc import Iterator

import pytest

from tests.conftest import SITES
from tests.secure.consortium import Consortium

TEACHING = "teaching-hospital"
POLICIES = dict(zip(SITES, [TEACHING, "strict-hospital", TEACHING], strict=True))


def running(name: str, sites: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    own = {site: POLICIES[site] for site in sites}
    consortium = Consortium(tmp_path_factory.mktemp(name), own)
    for site, policies in own.items():
        if policies == TEACHING:
            (consortium.kit(site) / "local/medsilo.yaml").write_text("device: cpu\nisolation: false\n")
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    yield from running("consortium", SITES, tmp_path_factory)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Another federation, of a teaching and a strict hospital, for tests that kill its servers and cut its lines."""
    yield from running("pair", SITES[:2], tmp_path_factory)
