"""Predicting whatever a model reads: a task names its predictor, which reads the files and writes the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medsilo.core.errors import MedsiloError
from medsilo.core.text import is_safe_name
from medsilo.deploy.source import Source
from medsilo.learning.loop import Compute
from medsilo.registry import PREDICTORS, WATCHERS
from medsilo.runs import paths
from medsilo.tasks.sources import DataSource

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
    source = Source.together([Source.open(folder, site) for folder in models])
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
