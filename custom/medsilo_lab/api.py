"""Studies from Python, for `import medsilo`: run a plan, compare methods, predict. See docs/research/python.md."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from csv import DictReader
from dataclasses import dataclass
from functools import cached_property, wraps
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.federation.centralised import POOL
from medsilo.flare import simulator
from medsilo.flare.jobs import plan_of
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import METHODS, SOURCE
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.record import Record, new_study
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings
from medsilo_lab import in_memory
from medsilo_lab.deploy.predictor import asked_to_predict
from medsilo_lab.deploy.source import Source
from medsilo_lab.report.class_rates import by_class
from medsilo_lab.report.deciding import OF_CLASS
from medsilo_lab.report.page import write
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.study_page import write_study
from medsilo_lab.study.cells import Row, base_plan, cells_of
from medsilo_lab.study.compare import Study, comparable
from medsilo_lab.study.verdict_file import About, Verdict, read_verdict

if TYPE_CHECKING:
    from pandas import DataFrame

PlanLike = Plan | Mapping[str, Any] | Path | str
PathLike = Path | str
Changes = Sequence[str] | Mapping[str, Any] | str
Sites = Sequence[str] | Mapping[str, Any]
Engine = Literal["simulator", "inprocess"]
WIDE = 24  # letters of a progress bar


def _as_python(does: Callable) -> Callable:
    """Let errors name this module's parameters and not the command line's options."""

    def in_python(text: str) -> str:
        text = text.replace("--set ", "changes: ").replace("in this site's medsilo.yaml, or give --data", "as data=")
        return re.sub(r"--([a-z][a-z-]+)", lambda option: option[1].replace("-", "_") + "=", text)

    @wraps(does)
    def tried(*args: Any, **values: Any) -> Any:
        try:
            return does(*args, **values)
        except MedsiloError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return tried


class Run:
    """A study that has ended, in its folder.

    Nothing is read before it is asked for, and nothing in the folder is changed but by `report`.

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
        """Open the folder of a run, whichever engine or consortium made it."""
        self.folder = Path(folder).resolve()
        self._kept: TemporaryDirectory | None = None  # goes when this object goes
        if not (self.folder / paths.SUMMARY).is_file():
            raise MedsiloError(f"{self.folder.name} is not a finished run: it has no summary.json", str(folder))

    @cached_property
    def plan(self) -> Plan:
        """The resolved plan."""
        return load_plan(self.folder / paths.PLAN)

    @cached_property
    def summary(self) -> Summary:
        """The outcome, as summary.json has it (docs/reference/run-folder.md)."""
        return read_summary(self.folder)

    @cached_property
    def history(self) -> list[Round]:
        """The rounds, as rounds.jsonl has them."""
        return Record(self.folder).rounds()

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The model that was tested at each site, in evaluation mode; loaded when it is asked for."""
        return _Models(self)

    @property
    def table(self) -> "DataFrame":
        """One row for each site: its cases, its test score, the round of its model, what it sent, its other figures."""
        run, metric = self._result, self._result.summary.metric
        rows = []
        for site in (*run.sites, *sorted(run.summary.evaluation_sites)):
            own = run.summary.sites.get(site) or run.summary.evaluation_sites[site]
            cases = {part: (own.cases or {}).get(part) for part in ("train", "validation", "test")}
            test, selected = own.test or {}, run.summary.selected.rounds
            scores = {metric: test.get(metric), "loss": test.get("loss"), "round": selected.get(site)}
            sent = {"bytes_up": own.bytes_up, "bytes_down": own.bytes_down, "seconds": own.seconds}
            cut = {"threshold": own.decisions.threshold} if own.decisions and own.decisions.decided else {}
            further = {
                name: value for name, value in own.figures.items() if name not in scores and not OF_CLASS.match(name)
            }
            rows.append({"site": site, **cases, **scores, **sent, **cut, **further})
        return _frame(rows, "site")

    @property
    def classes(self) -> "DataFrame":
        """One row for each site and class: its test cases, sensitivity, specificity and AUROC against the rest.

        The model's answer is the most probable class. A site that suppresses its classes has no rows.
        """
        run, names, rows = self._result, self.plan.task.goal.label_names, []
        for site, own in (run.summary.sites | run.summary.evaluation_sites).items():
            for rates in by_class(own, names):
                name, *told = rates
                rows.append({"site": site, "class": name, **dict(zip(rates._fields[1:], told, strict=True))})
        return _frame(rows, ["site", "class"])

    @property
    def cases(self) -> "DataFrame":
        """One row for each test case of the sites on this machine: site, case, patient, and what was measured."""
        found = []
        for path in sorted(self.folder.glob(f"{paths.SITES}/*/{paths.CASES}")):
            with path.open(encoding="utf-8", newline="") as file:
                for line in DictReader(file):
                    measured = {key: float(value) if value else None for key, value in line.items()}
                    found.append({"site": path.parent.name, **measured})
        return _frame(found, "site")

    @property
    def rounds(self) -> "DataFrame":
        """One row for each round and site: losses, validation score, seconds, bytes."""
        told = ("train_loss", "validation", "validation_loss", "samples", "seconds", "bytes_up", "bytes_down")
        every = ((line, site, own) for line in self.history for site, own in line.sites.items())
        rows = [
            {"round": line.round, "site": site, **{key: getattr(own, key) for key in told}} for line, site, own in every
        ]
        return _frame(rows, ["round", "site"])

    @property
    def plot(self) -> SimpleNamespace:
        """The sections of the report with their pictures, by name: `run.plot.learning`; `dir(run.plot)` lists them."""
        with TemporaryDirectory() as folder:
            page = self.report(Path(folder) / "page.html").read_text(encoding="utf-8")
        head = page.partition("</head>")[0]
        found = re.findall(r'(<section[^>]* id="([\w-]+)".*?</section>)', page, re.DOTALL)
        return SimpleNamespace(**{key.replace("-", "_"): Picture(f"{head}</head>{text}") for text, key in found})

    def predict(self, images: Any, out: PathLike | None = None, *, site: str = "", device: str = "auto") -> Any:
        """Predict new cases with the model that was tested.

        images: an array [cases, ...] as the model reads it, of which the model's output comes back; or files, whose
        results are written to `out`, as by `medsilo.predict`. site: whose model, where each has its own.
        """
        if out is not None:
            return predict(self.folder, images, out, site=site, device=device)
        if not hasattr(images, "shape"):
            raise MedsiloError("images: give an array of cases; for files also out, the folder for their results")
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
        """Write the HTML page about this run and return where it is; by default beside the results."""
        page = Path(destination) if destination else self.folder / paths.REPORT
        return write([self.folder], page, self.folder.name)

    @cached_property
    def _result(self) -> RunResult:
        return read(self.folder)

    def __repr__(self) -> str:
        summary = self._result.summary
        mean = "no score" if summary.mean_test is None else f"mean test {summary.metric} {summary.mean_test:.3f}"
        return f"<Run {summary.title} on {summary.task}, {len(self._result.sites)} sites, {summary.status}: {mean}>"


@dataclass(frozen=True)
class Picture:
    """A section of a report as a page of its own, which a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" style="width:100%;height:34em;border:0" sandbox></iframe>'


