"""Compare hospitals that lack some labels and columns with the same hospitals with complete data.

    python -m results.labels [--seeds N] [--data DIR] [--quick] [--write]

The program prints the content of results/labels.csv; with --write, the program also writes the file. DATA is a folder
with the data set `hippocampus`; without DATA, the program leaves out the section on hippocampus volumes. Every row
makes the same number of training steps. A fifth hospital, which has complete data and does not train, tests the model.
The program takes about seven minutes on a free core.
"""

import argparse
import csv
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import nibabel
import numpy as np
from scipy.stats import t as student

from medsilo.plan import parse_plan
from medsilo.site.settings import EachSites, SiteSettings, make_settings
from results import result_files
from results.result_files import Study, Table
from tests.inprocess import run

ROOT = Path(__file__).resolve().parents[1]
FILE = result_files.FOLDER / "labels.csv"
SITES, JUDGE = ("a", "b", "c", "d"), "judge"
STRUCTURES = ("anterior", "posterior")
DREW = dict(zip(SITES, (1, 1, 2, 2), strict=True))  # maps each hospital to the structure that the hospital outlined
COLUMNS = tuple(f"x{number:02}" for number in range(18))
ADAM = {"optimizer": "adam", "momentum": 0, "weight_decay": 0, "learning_rate": 0.01, "batch_size": 2}
LEAST = 3  # minimum number of seeds in a file that the program writes

Own = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    title: str
    own: Own
    task: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedavg", "weighting": "uniform"})


@dataclass(frozen=True)
class Part:
    title: str
    words: str
    write: Callable[[Path, int, bool], None]
    plan: Mapping[str, Any]
    rows: tuple[Row, ...]
    # maps the title of each score at the judging hospital to the score's key; the first score is the mean
    scores: Mapping[str, str]


def everything(**own: Any) -> Own:
    return dict.fromkeys((*SITES, JUDGE), own)


