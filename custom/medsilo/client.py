"""The names that a training script imports in place of those of `nvflare.client`. The package medsilo_script defines
the names.
"""

from typing import Any

from medsilo_script import client
from medsilo_script.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(client, name)
