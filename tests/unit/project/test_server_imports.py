"""A server that checks a plan imports no module that reads cases."""

import subprocess
import sys

import pytest

from tests.conftest import slow_but

SERVER = """
import sys
import medsilo_server.flare.controller
from medsilo.exchange.bounds import answer_bounds
from medsilo.plan import parse_plan
plan = parse_plan({"algorithm": {"name": "fedavg"}, "participation": {"sites": ["a", "b"]}, **eval(sys.argv[1])})
assert answer_bounds(plan) and plan.code and plan.parameters and plan.to_yaml() and plan.task.goal.layout
print(*sys.modules, sep="\\n")
"""
TASKS = ["synthetic-activity", "synthetic-prostate", "image-folder", "nifti-folder", "table"]
READING = {"cache", "case_index", "headers", "scans", "site_data", "sources", "splits", "survey", "table_reader"}
READING |= {"own.augmentation", "own.image_patches", "own.image_reading", "own.reading", "own.table_rows"}


@pytest.mark.parametrize("task", slow_but((), TASKS, ["table"]))
def test_a_server_reads_what_a_plan_says_and_loads_nothing_that_reads_cases(task: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, repr({"task": {"name": task}})], capture_output=True, text=True
    )
    loaded = {name.removeprefix("medsilo.tasks.") for name in done.stdout.split()}
    assert done.returncode == 0 and "task" in loaded, done.stderr
    assert not loaded & READING and not loaded & {"medsilo.federation.participant", "medsilo.learning.loop"}
