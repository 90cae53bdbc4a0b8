"""Many hospitals behind two relays over mutual TLS on this machine: time per round, and the server's memory.

python -m tests.secure.many --sites 6,24 --rounds 30 --kills 6 --folder <an empty folder on a disk>

A hospital takes some 330 MB, 580 MB where its trainer is to be killed.
"""

import argparse
import random
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from medsilo.flare.jobs import write_job
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import make_plan
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.test_resume import ended

HOURS = 3600.0


def measure(sites: int, rounds: int, kills: int, folder: Path) -> None:
    """Run a study of FedAvg, kill the trainers of some hospitals in the middle of it, and print how it went."""
    names = [f"site-{number:03d}" for number in range(sites)]
    relays = {"north": names[: sites // 2], "south": names[sites // 2 :]}
    folder.mkdir(parents=True)
    consortium = Consortium(folder, dict.fromkeys(names, "teaching-hospital"), relays=relays)
    killed = dict(zip(random.Random(0).sample(names, kills), _chosen(rounds, kills), strict=True))
    for name in names:
        limit = "null" if name in killed else "0"
        (consortium.kit(name) / "local/medsilo.yaml").write_text(f"device: cpu\nmemory_limit: {limit}\n")
    try:
        consortium.start(HOURS)
        changes = [f"training.rounds={rounds}", "participation.when_missing=continue", "participation.minimum=1"]
        write_job(folder / "job", make_plan("fedavg", *changes, "participation.timeout=600", sites=names), study="many")
        job = lead.submit(folder / "job", consortium.kit(LEAD), print)
        record = Record(consortium.kit(SERVER) / "medsilo" / "many")

        def reached(number: int) -> bool:
            done = len(record.rounds())
            if 0 < done < number:
                assert len(consortium.family(SERVER)) > 1, f"the server's job ended after {done} rounds"
            return done >= number

        for name, last in sorted(killed.items(), key=lambda item: item[1]):
            wait_until(partial(reached, last), HOURS, f"round {last}")
            for trainer in consortium.family(name, "medsilo.federation.process.worker"):
                trainer.kill()
        wait_until(partial(reached, rounds - 1), HOURS, "the last rounds")
        peak = max(_peak(process) for process in consortium.family(SERVER))
        status, lines = ended(consortium.kit(LEAD), job, HOURS), record.rounds()
        refused = sorted({site for line in lines for site in line.refused})
        lost = sorted({site for line in lines for site in line.lost})
        seconds = median(line.seconds for line in lines)
        print(f"{sites} sites: {status}, {len(lines)} rounds of {seconds:.2f} s, server's peak {peak:.0f} MB,", end=" ")
        print(f"killed {sorted(killed)}, refused {refused}, lost {lost}", flush=True)
    finally:
        consortium.stop()


def _chosen(rounds: int, kills: int) -> list[int]:
    return sorted(random.Random(1).sample(range(2, max(rounds - 3, kills + 3)), kills))


def _peak(process: psutil.Process) -> float:
    """Return the most memory that a process ever had, in MB (Linux)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Measure one federation after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default="6,48")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    for sites in map(int, asked.sites.split(",")):
        measure(sites, asked.rounds, asked.kills, asked.folder / str(sites))


if __name__ == "__main__":
    main()
