"""An analysis of some runs: its input, its output, and the folder that it is written into."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.extend import (
    POOL,
    Compute,
    MedsiloError,
    Plan,
    Record,
    SiteData,
    SiteSettings,
    Summary,
    batches,
    evaluate,
    generator_for,
    judges_by_batch,
    load_plan,
    load_tensors,
    paths,
    read_for,
    seed_for,
    site_folder,
    write_json,
)
from medsilo_papers import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Question:
    """A person's question about runs; each analysis takes the parts that it needs."""

    settings: SiteSettings
    seed: int = 0
    cases: int | None = None  # of each site; by default the analysis's own number
    reach: float = 1.0  # how far a landscape goes
    steps: int | None = None  # of a landscape from its centre to its edge
    iterations: int = 300  # of an inversion
    network: str | None = None  # one of the method's networks, where it has several


@dataclass(frozen=True)
class AnalysisResult:
    """Results of an analysis: values for JSON, figures by name, and one line per fact that a person should see at
    once."""

    data: dict[str, Any]
    figures: "Mapping[str, Figure]"
    lines: Sequence[str] = ()
    warns: bool = False  # of a broken claim, or a model that should not leave


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, of which this machine has all sites' data."""

    folder: Path
    label: str  # unique among the runs shown together
    plan: Plan
    summary: Summary

    @property
    def sites(self) -> list[str]:
        return sorted(self.summary.agreed.sites)

    def data(self, site: str, settings: SiteSettings) -> SiteData:
        """The site's data, as it trained and was tested on them; of images of any size, pieces."""
        source = read_for(self.plan, settings.of(site).data)
        data = self.plan.task.site_data(site, self.sites, self.plan.seed, source)
        return SiteData(
            *(self.plan.task.pieces(part, self.plan.seed) for part in (data.train, data.validation, data.test))
        )

    def model(self, site: str, device: torch.device) -> nn.Module:
        """The model that the site tested, in evaluation mode: its own file, the pool's, or the one all share."""
        own, pool = (site_folder(self.folder, name) for name in (site, POOL))
        folders = [own, pool, self.folder / paths.GLOBAL]
        files = [folder / paths.BEST for folder in folders]
        path = next((file for file in files if file.exists()), None)
        if path is None:
            raise MedsiloError(f"run '{self.folder.name}': no model of {site} is here; analyse a run that has it")
        model = self.plan.algorithm.whole(self.plan.build_networks())
        model.load_state_dict(load_tensors(path)[0])
        return model.to(device).eval()

    def experts(self, device: torch.device) -> dict[str, nn.Module]:
        """Return the personal models in the run's super model by site, in evaluation mode; empty where it has none."""
        found = {}
        for path in sorted((self.folder / paths.SUPER_MODEL).glob(paths.EXPERT_FILES)):
            model = self.plan.network.build(self.plan.task.channels, self.plan.task.goal.outputs)
            model.load_state_dict(load_tensors(path)[0])
            found[path.stem] = model.to(device).eval()
        return found

    def part(self, name: str) -> nn.Module:
        """One network of the run's super model, such as its selector, in evaluation mode."""
        self.check_network(name)
        networks = self.plan.build_networks()
        if name not in networks:
            raise MedsiloError(f"--network {name}: choose one of the method's networks: {', '.join(networks)}")
        networks[name].load_state_dict(load_tensors(self.folder / paths.SUPER_MODEL / f"{name}.safetensors")[0])
        return networks[name].eval()

    def check_network(self, name: str) -> None:
        """Raise an error if the run's method has no such network."""
        names = list(self.plan.build_networks())
        if name not in names:
            raise MedsiloError(f"--network {name}: run '{self.folder.name}' has {', '.join(names)}; give one of these")

    def facts(self) -> dict[str, Any]:
        """Return what tells this run from others, for the data beside a figure."""
        keys = {"method", "title", "task", "synthetic", "network", "seed", "protocol", "plan_hash", "package", "rounds"}
        return {"label": self.label, "run": self.folder.name} | self.summary.model_dump(mode="json", include=keys)


def read_finished(folders: Sequence[Path]) -> list[FinishedRun]:
    """Finished runs; those with the same title are told apart by their folders."""
    runs = []
    for folder in folders:
        summary = Record(folder).summary()
        if summary is None or not summary.finished:
            raise MedsiloError(f"{folder.name}: there is no finished run; give a folder that medsilo run has written")
        runs.append(FinishedRun(folder, summary.title, load_plan(folder / paths.PLAN), summary))
    titles = Counter(run.label for run in runs)
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise MedsiloError("a run is given twice; give each once")
    return [replace(run, label=f"{run.label}, {run.folder.name}") if titles[run.label] > 1 else run for run in runs]


def drawn(data: Dataset, most: int, seed: int, *purpose: str) -> Subset:
    """At most so many cases, in their order; which ones, the seed and the purpose say."""
    order = torch.randperm(len(data), generator=generator_for(seed, "cases", *purpose))  # type: ignore[arg-type]
    return Subset(data, sorted(order[:most].tolist()))


def as_evaluated(
    run: FinishedRun, model: nn.Module, cases: Dataset, compute: Compute
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as a round evaluates them: mixed where a batch norm takes each batch's own statistics, else in order."""
    order = generator_for(run.plan.seed, "evaluation") if judges_by_batch(model) else None
    return batches(cases, run.plan.task.evaluation_batch, compute, order, whole=True)


def mean_loss(run: FinishedRun, model: nn.Module, cases: Dataset, compute: Compute) -> float:
    """The model's loss on these cases in evaluation mode."""
    task, data = run.plan.task, as_evaluated(run, model, cases, compute)
    return evaluate(model, data, task.goal.loss, lambda output, target: {}, compute, infer=task.infer)[0]


def finite_or_none(value: float) -> float | None:
    """A number for JSON; None stands for one that could not be computed."""
    return value if math.isfinite(value) else None


def analyse(kind: str, folders: Sequence[Path], asked: Question, out: Path) -> tuple[list[Path], AnalysisResult]:
    """Write <kind>.json and the figures; returns where they are, and what came out."""
    from medsilo_papers.figures import save  # here, because matplotlib takes long

    module, function = KINDS[kind]
    runs = read_finished(folders)
    for run in runs if asked.network else ():
        run.check_network(str(asked.network))
    work = getattr(import_module(f"medsilo_papers.{module}"), function)
    with asked.settings.compute().reproducible(seed_for(asked.seed, kind)):
        finding = work(runs, asked)
    options = {key: value for key, value in asdict(asked).items() if key != "settings"}
    data = {"kind": kind, "asked": options, "runs": [run.facts() for run in runs], **finding.data}
    write_json(out / f"{kind}.json", data)
    figures = [save(figure, out / f"{name}.png") for name, figure in finding.figures.items()]
    return [*figures, out / f"{kind}.json"], finding
