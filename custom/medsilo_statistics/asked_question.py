"""A question to hospitals: variables, whom it is about, and what is asked. All hospitals agree on it by its hash."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from medsilo.core.section import Section
from medsilo_statistics.grammar import LONGEST, Filter

LARGEST, MOST_TIMES, MOST_VALUES, LONGEST_TASK = 1e9, 20_000, 2_000_000, 10_000
MOST_STEPS = 20  # of a regression, and points at which a hospital answers about the same patients
ENOUGH = 3  # hospitals, whose sums are sealed
MOST_SITES = 256
Word = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,59}$")]
Text = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Site = Annotated[str, Field(min_length=1, max_length=200)]
Words = Annotated[tuple[Word, ...], Field(max_length=100)]


def _levels(given: Any) -> Any:
    """Return levels with what each is called at hospitals; a list means that they are called so."""
    if isinstance(given, list | tuple) and len(set(map(str, given))) == len(given):
        given = {level: [level] for level in given}
    if not isinstance(given, dict):
        return given
    words = {"true": "yes", "false": "no"}  # which YAML reads as truth values

    def text(value: Any) -> str:
        return words[json.dumps(value)] if isinstance(value, bool) else str(value)

    several = {key: tuple(map(text, own)) if isinstance(own, list | tuple) else own for key, own in given.items()}
    return {words.get(str(key), text(key)): own for key, own in several.items()}


def _bounded(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is too long for a task."""
    if len(json.dumps(given)) > LONGEST_TASK or (given and "name" not in given):
        raise ValueError(f"give a task's name and keys, of {LONGEST_TASK} characters at most")
    return given


class Variable(Section):
    """A variable: a number with its range, or a category with its levels."""

    range: tuple[Number, Number] | None = Field(
        None, description="of a number: least and greatest; a value beyond counts as missing"
    )
    step: Annotated[float, Field(gt=0, le=LARGEST)] | None = Field(
        None, description="of a number: distance of a histogram's bins, or of a time's places; null: range / 100"
    )
    levels: Annotated[dict[Text, tuple[Text, ...]], BeforeValidator(_levels), Field(max_length=100)] = Field(
        {},
        description="of a category: levels in order, or with the values that hospitals write; the first is reference",
    )
    cuts: Annotated[tuple[Number, ...], Field(max_length=99)] = Field(
        (), description="of a category: a number at or below the first cut is the first level, and so on"
    )
    unit: str = Field("", max_length=20)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.range is None) == (not self.levels):
            raise ValueError("a variable has a range, or levels; give one of both")
        if self.range and not self.range[0] < self.range[1]:
            raise ValueError("range: the least has to be below the greatest")
        if self.range and self.places > MOST_TIMES:
            raise ValueError(f"step: makes more than {MOST_TIMES} places; give a larger one")
        if self.levels and len(self.levels) < 2:
            raise ValueError("levels: give two or more")
        if self.cuts and (len(self.cuts) != len(self.levels) - 1 or list(self.cuts) != sorted(set(self.cuts))):
            raise ValueError("cuts: give one less than levels, each greater than the one before")
        return self

    @property
    def middle(self) -> float:
        """The middle of the range."""
        assert self.range
        return (self.range[0] + self.range[1]) / 2

    @property
    def half(self) -> float:
        """Half of the range's width."""
        assert self.range
        return (self.range[1] - self.range[0]) / 2

    @property
    def width(self) -> float:
        """The distance of two places."""
        return self.step or 2 * self.half / 100

    @property
    def places(self) -> int:
        """The number of places on the range."""
        return round(2 * self.half / self.width) + 1

    @property
    def columns(self) -> int:
        """The columns of a regression's matrix."""
        return max(1, len(self.levels) - 1)


