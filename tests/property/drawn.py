"""How property tests draw: the same examples in every run, few by default."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

FIXED: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of this many drawn examples."""
    return settings(max_examples=count, **FIXED)
