"""The names with which a plug-in defines a network that consists of several networks, or that starts with pre-trained
weights from a file.

The package `medsilo_pretrained` contains examples of networks that use the names of this module.
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
