"""Further names for a network that is made of others, or that begins with a file.

Each is here once, and is loaded when it is first used. `medsilo_adapters` shows them in use.
"""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.core import weight_cache
    from medsilo.learning.layers import norm_names
    from medsilo.models.network import Dimensions
    from medsilo.registry import NETWORKS

NAMES = places_in(__file__)
__all__ = [*NAMES]
__getattr__ = lazily(__name__, __file__)
