"""The functions of `import medsilo`: run studies, compare methods, and predict cases from Python. See
docs/research/python.md.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from csv import DictReader
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, wraps
from html import escape
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from medsilo.cli.plan_keys import keys_of_plans
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.core.text import counted
from medsilo.core.wording import ALSO_CALLED
from medsilo.flare.jobs import plan_of
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import METHODS, SOURCE
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings
from medsilo_lab import in_memory
from medsilo_lab.comparison import USUAL_SEEDS
from medsilo_lab.comparison.compare import Study, comparable
from medsilo_lab.deploy.exporter import export
from medsilo_lab.deploy.predictor import asked_to_predict
from medsilo_lab.deploy.source import Source
from medsilo_lab.engines import inprocess, simulator
from medsilo_lab.engines.centralised import POOL
from medsilo_lab.engines.continuation import Longer
from medsilo_lab.given import GivenFolder, GivenSites, as_given
from medsilo_lab.report import figures
from medsilo_lab.report.class_rates import by_class
from medsilo_lab.report.decision import OF_CLASS
from medsilo_lab.report.differences import finding
from medsilo_lab.report.figures import Figures
from medsilo_lab.report.page import write
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.run_warnings import of_run, runs_of
from medsilo_lab.report.study_page import write_study
from medsilo_lab.study.cells import Row, base_plan, cells_of
from medsilo_lab.study.subgroup_tables import SubgroupTable
from medsilo_lab.study.subgroups import of_run as of_run_subgroups
from medsilo_lab.study.verdict_file import About, Notice, Verdict, read_verdict
from medsilo_server.record import Record, new_study

if TYPE_CHECKING:
    from pandas import DataFrame

    from medsilo_lab.study.planner import Power

PlanLike = Plan | Mapping[str, Any] | Path | str
PathLike = Path | str
Changes = Sequence[str] | Mapping[str, Any] | str
Sites = Sequence[str] | Mapping[str, Any]
Engine = Literal["simulator", "inprocess"]
WIDE = 24
# a parameter's name in earlier versions of medsilo → the parameter's present name
FORMERLY = {"against": "baseline", "site_config": "settings"}


def _as_python(does: Callable) -> Callable:
    def in_python(text: str) -> str:
        text = text.replace("--set ", "changes: ").replace("in this site's medsilo.yaml, or give --data", "as data=")
        return re.sub(r"--([a-z][a-z-]+)", lambda option: option[1].replace("-", "_") + "=", text)

    known = signature(does).parameters

    @wraps(does)
    def tried(*args: Any, **values: Any) -> Any:
        for name in values:
            if name not in known:
                raise MedsiloError(f"medsilo.{does.__name__} has no parameter {name!r}; {_hint(name, known)}")
        try:
            return does(*args, **values)
        except MedsiloError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return tried


def _hint(name: str, known: Iterable[str]) -> str:
    name = {**ALSO_CALLED, **FORMERLY}.get(name, name)
    keys = {key: f"{section}.{key}" for section, within in keys_of_plans().items() for key in within}
    nearest = get_close_matches(name, [*known, *keys], 1)
    if not nearest:
        return f"it takes {', '.join(known)}"
    if nearest[0] in known:
        return f"did you mean {nearest[0]}=?"
    return f"the plan has {keys[nearest[0]]}: changes={{{keys[nearest[0]]!r}: ...}}"


class Run:
    """A finished study and its results, read from its run folder.

    Each attribute reads its file when it is first used. Of the methods of this class, only `report` writes into the run
    folder.

    >>> import medsilo
    >>> plan = {
    ...     "algorithm": {"name": "local"},
    ...     "task": {"name": "synthetic-activity", "persons": 4, "windows": 5},
    ...     "training": {"rounds": 1},
    ...     "participation": {"sites": ["a"]},
    ... }
    >>> study = medsilo.run(plan, device="cpu")
    >>> Run(study.folder).summary.status
    'finished'
    """

    def __init__(self, folder: PathLike) -> None:
        """Open a run folder that any engine or consortium has written.

        Args:
            folder: the run folder, with its summary.json
        """
        self.folder = Path(folder).resolve()
        self._kept: TemporaryDirectory | None = None  # the temporary folder is deleted together with this object
        self._settings: SiteSettings | None = None  # settings of the sites; None if another program ran the study
        if not (self.folder / paths.SUMMARY).is_file():
            raise MedsiloError(f"{self.folder.name} is not a finished run: it has no summary.json", str(folder))

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run, including all default values."""
        return load_plan(self.folder / paths.PLAN)

    @cached_property
    def summary(self) -> Summary:
        """The results of the run, as in summary.json (docs/reference/run-folder.md)."""
        return read_summary(self.folder)

    @cached_property
    def history(self) -> list[Round]:
        """The results of each round, as in rounds.jsonl."""
        return Record(self.folder).rounds()

    @property
    def warnings(self) -> list[Notice]:
        """The warnings about the run, most serious first: for example, that a model has not learned."""
        return of_run(self._result)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """A dictionary with the tested model of each site. All models are in evaluation mode. A model is loaded when it
        is first used.
        """
        return _Models(self)

    @property
    def table(self) -> "DataFrame":
        """A table with a row per site: test cases, test score, selected round, traffic in bytes, and further columns.

        If a site rounds its score, the table lacks the exact score, which lies between `low` and `high`. `n` is the
        number of test patients, or the number of test cases if patients are unknown.
        """
        run, metric = self._result, self._result.summary.metric
        rows = []
        for site in (*run.sites, *sorted(run.summary.evaluation_sites)):
            own = run.summary.sites.get(site) or run.summary.evaluation_sites[site]
            cases = {part: (own.cases or {}).get(part) for part in ("train", "validation", "test")}
            test, selected = own.test or {}, run.summary.selected.rounds
            told = run.score_at(site)
            of_score = {"low": told.low, "high": told.high, "n": told.n, "kind": told.kind}
            scores = {metric: told.value, **of_score, "loss": test.get("loss"), "round": selected.get(site)}
            sent = {"bytes_up": own.bytes_up, "bytes_down": own.bytes_down, "seconds": own.seconds}
            cut = {"threshold": own.decisions.threshold} if own.decisions and own.decisions.decided else {}
            further = {
                name: value for name, value in own.figures.items() if name not in scores and not OF_CLASS.match(name)
            }
            rows.append({"site": site, **cases, **scores, **sent, **cut, **further})
        return _frame(rows, "site")

    @property
    def classes(self) -> "DataFrame":
        """A table with a row per site and class. The columns are test cases, sensitivity, specificity, precision, F1,
        AUROC and PR-AUC, and rates at 90 % specificity or sensitivity. Columns such as `f1_low` and `f1_high`
        are the ends of 95 % intervals.

        The predicted class is the class with the highest probability. If a site suppresses its class counts, the table
        has no rows for this site.
        """
        run, names, rows = self._result, self.plan.task.goal.label_names, []
        for site, own in (run.summary.sites | run.summary.evaluation_sites).items():
            for rates in by_class(own, names):
                told = rates._asdict()
                name, intervals = told.pop("name"), told.pop("intervals")
                for of in [*told][1:]:
                    told |= dict(zip((f"{of}_low", f"{of}_high"), intervals.get(of, (None, None)), strict=True))
                rows.append({"site": site, "class": name, **told})
        return _frame(rows, ["site", "class"])

    @property
    def subgroups(self) -> "DataFrame":
        """A table with a row per level of each declared subgroup: number of patients, score and interval.

        If the score is rounded, the exact score lies between `least` and `most`. `low` and `high` are the ends of the
        95 % interval. `few` is true if the subgroup level has too few patients for a comparison. `differs` lists the
        other levels whose scores differ significantly from the score of this level, after correction for multiple
        comparisons.
        """
        return _frame(_subgroup_rows(of_run_subgroups(self.summary)), ["subgroup", "level"])

    @property
    def cases(self) -> "DataFrame":
        """A table with a row per test case of the sites on this machine: site, case, patient, and the metrics of the
        case.
        """
        found = []
        for path in sorted(self.folder.glob(f"{paths.SITES}/*/{paths.CASES}")):
            with path.open(encoding="utf-8", newline="") as file:
                for line in DictReader(file):
                    measured = {key: float(value) if value else None for key, value in line.items()}
                    found.append({"site": path.parent.name, **measured})
        return _frame(found, "site")

    @property
    def rounds(self) -> "DataFrame":
        """A table with a row per round and site: losses, validation score, duration in seconds, and traffic in
        bytes.
        """
        told = ("train_loss", "validation", "validation_loss", "samples", "seconds", "bytes_up", "bytes_down")
        every = ((line, site, own) for line in self.history for site, own in line.sites.items())
        rows = [
            {"round": line.round, "site": site, **{key: getattr(own, key) for key in told}} for line, site, own in every
        ]
        return _frame(rows, ["round", "site"])

    @property
    def plot(self) -> SimpleNamespace:
        """The sections of the HTML report as attributes, for example `run.plot.learning`. `dir(run.plot)` lists the
        names.
        """
        with TemporaryDirectory() as folder:
            page = self.report(Path(folder) / "page.html").read_text(encoding="utf-8")
        head = page.partition("</head>")[0]
        page = page.replace('<details class="whole">', '<details class="whole" open>')
        found = re.findall(r'(<section[^>]* id="([\w-]+)".*?</section>)', page, re.DOTALL)
        return SimpleNamespace(**{key.replace("-", "_"): Picture(f"{head}</head>{text}") for text, key in found})

    @property
    def figures(self) -> Figures:
        """Matplotlib figures for a paper: `run.figures["scores"]`, `run.figures.save("figures", "pdf")`."""
        return figures.of_run(self._result)

    @_as_python
    def more(
        self,
        rounds: int,
        *,
        folder: PathLike | None = None,
        data: PathLike | Mapping[str, Any] | None = None,
        device: str = "auto",
        on_round: Callable[[Round], None] | None = None,
    ) -> "Run":
        """Train for further rounds in a new run folder, and return the new run. The folder of the finished run stays
        unchanged.

        Args:
            rounds: number of additional rounds
            folder: folder of the longer run, as for `medsilo.run`
            data: the sites' data folder; by default the data of this run, if this program ran it
            device: "auto", "cpu", "cuda" or "cuda:1"; by default the device of this run, if this program ran it
            on_round: function called after every finished round; by default, a progress bar in a terminal or notebook
        """
        longer = Longer(self.folder, rounds)
        settings = self._settings if data is None and self._settings else _settings("Run.more", data, device)
        place, kept = _place(folder, f"{self.folder.name}-to-{longer.plan.rounds}")
        if place.is_dir() and any(place.iterdir()):
            raise MedsiloError(f"{place.name} exists; choose another name", str(place))
        longer.begin(place)
        with _shown(longer.plan.rounds) if on_round is None else nullcontext(on_round) as follow:
            inprocess.run(longer.plan, folder=place, resume=True, settings=settings, on_round=follow)
        return _done(place, kept, settings)

    @_as_python
    def export(self, out: PathLike, to: str = "monai", *, site: str = "") -> Path:
        """Export the tested model into a new folder, in a format for other programs. Return the folder.

        Args:
            out: the new folder
            to: the format, as for `medsilo release export --to`
            site: name of the site whose model is exported, if each site has its own model
        """
        export(Source.open(self.folder, site), Path(out), to)
        return Path(out)

    def predict(self, images: Any, out: PathLike | None = None, *, site: str = "", device: str = "auto") -> Any:
        """Predict new cases with the tested model.

        For an array or a Dataset, return the model's output. For files, write the results to `out`.

        Args:
            images: an array [cases, ...] in the model's input format, a Dataset as for `medsilo.run`, or paths of files
            out: output folder for predictions of files, as for `medsilo.predict`
            site: name of the site whose model predicts, if each site has its own model
            device: "auto", "cpu", "cuda" or "cuda:1"
        """
        if out is not None:
            return predict(self.folder, images, out, site=site, device=device)
        if not hasattr(images, "shape"):
            images = in_memory.inputs_of(images)
        compute = _settings("Run.predict", None, device).compute()
        source = _as_python(Source.open)(self.folder, site)
        network = source.network.to(compute.device)
        values, shape = torch.as_tensor(images, dtype=torch.float32), source.plan.task.shape
        if shape and (values.ndim != len(shape) + 1 or values.shape[1] != shape[0]):
            reads = ", ".join(map(str, ("cases", *shape)))
            raise MedsiloError(f"images: the shape is {tuple(values.shape)}; the model reads ({reads})")
        with torch.no_grad():
            answers = [source.plan.task.infer(network, some.to(compute.device)).cpu() for some in values.split(64)]
        return torch.cat(answers)

    def report(self, destination: PathLike | None = None) -> Path:
        """Write the HTML report of this run and return its path.

        Args:
            destination: path of the report; by default it is written into the run folder
        """
        page = Path(destination) if destination else self.folder / paths.REPORT
        return write([self.folder], page, self.folder.name)

    @cached_property
    def _result(self) -> RunResult:
        return read(self.folder)

    def __repr__(self) -> str:
        summary = self._result.summary
        mean = f"mean test {summary.metric} {summary.mean_score}" if summary.mean_score.known else "no score"
        told = f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return (
            f"<Run {summary.title} on {summary.task}, {len(self._result.sites)} sites, {summary.status}: {mean}{told}>"
        )


