"""Time of Fed-IXI: one round of FedAvg on volumes that are generated, of the size and number of the published ones.

    python -m benchmarks.flamby_volumes

Prints seconds of processor time, of one thread: they hold on a busy machine, too.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.flamby import IXI, POOLED, Work
from benchmarks.timing import run
from medsilo.federation import inprocess
from medsilo.site.settings import make_settings
from tests.patients import write_ixi

SUBJECTS, SHAPE = {"Guys": 311, "HH": 181, "IOP": 74}, (83, 44, 55)
STEPS, RATE, SEED = (100, 1), 0.001, 42


def timed(what: str, since: float) -> float:
    """Print the time since then; return what it is now."""
    print(f"{what}: {time.process_time() - since:.0f} s", flush=True)
    return time.process_time()


def main() -> None:
    """Time the parts of a run."""
    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        folder, ready = Path(place, "data"), Path(place, "ready")
        ready.mkdir()
        write_ixi(folder / IXI.folder, SUBJECTS, SHAPE)
        now = time.process_time()
        work = IXI.ready(folder, ready)
        now = timed("preparing", now)
        one: dict[str, Any] = {"data": str(work.folder), "public_data": True, "device": "cpu"}
        settings = make_settings(one, "the benchmark")
        for steps in STEPS:
            short = replace(IXI, rounds=1, training={**IXI.training, "local_steps": steps})
            plan = Work(short, work.columns, work.sites, work.folder).federated("fedavg", RATE, SEED)
            study = inprocess.run(plan, settings=settings)
            now = timed(f"a run of one round of {steps} updates at each of {len(work.sites)} hospitals", now)
        work.score(plan, study.models[work.sites[0]], POOLED)
        timed("scoring", now)


if __name__ == "__main__":
    small = replace(IXI, task={**IXI.task, "size": [16, 16, 16]})
    run(main, globals(), SUBJECTS={"Guys": 6, "HH": 6, "IOP": 6}, SHAPE=(12, 12, 14), STEPS=(1,), IXI=small)
