"""A plan's `secure_aggregation`: whether the server learns sums over hospitals and no single one's numbers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from medsilo.core.errors import PlanError
from medsilo.core.section import Feature
from medsilo.registry import AGGREGATIONS

if TYPE_CHECKING:  # its package brings it
    from medsilo.schedule.sealing import SecureAggregation

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
    def implementation(self) -> "SecureAggregation | None":
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