@dataclass(frozen=True)
class Picture:
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" style="width:100%;height:34em;border:0" sandbox></iframe>'


def _subgroup_rows(tables: Sequence[SubgroupTable]) -> list[dict[str, Any]]:
    rows = []
    for table in tables:
        for level in table.levels:
            pairs = (pair for pair in table.pairs if pair.sure and level.level in (pair.first, pair.second))
            told: dict[str, Any] = {
                "patients": level.patients,
                "score": level.score.value,
                "least": level.score.low,
                "most": level.score.high,
            }
            told |= {"low": level.low, "high": level.high, "kind": level.score.kind, "few": level.few}
            told["differs"] = ", ".join(own.second if own.first == level.level else own.first for own in pairs)
            if table.baseline:
                found = level.difference
                told["difference"] = found and found.mean
                told |= {"difference_low": found and found.low, "difference_high": found and found.high}
                told["sure"] = found and found.sure
            rows.append({"subgroup": table.subgroup, "level": level.level, **told})
    return rows


class _Models(Mapping[str, nn.Module]):
    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Iterator[str]:
        # in pooled training, all hospitals receive the same model, so no hospital has a separate file
        if self.run.plan.algorithm.pooled:
            return iter(self.run._result.sites)
        return iter(sorted(path.parent.name for path in self.run.folder.glob("sites/*/best.safetensors")))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<Models: {', '.join(self)}>"

    def __getitem__(self, site: str) -> nn.Module:
        if site not in list(self):
            raise KeyError(site)
        plan, folder = self.run.plan, self.run.folder
        if not plan.algorithm.pooled:
            return Source.open(folder, site).network
        network = plan.algorithm.whole(plan.build_networks())
        tensors, facts = load_tensors(paths.site_folder(folder, POOL) / paths.BEST)
        if facts.get("plan_hash") != plan.hash:
            raise MedsiloError(
                f"{paths.BEST} of {POOL} does not belong to the plan.yaml of {folder.name}; repeat the run"
            )
        network.load_state_dict(tensors)
        return network.eval()


