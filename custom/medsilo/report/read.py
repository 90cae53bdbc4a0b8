"""Run folders as objects: read once, checked once, with one-line errors that name the file and the fix."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.png import SIGNATURE
from medsilo.core.text import plain

SCHEMA = 1
CASES = "test.csv"  # of a site: its test cases' scores
LARGEST_PICTURE = 2_000_000  # bytes
Interval = tuple[float, float]
OVERLAYS = ("best", "median", "worst")
BROKEN = "the file is damaged or was changed by hand: repeat the run"


class Part(BaseModel):
    """A part of a run's files. Unknown keys pass, so that a newer medsilo may add some within one schema version."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class SiteResult(Part):
    """What one site gave and got over the whole run. A value that is missing is None, never 0."""

    cases: dict[str, int | None] = {}
    classes: dict[str, list[int] | None] | None = None  # by part: the cases of each class, where they are told
    contributed: int | None = None
    missed: dict[int, str] = {}
    validation: list[float | None] = []
    test: dict[str, float | None] | None = None
    figures: dict[str, float | None] = {}  # all that was measured on the test cases
    withheld: list[str] = []  # what of it the site does not tell, because it covers too few cases
    bytes_up: int | None = None
    bytes_down: int | None = None
    seconds: float | None = None
    memory: int | None = None


class Package(Part):
    version: str | None = None
    hash: str | None = None


class RoundCount(Part):
    planned: int
    done: int


class Agreement(Part):
    """Who was to take part, and what was to happen when a site is missing."""

    sites: list[str] = []
    minimum: int | None = None
    when_missing: str | None = None


class Selection(Part):
    """The round whose model was tested at each site."""

    by: str | None = None
    rounds: dict[str, int | None] = {}


class Similarity(Part):
    """AdaFed's mixing weights W: row i is what site i takes from each site."""

    sites: list[str]
    weights: list[list[float]]

    @model_validator(mode="after")
    def _is_square(self) -> "Similarity":
        count = len(self.sites)
        if len(self.weights) != count or any(len(row) != count for row in self.weights):
            raise ValueError("weights are not one row and one column per site")
        return self


class SuperModelFacts(Part):
    """FedSM's super model: which threshold was best, and how often each model answered for each site's cases."""

    rule: str
    sites: list[str]
    agreed: list[str] = []
    threshold: float | None = None
    curve: list[tuple[float, int, float]] = []  # threshold, cases, mean score
    validated: dict[str, dict[str, int]] = {}
    tested: dict[str, dict[str, int]] = {}


class Details(Part):
    """What the method found out by itself; the keys depend on the method."""

    similarity: Similarity | None = None
    pretraining: dict[str, Any] | None = None
    super_model: SuperModelFacts | None = None
    cautions: list[str] = []


class Summary(Part):
    """summary.json, schema version 1."""

    status: Literal["finished", "failed"]
    reason: str | None = None
    method: str
    title: str
    task: str | None = None
    task_title: str | None = None
    synthetic: bool = False
    engine: str | None = None
    metric: str
    seed: int | None = None
    protocol: str | None = None
    plan_hash: str | None = None
    package: Package = Package()
    study: str | None = None
    network: str | None = None
    parameters: int | None = None
    rounds: RoundCount
    agreed: Agreement = Agreement()
    selected: Selection = Selection()
    sites: dict[str, SiteResult]
    unseen: dict[str, SiteResult] = {}  # tested, but not trained at
    mean_test: float | None = None
    pooled_test: float | None = None
    pooled: dict[str, float | None] = {}  # all figures, over the sites' cases together
    details: Details = Details()
    seconds: float | None = None
    memory: int | None = None  # of the server
    started: str | None = None
    ended: str | None = None

    @model_validator(mode="after")
    def _tested_with_the_metric(self) -> "Summary":
        for name, site in self.sites.items():
            if site.test is not None and self.metric not in site.test:
                raise ValueError(f"sites.{name}.test has no '{self.metric}', which 'metric' names")
        return self


