"""Start federations over mutual TLS; several test files share a federation, and all tests with one federation run in
one process.

The first federation has three hospitals: two teaching hospitals and one strict hospital. The second federation has two
teaching hospitals. The third federation has three hospitals, two of which are behind relays.

Teaching hospitals train in the process of their NVFlare job. A strict hospital trains in a separate process, which is
the default.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import Consortium
from tests.secure.test_mutual_tls import gathered

TEACHING = "teaching-hospital"
POLICIES = dict(zip(SITES, [TEACHING, "strict-hospital", TEACHING], strict=True))


def running(
    name: str,
    policies: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    relays: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Consortium]:
    consortium = Consortium(tmp_path_factory.mktemp(name), policies, relays=relays)
    for site, own in policies.items():
        if own == TEACHING:
            (consortium.kit(site) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    yield from running("consortium", POLICIES, tmp_path_factory)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Start a second federation with a teaching and a strict hospital, for tests that kill servers and cut
    connections.
    """
    yield from running("pair", {site: POLICIES[site] for site in SITES[:2]}, tmp_path_factory)


@pytest.fixture(scope="session")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Start three hospitals: two hospitals connect to the server through a chain of two relays, and one hospital
    connects directly.
    """
    relays = {"country": ["city"], "city": SITES[:2]}
    yield from running("relayed", dict.fromkeys(SITES, TEACHING), tmp_path_factory, relays)


@pytest.fixture(scope="session")
def whole(relayed: Consortium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_job(folder / "job", make_plan("ditto"), study="whole")
    assert relayed.run(folder / "job") == "FINISHED:COMPLETED"
    return gathered(relayed, "whole", SITES, folder / "whole")
