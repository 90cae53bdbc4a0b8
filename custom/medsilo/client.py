"""Export the names that a training script imports from medsilo instead of from `nvflare.client`, and that the package
medsilo_script defines.
"""

from typing import Any

from medsilo_script import client
from medsilo_script.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(client, name)
