"""Define the interface of secure aggregation, by which the server learns sums over hospitals but no single hospital's
tensors.

A package registers its secure aggregation as an entry point of the group `medsilo.aggregations`. A plan chooses a
secure aggregation by its name in `secure_aggregation.mode`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from medsilo.core.section import Feature
from medsilo.core.tensors import Groups, Modules
from medsilo.mixing.forms import Form
from medsilo.schedule.phase import Phase


class SecureAggregation(Feature):
    """A protocol by which hospitals mask the tensors that they send.

    The objects that the methods `site` and `server` return contain the protocol's state.
    """

    name: str
    promises: ClassVar[tuple[str, ...]]  # threats that the protocol prevents, and threats that it does not prevent
    # Largest ratio between the bytes of a masked tensor and the bytes of the same tensor in half precision.
    times_as_large: ClassVar[int]

    @abstractmethod
    def forms(self, plan: Any, phase: Phase) -> Mapping[str, Form]:
        """Return the form of aggregation for each group of tensors that sites mask in a phase."""

    @abstractmethod
    def layout(self, plan: Any, phase: Phase, networks: Modules) -> Groups:
        """Return the shapes and types of the masked tensors that sites send in a phase.

        Args:
            networks: A site's networks on PyTorch's meta device.
        """

    @abstractmethod
    def site(self, place: Any) -> Any:
        """Return a site's `UpdateCodec` (federation/site_context.py), which masks the tensors that the site sends."""

    @abstractmethod
    def server(self, asker: Any, state: Any, kit: Any) -> Any:
        """Return the server's `RoundAggregation` (medsilo_server/server_state.py), which unmasks sums over sites."""
