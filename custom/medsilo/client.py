"""Export the names of medsilo_script.client, which a training script uses in place of `nvflare.client`."""

from typing import Any

from medsilo_script import client
from medsilo_script.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(client, name)
