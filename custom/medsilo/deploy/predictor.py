"""Predicting whatever a model reads: a task names its predictor, which reads the files and writes the answers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.core.text import is_safe_name
from medsilo.deploy.source import Source, open_source
from medsilo.learning.loop import Compute
from medsilo.registry import PREDICTORS, WATCHERS
from medsilo.runs import paths
from medsilo.tasks.sources import DataSource
from medsilo.tasks.task import Task

MOST = 16  # members


class Committee(nn.Module):
    """The mean of its members' probabilities as scores, so that a softmax or a logistic function gives it back.

    Of numbers that are no probabilities, as a regression has them, it is their mean. No mean of several models has a
    larger squared error than these have on average (Krogh and Vedelsby, NeurIPS 1994).
    """

    def __init__(self, task: Task, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not task.goal.by_case:
            raise MedsiloError("risks of two models can't be compared, so that they don't answer together; choose one")
        self.members = nn.ModuleList(members)
        self.chooses = task.goal.outputs > 1 and not task.goal.overlaps
        self.decides = not self.chooses and task.goal.classes > 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.stack([member(inputs) for member in self.members])
        if self.chooses:
            return _log_mean(outputs.log_softmax(2))
        if self.decides:
            sigmoid = nn.functional.logsigmoid
            return _log_mean(sigmoid(outputs)) - _log_mean(sigmoid(-outputs))
        return outputs.mean(0)


def _log_mean(logarithms: Tensor) -> Tensor:
    return torch.logsumexp(logarithms, 0) - math.log(len(logarithms))


def answering_together(sources: Sequence[Source]) -> Source:
    """Return one source of several, whose models have learned the same task; one alone is returned as it is."""
    first, *others = sources
    if not others:
        return first
    if len(sources) > MOST:
        raise MedsiloError(f"{len(sources)} models are to answer together; give {MOST} at most")
    task, *tasks = (source.plan.task for source in sources)
    if any(other != task for other in tasks):
        raise MedsiloError("these models were trained for different tasks; give models of one task, with equal keys")
    committee = Committee(task, [source.network for source in sources]).eval()
    facts = {"kind": "committee", "members": [source.facts for source in sources]}
    plan = first.plan.model_copy(update={"layers": ()})  # what layers say was found of one model
    return Source(committee, plan, facts, first.run)


Say = Callable[[str], None]
Send = Callable[[Sequence[Path]], int]  # returns how many files were not taken


@dataclass(frozen=True)
class PredictionRequest:
    """The files that are to be predicted, by which model, and where the answers go.

    >>> import torch
    >>> from pathlib import Path
    >>> cpu = torch.device("cpu")
    >>> PredictionRequest(None, [Path("scan.nii.gz")], Path("found"), cpu, print, data=None, own=Path("run")).given
    [PosixPath('scan.nii.gz')]
    """

    source: Source
    given: Sequence[Path]  # files, or folders with such
    out: Path
    device: torch.device
    say: Say  # takes lines for people, in which no file is named
    data: DataSource | None  # the hospital's own description of its data, by which its files are read
    own: Path  # the hospital's part of a run, where the model was trained on this machine


@dataclass(frozen=True)
class Predictor:
    """Predicts cases of one kind. A task's `use` has its name among the entry points `medsilo.predictors`.

    >>> from medsilo.extend import Predictor
    >>> Predictor("recordings", lambda asked: len(asked.given)).cases
    'recordings'
    """

    cases: str  # what is predicted, in the plural: "images"
    predict: Callable[[PredictionRequest], int]  # writes predictions.csv and .json, and returns how many cases failed
    connect: Callable[[str], Send] | None = None  # checks an address of --send; returns what sends results there


def asked_to_predict(
    models: Sequence[Path],
    given: Sequence[Path],
    out: Path,
    site: str,
    data: DataSource | None,
    compute: Compute,
    say: Say,
) -> tuple[Predictor, PredictionRequest]:
    """Open the models, which answer together, and return what predicts their task's cases and what it is asked."""
    source = answering_together([open_source(folder, site) for folder in models])
    run = models[0] / paths.SITES / site if is_safe_name(site) else models[0]
    source = replace(source, own=run)
    request = PredictionRequest(source, given, out, compute.device, say, data, run)
    name, task = source.plan.task.use.predictor, source.plan.task.name
    if name not in PREDICTORS:
        raise MedsiloError(
            f"task {task} reads no image files or others that could be predicted; give a model of a task that does "
            "(docs/your-data.md), or of synthetic-prostate to try it"
        )
    watch = next((watch for own in WATCHERS if (watch := WATCHERS[own](request))), None)
    return PREDICTORS[name], replace(request, source=replace(source, watch=watch))


def sender_to(predictor: Predictor, node: str) -> Send:
    """Return what sends results to a node; refused before anything is predicted, where nothing could be sent."""
    if predictor.connect is None:
        raise MedsiloError("--send needs a model of task dicom-folder; others write no DICOM")
    return predictor.connect(node)
