"""Each benchmark runs with tiny models, and its simulated hospitals answer the server's requests.

A benchmark that compares two computations asserts that both give the same result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import history, over_tls, quick
from benchmarks.timing import RATIOS, note
from tests.sources import makefile

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
Bench = Callable[[str], ModuleType]


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
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
    """From round 2 on, server and sites send large unchanged tensors as references only."""
    features = [16, 32]
    found = over_tls.cost(2, features, 3, tmp_path)
    model = over_tls.plan_of(["a", "b"], features, 3).build_networks()["model"].state_dict()
    assert found.sent_mb == pytest.approx(2 * 2 * sum(tensor.nbytes for tensor in model.values()) / 1e6)
    assert found.server_mb > 100 and found.round_seconds > 0


@linux
def test_loops_and_mixers_compute_the_same(bench: Bench) -> None:
    mixing = bench("mixing")
    for name, (loop, aggregator) in mixing.CASES.items():
        slow, fast = (
            play([mixing.make("LeNet", float(place)) for place in range(3)], 3) for play in (loop, aggregator)
        )
        if name == "UniformMean" or "reverse" in name:
            # the two networks have equally many weights with different values
            assert len(slow) == len(fast) == 3
            continue
        for one, other in zip(slow, fast, strict=True):
            assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one), name


def test_what_sealing_costs(bench: Bench) -> None:
    """The benchmark asserts that each protocol gives the mean of the sites' vectors.

    A round needs two thirds of the sites, which is four of six.
    """
    sealing = bench("sealing")
    costs = {(count, way): cost for way, count, cost in sealing.rows((3, 6), 100, 1)}
    assert {way for _, way in costs} >= set(sealing.WAYS) - {"CKKS"}
    clear, sealed = costs[6, "clear"], costs[6, "pairwise"]
    assert clear.sent == 400 and sealed.sent == 2 * 400 + 4 * 8
    fast = sealing.Cost(800, 0.0, 0.1, 0.05)
    assert sealing.keeps_bounds(fast, sealing.Cost(400, 0, 0.1, 0))
    for slow in (sealing.Cost(801, 0, 0, 0), sealing.Cost(800, 0.2, 0.1, 0), sealing.Cost(800, 0, 0.16, 0)):
        assert not sealing.keeps_bounds(slow, sealing.Cost(400, 0, 0.1, 0))


@pytest.mark.long
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
    assert first.split()[1] == said.split()[-1]  # medsilo and nnU-Net compute the same score for nnU-Net's network
    assert any(line.startswith("1 ") for line in lines)


APART = {"over_tls", "nnunet"}


@linux
@pytest.mark.long
def test_every_benchmark_runs_quickly(root: Path) -> None:
    """The test does not run the benchmarks in APART, nor a benchmark that needs published data."""
    names = sorted({*quick.benchmarks()} - APART)
    assert len(names) >= 20
    command = [sys.executable, "-m", "benchmarks.quick", *names]
    done = subprocess.run(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_regression_since_the_last_release_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark is worse if its measured ratio is more than a tenth higher than the ratio of the last release.

    A new benchmark or a missing benchmark does not count as worse.
    """
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


NOTES = """
from pathlib import Path
from benchmarks.timing import note

runs = Path(__file__).with_suffix(".runs")
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
note("a script's round", {ratios}[len(runs.read_text()) - 1])
"""


@pytest.mark.parametrize(
    ("ratios", "code", "times"), [([0.95], 0, 1), ([1.5, 0.95], 0, 2), ([1.5, 1.6], 1, 2), (None, None, 1)]
)
def test_ratios_are_held_against_the_last_releases_at_night(
    ratios: list[float] | None,
    code: int | None,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
) -> None:
    """In earlier versions, a round of a training script took twice as long, and for a day, no test noticed this."""
    script, released = tmp_path / "one.py", tmp_path / "released.json"
    script.write_text(NOTES.replace("{ratios}", str(ratios)))
    released.write_text(json.dumps({"commit": "c", "date": "d", "ratios": {"a script's round": 0.9}}))
    monkeypatch.setattr(history, "RELEASED", released)
    monkeypatch.setattr(history, "CHEAP", ((str(script),),))
    monkeypatch.setenv("PYTHONPATH", str(root))
    if code is None:
        with pytest.raises(SystemExit, match="one.py measured nothing"):
            history.main(["--now"])
    else:
        assert history.main(["--now"]) == code
    assert len(script.with_suffix(".runs").read_text()) == times


def test_the_ratios_of_a_script_of_ones_own_have_a_bound(root: Path) -> None:
    kept = json.loads((root / "benchmarks/released.json").read_text())["ratios"]
    for measured in ("small round, 3", "small round, 6", "large round, 3"):
        assert kept[f"own script: a {measured} sites, time"] * history.WORSE <= 1
    ring = makefile(root).partition("\ntest-long:")[2].partition("\n\n")[0]
    assert "benchmarks.history --now" in ring
