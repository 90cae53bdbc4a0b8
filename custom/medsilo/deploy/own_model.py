"""Export of a model that reads no images: its weights, the plan, and what each input is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.deploy.exporter import Exporter
from medsilo.deploy.source import GLOBAL_MODEL, PLAIN, Source
from medsilo.deploy.supermodel import SuperModel
from medsilo.runs import paths
from medsilo.tasks.own.patient_table import PatientTable

SAYS = {
    "classification": "the score of {last!r}: its probability is the logistic function of it",
    "classes": "a score per class ({labels}): a softmax gives probabilities",
    "regression": "{target!r} as a share of the way from {low:g} to {high:g}",
    "survival": "the logarithm of the case's relative risk",
}


@dataclass(frozen=True)
class Reading:
    """A description, for people and programs, of what a model of rows or windows reads."""

    kind: str  # of data, in the plural: "tables"
    each: str  # where the plan describes each input: "columns"
    reads: str  # of a case
    example: str  # of a file that can be predicted
    predicts: str
    target: str = "the label"
    facts: Mapping[str, object] = field(default_factory=dict)  # in configs/inputs.json beside the inputs' names


def folder_exporter(reading: Callable[[Any], Reading]) -> Exporter:
    """Return what writes a model's folder, which `medsilo predict` reads, too. reading: what a task's models read."""

    def write(source: Source, out: Path) -> None:
        task: Any = source.plan.task
        network = source.network
        told = reading(task)
        if isinstance(network, SuperModel):
            network.save(out / "models")
        else:
            save_tensors(
                out / "models" / GLOBAL_MODEL, network.state_dict(), {"plan_hash": source.plan.hash, PLAIN: True}
            )
            write_text(out / "models" / paths.PLAN, source.plan.to_yaml())
        inputs = {"inputs": list(task.input_names), "standardise": task.standardise, **told.facts}
        write_json(out / "configs" / "inputs.json", inputs)
        write_text(out / "docs" / "README.md", _readme(source, told))

    return Exporter("folder", write)


def _of_table(task: PatientTable) -> Reading:
    reads = f"{task.channels} numbers of a case in the order of `configs/inputs.json`"
    return Reading("tables", "columns", reads, "patients.csv", "a table", task.target)


EXPORTER = folder_exporter(_of_table)


def _readme(source: Source, told: Reading) -> str:
    task: Any = source.plan.task
    scaled = {
        "site": "Each hospital's own means and standard deviations of its training cases standardise the numbers.",
        "plan": f"The plan's means and standard deviations (`task.{told.each}`) standardise the numbers.",
        "none": "Numbers are read as they are.",
    }[task.standardise]
    return f"""# A model for {told.kind}

Plan {source.plan.hash}, trained with {source.plan.algorithm.title}. `MODEL_CARD.md` has its use and scores.

It reads {told.reads} and gives {_gives(task, told.target)}.
{scaled}

`medsilo predict models {told.example} -o OUT --settings <folder with medsilo.yaml>` predicts {told.predicts}.
"""


def _gives(task: Any, target: str) -> str:
    """Return what the network's numbers mean."""
    kind = "classes" if task.goal.outputs > 1 else task.kind
    named: dict[str, object] = {"last": task.labels[-1], "labels": ", ".join(task.labels), "target": target}
    return SAYS[kind].format(**named, low=task.range[0], high=task.range[1])