class Curve(Section):
    """A survival curve by Kaplan and Meier, for each level of `by`, with the log-rank test between them."""

    time: Word
    event: Word = Field(description="a variable of two levels; the second is the event")
    by: Word | None = None

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables, which a patient must have."""
        return (self.time, self.event, *([self.by] if self.by else []))


class RegressionAsked(Section):
    """A regression. Numbers enter as they are, categories as a column for each level but the first."""

    kind: Literal["linear", "logistic", "poisson", "cox"]
    covariates: Words = Field(min_length=1)
    outcome: Word | None = Field(None, description="a number; of `logistic` a variable of two levels")
    time: Word | None = None
    event: Word | None = None
    ties: Literal["efron", "breslow"] = "efron"
    meta: bool | Literal["only"] = Field(
        False, description="each hospital tells its own estimates, which are combined; `only`: and takes no steps"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = (self.time, self.event) if self.kind == "cox" else (self.outcome,)
        surplus = self.outcome if self.kind == "cox" else self.time or self.event
        if None in needed or surplus:
            raise ValueError("cox has time and event, the others have an outcome")
        if len({*self.covariates, *self.outcomes}) < len(self.covariates) + len(self.outcomes):
            raise ValueError("a variable is listed twice; name each once")
        return self

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The variables that are explained."""
        return tuple(own for own in (self.outcome, self.time, self.event) if own)

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables, which a patient must have."""
        return (*self.covariates, *self.outcomes)


class Harmonised(Section):
    """ComBat: features whose place and width differ between hospitals for no reason that covariates give."""

    features: Words = Field(min_length=2, description="numbers that are harmonised")
    covariates: Words = Field((), description="what may differ between hospitals, and stays")

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables, which a patient must have."""
        return (*self.features, *self.covariates)

    def sizes(self, question: "Question") -> tuple[int, ...]:
        """Return how many sums it takes: patients, x, y, and the products xx, xy and yy."""
        width, features = sum(question.variables[name].columns for name in self.covariates), len(self.features)
        return 1, width, features, width * (width + 1) // 2, width * features, features


class NoiseOffer(Section):
    """The privacy that is offered to each patient, for all answers together."""

    epsilon: float = Field(gt=0, le=1000)
    delta: float = Field(ge=1e-12, le=0.1)


