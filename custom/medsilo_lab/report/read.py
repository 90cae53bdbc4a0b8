"""Run folders as objects: read once, checked once, with one-line errors that name the file and the fix."""

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
from medsilo.runs.own_files import Spent
from medsilo.runs.reading import read_of_sites, read_provenance, read_rounds, read_summary, read_text
from medsilo.runs.rounds import Round
from medsilo.runs.schema import SiteResult, Summary
from medsilo.runs.site_files import Provenance

LARGEST_PICTURE = 2_000_000  # bytes
LONGEST_NAME = 40  # bytes of a class's name
Interval = tuple[float, float]
OVERLAYS = ("best", "median", "worst")


@dataclass(frozen=True)
class Overlay:
    """One test case with the structures that are there and that were found."""

    which: str  # best, median or worst
    score: float | None
    image: str


@dataclass(frozen=True)
class RunResult:
    """One run folder. `label` is what people read; `read_all` makes it unique among the runs shown together."""

    folder: str
    label: str
    summary: Summary
    rounds: tuple[Round, ...]
    plan: str
    provenance: Provenance
    pictures: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by site: (before, after) as data URIs
    intervals: dict[str, Interval] = field(default_factory=dict)  # of the score, where the cases' scores are here
    patients: dict[str, int] = field(default_factory=dict)  # by site: those of the test cases, where they are here
    means: dict[str, float] = field(default_factory=dict)  # by site: the score of the mean, where a number is learned
    overlays: dict[str, list[Overlay]] = field(default_factory=dict)  # by site
    spent: dict[str, Spent] = field(default_factory=dict)  # by site whose own folder is here

    @property
    def record(self) -> str:
        """The file that tells where the numbers come from, as people read it."""
        return json.dumps(self.provenance.as_read(), indent=2, ensure_ascii=False)

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
        return self.summary.score(site) if site in self.summary.sites else None

    def withholds(self, site: str) -> bool:
        """Return whether the site does not tell the score: it has too few test cases."""
        return self.summary.metric in self.site(site).suppressed

    def step(self, site: str, part: str = "test") -> float:
        """Return the steps in which a site tells its scores over a part; 0 where it tells them exactly."""
        return self.site(site).steps.get(part, 0.0)

    @property
    def rounding(self) -> Iterator[str]:
        """Yield how coarse the scores of sites are that round them, one line for those that round alike."""
        steps = {site: max(self.site(site).steps.values(), default=0.0) for site in self.sites}
        for step in sorted({*steps.values()} - {0.0}):
            named = [(site, self.tested_in_words(site)) for site in self.sites if steps[site] == step]
            told = ", ".join(f"{plain(site)} ({cases})" if cases else plain(site) for site, cases in named)
            yield (
                f"scores of {told} are rounded to steps of {step:g}, because their patients are few: 0.000 means below "
                f"{step / 2:g}, and 1.000 above {1 - step / 2:g}"
            )

    def tested_in_words(self, site: str) -> str:
        """Return how many test cases a site has, of how many patients; nothing where neither is known."""
        cases, patients = cases_tested(self.summary, site), self.patients.get(site)
        if cases is None:
            return ""
        of = f" of {counted(patients, 'patient')}" if patients else ""
        return counted(cases, "slice" if self.summary.sliced else "case") + of

    @property
    def tested(self) -> int:
        """The test cases of all sites, as far as they disclose them."""
        return sum(cases_tested(self.summary, site) or 0 for site in self.sites)

    def cases_in(self, part: str) -> int:
        """Return the cases of a part of the data at all sites, as far as they disclose them."""
        return sum((self.site(site).cases or {}).get(part) or 0 for site in self.sites)

    @property
    def validated_in_words(self) -> str:
        """Return the validation cases of all sites, as far as they disclose them, as a caption says it."""
        cases = self.cases_in("validation")
        return f"n = {counted(cases, 'validation case')}" if cases else "validation cases not stated"

    def class_names(self, count: int) -> list[str]:
        """Return the names of so many classes; their numbers where the plan names none."""
        names = [plain(name, LONGEST_NAME) for name in self.summary.labels]
        named = len(names) == count and names != [str(label) for label in range(count)]
        return names if named else [f"class {label}" for label in range(count)]

    @property
    def mean_curve(self) -> list[float | None]:
        """Validation, mean over sites; no value where a site has none: over fewer sites it would jump for no reason."""
        by_round = zip_longest(*(self.site(site).validation for site in self.sites))
        return [None if None in scores else sum(filter(None, scores)) / len(scores) for scores in by_round]

    def missed(self, site: str) -> dict[int, str]:
        """Return the rounds that a site has no part in, and why."""
        return {line.round: why for line in self.rounds if (why := line.absence(site))}


def read(folder: Path) -> RunResult:
    """Read one run folder, or raise a MedsiloError that names the file and what to do."""
    name = folder.resolve().name
    if not folder.is_dir():
        raise MedsiloError(f"There is no run folder '{name}': give the folder that holds {paths.SUMMARY}", str(folder))
    with reading(f"run '{name}'"):
        summary, provenance = read_summary(folder), read_provenance(folder)
        plan = read_text(folder, paths.PLAN)
        # A run that failed before its first round ended has nothing to write there.
        needed = summary.finished or summary.rounds.done > 0 or (folder / paths.ROUNDS).exists()
        rounds = tuple(read_rounds(folder)) if needed else ()
        return RunResult(
            name,
            summary.title,
            summary,
            rounds,
            plan,
            provenance,
            pictures=_pictures(folder),
            spent=read_of_sites(Spent, folder, paths.SPENT),
            **_of_cases(folder, summary),
        )


