"""A private study gives the same tensors in one process, in an isolated trainer and in NVFlare's simulator.

The hospitals are synthetic, so a public seed determines noise and samples.
"""

from pathlib import Path

import pytest

from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.site_context import SiteContext
from medsilo.runs.paths import site_folder
from medsilo.site.ledger import Ledger, ledgers
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from medsilo_lab.engines import inprocess, simulator
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES
from tests.federation.test_simulator import CPU, assert_same_outcome
from tests.unit.privacy.test_private_training import promised, same, tensors_of

SAMPLED = ["training.rounds=2"]
TWO = SITES[:2]  # only two sites, because each site is a process
BY_TWO = f"participation.sites=[{','.join(TWO)}]"


@pytest.mark.long
@pytest.mark.parametrize(("method", "threads"), [("fedavg", None), ("fedsm", 1), ("mr-mtl", None)])
def test_private_simulator_equals_the_loop(method: str, threads: int | None, tmp_path: Path) -> None:
    plan = promised(method, *SAMPLED)
    inprocess.run(plan, folder=tmp_path / "loop", settings=CPU)
    simulator.run(plan, tmp_path / "simulator", CPU, threads=threads)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")


@pytest.mark.long
def test_private_trainers_of_their_own_equal_the_loop(tmp_path: Path) -> None:
    plan = promised("ditto", *SAMPLED, f"participation.sites=[{SITES[0]}]")
    inprocess.run(plan, folder=tmp_path / "loop", settings=CPU)
    root = tmp_path / "isolated"
    one = SITES[:1]
    site = IsolatedParticipant(SiteContext(plan, one[0], one, CPU, site_folder(root, one[0])))
    try:
        loop = Loop({one[0]: site})  # type: ignore[dict-item]
        Coordinator(plan, one, loop, Record(root), "in-process").run()
    finally:
        site.close()
    assert same(tensors_of(tmp_path / "loop"), tensors_of(root))


@pytest.mark.long
def test_the_simulator_writes_the_ledger_of_the_loop(tmp_path: Path) -> None:
    """Hospitals that demand privacy write the same ledger entries in the same order, with the same ε."""
    plan = promised("fedavg", *SAMPLED, BY_TWO, "privacy.scores.epsilon=0.3", "privacy.counts.epsilon=0.1")
    own = SiteSettings(device="cpu", privacy=PrivacyRequirements(epsilon=4.0, delta=1e-3))
    inprocess.run(plan, folder=tmp_path / "one/study", settings=own)
    simulator.run(plan, tmp_path / "other/study", own)
    for site in TWO:
        told = []
        for root in ("one", "other"):
            book = tmp_path / root / "_hospital" / site
            [data] = ledgers(book)
            standing = Ledger(book, data).standing()
            told.append([(entry.kind, entry.what, entry.charges, entry.epsilon) for entry in standing.entries])
            assert 1.9 < standing.epsilon(1e-3) <= 2.0
        assert told[0] == told[1]
    assert same(tensors_of(tmp_path / "one/study"), tensors_of(tmp_path / "other/study"))
    assert_same_outcome(tmp_path / "one/study", tmp_path / "other/study")
