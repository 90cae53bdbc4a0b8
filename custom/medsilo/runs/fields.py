"""Define types of values, and the base class of pydantic models, for the JSON files of a study.

medsilo can read every file that it writes, because both writing and reading validate the file against these types.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from medsilo.core.text import plain

SCHEMA: Literal[1] = 1
LARGEST = 1e39  # limit on numbers; larger than any finite float32 number
SCRIPT = "script"  # name of the task of a user's training script
# limit on the absolute value of a training script's metric, because a script's metric need not be between 0 and 1
FURTHEST = 1e12
SLACK = 1e-6  # rounding errors can move a mean of scores this far outside the range of scores

Text = Annotated[str, BeforeValidator(lambda value: plain(value) if isinstance(value, str) else value)]
# every JSON parser represents integers up to this limit exactly
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e12)]
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, le=LARGEST)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Figure = Annotated[int | float, PlainValidator(lambda value: _figure(value))]  # an int or a float, without conversion
Score = Annotated[float, Field(strict=True, ge=-SLACK, le=1 + SLACK)]
Metric = Annotated[float, Field(strict=True, ge=-FURTHEST, le=FURTHEST)]
Difference = Annotated[float, Field(strict=True, ge=-1 - SLACK, le=1 + SLACK)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Scores = dict[str, Score | None]


def _figure(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise ValueError("input should be a finite number")
    return value


class RecordPart(BaseModel):
    """Base class of models of JSON files.

    Unknown keys are ignored, so that a newer medsilo may add keys without a new schema version.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, populate_by_name=True, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def changed(self, **values: Any) -> Self:
        return type(self).model_validate({**{name: getattr(self, name) for name in type(self).model_fields}, **values})
