"""Define the input and output of an analysis of finished runs, and write the analysis' results into a folder."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, write_json
from medsilo.learning.compute import Compute
from medsilo.learning.layers import judges_by_batch
from medsilo.learning.loop import batches, evaluate
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from results.analyses.finished import FinishedRun, read_finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS = {
    "landscape": ("landscape", "landscapes"),
    "profile": ("landscape", "profiles"),
    "drift": ("drift", "drifts"),
    "tsne": ("features", "maps"),
    "inversion": ("inversion", "inversions"),
    "convergence": ("convergence", "curves"),
    "privacy": ("membership", "audits"),
}


@dataclass(frozen=True)
class Question:
    """The options of all analyses of finished runs; each kind of analysis uses only some of these options."""

    settings: SiteSettings
    seed: int = 0
    cases: int | None = None  # number of cases of each site; by default, each analysis chooses a number
    reach: float = 1.0  # distance from the centre of a loss landscape to its edge
    steps: int | None = None  # number of points of a loss landscape from its centre to its edge
    iterations: int = 300  # iterations of an inversion attack
    network: str | None = None  # name of the analysed network, if the method has several networks


@dataclass(frozen=True)
class AnalysisResult:
    data: dict[str, Any]
    figures: "Mapping[str, Figure]"
    lines: Sequence[str] = ()
    warns: bool = False  # True if the result advises against releasing the model


def part_of(run: FinishedRun, name: str) -> nn.Module:
    """Return one network of the run's super model, such as the selector, in evaluation mode."""
    check_network(run, name)
    network = run.plan.build_networks()[name]
    network.load_state_dict(load_tensors(run.folder / paths.SUPER_MODEL / f"{name}.safetensors")[0])
    return network.eval()


def check_network(run: FinishedRun, name: str) -> None:
    names = list(run.plan.build_networks())
    if name not in names:
        raise MedsiloError(f"--network {name}: run '{run.folder.name}' has {', '.join(names)}; give one of these")


def as_evaluated(
    run: FinishedRun, model: nn.Module, cases: Dataset, compute: Compute
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches in which a round would evaluate the cases. The batches are random if a batch norm uses the
    statistics of each batch; otherwise, they follow the data set's order.
    """
    order = generator_for(run.plan.seed, "evaluation") if judges_by_batch(model) else None
    return batches(cases, run.plan.task.evaluation_batch, compute, order, whole=True)


def mean_loss(run: FinishedRun, model: nn.Module, cases: Dataset, compute: Compute) -> float:
    task, data = run.plan.task, as_evaluated(run, model, cases, compute)
    return evaluate(model, data, task.goal.loss, lambda output, target: {}, compute, infer=task.infer)[0]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def analyse(kind: str, folders: Sequence[Path], asked: Question, out: Path) -> tuple[list[Path], AnalysisResult]:
    from results.analyses.figures import save  # matplotlib is slow to import

    module, function = KINDS[kind]
    runs = read_finished(folders)
    for run in runs if asked.network else ():
        check_network(run, str(asked.network))
    work = getattr(import_module(f"results.analyses.{module}"), function)
    with asked.settings.compute().reproducible(seed_for(asked.seed, kind)):
        finding = work(runs, asked)
    options = {key: value for key, value in asdict(asked).items() if key != "settings"}
    data = {"kind": kind, "asked": options, "runs": [run.facts() for run in runs], **finding.data}
    write_json(out / f"{kind}.json", data)
    figures = [save(figure, out / f"{name}.png") for name, figure in finding.figures.items()]
    return [*figures, out / f"{kind}.json"], finding
