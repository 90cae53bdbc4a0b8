"""What the engine asks of secure aggregation, by which a server learns sums over hospitals and no single one's numbers.

It is a package of its own, found by its entry point (`medsilo.aggregations`) under the name that a plan gives
(`secure_aggregation.mode`). A site's stack and the server's each take their part of it from there.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from medsilo.core.section import Feature
from medsilo.core.tensors import Groups, Modules
from medsilo.mixing.forms import Form
from medsilo.schedule.phase import Phase


class SecureAggregation(Feature):
    """A way in which hospitals seal what they send. It holds no state: that lies in what `site` and `server` return."""

    name: str
    promises: ClassVar[tuple[str, ...]]  # what it protects against, and against whom it does not
    times_as_large: ClassVar[int]  # how many times its bytes in half precision a tensor may take when it is sealed

    @abstractmethod
    def forms(self, plan: Any, phase: Phase) -> Mapping[str, Form]:
        """Return how each group is mixed that sites seal in a phase."""

    @abstractmethod
    def layout(self, plan: Any, phase: Phase, networks: Modules) -> Groups:
        """Return what travels in place of the groups that sites seal in a phase. networks: without values."""

    @abstractmethod
    def site(self, place: Any) -> Any:
        """Return what a site's tensors travel in: an `UpdateCodec` (federation/place.py)."""

    @abstractmethod
    def server(self, asker: Any, state: Any, kit: Any) -> Any:
        """Return how answers become the next round's tensors: a `RoundAggregation` (federation/server_state.py).

        kit: the server's own, where it has one.
        """