class Question(Section):
    """The question: a file that all hospitals get as it is."""

    title: str = Field("Statistics over hospitals", min_length=1, max_length=120)
    sites: tuple[Site, ...] = Field((), max_length=MOST_SITES, description="hospitals; sealing needs three or more")
    variables: dict[Word, Variable] = Field(min_length=1, max_length=100)
    columns: dict[Site, dict[Word, Text]] = Field(
        {}, max_length=MOST_SITES, description="for each hospital: variables to its own columns, where they differ"
    )
    task: Annotated[dict[Word, Any], AfterValidator(_bounded)] = Field(
        {}, description="a task with its keys, about whose images is asked; none: hospitals' tables"
    )
    where: str = Field("", max_length=LONGEST, description="whom it is about: a filter")
    by: Word | None = Field(None, description="the columns of Table 1: a variable with levels")
    table: Words = Field((), description="the rows of Table 1")
    curves: tuple[Curve, ...] = Field((), max_length=20)
    models: tuple[RegressionAsked, ...] = Field((), max_length=20)
    harmonise: Harmonised | None = Field(None, description="ComBat, told as a file that hospitals' tables may use")
    by_hospital: bool = Field(False, description="each hospital tells its own column of Table 1, as far as it may")
    wanted: dict[Word, Annotated[float, Field(gt=0)]] = Field(
        {},
        max_length=100,
        description="half widths of 95 % intervals of means or shares, to say how many cases they need",
    )
    privacy: NoiseOffer | None = Field(None, description="noise at every hospital, charged to its ledger")

    @field_validator("sites")
    @classmethod
    def _in_order(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(sites)) < len(sites):
            raise ValueError("names a hospital twice; name each once")
        return tuple(sorted(sites))

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for where, name, kind in self._named():
            if name is None:
                continue
            variable = self.variables.get(name)
            if variable is None:
                raise ValueError(f"{where}: {name!r} is no variable of the question; add it under variables")
            fits = {"any": True, "number": bool(variable.range), "levels": bool(variable.levels)}
            if not fits.get(kind, len(variable.levels) == 2):
                raise ValueError(f"{where}: {name!r} has to be {'a number' if kind == 'number' else kind}")
        if self.where:
            self.filter  # noqa: B018 - it is read once, and checked by that
        if self.privacy:
            self._check_private()
        if (count := self.values) > MOST_VALUES:
            raise ValueError(f"asks each hospital for {count} numbers at once; {MOST_VALUES} may be: give larger steps")
        return self

    def _check_private(self) -> None:
        """Raise ValueError for what has no bound on how far one patient moves it."""
        for model in self.models:
            if model.kind == "cox":
                raise ValueError(
                    "privacy: cox has no bound, as a patient is at risk at every event before; take poisson or logistic"
                )
            if model.kind == "poisson" and model.outcome and (self.variables[model.outcome].range or (0,))[0] < 0:
                raise ValueError(f"privacy: poisson counts from 0; begin the range of {model.outcome!r} there")
        if self.by_hospital or self.harmonise or any(model.meta for model in self.models):
            raise ValueError("privacy: by_hospital, meta and harmonise tell exact numbers; leave them out")

    def _named(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield each variable that may be used: where, its name, and of which kind it must be."""
        yield "by", self.by, "levels"
        yield from (("table", name, "any") for name in self.table)
        yield from (("wanted", name, "any") for name in self.wanted)
        for curve in self.curves:
            yield "curves", curve.time, "number"
            yield "curves", curve.event, "two levels"
            yield "curves", curve.by, "levels"
        for model in self.models:
            yield from (("models", name, "any") for name in model.covariates)
            yield "models", model.outcome, "two levels" if model.kind == "logistic" else "number"
            yield "models", model.time, "number"
            yield "models", model.event, "two levels"
        if self.harmonise:
            yield from (("harmonise", name, "number") for name in self.harmonise.features)
            yield from (("harmonise", name, "any") for name in self.harmonise.covariates)
        yield from (("columns", name, "any") for own in self.columns.values() for name in own)

    @cached_property
    def filter(self) -> Filter | None:
        """The filter, where there is one."""
        levels = {name: tuple(own.levels) for name, own in self.variables.items()}
        return Filter(self.where, levels) if self.where else None

    def levels_of(self, name: str | None) -> tuple[str, ...]:
        """Return the levels of a variable; one without a name where there is none."""
        return tuple(self.variables[name].levels) if name else ("",)

    def width_of(self, model: RegressionAsked) -> int:
        """Return the columns of a regression's matrix."""
        return (model.kind != "cox") + sum(self.variables[name].columns for name in model.covariates)

    @property
    def rows(self) -> tuple[str, ...]:
        """The variables of Table 1, and those whose interval is wanted."""
        return tuple(dict.fromkeys((*self.table, *self.wanted)))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the first sums: of table and curves, and of where regressions begin."""
        groups = len(self.levels_of(self.by))
        found: dict[str, tuple[int, ...]] = {"patients": (groups,)}
        for name in self.rows:
            variable = self.variables[name]
            found[f"row {name}"] = (groups, len(variable.levels) or 3)
            if variable.range:
                found[f"histogram {name}"] = (groups, variable.places)
        for number, curve in enumerate(self.curves):
            found[f"curve {number}"] = (len(self.levels_of(curve.by)), self.variables[curve.time].places, 2)
        found |= {f"start {number}": (3,) for number in range(len(self.models))}
        return found | ({"harmonise": (sum(self.harmonise.sizes(self)),)} if self.harmonise else {})

    def step_of(self, model: RegressionAsked) -> int:
        """Return the sums of a regression's step: patients, log likelihood, gradient and information."""
        width = self.width_of(model)
        return 2 + width + width * (width + 1) // 2

    @property
    def values(self) -> int:
        """All sums of the first answer, and those of a step of each regression."""
        return sum(map(math.prod, self.shapes.values())) + sum(map(self.step_of, self.models))

    def leaves(self) -> list[str]:
        """Return what leaves a hospital, a line each."""
        once = sum(map(math.prod, self.shapes.values()))
        sealed = "read as sums over all hospitals" if self.sealed else "in clear"
        found = [f"once: {once} sums for table, curves and where regressions begin, {sealed}"]
        for number, model in enumerate(self.models, 1):
            if model.meta != "only":
                steps = f"at each of Newton's steps, {MOST_STEPS} at most, {self.step_of(model)} sums"
                found.append(f"model {number}, {model.kind}: {steps}, {sealed}")
            if model.meta:
                found.append(f"model {number}: the hospital's own estimates and errors, in clear")
        if self.by_hospital:
            found.append("its own means, deviations and quartiles, and counts as multiples of its floor, in clear")
        noise = self.privacy and f"noise: ε = {self.privacy.epsilon:g} at δ = {self.privacy.delta:g} for each patient"
        return [*found, noise or "no noise: the floor and the book protect patients"]

    @property
    def sealed(self) -> bool:
        """The server reads sums over all hospitals alone."""
        return len(self.sites) >= ENOUGH

    @property
    def job(self) -> str:
        """The name of the job that asks it."""
        return "statistics-sealed" if self.sealed else "statistics"

    def told(self) -> dict[str, Any]:
        """Return what a hospital's engineer reads before a decision."""
        asked = self.model_dump(mode="json", exclude_defaults=True, exclude={"title"})
        return {"title": self.title, "leaves": self.leaves(), "asked": asked}

    def in_yaml(self) -> str:
        """Return the file that hospitals get: JSON, which is YAML, too."""
        return json.dumps(self.model_dump(mode="json"), indent=1)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the question, which hospitals approve."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def read_question(path: Path) -> Question:
    """Read a question's file."""
    return Question.in_file(path, path.name, "give a question, as docs/statistics.md has one")
