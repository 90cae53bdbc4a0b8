"""Export the names that a lead's `job.py` imports in place of NVFlare's recipes. The package medsilo_script defines the
names for `job.py`, and needs medsilo-lab.
"""

from typing import Any

try:
    from medsilo_script import recipes
    from medsilo_script.recipes import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "medsilo_server":
        raise
    raise ImportError("recipes need medsilo_server, which is not here; install medsilo-lab", name=error.name) from None


def __getattr__(name: str) -> Any:
    return getattr(recipes, name)
