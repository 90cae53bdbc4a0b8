"""A backbone trained without labels, and what of it trains with them: on nuclei of three hospitals.

    python -m benchmarks.adapters [--data DIR] [--seed N]... [--runs DIR] [--write] [--quick]

A run that lies under RUNS is not made again. Prints docs/results/adapters.md, which --write writes. Five minutes on a
free core.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scipy import stats

from medsilo.core import shelf
from medsilo.federation import inprocess
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import GLOBAL, LAST
from medsilo.site.settings import SiteSettings, make_settings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results" / "adapters.md"
SITES = ["monusac2020", "monuseg2018", "tnbc"]
OF = {"name": "basic-unet", "features": [8, 16, 32, 64, 128]}
PRETRAINING, START = "pretraining", "from"
ROWS: dict[str, dict[str, Any]] = {  # what `network` has beside the network itself, and the method
    "all, from initial weights": {"train": "all"},
    "all, from the backbone": {"train": "all", START: True},
    "head only": {"train": "head", START: True},
    "adapters and head": {"train": ["adapters", "head"], START: True},
    "adapters, norms and head": {"train": ["adapters", "norms", "head"], START: True},
    "shared and own adapters, head": {"train": ["adapters", "head"], START: True, "method": "own-adapter"},
}


def plan_of(row: str, seed: int, backbone: Path, quick: bool) -> Plan:
    """Return the plan of a row; all have the same numbers of training."""
    how = {**ROWS.get(row, {"train": "all", "method": "masked-images"})}
    method = how.pop("method", "fedavg")
    if how.pop(START, False):
        own = {"sha256": shelf.hash_of_file(backbone), "bytes": backbone.stat().st_size}
        how[START] = {"file": backbone.name, **own}
        shelf.look_in(backbone.parent)
    task = {"name": "synthetic-prostate", "size": 32} if quick else {"name": "nuclei", "size": 48}
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": task,
            "network": {"name": "tuned", "of": OF, **how},
            "training": {
                "rounds": 1 if quick else 12 if row in ROWS else 20,
                "batch_size": 8,
                "optimizer": "adam",
                "learning_rate": 0.003,
            },
            "participation": {"sites": SITES},
            "tracking": {"select": "best" if row in ROWS else "last", "validate_every": 3 if row in ROWS else 10_000},
            "seed": seed,
        }
    )


def made(row: str, seed: int, folder: Path, settings: SiteSettings, quick: bool) -> dict[str, Any]:
    """Run one row with one seed, in this process; returns what the page says of it."""
    started = time.process_time()
    plan = plan_of(row, seed, folder / f"{PRETRAINING}-{seed}.safetensors", quick)
    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        summary = inprocess.run(plan, folder=Path(place) / "run", settings=settings).summary
        if row == PRETRAINING:
            shutil.copyfile(Path(place) / "run" / GLOBAL / LAST, folder / f"{PRETRAINING}-{seed}.safetensors")
    sites = list(summary.sites.values())
    dice = [site.test["dice"] for site in sites if site.test]
    return {
        "dice": sum(dice) / len(dice),
        "parameters": plan.parameters,
        "bytes": max(site.bytes_up or 0 for site in sites) // plan.rounds,
        "seconds": time.process_time() - started,
    }


def cell(values: list[float]) -> str:
    """Return a mean with its 95 % interval by Student's t."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.tstd(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the document. found: by row and seed."""
    seeds = len(found[PRETRAINING])
    told = f"{seeds} seeds, each with a backbone of its own"
    if seeds < 3:
        told = "**One seed**: no row is told from another by this table" if seeds == 1 else f"**{told}: too few**"
    first, lines = found["all, from initial weights"], []
    for row, own in found.items():
        every = list(own.values())
        mean = {key: sum(one[key] for one in every) / len(every) for key in ("bytes", "seconds")}
        dice = gain = "–"
        if row != PRETRAINING:
            dice = cell([one["dice"] for one in every])
            gain = "–" if own is first else cell([one["dice"] - first[seed]["dice"] for seed, one in own.items()])
        lines.append(
            f"| {row} | {dice} | {gain} | {every[0]['parameters']:,} | {mean['bytes'] / 1e3:.1f} | "
            f"{mean['seconds']:.0f} |"
        )
    table = "\n".join(lines)
    return f"""# Adapters on nuclei

Real data (MoNuSAC 2020, MoNuSeg 2018 and TNBC; not part of this project): three hospitals with 41, 50 and 38 training
tiles, 48 pixels wide. MONAI's basic U-Net of 488,394 weights. The backbone is trained without labels (`masked-images`,
20 rounds) on the training images of the same three hospitals; then 12 rounds with labels, Adam, learning rate 0.003 in
all rows, which was chosen for none of them. {told}. Written by

    python -m benchmarks.adapters --write

Dice is the mean over the hospitals' test tiles (10, 16 and 21), of the round that was best in validation; ± is the
95 % interval over seeds, by Student's t. Bytes are those of the tensors that one hospital sends in one round. Seconds
are those of the processor, of all three hospitals and the server. Memory was not measured.

| what trains | Dice | less the first row's | weights that train | kB a round | seconds |
|---|---|---|---|---|---|
{table}

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    where = {} if asked.quick else {"data": str(asked.data / "nuclei_he"), "public_data": True}
    settings = make_settings({"device": "cpu", **where}, "the benchmark")
    seeds = [0] if asked.quick else asked.seed or [0, 1, 2]
    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        folder = asked.runs or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for seed in seeds:
            for row in (PRETRAINING, *list(ROWS)[:: 4 if asked.quick else 1]):
                kept = folder / f"{row}-{seed}.json"
                if not kept.exists():
                    text = json.dumps(made(row, seed, folder, settings, asked.quick))
                    kept.write_text(text, "utf-8")
                    print(row, seed, text, file=sys.stderr, flush=True)
                found.setdefault(row, {})[str(seed)] = json.loads(kept.read_text("utf-8"))
    print(page(found))
    if asked.write:
        DOCUMENT.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
