"""The server's process is killed at the worst moments; what was finished is kept, and resuming changes no number."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.runs.record import Record
from tests.unit.test_participant import assert_same_run, planned

pytestmark = pytest.mark.slow

# Runs a study whose process kills itself in round 3.
VICTIM = """
import os, signal, sys
from pathlib import Path
from medsilo.runs.record import Record
from medsilo.mixing.mixers import WeightedMean
from medsilo.plan import load_plan
from medsilo.federation import inprocess

plan, folder, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
done = []


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(moment_here, original, when):
    def replaced(self, *arguments):
        result = original(self, *arguments)
        if moment == moment_here and when(*arguments):
            die()
        return result

    return replaced


def third_round(site, *rest):
    return len(done) == 2 and site == "hospital-b"  # hospital-a is in the sum, hospital-c is not


def after(record):
    done.append(record)
    if moment == "between rounds" and len(done) == 3:
        die()


WeightedMean.add = dies_at("in the sum", WeightedMean.add, third_round)
Record.add_round = dies_at("round told, not kept", Record.add_round, lambda record: record.round == 3)
Record.save_checkpoint = dies_at("checkpoint kept", Record.save_checkpoint, lambda number, *rest: number == 3)
inprocess.run(load_plan(plan), folder=folder, on_round=after)
"""


@pytest.mark.parametrize(
    "moment",
    [
        "in the sum",
        "round told, not kept",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("between rounds", "checkpoint kept")),
    ],
)
def test_a_server_killed_in_round_three(moment: str, tmp_path: Path, root: Path) -> None:
    plan = planned("fedbn", [])
    inprocess.run(plan, folder=tmp_path / "whole")
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    command = [sys.executable, "-c", VICTIM, str(tmp_path / "plan.yaml"), str(tmp_path / "run"), moment]
    environment = {**os.environ, "PYTHONPATH": str(root / "custom")}
    died = subprocess.run(command, env=environment, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    record = Record(tmp_path / "run")
    assert record.summary() is None
    assert record.load_checkpoint()[1]["round"] in ((3,) if moment == "checkpoint kept" else (1, 2))
    assert [line.round for line in record.rounds()][:2] == [1, 2]
    inprocess.run(plan, folder=tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
