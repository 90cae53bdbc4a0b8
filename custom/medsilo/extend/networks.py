"""Further names for a network that is made of others, or that begins with a file.

Each is here once. `medsilo_pretrained` shows them in use.
"""

from medsilo.core import weight_cache
from medsilo.learning.layers import norm_names
from medsilo.models.network import Dimensions
from medsilo.registry import NETWORKS

__all__ = [
    "NETWORKS",
    "Dimensions",
    "norm_names",
    "weight_cache",
]