class Sent(Part):
    """What one site sent and got in one round."""

    bytes_up: int = 0
    bytes_down: int = 0


class Round(Part):
    """One line of rounds.jsonl: who was asked, who answered, who was refused or lost and why."""

    round: int
    phase: str | None = None
    asked: list[str] = []
    answered: list[str] = []
    refused: dict[str, str] = {}
    lost: dict[str, str] = {}
    sites: dict[str, Sent] = {}


class Cross(Part):
    """cross.json: the score of every site's model on every site's test data, by owner, then by data."""

    metric: str
    scores: dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Absence:
    """A site without a part in one round's result."""

    site: str
    round: int
    kind: Literal["refused", "lost", "missed"]
    reason: str

    @classmethod
    def said(cls, site: str, number: int, kind: Literal["refused", "lost", "missed"], reason: str) -> "Absence":
        """The reason may repeat the kind ("lost: no answer") or be the only one to know it."""
        for word in ("refused", "lost"):
            if reason.startswith(f"{word}: "):
                return cls(site, number, word, reason.removeprefix(f"{word}: "))
        return cls(site, number, kind, reason)

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class Overlay:
    """One test case with the structures that are there and that were found."""

    which: str  # best, median or worst
    score: float | None
    image: str


@dataclass(frozen=True)
class Run:
    """One run folder. `label` is what people read; `read_all` makes it unique among the runs shown together."""

    folder: str
    label: str
    summary: Summary
    rounds: tuple[Round, ...]
    plan: str
    provenance: dict[str, Any]
    pictures: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by site: (before, after) as data URIs
    amplitude: str | None = None  # the picture of the amplitude that all sites share
    cross: Cross | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)  # of the score, where the cases' scores are here
    overlays: dict[str, list[Overlay]] = field(default_factory=dict)  # by site

    @property
    def failed(self) -> bool:
        return self.summary.status == "failed"

    @property
    def sites(self) -> list[str]:
        """All sites of the run: the agreed ones in the plan's order, then any others by name."""
        agreed = list(dict.fromkeys(self.summary.agreed.sites))
        return agreed + sorted(set(self.summary.sites) - set(agreed))

    def site(self, name: str) -> SiteResult:
        return self.summary.sites.get(name, SiteResult())

    def score(self, site: str) -> float | None:
        """The test score of the site's selected model."""
        test = self.site(site).test
        return None if test is None else test[self.summary.metric]

    def withholds(self, site: str) -> bool:
        """Whether the site does not tell the score: it has too few test cases."""
        return self.summary.metric in self.site(site).withheld

    def test_cases(self, site: str) -> int | None:
        result = self.site(site)
        tested = result.test.get("cases") if result.test is not None else None
        return result.cases.get("test") if tested is None else int(tested)

    @property
    def mean_curve(self) -> list[float | None]:
        """Validation, mean over sites; no value where a site has none: over fewer sites it would jump for no reason."""
        curves = [self.site(site).validation for site in self.sites]
        columns = [[curve[n] if n < len(curve) else None for curve in curves] for n in range(last_round([self]) + 1)]
        return [None if None in column or not column else sum(filter(None, column)) / len(column) for column in columns]

    @property
    def traffic(self) -> list[float]:
        """The bytes that all sites sent and got after 0, 1, 2, … rounds."""
        rounds = [sum(sent.bytes_up + sent.bytes_down for sent in line.sites.values()) for line in self.rounds]
        return [0.0, *accumulate(map(float, rounds))]

    def elsewhere(self, owner: str) -> tuple[list[float | None], float | None, float | None]:
        """One site's model on every site's test data; mean over sites, and over cases. From cross.json."""
        assert self.cross is not None
        row = self.cross.scores.get(owner, {})
        scores = [row.get(site) for site in self.sites]
        cases = [self.test_cases(site) for site in self.sites]
        known = [(score, count) for score, count in zip(scores, cases, strict=True) if score is not None and count]
        if len(known) < len(scores):
            return scores, None, None
        pooled = sum(score * count for score, count in known) / sum(count for _, count in known)
        return scores, sum(score for score, _ in known) / len(known), pooled

    def absences(self) -> list[Absence]:
        """Every site and round without a part in the result, from both files, in order of the rounds."""
        found: list[Absence] = []
        for line in self.rounds:
            found += [Absence.said(site, line.round, "refused", why) for site, why in line.refused.items()]
            found += [Absence.said(site, line.round, "lost", why) for site, why in line.lost.items()]
            for site in set(line.asked) - set(line.answered) - set(line.refused) - set(line.lost):
                why = self.site(site).missed.get(line.round, "no answer is recorded")
                found.append(Absence.said(site, line.round, "missed", why))
        known = {(absence.site, absence.round) for absence in found}
        for site in self.sites:
            for number, why in self.site(site).missed.items():
                if (site, number) not in known:
                    found.append(Absence.said(site, number, "missed", why))
        return sorted(found, key=lambda absence: (absence.round, absence.site))


