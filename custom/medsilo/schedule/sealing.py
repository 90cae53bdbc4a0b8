"""Define the interface of secure aggregation, by which the server learns sums over hospitals but no hospital's own
numbers.

A package provides an implementation by an entry point (`medsilo.aggregations`), which a plan names
(`secure_aggregation.mode`).
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

    The objects that `site` and `server` return hold its state.
    """

    name: str
    promises: ClassVar[tuple[str, ...]]  # threats that the protocol prevents, and threats that it does not prevent
    # largest ratio of a masked tensor's size to its size in half precision
    times_as_large: ClassVar[int]

    @abstractmethod
    def forms(self, plan: Any, phase: Phase) -> Mapping[str, Form]:
        """Return the form of aggregation of each masked group of tensors in a phase."""

    @abstractmethod
    def layout(self, plan: Any, phase: Phase, networks: Modules) -> Groups:
        """Return the tensors that sites send instead of a phase's masked groups. networks: networks on torch's meta
        device."""

    @abstractmethod
    def site(self, place: Any) -> Any:
        """Return a site's `UpdateCodec` (federation/site_context.py), which masks its tensors."""

    @abstractmethod
    def server(self, asker: Any, state: Any, kit: Any) -> Any:
        """Return the server's `RoundAggregation` (medsilo_server/server_state.py), which unmasks sums.

        kit: the server's startup kit, if it has one.
        """