# ------------------------------------------------------------------------------------------------ real volumes
def hippocampus(source: Path) -> Callable[[Path, int, bool], None]:
    """Return a function that writes 50 volumes for each training hospital and 60 for the testing hospital.

    A mask in `labels` shows both structures; a mask in `drawn` shows the structure that the hospital labels.
    """

    def write(folder: Path, seed: int, few: bool) -> None:
        names = sorted(path.name for path in (source / "images").glob("*.nii.gz"))
        order = np.random.default_rng(seed).permutation(len(names))
        each = 5 if few else 50
        for place, number in enumerate(order[: each * 4 + (4 if few else 60)]):
            site = (*SITES, JUDGE)[min(place // each, 4)]
            mask: Any = nibabel.load(source / "labels" / names[number])
            values = np.asarray(mask.dataobj).astype(np.uint8)
            _copy(source / "images" / names[number], folder / site / "images" / names[number])
            _save(folder / site / "labels" / names[number], values, mask.affine)
            if site != JUDGE:
                _save(folder / site / "drawn" / names[number], (values == DREW[site]).astype(np.uint8), mask.affine)

    return write


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)


def _save(path: Path, values: np.ndarray, affine: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def _drawn(marked: bool) -> Own:
    own = {"images": "images/*.nii.gz", "labels": "drawn/*.nii.gz"}
    parts = {
        site: {
            **own,
            "label_map": {1: STRUCTURES[drew - 1]},
            "unannotated": [STRUCTURES[2 - drew]] if marked else [],
        }
        for site, drew in DREW.items()
    }
    return {**parts, JUDGE: {}}


def volumes(source: Path) -> Part:
    """Return the section on hippocampus volumes: two hospitals outlined the anterior part, two the posterior part."""
    return Part(
        "Structures: two hospitals drew one, two the other",
        "Hippocampus volumes of the Medical Segmentation Decathlon (CC BY-SA 4.0), one centre dealt to four "
        "hospitals of 50 by each seed; of 60 others the twelve of the test part "
        "are tested. Two hospitals drew the anterior part, two the posterior. "
        "*Naive* takes what was not drawn for background.",
        hippocampus(source),
        {
            "task": {
                "name": "nifti-folder",
                "labels": list(STRUCTURES),
                "size": [20, 28, 20],
                "intensity": {"kind": "z-score"},
            },
            "network": {"name": "unet", "dimensions": 3, "features": [8, 16, 32], "norm": "instance"},
            "training": {**ADAM, "rounds": 160, "local_steps": 3, "schedule": "poly"},
        },
        (
            Row("all drew both", everything()),
            Row("each drew one, named in `unannotated`", _drawn(True)),
            Row("the same, by ConDistFL", _drawn(True), method={"name": "condistfl"}),
            Row("each drew one, naive", _drawn(False)),
        ),
        {"mean Dice": "dice", "anterior": "dice_anterior", "posterior": "dice_posterior"},
    )


# ------------------------------------------------------------------------------------------------ columns
def write_tables(folder: Path, seed: int, few: bool) -> None:
    """Write a generated table of 18 columns for each hospital, including the judging hospital."""
    drawn = np.random.default_rng(seed)
    weights = drawn.normal(size=len(COLUMNS))
    for site in (*SITES, JUDGE):
        count = 2000 if site == JUDGE else 60 if few else 300
        values = drawn.normal(size=(count, len(COLUMNS)))
        values[:, 1::2] = 0.7 * values[:, ::2] + 0.7 * values[:, 1::2]  # pairs of columns are correlated
        outcome = drawn.random(count) < 1 / (1 + np.exp(-0.8 * values @ weights))
        (folder / site).mkdir(parents=True)
        with (folder / site / "cases.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*COLUMNS, "outcome", "patient"])
            lines.writerows(
                [*map(float, row), int(one), case] for case, (row, one) in enumerate(zip(values, outcome, strict=True))
            )


LACKS = {"b": COLUMNS[:4], "c": COLUMNS[4:9], "d": COLUMNS[9:15]}
EVERYWHERE = [name for name in COLUMNS if not any(name in lacks for lacks in LACKS.values())]
TABLES = Part(
    "Columns: three of four hospitals lack 4, 5 and 6 of 18",
    "GENERATED tables of 18 numbers, 300 lines at each hospital and 400 that are tested, with all columns. Logistic "
    "regression, `missing: mark`.",
    write_tables,
    {
        "task": {
            "name": "table",
            "columns": list(COLUMNS),
            "target": "outcome",
            "labels": ["0", "1"],
            "missing": "mark",
        },
        "training": {"rounds": 20, "batch_size": 32, "learning_rate": 0.1},
    },
    (
        Row("all have 18", everything()),
        Row(
            "named in `unannotated`",
            {**everything(), **{site: {"unannotated": list(lacks)} for site, lacks in LACKS.items()}},
        ),
        Row("only the 3 columns that all have", everything(), task={"columns": EVERYWHERE}),
    ),
    {"AUROC": "auroc", "accuracy": "accuracy"},
)


# ------------------------------------------------------------------------------------------------ running
def judged(part: Part, row: Row, folder: Path, seed: int, few: bool) -> dict[str, float]:
    steps = {"rounds": 1} if few else {}
    training = {**part.plan["training"], **steps}
    if few and "local_steps" in training:
        training["local_steps"] = 1
    plan = parse_plan(
        {
            **part.plan,
            "seed": seed,
            "algorithm": dict(row.method),
            "task": {**part.plan["task"], **row.task},
            "training": training,
            "participation": {"sites": list(SITES), "evaluation_sites": [JUDGE]},
            "model_selection": {"keep": "last", "validate_every": training["rounds"]},
        }
    )
    known = make_settings({"public_data": True, "min_patients_per_metric": 1, "device": "cpu"}, "benchmark")
    sites = {
        site: make_settings(
            {**known.model_dump(), "data": {"folder": str(folder / site), **row.own[site]}}, "benchmark"
        )
        for site in (*SITES, JUDGE)
    }
    settings = EachSites(**{name: getattr(known, name) for name in SiteSettings.model_fields}, sites=sites)
    found = run(plan, settings=settings).summary.evaluation_sites[JUDGE].figures
    return {title: float(found[name] or 0.0) for title, name in part.scores.items()}


def interval(values: Sequence[float]) -> str:
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean(values):+.2f} ({mean(values) - half:+.2f} to {mean(values) + half:+.2f})"


def section(part: Part, seeds: Sequence[int], few: bool) -> Table:
    found: dict[str, list[dict[str, float]]] = {row.title: [] for row in part.rows}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            part.write(Path(folder), seed, few)
            for row in part.rows:
                found[row.title].append(judged(part, row, Path(folder), seed, few))
                print(f"{part.title}: seed {seed}, {row.title}: {found[row.title][-1]}", file=sys.stderr, flush=True)
    first, *_ = part.scores
    whole = found[part.rows[0].title]
    rows = []
    for title, own in found.items():
        scores = [f"{100 * mean(one[name] for one in own):.2f}" for name in part.scores]
        gaps = [100 * (one[first] - other[first]) for one, other in zip(own, whole, strict=True)]
        rows.append([title, *scores, interval(gaps) if own is not whole else ""])
    heads = ("", *part.scores, f"{first} against the first row, points (95 % interval over seeds)")
    return Table(heads, rows, part.title, seeds=str(len(seeds)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.labels")
    parser.add_argument("--seeds", type=int, default=LEAST)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--quick", action="store_true", help="only test that the program runs: one seed, few cases")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    seeds = range(1 if chosen.quick else chosen.seeds)
    source = chosen.data / "hippocampus"
    parts = [*([volumes(source)] if source.is_dir() else []), TABLES]
    header = result_files.header_of(FILE) | {"date": [time.strftime("%Y-%m-%d", time.gmtime())]}
    text = Study(header, [section(part, seeds, chosen.quick) for part in parts]).text()
    print(text)
    if chosen.write and len(seeds) >= LEAST and len(parts) == 2:
        FILE.write_text(text, "utf-8")
        result_files.write_index()
    return 0


if __name__ == "__main__":
    sys.exit(main())
