"""Every benchmark runs, at a tiny size; what they play instead of hospitals keeps up with what the server asks of one.

Times say nothing here; where a benchmark compares two ways of one computation, both must give the same.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks import history, over_tls, quick
from benchmarks.timing import RATIOS, note
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.inprocess import Loop
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from results import gamma, power
from tests.conftest import SITES, make_plan
from tests.sites import site_of

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
Bench = Callable[[str], ModuleType]


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Imports one of the benchmarks as if its folder were the working place."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.syspath_prepend(root / "benchmarks/federation_parts")
    yield import_module
    files = {path.stem for path in (root / "benchmarks").rglob("*.py")}
    for name in files & (set(sys.modules) - before):
        del sys.modules[name]


@linux
@pytest.mark.long
def test_what_a_federation_over_tls_costs(tmp_path: Path) -> None:
    """Its sites learn nothing: what is large is sent once, and goes both ways by its mark from the second round on."""
    features = [16, 32]
    found = over_tls.cost(2, features, 3, tmp_path)
    model = over_tls.plan_of(["a", "b"], features, 3).build_networks()["model"].state_dict()
    assert found.sent_mb == pytest.approx(2 * 2 * sum(tensor.nbytes for tensor in model.values()) / 1e6)
    assert found.server_mb > 100 and found.round_seconds > 0


@linux
def test_loops_and_mixers_compute_the_same(bench: Bench) -> None:
    mixing = bench("mixing")
    for name, (loop, mixer) in mixing.CASES.items():
        slow, fast = (play([mixing.make("LeNet", float(place)) for place in range(3)], 3) for play in (loop, mixer))
        if name == "UniformMean" or "reverse" in name:
            assert len(slow) == len(fast) == 3  # the loop takes as long, and has other weights
            continue
        for one, other in zip(slow, fast, strict=True):
            assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one), name


def test_what_sealing_costs(bench: Bench) -> None:
    """Every way gives the mean, which the benchmark checks; two thirds of six sites are enough for it."""
    sealing = bench("sealing")
    costs = {(count, way): cost for way, count, cost in sealing.rows((3, 6), 100, 1)}
    assert {way for _, way in costs} >= set(sealing.WAYS) - {"CKKS"}
    clear, sealed = costs[6, "clear"], costs[6, "pairwise"]
    assert clear.sent == 400 and sealed.sent == 2 * 400 + 4 * 8
    fast = sealing.Cost(800, 0.0, 0.1, 0.05)
    assert sealing.keeps_bounds(fast, sealing.Cost(400, 0, 0.1, 0))
    for slow in (sealing.Cost(801, 0, 0, 0), sealing.Cost(800, 0.2, 0.1, 0), sealing.Cost(800, 0, 0.16, 0)):
        assert not sealing.keeps_bounds(slow, sealing.Cost(400, 0, 0.1, 0))


@pytest.mark.slow
def test_training_beside_nnunets_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    from benchmarks import nnunet

    monkeypatch.setattr(nnunet, "plans_of", partial(nnunet.plans_of, samples=2000))
    nnunet.main(["--seeds", "2"], nnunet.Size(cases=2, width=32.0, batch=2, epochs=3, steps=1, features=4))
    lines = capsys.readouterr().out.splitlines()
    first, said = (
        next(line for line in lines if line.startswith("0 ")),
        next(line for line in lines if "own score" in line),
    )
    assert first.split()[1] == said.split()[-1]  # both score nnU-Net's network alike
    assert any(line.startswith("1 ") for line in lines)


@pytest.fixture
def idle_study(bench: Bench, tmp_path: Path) -> Coordinator:
    """A study of the sites that the federation's benchmark plays."""
    small = ["task.size=32", "task.patients=4", "network.name=unet", "network.features=[2, 4]"]
    plan = make_plan("fedavg", "task.name=synthetic-prostate", *small, "model_selection.keep=last")
    kind, settings = bench("idle_site").IdleParticipant, SiteSettings(device="cpu")
    idle = {site: site_of(plan, site, SITES, settings, tmp_path / "run" / "sites" / site, kind=kind) for site in SITES}
    return Coordinator(plan, SITES, Loop(idle), Record(tmp_path / "run"), "in-process")


