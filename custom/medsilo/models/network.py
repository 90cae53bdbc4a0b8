"""The base of the plan's networks."""

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from medsilo.core.section import Section

Dimensions = Annotated[Literal[2, 3], Field(description="2: flat images and slices; 3: volumes")]
NORM = (
    "normalisation layers; `batch-statistics` is batch norm without weights that takes each batch's own statistics, "
    "also in tests"
)


class Network(Section):
    """A network of the plan: its name and its numbers; `build` makes the module.

    Subclasses declare `name: Literal["..."] = "..."` and their own numbers.

    >>> from typing import Literal
    >>> from torch import nn
    >>> class Straight(Network):
    ...     name: Literal["straight"] = "straight"
    ...     def build(self, channels: int, classes: int) -> nn.Module:
    ...         return nn.Linear(channels, classes)
    >>> Straight().build(3, 2)
    Linear(in_features=3, out_features=2, bias=True)
    """

    name: str

    @abstractmethod
    def build(self, channels: int, classes: int) -> nn.Module:
        """A freshly initialised module; its weights come from torch's global generator."""

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        """The same module in a MONAI bundle's words, its class under "_target_"; None where MONAI has none."""
        return None
