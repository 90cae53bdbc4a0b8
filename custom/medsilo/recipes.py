"""The names that a lead's `job.py` imports in place of NVFlare's recipes. The package medsilo_lab defines the recipes
that this module exports.
"""

from typing import Any

try:
    from medsilo_lab import recipes
    from medsilo_lab.recipes import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "medsilo_lab":
        raise
    raise ImportError("recipes come with medsilo-lab, which is not installed", name=error.name) from None


def __getattr__(name: str) -> Any:
    return getattr(recipes, name)
