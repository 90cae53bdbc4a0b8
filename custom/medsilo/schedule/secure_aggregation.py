"""What the engine asks of secure aggregation, by which a server learns sums over hospitals and no single one's numbers.

It is a package of its own, found by its entry point (`medsilo.aggregations`) under the name that a plan gives
(`secure_aggregation.mode`). A site's stack and the server's each take their part of it from there.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from medsilo.core.errors import PlanError
from medsilo.core.section import Feature
from medsilo.core.tensors import Groups, Modules
from medsilo.mixing.forms import Form
from medsilo.registry import AGGREGATIONS
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


CLEAR = "No secure aggregation: the server, and anyone who reads its disk, sees every update that leaves a hospital."


class SecureAggregationSettings(Feature):
    """A plan's `secure_aggregation`: whether hospitals mask what they send, so that the server reads sums only."""

    mode: Literal["none", "pairwise"] = Field(
        "none",
        description="whether hospitals send what the server cannot read. `pairwise`: it learns sums only",
    )
    threshold: int | None = Field(
        None,
        ge=2,
        le=256,
        description="of `pairwise`: how many (t) of the K hospitals have to stay until a round is opened, more than "
        "half; t - 1 may help a server that follows the protocol, and it learns no more than they know; `null`: 2K/3, "
        "rounded down, and one",
    )
    clip: float = Field(
        65536.0,
        gt=0,
        le=1e11,  # with it, the masked numbers of as many hospitals as there can be are 1e-5 apart at most
        description="the largest number that is masked, whatever its sign; a hospital with a larger one is refused",
    )

    @property
    def implementation(self) -> SecureAggregation | None:
        """Return how hospitals mask; None where they send in clear. Raises PlanError where its package is not here."""
        if self.mode == "none":
            return None
        if self.mode not in AGGREGATIONS:
            raise PlanError(
                f"secure_aggregation.mode: {self.mode} is in no package that is installed here; install "
                "medsilo_secagg, or set secure_aggregation.mode=none"
            )
        found: SecureAggregation = AGGREGATIONS[self.mode]()
        return found

    @property
    def promises(self) -> list[str]:
        """Return what it protects against, and against whom it does not: the same wherever it is said."""
        return [*self.implementation.promises] if self.implementation else [CLEAR]

    @property
    def times_as_large(self) -> int:
        """Return how many times its bytes a tensor may take when it is masked, at most."""
        return self.implementation.times_as_large if self.implementation else 1

    def leaves(self, plan: Any) -> Iterable[str]:
        if self.mode == "none":
            yield CLEAR