def runs_within(folder: Path) -> list[Path]:
    """Return the runs of a folder that holds several, as a demo or a comparison leaves it; else the folder itself."""
    if (folder / paths.SUMMARY).exists() or (folder / paths.PLAN).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{paths.SUMMARY}")) or [folder]


def read_all(folders: Sequence[Path]) -> list[RunResult]:
    """Read several run folders. Runs with the same title are told apart by their seed, else by their folder."""
    if not folders:
        raise MedsiloError("There is no run to report on: give at least one run folder")
    runs = [read(folder) for folder in folders]
    for distinction in (lambda run: f"seed {run.summary.seed}", lambda run: run.folder):
        count = Counter(run.label for run in runs)
        runs = [replace(run, label=f"{run.label}, {distinction(run)}") if count[run.label] > 1 else run for run in runs]
    return runs


def all_sites(runs: Sequence[RunResult]) -> list[str]:
    """The sites of all runs, in the order in which the runs name them."""
    return list(dict.fromkeys(site for run in runs for site in run.sites))


def same(runs: Sequence[RunResult], view: Callable[[RunResult], Any]) -> Any:
    """Return what all runs agree on, or None."""
    values = {view(run) for run in runs}
    return values.pop() if len(values) == 1 else None


def sample(runs: Sequence[RunResult]) -> str:
    """Return what the runs' test scores rest on, as a caption says it."""
    cases, patients = same(runs, lambda run: run.tested), same(runs, lambda run: sum(run.patients.values()))
    if not cases:
        return f"n = {counted(len(runs), 'run')}"
    whole = all(set(run.sites) <= set(run.patients) for run in runs)
    unit = "test slice" if all(run.summary.sliced for run in runs) else "test case"
    return f"n = {counted(cases, unit)}" + (f" of {counted(patients, 'patient')}" if patients and whole else "")


def last_round(runs: Iterable[RunResult]) -> int:
    """The last round of the longest validation curve."""
    return max([0, *(len(run.site(site).validation) - 1 for run in runs for site in run.sites)])


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 1, 2, 3, 5 becomes '1–3, 5'."""
    steps = groupby(
        enumerate(sorted(set(numbers))), lambda one: one[1] - one[0]
    )  # alike of those that follow each other
    groups = [[number for _, number in own] for _, own in steps]
    return ", ".join(f"{group[0]}–{group[-1]}" if len(group) > 2 else ", ".join(map(str, group)) for group in groups)


def _of_cases(folder: Path, summary: Summary) -> dict[str, Any]:
    """Return what is known of a run by its test cases' scores, by each site that leaves them here."""
    kept = {path.parent.name for path in folder.glob(f"{paths.SITES}/*/{paths.CASES}")} & {*summary.telling}
    if not kept:
        return {"overlays": _overlays(folder, {})}
    from medsilo_lab.study.scores import SiteTest

    tests = {site: SiteTest.read(folder, site, summary.metric) for site in sorted(kept)}
    return {
        "intervals": {site: interval for site, own in tests.items() if (interval := own.interval)},
        "patients": {site: own.scores.people for site, own in tests.items()},
        "means": {site: mean for site, own in tests.items() if (mean := own.mean) is not None},
        "overlays": _overlays(folder, {site: own.ranks for site, own in tests.items()}),
    }


def _overlays(folder: Path, ranks: dict[str, dict[str, float]]) -> dict[str, list[Overlay]]:
    """Segmentations that sites allowed to be drawn."""
    found: dict[str, list[Overlay]] = {}
    for site in sorted(path.parent.name for path in folder.glob(f"{paths.SITES}/*/{paths.PICTURES}")):
        for which in OVERLAYS:
            image = picture_of(paths.site_folder(folder, site) / paths.PICTURES / f"test-{which}.png")
            if image:
                found.setdefault(site, []).append(Overlay(which, ranks.get(site, {}).get(which), image))
    return found


def _pictures(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The pictures that sites allowed to be kept in this run tree."""
    found: dict[str, list[tuple[str, str]]] = {}
    for before in sorted(folder.glob(f"{paths.SITES}/*/{paths.PICTURES}/before-*.png")):
        pair = picture_of(before), picture_of(before.with_name(before.name.replace("before", "after")))
        if pair[0] and pair[1]:
            found.setdefault(before.parents[1].name, []).append((pair[0], pair[1]))
    return found


def picture_of(path: Path) -> str | None:
    """Return a PNG file as a data URI, so that the page stays one file; None for anything else."""
    try:
        content = path.read_bytes() if path.stat().st_size <= LARGEST_PICTURE else b""
        with Image.open(BytesIO(content), formats=["PNG"]) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow says of a damaged file
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def cases_tested(summary: Summary, site: str) -> int | None:
    """Return the number of a site's test cases."""
    result = summary.sites.get(site)
    if result is None:
        return None
    tested = result.test.get("cases") if result.test is not None else None
    return (result.cases or {}).get("test") if tested is None else int(tested)
