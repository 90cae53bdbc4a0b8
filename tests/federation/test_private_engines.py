"""A study that promises privacy gives the same tensors in process, in an isolated trainer and in NVFlare's simulator.

Its hospitals are drawn, so noise and samples come from the seed.
"""

from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.inprocess import Loop
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.flare import simulator
from medsilo.runs.paths import site_folder
from medsilo.runs.record import Record
from tests.conftest import SITES
from tests.federation.test_simulator import CPU, assert_same_outcome
from tests.unit.test_private_training import promised, same, tensors_of

SAMPLED = ["training.rounds=2", "privacy.adaptive={}"]  # batches of eight: Poisson samples


@pytest.mark.slow
@pytest.mark.parametrize(("method", "threads"), [("fedavg", None), ("fedsm", 1), ("mr-mtl", None)])
def test_private_simulator_equals_the_loop(method: str, threads: int | None, tmp_path: Path) -> None:
    plan = promised(method, *SAMPLED)
    inprocess.run(plan, folder=tmp_path / "loop", settings=CPU)
    simulator.run(plan, tmp_path / "simulator", CPU, threads=threads)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")


@pytest.mark.slow
def test_private_trainers_of_their_own_equal_the_loop(tmp_path: Path) -> None:
    plan = promised("ditto", *SAMPLED)
    inprocess.run(plan, folder=tmp_path / "loop", settings=CPU)
    root = tmp_path / "isolated"
    sites = {site: IsolatedParticipant(plan, site, SITES, CPU, site_folder(root, site)) for site in SITES}
    try:
        loop = Loop(sites)  # type: ignore[arg-type]
        Coordinator(plan, SITES, loop, Record(root), "in-process").run()
    finally:
        for site in sites.values():
            site.close()
    assert same(tensors_of(tmp_path / "loop"), tensors_of(root))
