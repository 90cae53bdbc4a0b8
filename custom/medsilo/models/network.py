"""What a network of the plan is."""

from abc import abstractmethod
from typing import Any, Literal

from torch import nn

from medsilo.core.section import Section

Dimensions = Literal[2, 3]  # slices and flat images, or volumes


class Network(Section):
    """A network of the plan: its name and its numbers; `build` makes the module.

    Subclasses declare `name: Literal["..."] = "..."` and their own numbers.
    """

    @abstractmethod
    def build(self, channels: int, classes: int) -> nn.Module:
        """A freshly initialised module; its weights come from torch's global generator."""

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        """The same module in a MONAI bundle's words, its class under "_target_"; None where MONAI has none."""
        return None