class Comparison:
    """A finished comparison of methods, read from its folder.

    >>> Comparison("docs")
    Traceback (most recent call last):
    medsilo.core.errors.MedsiloError: docs is not a comparison: it has no verdict.json
    """

    def __init__(self, folder: PathLike) -> None:
        """Open a folder that `compare` or `medsilo compare --out` has written.

        Args:
            folder: the comparison's folder, with its verdict.json
        """
        self.folder = Path(folder).resolve()
        self._kept: TemporaryDirectory | None = None
        if not (self.folder / paths.VERDICT).is_file():
            raise MedsiloError(f"{self.folder.name} is not a comparison: it has no {paths.VERDICT}", str(folder))

    @cached_property
    def verdict(self) -> Verdict:
        """The statistics of the comparison, as in verdict.json."""
        return read_verdict(self.folder)

    @property
    def headline(self) -> str:
        """A text of one or two sentences about the better method and its confidence interval. Further lines of the text
        are the warnings of the comparison.
        """
        return "\n".join([self.verdict.headline, *map(str, self.warnings)])

    @property
    def warnings(self) -> list[Notice]:
        """The warnings about the comparison, most serious first: for example, that models have not learned."""
        return self.verdict.warnings

    def power(self, difference: float | None = None) -> "list[Power]":
        """Return the smallest detectable difference between two methods, for all hospitals of the comparison together
        and for each hospital.

        The variances between patients and between repetitions come from the scores of this comparison. In each result,
        `least` is the smallest difference that can be detected with power 0.8. `reach` is half the width of the
        confidence interval. `needed` is the number of patients or repetitions with which a comparison would detect
        `difference`. `str` describes the result in a sentence.

        Args:
            difference: the difference to detect, where 0.02 is 2 points; by default a small difference
        """
        from medsilo_lab.study import planner
        from medsilo_lab.study.words import LITTLE

        return planner.after(self.folder, LITTLE if difference is None else difference)

    @property
    def failures(self) -> list[str]:
        """The failed runs, with one line of text per run."""
        return self.verdict.about.failures

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """A dictionary of the finished runs. Each key is a pair of a configuration's title and a seed."""
        found = {(one.row, one.seed): Run(self.folder / one.run) for one in self.verdict.runs}
        for run in found.values():
            run._kept = self._kept
        return found

    @property
    def table(self) -> "DataFrame":
        """A table with a row per method: mean score over sites and seeds, confidence interval, difference from the
        baseline, scores of the sites.
        """
        rows = []
        for row in self.verdict.rows:
            score, found = row.score, row.difference.mean
            own = {"row": row.title, "seeds": len(row.seeds)}
            own |= {key: getattr(score, key, None) for key in ("mean", "sd", "low", "high")}
            own |= {"difference": found and found.mean, "p": found and found.adjusted, "sure": found and found.sure}
            rows.append(own | {site: at and at.mean for site, at in row.sites.items()})
        return _frame(rows, "row")

    @property
    def subgroups(self) -> "DataFrame":
        """A table with a row per level of each declared subgroup. Each row compares a method with the baseline.

        The table `Comparison.subgroups` has the columns of the table `Run.subgroups`, and columns for the difference
        from the baseline. The column `difference` is the score of the method minus the score of the baseline. The
        confidence interval of the difference is corrected for the number of levels. For the differences between levels,
        see `comparison.verdict.subgroups`.
        """
        return _frame(_subgroup_rows(self.verdict.subgroups), ["subgroup", "level"])

    def report(self, destination: PathLike | None = None) -> Path:
        """Write the HTML report of this comparison and return its path.

        Args:
            destination: path of the report; by default it is written into the comparison's folder
        """
        return write_study(self.folder, Path(destination) if destination else None)

    @property
    def figures(self) -> Figures:
        """Matplotlib figures for a paper: `comparison.figures["scores"]`, `comparison.figures.save("figures")`."""
        return figures.of_comparison(self.verdict, runs_of(self.folder, self.verdict, whole=True))

    def __repr__(self) -> str:
        own, told = self.verdict, f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        seeds = counted(len(own.seeds), "seed")
        return f"<Comparison of {len(own.rows)} rows on {own.task}, {seeds}: {finding(own)}{told}>"


