"""A server that lies, in place of the honest one."""

from typing import Any

import pytest

from medsilo.federation import around
from tests.attacks.test_secure_aggregation import Liar


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> type[Liar]:
    kind: Any = type("Liar", (Liar,), {"opened": []})
    monkeypatch.setattr(around, "SealedServer", kind)
    return kind  # type: ignore[no-any-return]
