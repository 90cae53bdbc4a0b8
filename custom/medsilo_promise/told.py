"""The messages of hospitals and server about a promise, typed and bounded, and a summary's part about it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from medsilo.extend import Message
from medsilo_promise.risks import CUTS, TEMPERATURES

Rule = Literal["shrunk", "pooled", "local"]
RULES: tuple[Rule, ...] = get_args(Rule)
MOST_STRENGTH = 2500.0
Share = Annotated[float, Field(ge=0, le=1)]
Patients = Annotated[int, Field(ge=0, le=10_000_000)]
Curve = Annotated[list[Share], Field(min_length=CUTS, max_length=CUTS)]
Place = Annotated[int, Field(ge=0, lt=CUTS - 1)] | None


class ToldCurve(Message):
    """A site's word on a group's validation cases: patients, and the mean of what they lose at each cut."""

    patients: Patients
    risks: Curve


class ToldOfOthers(Message):
    """The server's word to a site on a group: κ and mean risks of the others, and the cut of all patients together."""

    strength: Annotated[float, Field(ge=0, le=MOST_STRENGTH)]
    means: Curve
    pooled: Place


class KeptCuts(Message):
    """promise.json, which goes with a model: the promise, and by group the cut of each rule."""

    promise: dict[str, Any]
    cuts: dict[Annotated[str, Field(max_length=200)], dict[Rule, Place]]


class Kept(Message):
    """A rule's result at the test cases of a group: mean loss and size; no promise where there is no cut."""

    promised: bool
    lost: Share | None
    size: Annotated[float, Field(ge=0, le=1e3)] | None


class ToldTest(Message):
    """A site's word on a group's test cases."""

    calibrated: Patients
    patients: Patients
    rules: dict[Rule, Kept]


class Told(Message):
    """A site's word, by group; of a classification the temperature, or the calibration error without and with."""

    curves: dict[str, ToldCurve] = {}
    tests: dict[str, ToldTest] = {}
    temperature: Annotated[int, Field(ge=0, lt=len(TEMPERATURES))] | None = None
    errors: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None


class Shown(Message):
    """A summary's part about a promise."""

    level: float
    confidence: float | None
    rule: str
    says: str
    sized: str
    needed: int
    strength: dict[str, float]
    sites: dict[str, dict[str, ToldTest]]
    temperatures: dict[str, float]
    errors: dict[str, list[float]]