def read(folder: Path) -> Run:
    """Read one run folder, or raise a MedsiloError that names the file and what to do."""
    name = Path(folder).resolve().name
    with reading(f"run '{name}'"):
        return _read(folder, name)


def _read(folder: Path, name: str) -> Run:
    if not Path(folder).is_dir():
        raise MedsiloError(f"There is no run folder '{name}': give the folder that holds summary.json", str(folder))
    summary = _summary(folder, name)
    provenance = _parsed(_text(folder, "provenance.json", name), f"provenance.json of run '{name}'")
    if not isinstance(provenance, dict):
        raise MedsiloError(f"provenance.json of run '{name}' holds no object: {BROKEN}")
    plan = _text(folder, "plan.yaml", name)
    rounds = _rounds(folder, name, summary)
    amplitude = _picture(Path(folder) / "figures/amplitude.png")
    pictures, cross = _pictures(Path(folder)), _cross(folder, name)
    intervals, ranks = _cases(Path(folder), summary)
    overlays = _overlays(Path(folder), ranks)
    run = Run(name, summary.title, summary, rounds, plan, provenance, pictures, amplitude, cross)
    return replace(run, intervals=intervals, overlays=overlays)


def read_all(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders. Runs with the same title are told apart by their seed, else by their folder."""
    if not folders:
        raise MedsiloError("There is no run to report on: give at least one run folder")
    runs = [read(Path(folder)) for folder in folders]
    for distinction in (lambda run: f"seed {run.summary.seed}", lambda run: run.folder):
        count = Counter(run.label for run in runs)
        runs = [replace(run, label=f"{run.label}, {distinction(run)}") if count[run.label] > 1 else run for run in runs]
    return runs


def all_sites(runs: Sequence[Run]) -> list[str]:
    """The sites of all runs, in the order in which the runs name them."""
    return list(dict.fromkeys(site for run in runs for site in run.sites))


def same(runs: Sequence[Run], view: Callable[[Run], Any]) -> Any:
    """What all runs agree on, or None."""
    values = {view(run) for run in runs}
    return values.pop() if len(values) == 1 else None


def last_round(runs: Iterable[Run]) -> int:
    """The last round of the longest validation curve."""
    return max([0, *(len(run.site(site).validation) - 1 for run in runs for site in run.sites)])


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 1, 2, 3, 5 becomes '1–3, 5'."""
    groups: list[list[int]] = []
    for number in sorted(set(numbers)):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{group[0]}–{group[-1]}" if len(group) > 2 else ", ".join(map(str, group)) for group in groups)


def _summary(folder: Path, name: str) -> Summary:
    content = _parsed(_text(folder, "summary.json", name), f"summary.json of run '{name}'")
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        raise MedsiloError(
            f"summary.json of run '{name}' has schema {version!r}, but this medsilo reads schema {SCHEMA}: "
            "make the report with the medsilo that made the run"
        )
    return _checked(Summary, content, f"summary.json of run '{name}'")


def _rounds(folder: Path, name: str, summary: Summary) -> tuple[Round, ...]:
    # A run that failed before its first round ended has nothing to write there.
    if summary.status == "failed" and summary.rounds.done == 0 and not (Path(folder) / "rounds.jsonl").exists():
        return ()
    rounds = []
    for number, line in enumerate(_text(folder, "rounds.jsonl", name).split("\n"), start=1):
        if line.strip():
            where = f"rounds.jsonl of run '{name}', line {number}"
            rounds.append(_checked(Round, _parsed(line, where), where))
    return tuple(rounds)


def _cross(folder: Path, name: str) -> Cross | None:
    if not (Path(folder) / "cross.json").exists():
        return None
    where = f"cross.json of run '{name}'"
    return _checked(Cross, _parsed(_text(folder, "cross.json", name), where), where)


def _cases(folder: Path, summary: Summary) -> tuple[dict[str, Interval], dict[str, dict[str, float]]]:
    """By site, from its test cases' scores where they are here: the interval, and the best, median and worst score."""
    kept = {path.parent.name for path in folder.glob(f"sites/*/{CASES}")}
    tests = {site: facts.test for site, facts in summary.sites.items() if site in kept and facts.test}
    told = {site: (test[summary.metric], int(test.get("cases") or 0)) for site, test in tests.items()}
    known = {site: (score, cases) for site, (score, cases) in told.items() if score is not None}
    if not known:
        return {}, {}
    from medsilo.study.evidence import interval
    from medsilo.study.scores import ranks, scores_in

    scores = scores_in(folder, summary.metric, known)
    return {site: interval(own) for site, own in scores.items()}, {site: ranks(own) for site, own in scores.items()}


def _overlays(folder: Path, ranks: dict[str, dict[str, float]]) -> dict[str, list[Overlay]]:
    """Segmentations that sites allowed to be drawn."""
    found: dict[str, list[Overlay]] = {}
    for site in sorted(path.parent.name for path in folder.glob("sites/*/pictures")):
        for which in OVERLAYS:
            image = _picture(folder / "sites" / site / "pictures" / f"test-{which}.png")
            if image:
                found.setdefault(site, []).append(Overlay(which, ranks.get(site, {}).get(which), image))
    return found


def _pictures(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The pictures that sites allowed to be kept in this run tree."""
    found: dict[str, list[tuple[str, str]]] = {}
    for before in sorted(folder.glob("sites/*/pictures/before-*.png")):
        pair = _picture(before), _picture(before.with_name(before.name.replace("before", "after")))
        if pair[0] and pair[1]:
            found.setdefault(before.parents[1].name, []).append((pair[0], pair[1]))
    return found


def _picture(path: Path) -> str | None:
    """A PNG file as a data URI, so that the page stays one file."""
    try:
        content = path.read_bytes() if path.stat().st_size <= LARGEST_PICTURE else b""
    except OSError:
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}" if content.startswith(SIGNATURE) else None


def _text(folder: Path, file: str, name: str) -> str:
    try:
        return (Path(folder) / file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MedsiloError(
            f"Run '{name}' has no {file}: give a complete run folder, or repeat the run if it was interrupted",
            str(folder),
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MedsiloError(f"{file} of run '{name}' cannot be read: check its permissions", str(error)) from None


def _parsed(text: str, where: str) -> Any:
    try:
        # NaN and Infinity are no JSON, but programs write them: for a reader such a number is missing.
        return _plain(json.loads(text, parse_constant=lambda constant: None))
    except (ValueError, RecursionError) as error:
        raise MedsiloError(f"{where} is no JSON: {BROKEN}", str(error)) from None


def _plain(value: Any) -> Any:
    """The same with all its texts fit to be shown: sites and servers elsewhere wrote them."""
    if isinstance(value, dict):
        return {plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


def _checked(model: type[Any], content: Any, where: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise MedsiloError(f"{where}: {f'{key}: ' if key else ''}{message}; {BROKEN}", str(error)) from None
