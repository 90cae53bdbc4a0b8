"""Read and check run folders. If a file is wrong, the error message is one line that names the file and the remedy."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.text import counted, plain
from medsilo.runs import paths
from medsilo.runs.own_files import Spent, Weighed
from medsilo.runs.reading import read_of_sites, read_provenance, read_rounds, read_summary, read_text
from medsilo.runs.rounds import Round
from medsilo.runs.schema import SiteResult, Summary
from medsilo.runs.score import Score
from medsilo.runs.site_files import Provenance

LARGEST_PICTURE = 2_000_000
LONGEST_NAME = 40
Interval = tuple[float, float]
OVERLAYS = ("best", "median", "worst")


@dataclass(frozen=True)
class Overlay:
    which: str
    score: float | None
    image: str


@dataclass(frozen=True)
class RunResult:
    """The contents of a run folder. `label` is the title of the run. If several runs have the same title, the function
    `read_all` appends text to their labels, so that every label is unique.
    """

    folder: str
    label: str
    summary: Summary
    rounds: tuple[Round, ...]
    plan: str
    provenance: Provenance
    # for each site, pairs of images before and after harmonisation, as data URIs
    pictures: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    # confidence intervals of the test scores by site, if the folder contains the scores of single cases
    intervals: dict[str, Interval] = field(default_factory=dict)
    # number of test patients by site, if the folder contains the scores of single cases
    patients: dict[str, int] = field(default_factory=dict)
    # in a regression, for each site: the score of a constant prediction, which is the mean of the site's test cases
    means: dict[str, float] = field(default_factory=dict)
    overlays: dict[str, list[Overlay]] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=dict)  # privacy cost of each site whose folder is on this machine
    weighed: dict[str, Weighed] = field(default_factory=dict)  # weight of each site whose folder is on this machine

    @property
    def record(self) -> str:
        return json.dumps(self.provenance.as_read(), indent=2, ensure_ascii=False)

    @property
    def failed(self) -> bool:
        return self.summary.status == "failed"

    @property
    def sites(self) -> list[str]:
        """All sites of the run: first the agreed sites in the order of the plan, then other sites by name."""
        agreed = list(dict.fromkeys(self.summary.agreed.sites))
        return agreed + sorted(set(self.summary.sites) - set(agreed))

    def site(self, name: str) -> SiteResult:
        return self.summary.sites.get(name, SiteResult())

    def score(self, site: str) -> float | None:
        return self.summary.score(site) if site in self.summary.sites else None

    def score_at(self, site: str) -> Score:
        """Return the known facts of a site's test score: the exact score, a range around the score, or nothing."""
        found = self.summary.score_at(site)
        return found.changed(n=self.patients.get(site, found.n))

    def withholds(self, site: str) -> bool:
        """Return True if a site suppresses its score because of too few test cases."""
        return self.summary.metric in self.site(site).suppressed

    def step(self, site: str, part: str = "test") -> float:
        """Return the step to which a site rounds its scores on its validation or test cases (`validation` or `test`); 0
        means exact scores.
        """
        return self.site(site).steps.get(part, 0.0)

    @property
    def rounding(self) -> Iterator[str]:
        """For each rounding step, a line of text with the names of the sites that round scores to this step."""
        steps = {site: max(self.site(site).steps.values(), default=0.0) for site in self.sites}
        for step in sorted({*steps.values()} - {0.0}):
            named = [(site, self.tested_in_words(site)) for site in self.sites if steps[site] == step]
            told = ", ".join(f"{plain(site)} ({cases})" if cases else plain(site) for site, cases in named)
            yield (
                f"scores of {told} are rounded to steps of {step:g}, because their patients are few, and lie anywhere "
                "in the ranges shown"
            )

    def tested_in_words(self, site: str) -> str:
        """Describe a site's number of test cases, and its number of test patients if known. The text is empty if the
        number of cases is unknown.
        """
        cases, patients = cases_tested(self.summary, site), self.patients.get(site)
        if cases is None:
            return ""
        of = f" of {counted(patients, 'patient')}" if patients else ""
        return counted(cases, "slice" if self.summary.sliced else "case") + of

    @property
    def tested(self) -> int:
        return sum(cases_tested(self.summary, site) or 0 for site in self.sites)

    def cases_in(self, part: str) -> int:
        return sum((self.site(site).cases or {}).get(part) or 0 for site in self.sites)

    @property
    def validated_in_words(self) -> str:
        """A caption with the total number of validation cases that the sites disclose."""
        cases = self.cases_in("validation")
        return f"n = {counted(cases, 'validation case')}" if cases else "validation cases not stated"

    def class_names(self, count: int) -> list[str]:
        """Return the plan's names of the classes. If the plan does not name all `count` classes, return the names class
        0, class 1 and so on.
        """
        names = [plain(name, LONGEST_NAME) for name in self.summary.labels]
        named = len(names) == count and names != [str(label) for label in range(count)]
        return names if named else [f"class {label}" for label in range(count)]

    @property
    def mean_curve(self) -> list[float | None]:
        """The mean validation score over sites by round. A round has no mean if a site lacks a score, because the mean
        over fewer sites would jump. A site that has no score in any round is left out.
        """
        curves = [self.site(site).validation for site in self.sites]
        by_round = zip_longest(*(curve for curve in curves if any(score is not None for score in curve)))
        return [None if None in scores else sum(filter(None, scores)) / len(scores) for scores in by_round]

    def missed(self, site: str) -> dict[int, str]:
        return {line.round: why for line in self.rounds if (why := line.absence(site))}


