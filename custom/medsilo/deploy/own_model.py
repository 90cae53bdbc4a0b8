"""Export of a model that reads no images: its weights, the plan, and what it reads and gives."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.deploy.exporter import Exporter
from medsilo.deploy.source import GLOBAL_MODEL, PLAIN, Source
from medsilo.deploy.supermodel import SuperModel
from medsilo.runs import paths

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
        network = source.network
        if isinstance(network, SuperModel):
            network.save(out / "models")
        else:
            facts = {"plan_hash": source.plan.hash, PLAIN: True}
            save_tensors(out / "models" / GLOBAL_MODEL, network.state_dict(), facts)
            write_text(out / "models" / paths.PLAN, source.plan.to_yaml())
        told = {"inputs": list(task.input_names), "standardise": task.standardise, "gives": _gives(task)}
        write_json(out / "configs" / "inputs.json", {**told, **reads(task)})

    return Exporter("folder", write)


EXPORTER = folder_exporter(lambda task: {})


def _gives(task: Any) -> str:
    """Return what the network's numbers mean."""
    kind = "classes" if task.goal.outputs > 1 else task.kind
    named: dict[str, object] = {"last": task.labels[-1], "labels": ", ".join(task.labels)}
    return GIVES[kind].format(**named, target=task.target, low=task.range[0], high=task.range[1])