@_as_python
def run(
    plan: PlanLike | None = None,
    *,
    task: in_memory.Kind | None = None,
    sites: Sites | None = None,
    model: Any = None,
    method: Any = None,
    loss: in_memory.Loss | None = None,
    engine: Engine = "inprocess",
    folder: PathLike | None = None,
    changes: Changes = (),
    rounds: int | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    groups: Mapping[str, Any] | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    device: str = "auto",
    on_round: Callable[[Round], None] | None = None,
) -> Run:
    """Run a study on this machine and return its result.

    Args:
        plan: a plan, a dictionary of its sections, a plan.yaml, a job folder, or the name of a method; by default
            FedAvg
        task: the kind of task: "classification", "segmentation", "regression", "findings" (several 0/1 labels per case)
            or "survival" (time and event); or an Objective, a Task, or the name of a task
        sites: the names of the sites; or a dictionary with the data of each site; or the result of `medsilo.data`. The
            data of a site are a Dataset of (input, target); a Dataset of MONAI dictionaries with "image" and "label"
            (and "patient"); arrays (inputs, targets[, patients]); or a data frame with a column "label" (and "patient")
        model: a torch module, whose weights initialise all sites; a module class; a function that returns a module,
            called without arguments or with (channels, classes); or the name of a network
        method: a subclass of medsilo.extend.Algorithm, an instance with its parameters, or the name of a method
        loss: the training loss for the data in `sites`: a function of (outputs, targets), or an object such as a MONAI
            loss
        engine: "inprocess" runs in this process; "simulator" runs in NVFlare's simulator. Both engines give the same
            numbers
        folder: a new folder for the run; by default a temporary folder, which is deleted with the result
        changes: changes to the plan: {"training.rounds": 3}, or "training.rounds=3", or a list of such strings
        rounds, lr, optimizer: short forms of the plan's keys training.rounds, training.learning_rate and
            training.optimizer
        groups: for each site, the patient of each case, if `sites` has arrays (inputs, targets) or a Dataset
        data: the sites' data folder, or a `data` section as in medsilo.yaml; synthetic tasks need no data
        device: "auto", "cpu", "cuda" or "cuda:1"
        on_round: function called after every finished round; by default, a progress bar in a terminal or notebook

    >>> plan = {
    ...     "algorithm": {"name": "fedavg"},
    ...     "task": {"name": "synthetic-activity", "persons": 4, "windows": 5},
    ...     "training": {"rounds": 1},
    ...     "participation": {"sites": ["a", "b"]},
    ... }
    >>> study = run(plan, device="cpu")
    >>> study.summary.status, sorted(study.models)
    ('finished', ['a', 'b'])
    """
    own = _with_own(plan, task, _grouped(sites, groups), model, method, loss)
    plan = _plan(own, [*_short(rounds, lr, optimizer), *_changes(changes)])
    settings = sites.settings(device) if isinstance(sites, GivenFolder) else _settings("medsilo.run", data, device)
    if folder is not None and Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise MedsiloError(f"{Path(folder).name} exists; choose another name", str(folder))
    place, kept = _place(folder, new_study(plan))
    _check_engine(engine, plan)
    with _shown(plan.rounds) if on_round is None else nullcontext(on_round) as follow:
        if engine == "simulator":
            simulator.run(plan, place, settings, on_round=follow)
        else:
            inprocess.run(plan, folder=place, settings=settings, on_round=follow)
    return _done(place, kept, settings)