class _Models(Mapping[str, nn.Module]):
    """The models of a run's sites that are on this machine."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Iterator[str]:
        if self.run.plan.algorithm.pooled:  # one model, which every hospital gets
            return iter(self.run._result.sites)
        return iter(sorted(path.parent.name for path in self.run.folder.glob("sites/*/best.safetensors")))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, site: str) -> nn.Module:
        if site not in list(self):
            raise KeyError(site)
        plan, folder = self.run.plan, self.run.folder
        if not plan.algorithm.pooled:
            return Source.open(folder, site).network
        network = plan.algorithm.whole(plan.build_networks())
        tensors, facts = load_tensors(paths.site_folder(folder, POOL) / paths.BEST)
        if facts.get("plan_hash") != plan.hash:
            raise MedsiloError(f"{paths.BEST} of {POOL} was not made by the plan.yaml of {folder.name}; repeat the run")
        network.load_state_dict(tensors)
        return network.eval()


class Comparison:
    """A finished comparison of methods, in its folder.

    >>> Comparison("docs")
    Traceback (most recent call last):
    medsilo.core.errors.MedsiloError: docs is not a comparison: it has no verdict.json
    """

    def __init__(self, folder: PathLike) -> None:
        """Open the folder that `compare`, or `medsilo compare --out`, has written."""
        self.folder = Path(folder).resolve()
        self._kept: TemporaryDirectory | None = None
        if not (self.folder / paths.VERDICT).is_file():
            raise MedsiloError(f"{self.folder.name} is not a comparison: it has no {paths.VERDICT}", str(folder))

    @cached_property
    def verdict(self) -> Verdict:
        """The statistics, as verdict.json has them."""
        return read_verdict(self.folder)

    @property
    def headline(self) -> str:
        """Return which method is better, with the interval, in one sentence or two."""
        return self.verdict.headline

    @property
    def failures(self) -> list[str]:
        """Return what failed, one line for each run."""
        return self.verdict.about.failures

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """The finished runs, by row and seed."""
        found = {(one.row, one.seed): Run(self.folder / one.run) for one in self.verdict.runs}
        for run in found.values():
            run._kept = self._kept
        return found

    @property
    def table(self) -> "DataFrame":
        """One row for each method: its score over sites and seeds, the interval, the difference, each site's score."""
        rows = []
        for row in self.verdict.rows:
            score, found = row.score, row.difference.mean
            own = {"row": row.title, "seeds": len(row.seeds)}
            own |= {key: getattr(score, key, None) for key in ("mean", "sd", "low", "high")}
            own |= {"difference": found and found.mean, "p": found and found.adjusted, "sure": found and found.sure}
            rows.append(own | {site: at and at.mean for site, at in row.sites.items()})
        return _frame(rows, "row")

    def report(self, destination: PathLike | None = None) -> Path:
        """Write the HTML page about this comparison and return where it is; by default beside the results."""
        return write_study(self.folder, Path(destination) if destination else None)

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.verdict.rows)} rows on {self.verdict.task}: {self.headline}>"


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
    data: PathLike | Mapping[str, Any] | None = None,
    device: str = "auto",
    on_round: Callable[[Round], None] | None = None,
) -> Run:
    """Run a study on this machine and return its result.

    plan: a plan, a dictionary of its sections, a plan.yaml, a job's folder, or a method's name; by default FedAvg.
    task: what is learned: "classification", "segmentation", "regression", a Goal, a Task, or a task's name.
    sites: names, to run over these and not over those of the plan; or each site's own data by its name: a Dataset of
    (input, target) or of MONAI's dictionaries with "image" and "label" (and "patient"), arrays (inputs, targets[,
    patients]), or a frame with a column "label" (and "patient").
    model: a torch module, with whose weights all sites begin; its class or a function that makes one, of nothing or of
    (channels, classes); or a name.
    method: a class of medsilo.extend.Algorithm, one with its numbers, or a name.
    loss: a function of (outputs, targets), or an object such as a MONAI loss, that training minimises on data given as
    `sites`.
    engine: "inprocess", in this process; or "simulator", NVFlare's. Both give the same numbers.
    folder: where the run is written; it must not exist. By default a folder that goes when the result goes.
    changes: {"training.rounds": 3}, or "training.rounds=3", or several.
    data: the sites' data folder, or a section that describes it as in medsilo.yaml; synthetic tasks need none.
    device: "auto", "cpu", "cuda" or "cuda:1".
    on_round: called with every finished round; by default a terminal or a notebook shows a bar.

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
    plan = _plan(_with_own(plan, task, sites, model, method, loss), _changes(changes))
    settings = _settings("medsilo.run", data, device)
    if folder is not None and Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise MedsiloError(f"{Path(folder).name} exists; choose another name", str(folder))
    place, kept = _place(folder, new_study(plan))
    _check_engine(engine, plan)
    with _shown(plan.rounds) if on_round is None else nullcontext(on_round) as follow:
        if engine == "simulator":
            simulator.run(plan, place, settings, on_round=follow)
        else:
            inprocess.run(plan, folder=place, settings=settings, on_round=follow)
    done = Run(place)
    done._kept = kept
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
    seeds: Sequence[int] = (0,),
    folder: PathLike | None = None,
    changes: Changes = (),
    against: str | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run methods on the same task and return which is better, and whether federated training helps, with intervals.

    methods: the rows: "fedavg", "fedprox:mu=0.1", "a title: key=value key=value", or a method's class.
    plan: what the rows change; by default FedAvg on synthetic histology with three hospitals.
    seeds: every row runs once with each; one seed alone names no winner.
    folder: where the runs are written; called again with the same folder, only what is missing runs.
    against: the row that all others are compared with; by default "fedavg".
    say: called with a line for every finished run. The other parameters are those of `run`.

    >>> task = {"name": "synthetic-activity", "persons": 4, "windows": 5}
    >>> plan = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": ["a", "b"]}}
    >>> found = compare(["local", "fedavg"], plan=plan, changes={"training.rounds": 1}, device="cpu")
    >>> sorted(found.runs)
    [('fedavg', 0), ('local', 0)]
    """
    methods = [methods] if isinstance(methods, str | type) else methods
    rows = [one if isinstance(one, str) else in_memory.method(one)["name"] for one in methods]
    base, changed = _plan(_with_own(plan, task, sites, model, None, loss), ()), _changes(changes)
    settings = _settings("medsilo.compare", data, device)
    place, kept = _place(folder, "comparison")
    every_row = comparable(base, [Row.parse(text) for text in rows], changed)
    cells = cells_of(base, every_row, seeds, changed, place)
    about = About(title=f"{', '.join(rows)} on {base.task.title}", machine=device)
    Study(place, about, cells, against, settings=settings, say=say).run()
    done = Comparison(place)
    done._kept = kept
    return done


