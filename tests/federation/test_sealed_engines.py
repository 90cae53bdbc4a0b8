"""A study with secure aggregation gives the same tensors in one process and in NVFlare's simulator, even with a new
process for every task.
"""

from pathlib import Path

import pytest

from medsilo_lab.engines import inprocess, simulator
from tests.conftest import make_plan
from tests.federation.test_simulator import CPU, assert_same_outcome


@pytest.mark.long
@pytest.mark.parametrize("method, threads", [("fedavg", 1), ("fedsm", None)])
def test_sealed_simulator_equals_the_loop(method: str, threads: int | None, tmp_path: Path) -> None:
    plan = make_plan(method, "secure_aggregation.mode=pairwise")
    inprocess.run(plan, folder=tmp_path / "loop")
    simulator.run(plan, tmp_path / "simulator", CPU, threads=threads)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")
