"""A plan's `transport`: precision of tensors on their way, and whether hospitals seal what they send.

How it is sealed and what that promises, the package for secure aggregation says (course/aggregation.py).
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import PlanError
from medsilo.core.section import Feature
from medsilo.registry import AGGREGATIONS
from medsilo.schedule.aggregation import SecureAggregation

Sealing = Literal["none", "pairwise"]
CLEAR = "No secure aggregation: the server, and anyone who reads its disk, sees every tensor that leaves a hospital."
MEASURED_LINE = 4000  # kbit/s: the value that stands for "as measured"


class TransportSettings(Feature):
    """Settings of the tensors on their way: precision and sealing."""

    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="`bfloat16` halves the bytes and rounds every tensor that is sent"
    )
    slowest: int = Field(
        MEASURED_LINE,
        ge=8,
        le=1_000_000,
        description="kbit/s of the slowest line, of which ten seconds' worth is sent in one piece. Leave 4000, the "
        "default, and pieces have 1 MiB, of which two seconds' worth of the line's own speed are on their way",
    )
    sealing: Sealing = Field(
        "none",
        description="whether hospitals send what the server cannot read. `pairwise`: it learns sums only",
    )
    sealing_threshold: int | None = Field(
        None,
        ge=2,
        le=256,
        description="of `pairwise`: how many (t) of the K hospitals have to stay until a round is opened, more than "
        "half; t - 1 may help a server that follows the protocol, and it learns no more than they know; `null`: 2K/3, "
        "rounded down, and one",
    )
    sealing_bound: float = Field(
        65536.0,
        gt=0,
        le=1e11,  # with it, the sealed numbers of as many hospitals as there can be are 1e-5 apart at most
        description="the largest number that is sealed, whatever its sign; a hospital with a larger one is refused",
    )

    @property
    def rate(self) -> float | None:
        """The bytes a second of the slowest line, as the plan sets it; None where lines are measured."""
        return None if self.slowest == MEASURED_LINE else self.slowest * 1000 / 8

    @property
    def sealed(self) -> bool:
        """Return whether hospitals seal what they send."""
        return self.sealing != "none"

    @property
    def aggregation(self) -> SecureAggregation | None:
        """Return how hospitals seal; None where they send in clear. Raises PlanError where its package is not here."""
        if not self.sealed:
            return None
        if self.sealing not in AGGREGATIONS:
            raise PlanError(
                f"transport.sealing: {self.sealing} is in no package that is installed here; install medsilo_secagg, "
                "or set transport.sealing=none"
            )
        found: SecureAggregation = AGGREGATIONS[self.sealing]()
        return found

    @property
    def promises(self) -> list[str]:
        """Return what sealing protects against, and against whom it does not: the same wherever it is said."""
        return [*self.aggregation.promises] if self.aggregation else [CLEAR]

    @property
    def times_as_large(self) -> int:
        """Return how many times its bytes a tensor may take when it is sealed, at most."""
        return self.aggregation.times_as_large if self.aggregation else 1

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels: float32 is rounded when the plan says so, all else stays as it is."""
        return tensor.bfloat16() if self.precision == "bfloat16" and tensor.dtype == torch.float32 else tensor

    def leaves(self, plan: Any) -> Iterable[str]:
        if not self.sealed:
            yield CLEAR
