"""What every part of a plan is: a fixed, checked set of named values."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the plan. Unknown keys are refused, values never change after checking, infinities are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