def _done(folder: Path, temporary: TemporaryDirectory | None, settings: SiteSettings) -> Run:
    done = Run(folder)
    done._kept, done._settings = temporary, settings
    return done


@_as_python
def compare(
    methods: Sequence[Any] | str,
    *,
    plan: PlanLike | None = None,
    task: in_memory.Kind | None = None,
    sites: Sites | None = None,
    model: Any = None,
    loss: in_memory.Loss | None = None,
    seeds: Sequence[int] = USUAL_SEEDS,
    folds: int | None = None,
    folder: PathLike | None = None,
    changes: Changes = (),
    rounds: int | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    groups: Mapping[str, Any] | None = None,
    baseline: str | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run several methods on the same task and compare their scores with confidence intervals. The result names the
    better method, and states whether federated training helps.

    Args:
        methods: the configurations: "fedavg", "fedprox:mu=0.1", "a title: key=value key=value", or a method's class
        plan: the common plan of all configurations; by default FedAvg on synthetic histology with three hospitals
        task, sites, model, loss, rounds, lr, optimizer, groups, data, device: as for `run`
        seeds: every configuration runs once per seed; a single seed gives no verdict
        folds: number of cross-validation folds; every seed has a run per fold, with other test patients
        folder: folder for the runs; a second call with this folder starts only the missing runs
        changes: changes to the plan, for all configurations
        baseline: the configuration that all others are compared with; by default "fedavg"
        say: function called with a line of text for every finished run

    >>> task = {"name": "synthetic-activity", "persons": 4, "windows": 5}
    >>> plan = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": ["a", "b"]}}
    >>> found = compare(["local", "fedavg"], plan=plan, rounds=1, seeds=[0], device="cpu")
    >>> sorted(found.runs)
    [('fedavg', 0), ('local', 0)]
    """
    methods = [methods] if isinstance(methods, str | type) else methods
    rows = [method if isinstance(method, str) else in_memory.method(method)["name"] for method in methods]
    base = _plan(_with_own(plan, task, _grouped(sites, groups), model, None, loss), ())
    changed = [*_short(rounds, lr, optimizer), *_changes(changes)]
    settings = sites.settings(device) if isinstance(sites, GivenFolder) else _settings("medsilo.compare", data, device)
    place, kept = _place(folder, "comparison")
    every_row = comparable(base, [Row.parse(text) for text in rows], changed)
    cells = cells_of(base, every_row, seeds, changed, place, folds)
    about = About(title=f"{', '.join(rows)} on {base.task.title}", machine=device)
    Study(place, about, cells, baseline, settings=settings, say=say).run()
    done = Comparison(place)
    done._kept = kept
    return done


@_as_python
def power(
    patients: Mapping[str, int] | None = None,
    *,
    plan: PlanLike | None = None,
    sites: Sites | None = None,
    seeds: Sequence[int] = USUAL_SEEDS,
    difference: float | None = None,
    changes: Changes = (),
    data: PathLike | Mapping[str, Any] | None = None,
) -> "list[Power]":
    """Estimate the power of a comparison before it runs, and the sample sizes that would detect a difference.

    Before a comparison, the variances between patients and between repetitions are unknown. The power and the sample
    sizes are therefore computed for several assumed variances. `Comparison.power` estimates the variances between
    patients and between repetitions from the scores of a finished comparison.

    Args:
        patients: number of test patients of each hospital; by default they are counted in the hospitals' data
        plan, sites, data: as for `run`; the function counts their test patients
        seeds: the seeds of the comparison; only their number matters
        difference: the difference to detect, where 0.02 is 2 points; by default a small difference
        changes: changes to the plan

    >>> small, *_, large = power({"a": 20, "b": 40}, seeds=range(5), difference=0.05)
    >>> small.least < 0.02 < large.least and large.needed.number > small.needed.number
    True
    """
    from medsilo_lab.study import planner
    from medsilo_lab.study.words import LITTLE

    if patients is None:
        base, changed = _plan(_with_own(plan, None, sites, None, None, None), ()), _changes(changes)
        given = sites.settings("cpu") if isinstance(sites, GivenFolder) else _settings("medsilo.power", data, "cpu")
        cells = cells_of(base, [Row.parse("fedavg")], seeds[:1], changed, Path())
        patients = planner.tested(cells, given)
    return planner.before(patients, len(seeds), LITTLE if difference is None else difference)


@_as_python
def predict(
    model: PathLike | Sequence[PathLike],
    images: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    site: str = "",
    device: str = "auto",
    settings: PathLike | None = None,
) -> list[dict[str, Any]]:
    """Predict cases with the model of a run or with a super model. Return a dictionary with the findings of each case.

    For a failed case, the dictionary has the reason under "error".

    Args:
        model: a run folder or the folder of a super model; several folders form an ensemble
        images: path of an image, a table, a recording or a folder of these; or several paths
        out: output folder, as for `medsilo predict`
        site: name of the site whose model predicts, if each site has its own model
        device: "auto", "cpu", "cuda" or "cuda:1"
        settings: a folder with a medsilo.yaml. The key data.label_map sets the values in masks, and the section `data`
            describes other kinds of files

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> import medsilo
    >>> place = Path(mkdtemp())
    >>> for site in ("a", "b"):
    ...     (place / "data" / site).mkdir(parents=True)
    ...     lines = [f"{number},{number % 9},{number % 2}" for number in range(40)]
    ...     _ = (place / "data" / site / "cases.csv").write_text("\\n".join(["patient,age,outcome", *lines]))
    >>> plan = {
    ...     "algorithm": {"name": "fedavg"},
    ...     "task": {"name": "table", "columns": ["age"], "standardise": "none"},
    ...     "training": {"rounds": 1},
    ...     "participation": {"sites": ["a", "b"]},
    ... }
    >>> study = medsilo.run(plan, data=place / "data", folder=place / "run", device="cpu")
    >>> found = predict(study.folder, place / "data/a/cases.csv", place / "found", device="cpu")
    >>> len(found)
    40
    """
    compute = _settings("medsilo.predict", None, device).compute()
    data = None if settings is None else SiteSettings.read(Path(settings)).data
    asked_to_predict(_several(model), _several(images), Path(out), site, data, compute, lambda line: None).predict()
    return json.loads((Path(out) / "predictions.json").read_text(encoding="utf-8"))["cases"]


def _several(folders: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(one) for one in ([folders] if isinstance(folders, Path | str) else folders)]


def _plan(plan: PlanLike, changes: Sequence[str]) -> Plan:
    if isinstance(plan, Plan):
        return plan.on_one_machine.with_changes(changes) if changes else plan.on_one_machine
    if isinstance(plan, Mapping):
        return parse_plan(dict(plan), changes, local=True)
    if isinstance(plan, str) and re.fullmatch(r"[\w-]+", plan) and not Path(plan).exists():
        raise MedsiloError(f"{plan!r} is neither a method nor a job folder nor a plan.yaml; {METHODS.remedy(plan)}")
    return plan_of(plan, changes, local=True)


def _with_own(
    plan: PlanLike | None, task: Any, sites: Sites | None, model: Any, method: Any, loss: in_memory.Loss | None
) -> PlanLike:
    if isinstance(plan, str) and plan in METHODS and not Path(plan).exists():
        plan, method = None, method or plan
    if isinstance(sites, GivenFolder):
        if task is not None or loss is not None:
            raise MedsiloError("task, loss: a folder's data set determines the task; leave out task and loss")
        plan, sites = sites.of(None if plan is None else _plan(plan, ())), None
    if all(one is None for one in (task, sites, model, method, loss)) and plan is not None:
        return plan
    values = base_plan() if plan is None else _plan(plan, ()).resolved()
    own = sites if isinstance(sites, Mapping) else {}
    if own:
        own, task = as_given(own, task)
    if sites is not None:
        names = [sites] if isinstance(sites, str) else list(sites)
        if not all(isinstance(name, str) for name in names):
            raise MedsiloError(
                "sites: give the names of the sites, or a dictionary with their data: {'a': ..., 'b': ...}"
            )
        values["participation"] = {**values["participation"], "sites": names}
    if own or task is not None or loss is not None:
        values["task"] = in_memory.task(task, own, loss, model)
        values.pop("network", None)
    if method is not None:
        values["algorithm"] = in_memory.method(method)
    if model is not None:
        values["network"] = in_memory.model(model)
    return {key: value for key, value in values.items() if key != "packages"}


def _short(rounds: int | None, lr: float | None, optimizer: str | None) -> list[str]:
    own = {"rounds": rounds, "learning_rate": lr, "optimizer": optimizer}
    return _changes({f"training.{key}": value for key, value in own.items() if value is not None})


def _grouped(sites: Sites | None, groups: Mapping[str, Any] | None) -> Sites | None:
    if groups is None:
        return sites
    if not isinstance(sites, Mapping) or {*groups} != {*sites}:
        raise MedsiloError(
            "groups: give a list with the patient of each case, for each site in sites: {'a': [...], 'b': [...]}"
        )
    return {site: in_memory.with_patients(given, groups[site], site) for site, given in sites.items()}


def _changes(changes: Changes) -> list[str]:
    if isinstance(changes, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return [changes] if isinstance(changes, str) else list(changes)


def _check_engine(engine: str, plan: Plan) -> None:
    if engine not in get_args(Engine):
        raise MedsiloError(f"engine {engine!r} is not known; choose 'inprocess' or 'simulator'")
    if engine == "simulator" and (own := [name for name in plan.packages if name.startswith(SOURCE)]):
        told = f"other processes do not know {own[0].removeprefix(SOURCE)}, which is of this program"
        raise MedsiloError(
            f"{told}; choose engine='inprocess', or make a package of your classes with 'python -m medsilo_lab.new'"
        )


@contextmanager
def _shown(rounds: int) -> Iterator[Callable[[Round], None]]:
    shows = sys.stderr.isatty() or "ipykernel" in sys.modules

    def follow(line: Round) -> None:
        full = WIDE * line.round // max(rounds, 1)
        if shows:
            print(f"\r{'█' * full}{'·' * (WIDE - full)} round {line.round} of {rounds}", end="", file=sys.stderr)

    yield follow
    if shows:
        print(file=sys.stderr)


def _settings(origin: str, data: PathLike | Mapping[str, Any] | None, device: str) -> SiteSettings:
    if isinstance(data, GivenSites):
        raise MedsiloError(f"{origin}: data must be a folder or a `data` section; pass this object as sites=")
    source = Path(data).resolve() if isinstance(data, str | Path) else data
    return make_settings({**ALL_MINE, "data": source, "device": device}, origin)


def _place(folder: PathLike | None, name: str) -> tuple[Path, TemporaryDirectory | None]:
    if folder is not None:
        return Path(folder), None
    kept = TemporaryDirectory(prefix="medsilo-")
    return Path(kept.name) / name, kept


def _frame(rows: Sequence[Mapping[str, Any]], index: str | list[str]) -> "DataFrame":
    try:
        from pandas import DataFrame
    except ImportError:
        raise MedsiloError("tables need the Python package pandas: pip install pandas") from None
    keys = [index] if isinstance(index, str) else index
    return DataFrame(rows, columns=None if rows else keys).set_index(index)