def read(folder: Path, whole: bool = True) -> RunResult:
    """Read a run folder. Raise MedsiloError if a file is missing or invalid.

    Args:
        whole: True to calculate intervals and to load pictures, which takes time
    """
    name = folder.resolve().name
    if not folder.is_dir():
        raise MedsiloError(f"There is no run folder '{name}': give the folder that holds {paths.SUMMARY}", str(folder))
    with reading(f"run '{name}'"):
        summary, provenance = read_summary(folder), read_provenance(folder)
        plan = read_text(folder, paths.PLAN)
        # a run that failed in its first round has no file with rounds
        needed = summary.finished or summary.rounds.done > 0 or (folder / paths.ROUNDS).exists()
        rounds = tuple(read_rounds(folder)) if needed else ()
        return RunResult(
            name,
            summary.title,
            summary,
            rounds,
            plan,
            provenance,
            pictures=_pictures(folder) if whole else {},
            spent=read_of_sites(Spent, folder, paths.SPENT),
            weighed=read_of_sites(Weighed, folder, paths.WEIGHT),
            **_of_cases(folder, summary, whole),
        )


def runs_within(folder: Path) -> list[Path]:
    """Return the run folders inside the folder of a comparison. If the given folder is the folder of a single run,
    return the given folder.
    """
    if (folder / paths.SUMMARY).exists() or (folder / paths.PLAN).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{paths.SUMMARY}")) or [folder]


def read_all(folders: Sequence[Path]) -> list[RunResult]:
    """Read several run folders. The labels of runs with the same title also contain the seed. The labels of runs with
    the same title and the same seed also contain the folder.
    """
    if not folders:
        raise MedsiloError("There is no run to report on: give at least one run folder")
    runs = [read(folder) for folder in folders]
    for distinction in (lambda run: f"seed {run.summary.seed}", lambda run: run.folder):
        count = Counter(run.label for run in runs)
        runs = [replace(run, label=f"{run.label}, {distinction(run)}") if count[run.label] > 1 else run for run in runs]
    return runs


def all_sites(runs: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(site for run in runs for site in run.sites))


