"""A plan's `transport`: precision of tensors on their way, and the slowest line."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.section import Feature

MEASURED_LINE = 4000  # kbit/s: the value that stands for "as measured"


class TransportSettings(Feature):
    """Settings of the tensors on their way."""

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

    @property
    def rate(self) -> float | None:
        """The bytes a second of the slowest line, as the plan sets it; None where lines are measured."""
        return None if self.slowest == MEASURED_LINE else self.slowest * 1000 / 8

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor as it travels: float32 is rounded when the plan says so, all else stays as it is."""
        return tensor.bfloat16() if self.precision == "bfloat16" and tensor.dtype == torch.float32 else tensor