def test_idle_sites_go_through_a_whole_study_and_give_back_what_they_got(idle_study: Coordinator) -> None:
    summary = idle_study.run()
    assert summary.status == "finished"
    start: dict[str, Tensor] = idle_study.plan.build_networks()["model"].state_dict()
    given = idle_study.state.mixers["model"].current(SITES[0])
    assert all(torch.equal(given[name], tensor) for name, tensor in start.items())
    assert summary.sites[SITES[0]].validation == [0.5, 0.5, 0.5]


def test_what_a_comparison_finds() -> None:
    """All rows together find more than one row, and without a check an unsteady row is often falsely sure."""
    found = {name: power.measured(judge, 300) for name, judge in power.JUDGES.items()}
    alone, unchecked, checked, moderated = found.values()
    assert alone[0][1] < 0.35 < 0.6 < min(unchecked[0][1], checked[0][1], moderated[0][1])
    assert unchecked[1][-1] > 0.12 > max(checked[1][-1], alone[1][-1])


@pytest.mark.parametrize("gain", [0.05, 0.15])
@pytest.mark.parametrize("darker", [0.0, 0.4])
def test_the_middle_of_the_plateau_costs_less_than_its_upper_edge(gain: float, darker: float) -> None:
    studies, (upper, lower, middle) = gamma.regrets(gain, darker, 300)
    assert studies > 100 and min(upper, lower, middle) > -0.01
    assert middle < 0.9 * upper and middle < lower + 0.05


APART = {"over_tls", "nnunet"}  # over TLS, and beside nnU-Net's trainer


@linux
@pytest.mark.long
def test_every_benchmark_runs_quickly(root: Path) -> None:
    """All but those apart, and one of published data."""
    names = sorted({*quick.benchmarks()} - APART)
    assert len(names) >= 20
    command = [sys.executable, "-m", "benchmarks.quick", *names]
    done = subprocess.run(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ALONE = """
import os, runpy, sys
sys.path[0] = os.path.dirname(sys.argv[1])
import timing
timing.run = lambda *told, **numbers: print("began")
sys.modules["benchmarks.timing"] = timing
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@linux
@pytest.mark.long
def test_the_scripts_of_make_bench_begin_as_make_begins_them(root: Path, tmp_path: Path) -> None:
    """Their own folder is where Python looks first, and the project's is not there."""
    scripts = re.findall(r"\$\(BIN\)/python (benchmarks/\w+\.py)", (root / "Makefile").read_text("utf-8"))
    assert len(scripts) >= 9
    for script in scripts:
        command = [sys.executable, "-c", ALONE, str(root / script)]
        once = {**os.environ, "MALLOC_TOP_PAD_": str(64 << 20)}  # one of them starts itself a second time to set it
        done = subprocess.run(command, cwd=tmp_path, env=once, capture_output=True, text=True)
        assert "began" in done.stdout, (script, done.stderr)


def test_a_regression_since_the_last_release_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above a tenth is worse; a benchmark that is new, or was not run, is no regression."""
    noted, released = tmp_path / "ratios.jsonl", tmp_path / "released.json"
    monkeypatch.setattr(history, "NOTED", noted)
    monkeypatch.setattr(history, "RELEASED", released)
    monkeypatch.setenv(RATIOS, str(noted))
    for name, ratio in (("a", 1.0), ("b", 0.5), ("gone", 2.0)):
        note(name, ratio)
    assert history.main(["--keep"]) == 0 and len(json.loads(released.read_text())["commit"]) == 40
    noted.unlink()
    for name, ratio in (("a", 1.09), ("b", 9.0), ("b", 0.4), ("new", 3.0)):
        note(name, ratio)
    assert history.main([]) == 0
    assert "WORSE" not in capsys.readouterr().out
    note("b", 0.56)
    assert history.main([]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("WORSE")] == ["b"]
