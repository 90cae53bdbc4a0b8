"""The imports of a training script, in place of `nvflare.client`. It is medsilo_script's."""

from typing import Any

from medsilo_script import client
from medsilo_script.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(client, name)
