"""Names for what holds tensors."""

from torch import Tensor, nn

Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]  # named groups of tensors, as they travel
Modules = dict[str, nn.Module]  # a site's networks, by name
