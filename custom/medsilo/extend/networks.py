"""Further names for a network that is made of others, or that begins with a file.

Each is here once, and is loaded when it is first used. `medsilo_adapters` shows them in use.
"""

from typing import TYPE_CHECKING

from medsilo.core.lazy import named_in, places_in

if TYPE_CHECKING:
    from medsilo.core import shelf
    from medsilo.learning.layers import norm_names
    from medsilo.models.network import Dimensions
    from medsilo.registry import NETWORKS

NAMES = places_in(__file__)
__all__ = [*NAMES]


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in NAMES:
        raise AttributeError(f"module 'medsilo.extend.networks' has no attribute {name!r}")
    found = globals()[name] = named_in(__file__, name)
    return found
