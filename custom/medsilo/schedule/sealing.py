"""Define the interface of secure aggregation, by which the server learns sums over hospitals but no single hospital's
tensors.

A package registers its secure aggregation as an entry point of the group `medsilo.aggregations`. A plan chooses a
protocol of secure aggregation by the protocol's name. The protocol's object at the server is an entry point of the
group `medsilo.sealed_servers` under the same name (medsilo_server/server_stack.py).
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from medsilo.core.section import Feature
from medsilo.core.tensors import Groups, Modules
from medsilo.mixing.mean_forms import Form
from medsilo.schedule.phase import Phase


class SecureAggregation(Feature):
    """A protocol by which hospitals mask the tensors that they send.

    The state of the protocol is in the objects at a site and at the server.
    """

    name: str
    promises: ClassVar[tuple[str, ...]]  # threats that the protocol prevents, and threats that it does not prevent
    # Largest ratio between the bytes of a masked tensor and the bytes of the unmasked tensor in half precision.
    times_as_large: ClassVar[int]

    @abstractmethod
    def forms(self, plan: Any, phase: Phase) -> Mapping[str, Form]:
        """For each tensor group that sites mask in a phase, return the kind of aggregation."""

    @abstractmethod
    def layout(self, plan: Any, phase: Phase, networks: Modules) -> Groups:
        """Return the shapes and types of the masked tensors that sites send in a phase.

        Args:
            networks: A site's networks on PyTorch's meta device.
        """

    @abstractmethod
    def site(self, context: Any) -> Any:
        """Return the object that masks the tensors which a site sends (`UpdateCodec` in federation/site_context.py)."""
