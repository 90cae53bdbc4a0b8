"""The same plan gives the same tensors in one process and in NVFlare's simulator."""

from pathlib import Path

import pytest
import torch

from medsilo.airlock.border import LEFT
from medsilo.airlock.room import ability
from medsilo.core.files import load_tensors
from medsilo.runs import paths
from medsilo.runs.messages import VARYING
from medsilo_lab.engines import inprocess, simulator
from tests.conftest import FEDSM, METHODS, PLAIN, SITES, make_plan
from tests.sites import CPU

FIRST = ["fedsm-extra"]
KINDS = ["adafed", "scaffold"]
BY_KIND = [method if method in FIRST else pytest.param(method, marks=pytest.mark.long) for method in METHODS]
# files that differ between runs, because they contain random masks or random names
OWN_FILES = (paths.STATE_FILES, paths.SEALED, paths.ANSWER_FILES)


def assert_same_outcome(one: Path, other: Path) -> None:
    own = {path for kind in OWN_FILES for path in one.glob(f"sites/*/{kind}")}
    names = sorted(path.relative_to(one) for path in one.glob("sites/*/*.safetensors") if path not in own)
    names += sorted(path.relative_to(one) for path in one.glob("global/*.safetensors"))
    names += sorted(path.relative_to(one) for path in one.glob("**/supermodel/**/*.safetensors"))
    assert len(names) >= 2 * len(list(one.glob("sites/*"))) >= 4
    for name in names:
        mine, facts = load_tensors(one / name)
        theirs, other_facts = load_tensors(other / name)
        assert facts == other_facts
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), f"{name}: {key}"
    scores = [
        {site: (facts.validation, facts.test, facts.contributed) for site, facts in run.sites.items()}
        for run in (simulator.Record(one).summary(), simulator.Record(other).summary())
    ]
    assert scores[0] == scores[1]
    assert simulator.Record(one).summary().details == simulator.Record(other).summary().details
    rounds = [
        [line.sites[site].model_copy(update=dict.fromkeys(VARYING)) for line in simulator.Record(run).rounds()]
        for run in (one, other)
        for site in sorted(scores[0])
    ]
    assert rounds[: len(scores[0])] == rounds[len(scores[0]) :]


@pytest.mark.first
@pytest.mark.parametrize("method", BY_KIND)
def test_simulator_equals_the_loop(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("medsilo", "random"):  # a user's files must not replace modules in NVFlare's processes
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')")
    monkeypatch.chdir(tmp_path)
    sites = SITES[:2] if method in FIRST else SITES  # only two sites, because each site is a process
    plan = make_plan(method, *["algorithm.pull=0.2"] * (method in FEDSM), sites=sites)
    inprocess.run(plan, folder=tmp_path / "loop")
    said: list[str] = []
    record = simulator.run(plan, tmp_path / "simulator", CPU, say=said.append)
    ready = {who for line in said if line.startswith("ready: ") for who in line.removeprefix("ready: ").split(", ")}
    # the first round may end before all messages have arrived
    assert "the server" in ready and ready <= {"the server", *sites}
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")
    cautions = record.summary().details.warnings
    told = [line for line in cautions if f"algorithm.pull 0.2 is below 1/{len(sites)}" in line]
    assert len(told) == (method in FEDSM)


@pytest.mark.slow
@pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces")
def test_rooms_in_the_simulator_equal_the_loop(tmp_path: Path) -> None:
    """The study's method has two networks and local state, and every site trains in the airlock."""
    plan = make_plan("ditto", sites=SITES[:2])
    inprocess.run(plan, folder=tmp_path / "loop", settings=CPU)
    rooms = CPU.changed({"airlock": "required", "memory_limit": 4096, "room": {"studies": True}}, "settings")
    simulator.run(plan, tmp_path / "simulator", rooms)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")
    assert all((tmp_path / "simulator" / "sites" / site / LEFT).is_file() for site in SITES[:2])


@pytest.mark.long
@pytest.mark.first
@pytest.mark.parametrize(
    "method",
    sorted({*FIRST, *KINDS, *PLAIN}),
)
def test_one_thread_for_all_sites_equals_the_loop(method: str, tmp_path: Path) -> None:
    """NVFlare starts a new process for every task, so a site must read its state from disk."""
    plan = make_plan(method, sites=SITES[:2])
    inprocess.run(plan, folder=tmp_path / "loop")
    simulator.run(plan, tmp_path / "simulator", CPU, threads=1)
    assert_same_outcome(tmp_path / "loop", tmp_path / "simulator")
