"""Export of a model that reads tables or series: its weights, the plan, what each input is, and an ONNX file."""

from pathlib import Path

from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.deploy.as_onnx import FILE as ONNX
from medsilo.deploy.as_onnx import OUTPUT, write_onnx
from medsilo.deploy.card import card
from medsilo.deploy.exporter import Exporter
from medsilo.deploy.source import GLOBAL_MODEL, Source
from medsilo.deploy.supermodel import SuperModel
from medsilo.runs import paths
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.own.series_folder import SeriesFolder

INPUT = "inputs"
SAYS = {
    "classification": "the score of {last!r}: its probability is the logistic function of it",
    "classes": "a score per class ({labels}): a softmax gives probabilities",
    "regression": "{target!r} as a share of the way from {low:g} to {high:g}",
    "survival": "the logarithm of the case's relative risk",
}


def write_own_model(source: Source, out: Path) -> str:
    """Write the folder, which `medsilo predict` reads, too; return why no ONNX file is in it, if that is so."""
    task = source.plan.task
    assert isinstance(task, PatientTable | SeriesFolder)
    assert task.shape is not None
    if isinstance(source.network, SuperModel):
        source.network.save(out / "models")
    else:
        save_tensors(out / "models" / GLOBAL_MODEL, source.network.state_dict(), {"plan_hash": source.plan.hash})
        write_text(out / "models" / paths.PLAN, source.plan.to_yaml())
    inputs: dict[str, object] = {"inputs": list(task.input_names), "standardise": task.standardise}
    if isinstance(task, SeriesFolder):
        inputs |= {"steps": task.window, "steps_a_second": task.rate}
    write_json(out / "configs" / "inputs.json", inputs)
    without = write_onnx(source.network, task.shape, out / "models" / ONNX, INPUT)
    write_text(out / "docs" / "README.md", _readme(source, task, without))
    return without


EXPORTER = Exporter("folder", write_own_model)


def _readme(source: Source, task: PatientTable | SeriesFolder, without: str) -> str:
    about = ""
    if isinstance(source.network, SuperModel) and source.network.origin:
        about = card(source.network, source.network.origin)
    alone = f"There is no ONNX file: {without}." if without else f"`models/model.onnx` maps `{INPUT}` to `{OUTPUT}`."
    series = isinstance(task, SeriesFolder)
    where = "signals" if series else "columns"
    scaled = {
        "site": "Each hospital's own means and standard deviations of its training cases standardise the numbers.",
        "plan": f"The plan's means and standard deviations (`task.{where}`) standardise the numbers.",
        "none": "Numbers are read as they are.",
    }[task.standardise]
    reads = f"{task.channels} numbers of a case in the order of `configs/inputs.json`"
    if isinstance(task, SeriesFolder):
        reads = (
            f"windows of {task.window} steps, {task.rate:g} in a second, of {task.channels} signals in the order of "
            "`configs/inputs.json`, [signals, steps],"
        )
    files, what = ("recordings", "recordings") if series else ("patients.csv", "a table")
    return f"""# A model for {"time series" if series else "tables"}

Plan {source.plan.hash}, trained with {source.plan.algorithm.title}. `MODEL_CARD.md` has its use and scores.

It reads {reads} and gives {_gives(task)}.
{scaled}

`medsilo predict models {files} -o OUT --site-config <folder with medsilo.yaml>` predicts {what}.
{alone}

{about}"""


def _gives(task: PatientTable | SeriesFolder) -> str:
    """Return what the network's numbers mean."""
    kind = "classes" if task.outputs > 1 else task.kind
    target = task.target if isinstance(task, PatientTable) else "the label"
    named: dict[str, object] = {"last": task.labels[-1], "labels": ", ".join(task.labels), "target": target}
    return SAYS[kind].format(**named, low=task.range[0], high=task.range[1])
