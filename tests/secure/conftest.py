"""One federation for all tests over mutual TLS: two teaching hospitals and, between them, a strict one."""

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