def same(runs: Sequence[RunResult], view: Callable[[RunResult], Any]) -> Any:
    """Return the result of `view` if all runs have the same result, otherwise None."""
    values = {view(run) for run in runs}
    return values.pop() if len(values) == 1 else None


def sample(runs: Sequence[RunResult]) -> str:
    cases, patients = same(runs, lambda run: run.tested), same(runs, lambda run: sum(run.patients.values()))
    if not cases:
        return f"n = {counted(len(runs), 'run')}"
    whole = all(set(run.sites) <= set(run.patients) for run in runs)
    unit = "test slice" if all(run.summary.sliced for run in runs) else "test case"
    return f"n = {counted(cases, unit)}" + (f" of {counted(patients, 'patient')}" if patients and whole else "")


def last_round(runs: Iterable[RunResult]) -> int:
    return max([0, *(len(run.site(site).validation) - 1 for run in runs for site in run.sites)])


def spans(numbers: Iterable[int]) -> str:
    """Format a set of integers as ranges: 1, 2, 3, 5 becomes '1–3, 5'."""
    steps = groupby(
        enumerate(sorted(set(numbers))), lambda one: one[1] - one[0]
    )  # for consecutive numbers, the difference between number and position is constant
    groups = [[number for _, number in own] for _, own in steps]
    return ", ".join(f"{group[0]}–{group[-1]}" if len(group) > 2 else ", ".join(map(str, group)) for group in groups)


def _of_cases(folder: Path, summary: Summary, whole: bool) -> dict[str, Any]:
    """Return the fields of RunResult that are calculated from the scores of single test cases. If the run folder lacks
    the scores of single test cases, return only the overlays.
    """
    kept = {path.parent.name for path in folder.glob(f"{paths.SITES}/*/{paths.CASES}")} & {*summary.telling}
    if not kept:
        return {"overlays": _overlays(folder, {}) if whole else {}}
    from medsilo_lab.study.scores import SiteTest

    tests = {site: SiteTest.read(folder, site, summary.metric) for site in sorted(kept)}
    known = {
        "patients": {site: test.scores.people for site, test in tests.items()},
        "means": {site: mean for site, own in tests.items() if (mean := own.mean) is not None},
    }
    if not whole:
        return known
    return known | {
        "intervals": {site: interval for site, own in tests.items() if (interval := own.interval)},
        "overlays": _overlays(folder, {site: own.ranks for site, own in tests.items()}),
    }


def _overlays(folder: Path, ranks: dict[str, dict[str, float]]) -> dict[str, list[Overlay]]:
    found: dict[str, list[Overlay]] = {}
    for site in sorted(path.parent.name for path in folder.glob(f"{paths.SITES}/*/{paths.PICTURES}")):
        for which in OVERLAYS:
            image = picture_of(paths.site_folder(folder, site) / paths.PICTURES / f"test-{which}.png")
            if image:
                found.setdefault(site, []).append(Overlay(which, ranks.get(site, {}).get(which), image))
    return found


def _pictures(folder: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for before in sorted(folder.glob(f"{paths.SITES}/*/{paths.PICTURES}/before-*.png")):
        pair = picture_of(before), picture_of(before.with_name(before.name.replace("before", "after")))
        if pair[0] and pair[1]:
            found.setdefault(before.parents[1].name, []).append((pair[0], pair[1]))
    return found


def picture_of(path: Path) -> str | None:
    """Return a PNG file as a data URI, so that the page needs no other files. Return None if the file is too large or
    is no valid PNG.
    """
    try:
        content = path.read_bytes() if path.stat().st_size <= LARGEST_PICTURE else b""
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            image.verify()
    # errors that Pillow raises for a damaged file
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def cases_tested(summary: Summary, site: str) -> int | None:
    result = summary.sites.get(site)
    if result is None:
        return None
    tested = result.test.get("cases") if result.test is not None else None
    return (result.cases or {}).get("test") if tested is None else int(tested)
