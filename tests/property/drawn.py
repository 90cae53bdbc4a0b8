"""Generate the same few random examples for property tests in every run."""

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
    return settings(max_examples=count, **FIXED)
