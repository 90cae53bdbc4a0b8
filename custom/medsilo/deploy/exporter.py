"""Write a finished model in a form that other programs run; of one that reads no images, its weights and its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.deploy.model_card import write_card
from medsilo.deploy.source import Source
from medsilo.registry import EXPORTERS


@dataclass(frozen=True)
class Exporter:
    """Writes models in one form. Its name among the entry points `medsilo.exporters` is what `--to` takes.

    A name with a dot is a form of one task's models: "monai.table" for those of task table.

    >>> from medsilo.extend import Exporter
    >>> Exporter("weights", lambda source, out: None).what
    'weights'
    """

    what: str  # that is written, for people
    write: Callable[[Source, Path], None]  # into a new folder
    part: Callable[[Source], str] = lambda source: ""  # what a model adds to a folder that others may be in already


def export(source: Source, out: Path, form: str = "monai") -> str:
    """Write a model into a folder that does not exist yet, or as a further part of one; return what it is."""
    own = f"{form}.{source.plan.task.name}"
    exporter: Exporter = EXPORTERS[own if own in EXPORTERS else form]
    place = out / exporter.part(source)
    if place.exists():
        raise MedsiloError("the folder exists; choose another", private=str(place))
    exporter.write(source, out)
    if (out / "models").is_dir():
        source.carry(out / "models")
    write_card(source, place)
    return exporter.what


GIVES = {
    "classification": "the score of {last!r}: its probability is the logistic function of it",
    "classes": "a score per class ({labels}): a softmax gives probabilities",
    "regression": "{target!r} as a share of the way from {low:g} to {high:g}",
    "survival": "the logarithm of the case's relative risk",
}


def folder_exporter(reads: Callable[[Any], Mapping[str, object]]) -> Exporter:
    """Return what writes a model's folder, which `medsilo predict` reads, too. reads: what a program has to know of a
    task's inputs beside their names."""

    def write(source: Source, out: Path) -> None:
        task: Any = source.plan.task
        source.save(out / "models")
        told = {"inputs": list(task.input_names), "standardise": task.standardise, "gives": _gives(task)}
        write_json(out / "configs" / "inputs.json", {**told, **reads(task)})

    return Exporter("folder", write)


EXPORTER = folder_exporter(lambda task: {})


def _gives(task: Any) -> str:
    """Return what the network's numbers mean."""
    kind = "classes" if task.goal.outputs > 1 else task.kind
    named: dict[str, object] = {"last": task.labels[-1], "labels": ", ".join(task.labels)}
    return GIVES[kind].format(**named, target=task.target, low=task.range[0], high=task.range[1])
