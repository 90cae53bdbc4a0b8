"""Measure the server's memory and a round's time over mutual TLS while all answers arrive at once.

    python -m benchmarks.over_tls [--sites 2,4,8] [--features 32,64,128,256,512,512,224] [--rounds 3]

Real processes run from provisioned kits on this machine. The sites do not train (federation_parts/idle_site.py), so all
answers are sent at once. Memory is the largest resident size of the server's process for the job (VmHWM). The first
ratio is the memory divided by the size of all sites' models. The second ratio is the transferred bytes divided by twice
the size of all sites' models.
"""

import argparse
import io
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.federation import idle_job
from benchmarks.timing import note, run
from medsilo.plan import Plan, parse_plan
from medsilo_lab.consortium import lead
from medsilo_server.record import Record
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until

SITES, FEATURES = "2,4,8", "32,64,128,256,512,512,224"
LIMIT = 1200.0  # maximum seconds of a study


@dataclass(frozen=True)
class Cost:
    parameters: int
    server_mb: float
    round_seconds: float  # the median of the times of all rounds except the first
    sent_mb: float  # megabytes that all sites send and receive in a round after the first round

    @property
    def row(self) -> str:
        return f"{self.server_mb:.0f} MB | {self.round_seconds:.2f} s | {self.sent_mb:.1f} MB |"


def plan_of(sites: Sequence[str], features: Sequence[int], rounds: int) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "synthetic-prostate", "size": 64},
            "network": {"name": "unet", "features": list(features), "residual_units": 2 if len(features) > 3 else 0},
            "training": {"rounds": rounds},
            "participation": {"sites": list(sites)},
        }
    )


def cost(sites: int, features: Sequence[int], rounds: int, folder: Path) -> Cost:
    names = [f"site-{number:02d}" for number in range(sites)]
    plan = plan_of(names, features, rounds)
    with redirect_stdout(io.StringIO()):
        consortium = Consortium(folder, dict.fromkeys(names, "teaching-hospital"))
    for name in names:
        (consortium.kit(name) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    record = Record(consortium.kit(SERVER) / "medsilo" / "idle")
    try:
        consortium.start(LIMIT)
        lead.submit(idle_job(folder / "job", plan, study="idle"), consortium.kit(LEAD), lambda line: None)
        peak = 0.0

        def over() -> bool:
            nonlocal peak
            peak = max(peak, *map(_peak, consortium.family(SERVER)), 0.0)
            return record.summary() is not None

        wait_until(over, LIMIT, "the study's end")
    finally:
        consortium.stop()
    lines = record.rounds()
    sent = [sum(site.bytes_up + site.bytes_down for site in line.sites.values()) for line in lines]
    seconds = statistics.median(line.seconds for line in lines[1:])
    return Cost(plan.parameters, peak, seconds, statistics.median(sent[1:]) / 1e6)


def _peak(process: psutil.Process) -> float:
    """Return the peak memory of a process in MB, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure server memory and round time over mutual TLS, without training."
    )
    parser.add_argument("--sites", default=SITES)
    parser.add_argument("--features", default=FEATURES)
    parser.add_argument("--rounds", type=int)
    asked = parser.parse_args()
    sizes = [int(number) for number in asked.features.split(",")]
    print("| sites | server | round | sent in a round |\n|---|---|---|---|")
    for sites in map(int, asked.sites.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = cost(sites, sizes, asked.rounds or 3, Path(folder))
            print(f"| {sites} | {found.row}", flush=True)
            models = sites * found.parameters * 4 / 1e6
            for name, ratio in (("memory", found.server_mb / models), ("sent", found.sent_mb / (2 * models))):
                print(f"  {name}: {ratio:.2f} times the models of {sites} sites")
                note(f"over TLS: {sites} sites, {name}", ratio)
    print(f"{found.parameters} parameters")


if __name__ == "__main__":
    run(main, globals(), SITES="2", FEATURES="8,16")
