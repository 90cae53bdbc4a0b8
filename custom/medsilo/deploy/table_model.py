"""Export of a model that reads tables: its weights, the plan, what each input is, and an ONNX file."""

from pathlib import Path

from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.deploy.as_onnx import OUTPUT, write_onnx
from medsilo.deploy.card import card
from medsilo.deploy.source import GLOBAL_MODEL, Source
from medsilo.deploy.supermodel import SuperModel
from medsilo.runs import paths
from medsilo.tasks.own.patient_table import PatientTable

INPUT = "inputs"
SAYS = {
    "classification": "the score of {last!r}: its probability is the logistic function of it",
    "classes": "a score per class ({labels}): a softmax gives probabilities",
    "regression": "{target!r} as a share of the way from {low:g} to {high:g}",
    "survival": "the logarithm of the case's relative risk",
}


def export_table_model(source: Source, out: Path, onnx: str) -> str:
    """Write the folder, which `medsilo predict` reads, too; return why no ONNX file is in it, if that is so."""
    task = source.plan.task
    assert isinstance(task, PatientTable)
    if isinstance(source.network, SuperModel):
        source.network.save(out / "models")
    else:
        save_tensors(out / "models" / GLOBAL_MODEL, source.network.state_dict(), {"plan_hash": source.plan.hash})
        write_text(out / "models" / paths.PLAN, source.plan.to_yaml())
    write_json(out / "configs" / "inputs.json", {"inputs": list(task.input_names), "standardise": task.standardise})
    without = write_onnx(source.network, task.shape, out / "models" / onnx, INPUT)
    write_text(out / "docs" / "README.md", _readme(source, task, without))
    return without


def _readme(source: Source, task: PatientTable, without: str) -> str:
    kind = "classes" if task.outputs > 1 else task.kind
    low, high = task.range
    named = {"last": task.labels[-1], "labels": ", ".join(task.labels), "target": task.target, "low": low, "high": high}
    about = ""
    if isinstance(source.network, SuperModel) and source.network.origin:
        about = card(source.network, source.network.origin)
    alone = f"There is no ONNX file: {without}." if without else f"`models/model.onnx` maps `{INPUT}` to `{OUTPUT}`."
    scaled = {
        "site": "Each hospital's own means and standard deviations of its training cases standardise the numbers.",
        "plan": "The plan's means and standard deviations (`task.columns`) standardise the numbers.",
        "none": "Numbers are read as they are.",
    }[task.standardise]
    return f"""# A model for tables

Plan {source.plan.hash}, trained with {source.plan.algorithm.title}. `MODEL_CARD.md` has its use and scores.

It reads {task.channels} numbers of a case in the order of `configs/inputs.json` and gives {SAYS[kind].format(**named)}.
{scaled}

`medsilo predict models patients.csv -o OUT --site-config <folder with medsilo.yaml>` predicts a table.
{alone}

{about}"""