@_as_python
def predict(
    model: PathLike | Sequence[PathLike],
    images: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    site: str = "",
    device: str = "auto",
    site_config: PathLike | None = None,
) -> list[dict[str, Any]]:
    """Predict with a run's model or a super model, and return what was found, a dictionary for each case.

    model: the folder of a run or of a super model, or several, whose models answer together.
    site: whose model, where each has its own.
    images: an image, a table, a recording, a folder with such, or several. Results are written to `out`, as by
    `medsilo predict`.
    site_config: a folder with a medsilo.yaml, whose data.label_map says which values masks get; other files are read
    as it says.
    A case that failed has its reason under "error".

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
    data = None if site_config is None else SiteSettings.read(Path(site_config)).data
    asked_to_predict(_several(model), _several(images), Path(out), site, data, compute, lambda line: None).predict()
    return json.loads((Path(out) / "predictions.json").read_text(encoding="utf-8"))["cases"]


def _several(places: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(one) for one in ([places] if isinstance(places, Path | str) else places)]


def _plan(plan: PlanLike, changes: Sequence[str]) -> Plan:
    if isinstance(plan, Plan):
        return plan.on_one_machine.with_changes(changes) if changes else plan.on_one_machine
    if isinstance(plan, Mapping):
        return parse_plan(dict(plan), changes, here=True)
    if isinstance(plan, str) and re.fullmatch(r"[\w-]+", plan) and not Path(plan).exists():
        raise MedsiloError(f"{plan!r} is no method, no job's folder and no plan.yaml; {METHODS.remedy(plan)}")
    return plan_of(plan, changes, here=True)


def _with_own(
    plan: PlanLike | None, task: Any, sites: Sites | None, model: Any, method: Any, loss: in_memory.Loss | None
) -> PlanLike:
    """Return a plan with what was given beside it."""
    if isinstance(plan, str) and plan in METHODS and not Path(plan).exists():
        plan, method = None, method or plan
    if all(one is None for one in (task, sites, model, method, loss)) and plan is not None:
        return plan
    values = base_plan() if plan is None else _plan(plan, ()).resolved()
    own = sites if isinstance(sites, Mapping) else {}
    if sites is not None:
        names = [sites] if isinstance(sites, str) else list(sites)
        if not all(isinstance(name, str) for name in names):
            raise MedsiloError("sites: give names, or data by name: {'a': ..., 'b': ...}")
        values["participation"] = {**values["participation"], "sites": names}
    if own or task is not None or loss is not None:
        values["task"] = in_memory.task(task, own, loss)
        values.pop("network", None)  # it was the other task's
    if method is not None:
        values["algorithm"] = in_memory.method(method)
    if model is not None:
        values["network"] = in_memory.model(model)
    return {key: value for key, value in values.items() if key != "packages"}


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
            f"{told}; choose engine='inprocess', or make a package of it with 'python -m medsilo_lab.new'"
        )


@contextmanager
def _shown(rounds: int) -> Iterator[Callable[[Round], None]]:
    """Yield what shows a bar for finished rounds on a terminal or in a notebook, and nothing elsewhere."""
    shows = sys.stderr.isatty() or "ipykernel" in sys.modules

    def follow(line: Round) -> None:
        full = WIDE * line.round // max(rounds, 1)
        if shows:
            print(f"\r{'█' * full}{'·' * (WIDE - full)} round {line.round} of {rounds}", end="", file=sys.stderr)

    yield follow
    if shows:
        print(file=sys.stderr)


def _settings(origin: str, data: PathLike | Mapping[str, Any] | None, device: str) -> SiteSettings:
    source = Path(data).resolve() if isinstance(data, str | Path) else data
    return make_settings({**ALL_MINE, "data": source, "device": device}, origin)


def _place(folder: PathLike | None, name: str) -> tuple[Path, TemporaryDirectory | None]:
    """Return where to write, and what removes it."""
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
