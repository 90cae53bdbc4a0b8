"""The values that files of a study hold, and what such a file is as a typed model.

The ranges hold for writer and reader alike: what was accepted can be written, and what was written can be read.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from medsilo.core.text import plain

SCHEMA: Literal[1] = 1
LARGEST = 1e39  # no number of a network in float32 is larger
SCRIPT = "script"  # the task of a user's own training script
FURTHEST = 1e12  # that its metric may be from 0; scores of all other tasks are between 0 and 1
SLACK = 1e-6  # by which a mean of scores may leave their range through rounding

Text = Annotated[str, BeforeValidator(lambda value: plain(value) if isinstance(value, str) else value)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]  # every JSON reader keeps such a number exactly
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e12)]
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, le=LARGEST)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Figure = Annotated[int | float, PlainValidator(lambda value: _figure(value))]  # a number of either kind, kept as it is
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
    """A part of a file. Unknown keys pass, so that a newer medsilo may add some within one schema version."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, populate_by_name=True, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        """Return the values as they stand in the file."""
        return self.model_dump(mode="json", by_alias=True)

    def changed(self, **values: Any) -> Self:
        """Return a copy with these values, checked like any other."""
        return type(self).model_validate({**{name: getattr(self, name) for name in type(self).model_fields}, **values})
