"""A table of methods x seeds, run in one process cell by cell; a cell that is finished is not run again.

    python -m medsilo.study.cells jobs/adafed --methods local fedavg:weighting=uniform adafed adafed:weights=uniform \
        --seeds 0 1 2 --out runs/table --set training.rounds=20

A method may carry changes of its own section behind colons. The table in Markdown goes to the screen and, with what it
rests on, to <out>/table.md and <out>/table.json.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medsilo.errors import MedsiloError
from medsilo.federation.record import Record
from medsilo.files import write_json, write_text
from medsilo.flare.jobs import find_job, plan_of
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.study import inprocess


def cell_plan(job: Path, method: str, seed: int, changes: Sequence[str]) -> Plan:
    """The job's plan with another method (and that method's own changes) and another seed."""
    name, *own = method.split(":")
    return plan_of(
        job, [f"algorithm.name={name}", *(f"algorithm.{change}" for change in own), *changes, f"seed={seed}"]
    )


def run_cell(plan: Plan, folder: Path, settings: SiteSettings) -> dict[str, Any]:
    """What came of one cell; run only if it isn't there yet. A started cell is begun anew."""
    record = Record(folder)
    summary = record.summary()
    if summary.get("status") != "finished" or summary["plan_hash"] != plan.hash:
        shutil.rmtree(folder, ignore_errors=True)
        summary = inprocess.run(plan, folder=folder, settings=settings).summary
        for saved in folder.glob("**/*.safetensors"):  # a table needs no models
            saved.unlink()
    lines = record.rounds()
    trained = [line["phase"] for line in lines if any(s["train_loss"] is not None for s in line["sites"].values())]
    curves = [facts["validation"] for facts in summary["sites"].values()]
    return {
        "test": summary["mean_test"],
        "sites": {site: facts["test"][summary["metric"]] for site, facts in summary["sites"].items()},
        "validation": [sum(column) / len(column) for column in zip(*curves, strict=True)],
        "measuring": len(lines) - len(trained),  # rounds without training; they come first
        "seconds": summary["seconds"],
        "details": summary["details"],
        "package": summary["package"],
    }


def rounds_to(level: float, cell: dict[str, Any]) -> int | None:
    """The training rounds after which the mean validation score first was this high."""
    reached = (number for number, value in enumerate(cell["validation"]) if value >= level)
    first = next(reached, None)
    return None if first is None else max(first - cell["measuring"], 0)


def table(cells: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Mean and spread over seeds, the worst site, and how soon FedAvg's end was reached."""
    seeds = sorted(next(iter(cells.values())))
    average = next((own for method, own in cells.items() if method.split(":")[0] == "fedavg"), None)
    lines = [f"| method | test, mean ± sd | each seed | worst site | rounds to FedAvg's end ({len(seeds)} seeds) | s |"]
    lines.append("|---|---|---|---|---|---|")
    for method, own in cells.items():
        tests = [100 * own[seed]["test"] for seed in seeds]
        spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
        worst = statistics.mean(100 * min(own[seed]["sites"].values()) for seed in seeds)
        soon = [rounds_to(average[seed]["validation"][-1], own[seed]) for seed in seeds] if average else []
        lines.append(
            f"| {method} | {statistics.mean(tests):.1f} ± {spread:.1f} | {', '.join(f'{t:.1f}' for t in tests)} "
            f"| {worst:.1f} | {', '.join('never' if n is None else str(n) for n in soon)} "
            f"| {statistics.mean(own[seed]['seconds'] for seed in seeds):.0f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing of a table and write it; 0 only when the whole table is there."""
    parser = argparse.ArgumentParser(prog="python -m medsilo.study.cells", description="A table of methods x seeds.")
    parser.add_argument("job", help="a job's folder, for example jobs/fedavg: its task, network and training")
    parser.add_argument("--methods", nargs="+", required=True, metavar="METHOD[:KEY=VALUE]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="where cells are kept")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="change the plan of every cell")
    parser.add_argument("--data", type=Path, default=None, help="folder with the sites' data, for tasks that need one")
    options = parser.parse_args(arguments)
    settings = make_settings({"device": "cpu", "data": options.data}, "the command line")
    try:
        plans = {
            (method, seed): cell_plan(find_job(options.job), method, seed, options.set)
            for seed in options.seeds  # a whole table first, then the next seed
            for method in options.methods
        }
        cells: dict[str, dict[int, dict[str, Any]]] = {}
        for (method, seed), plan in plans.items():
            started = time.monotonic()
            folder = options.out / f"{method.replace(':', '+').replace('=', '-')}-{seed}"
            cells.setdefault(method, {})[seed] = run_cell(plan, folder, settings)
            print(f"{folder.name}: {cells[method][seed]['test']:.4f} ({time.monotonic() - started:.0f} s)", flush=True)
    except MedsiloError as error:
        print(f"cells: {error} {error.private}".rstrip(), file=sys.stderr)
        return 1
    lines = table(cells)
    write_json(options.out / "table.json", json.loads(json.dumps(cells)))
    write_text(options.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(["", *lines, "", f"in {options.out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
