"""Test comparisons: their rows, reused runs, reported failures, and a kill during a run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import medsilo
from medsilo.cli import main
from medsilo.core.errors import PlanError
from medsilo.plan import parse_plan
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings
from medsilo.tasks.scans import Scan
from medsilo_lab.comparison.compare import Study
from medsilo_lab.engines import inprocess
from medsilo_lab.engines.inprocess import Loop
from medsilo_lab.study.cells import Row, cells_of, run_cell
from medsilo_lab.study.verdict_file import About, read_verdict
from results.figures import CellResult
from results.tables import rounds_to
from tests.conftest import SITES, make_plan
from tests.hospital import photograph, write_pixels

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1"]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(make_plan("fedavg", *SMALL).to_yaml())
    return path


def test_rows_are_methods_or_changes() -> None:
    assert Row.parse("fedbn") == Row("fedbn", ("algorithm.name=fedbn",))
    own = Row.parse("fedprox:weighting=uniform:mu=0.3")
    assert own.changes == ("algorithm.name=fedprox", "algorithm.weighting=uniform", "algorithm.mu=0.3")
    row = Row.parse("more steps: training.local_epochs=2 training.rounds=5")
    assert row == Row("more steps", ("training.local_epochs=2", "training.rounds=5"))


def test_cells_go_seed_by_seed_and_wrong_rows_are_named_before_anything_runs(tmp_path: Path) -> None:
    base = make_plan("fedavg", *SMALL)
    rows = [Row.parse("fedavg"), Row.parse("local")]
    cells = cells_of(base, rows, [3, 4], ["training.rounds=2"], tmp_path)
    assert [cell.name for cell in cells] == ["fedavg, seed 3", "local, seed 3", "fedavg, seed 4", "local, seed 4"]
    assert [cell.plan.seed for cell in cells] == [3, 3, 4, 4]
    assert all(cell.plan.rounds == 2 for cell in cells)
    assert len({cell.folder for cell in cells}) == 4
    with pytest.raises(PlanError, match="fedsum"):
        cells_of(base, [*rows, Row.parse("fedsum")], [0], [], tmp_path)
    with pytest.raises(PlanError, match="two rows"):
        cells_of(base, [Row("a b", ()), Row("a+b", ())], [0], [], tmp_path)


def test_rounds_until_a_level_is_reached() -> None:
    result = CellResult(validation=[0.1, None, 0.4, 0.6, 0.5], measuring=1)
    assert rounds_to(0.4, result) == 1
    assert rounds_to(0.55, result) == 2
    assert rounds_to(0.05, result) == 0
    assert rounds_to(0.7, result) is None
    assert rounds_to(None, result) is None


def test_a_comparison_is_filled_once_and_says_what_failed(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "study"
    arguments = ["compare", "--plan", str(plan), "--methods", "fedavg,local", "--seeds", "0", "--out", str(out)]
    arguments += ["--row", "diverging: algorithm.name=fedavg training.learning_rate=1000 training.rounds=30"]
    arguments += ["--at-once", "1", "--device", "cpu"]
    arguments += ["--set", "participation.sites=[hospital-x,hospital-y]"]
    assert main(arguments) == 1
    heard = capsys.readouterr()
    assert "diverging, seed 0" in heard.err and "training diverged" in heard.err
    assert "3/3" in heard.out
    verdict = read_verdict(out)
    assert (len(verdict.runs), verdict.about.cells) == (2, 3) and " CPU cores" in verdict.about.machine
    assert verdict.sites == ["hospital-x", "hospital-y"] and "training diverged" in verdict.about.failures[0]
    scores = {row.title: row.score for row in verdict.rows}
    assert scores["diverging"] is None and scores["fedavg"] is not None
    assert scores["fedavg"].by_seed == [pytest.approx(read_summary(out / "fedavg-0").mean_test)]
    assert list(out.glob("*/sites/*/best.safetensors")) and not list(out.glob("fedavg-*/checkpoints"))
    made = (out / "fedavg-0/summary.json").stat().st_mtime_ns
    assert main(arguments) == 1
    assert (out / "fedavg-0/summary.json").stat().st_mtime_ns == made
    assert main(["compare", "--plan", str(plan)]) == 1
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_that_is_killed_goes_on_to_the_same_numbers(plan: Path, tmp_path: Path) -> None:
    command = ["compare", "--plan", str(plan), "--methods", "local,fedavg,fedbn"]
    command += ["--seeds", "0", "--at-once", "1", "--set", "training.rounds=12", "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, str(whole)]) == 0
    started = [sys.executable, "-m", "medsilo", *command, str(killed)]
    process = subprocess.Popen(started, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 600
    while not (killed / "fedavg-0").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "fedbn-0").exists()
    kept = (killed / "local-0/summary.json").stat().st_mtime_ns
    assert main([*command, str(killed)]) == 0
    assert (killed / "local-0/summary.json").stat().st_mtime_ns == kept
    assert read_verdict(killed).rows == read_verdict(whole).rows


class Killed(BaseException):
    """End a run without a summary, as if the run's process had died."""


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["killed", "stopped"])
def test_a_comparison_goes_on_inside_a_run(stop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SiteSettings(device="cpu")
    changes = ["training.rounds=4"]
    whole, cell = (
        cells_of(make_plan("fedavg", *SMALL), [Row.parse("fedavg")], [0], changes, tmp_path / name)[0]
        for name in ("whole", "cut")
    )
    assert run_cell(whole, settings) == ""

    def ends(line: Round) -> None:
        if line.round == 2:
            raise Killed

    with pytest.raises(Killed):
        inprocess.run(cell.plan, folder=cell.folder, settings=settings, on_round=ends)
    if stop == "killed":
        (cell.folder / "summary.json").unlink()
    made = json.loads((cell.folder / "provenance.json").read_text())["started"]
    began: list[int] = []
    ask = Loop.ask
    monkeypatch.setattr(Loop, "ask", lambda self, sites, outgoing, *rest: (
        began.append(outgoing(sites[0]).facts["round"]), ask(self, sites, outgoing, *rest))[1])  # fmt: skip
    assert run_cell(cell, settings) == ""
    assert {0, 3, 4} <= set(began) and 1 not in began
    assert json.loads((cell.folder / "provenance.json").read_text())["started"] == made
    one, other = (read_summary(one.folder) for one in (whole, cell))
    assert (
        one.mean_test == other.mean_test and one.sites["hospital-a"].validation == other.sites["hospital-a"].validation
    )
    assert not list(cell.folder.glob("checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["another package", "a failure", "a damaged checkpoint"])
def test_what_a_run_can_not_go_on_from_begins_anew(fault: str, tmp_path: Path) -> None:
    settings = SiteSettings(device="cpu")
    (cell,) = cells_of(make_plan("fedavg", *SMALL), [Row.parse("fedavg")], [0], ["training.rounds=3"], tmp_path)

    def ends(line: Round) -> None:
        raise Killed

    with pytest.raises(Killed):
        inprocess.run(cell.plan, folder=cell.folder, settings=settings, on_round=ends)
    provenance, summary = cell.folder / "provenance.json", cell.folder / "summary.json"
    if fault == "another package":
        provenance.write_text(provenance.read_text().replace('"hash": "', '"hash": "0', 1))
    elif fault == "a failure":
        summary.write_text(summary.read_text().replace('"stopped"', '"the disk is full"'))
    elif fault == "a damaged checkpoint":
        (checkpoint,) = cell.folder.glob("checkpoints/round-*")
        checkpoint.write_bytes(b"x")
    (cell.folder / "left").touch()
    assert run_cell(cell, settings) == "" and cell.summary()
    assert not (cell.folder / "left").exists()


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and paths.LOCKS not in path.parts
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    (place / "plan.yaml").write_text(make_plan("fedavg", *SMALL).to_yaml())
    for name, threads in (("one", 1), ("two", 2)):
        (place / name).mkdir()
        (place / name / "medsilo.yaml").write_text(f"threads: {threads}\n")
    assert main(["compare", *compared(place)]) == 0
    return place


def compared(place: Path, methods: str = "fedavg,local", settings: str = "one") -> list[str]:
    own = ["--plan", str(place / "plan.yaml"), "--methods", methods, "--seeds", "0", "--at-once", "1"]
    return [*own, "--device", "cpu", "--settings", str(place / settings), "--out", str(place / "study")]


def test_a_finished_comparison_is_never_replaced(
    finished: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comparison in a folder differs from the first in its plan, settings, rows or version of medsilo."""
    before = everything_in(finished / "study")
    assert json.loads(before["comparison.json"])["settings"]["device"] == "cpu"
    tried = [
        ([*compared(finished), "--set", "training.rounds=2"], ["2 runs", "training.rounds 1, now 2"]),
        (compared(finished, settings="two"), ["threads null, now 2"]),
        (compared(finished, "fedavg"), ["1 run", "local-0"]),
    ]
    for command, words in tried:
        assert main(["compare", *command]) == 1
        said = capsys.readouterr().err
        assert all(word in said for word in [*words, "study", "-o", "--again"]), said
        assert everything_in(finished / "study") == before
    changed = {"version": "9", "hash": "f" * 64}
    monkeypatch.setattr("medsilo.plan.facts_of", lambda name: changed)
    assert main(["compare", *compared(finished)]) == 1
    assert "another medsilo" in (said := capsys.readouterr().err) and "f" * 12 in said
    assert everything_in(finished / "study") == before


def test_power_is_told_before_a_comparison_and_after_it(finished: Path, capsys: pytest.CaptureFixture) -> None:
    """The option --power trains no model.

    Before a comparison, the statistical power follows from assumptions; after the comparison, from the scores.
    """
    before = everything_in(finished / "study")
    assert main(["compare", *compared(finished), "--power", "--difference", "5"]) == 1
    assert "repetitions differ" in capsys.readouterr().err
    changes = ["--set", "task.persons=40", "--seeds", "0,1,2,3,4"]
    command = ["compare", "--task", "synthetic-activity", "--methods", "local,fedavg", *changes, "--power"]
    assert main([*command, "-o", str(finished / "nothing"), "--difference", "5"]) == 0
    told = capsys.readouterr().out
    assert "if patients' differences spread by 10 points" in told and "5 repetitions of the training (±" in told
    assert "a difference of 5.0 points" in told and not (finished / "nothing").exists()
    assert main([*command[:-1], "--difference", "5", "-o", str(finished / "nothing")]) == 1
    assert "--power" in capsys.readouterr().err
    assert everything_in(finished / "study") == before


def test_power_before_a_comparison_is_the_same_in_python(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without an argument for the number of test patients, `medsilo compare` counts the test patients in the data."""
    changes = ["task.persons=40", "task.windows=5"]
    command = ["compare", "--task", "synthetic-activity", "--methods", "local,fedavg", "--seeds", "0,1,2,3", "--power"]
    asked = [*command, *(word for one in changes for word in ("--set", one)), "-o", str(tmp_path / "none"), "--json"]
    assert main([*asked, "--difference", "5"]) == 0
    told = json.loads(capsys.readouterr().out)["power"]
    plan = make_plan("fedavg", *changes)
    lines = medsilo.power(plan=plan, seeds=range(4), difference=0.05)
    assert json.loads(json.dumps([one.as_json() for one in lines])) == told
    (sizes,) = {one.patients for one in lines}
    assert len(sizes) == len(SITES) and min(sizes) > 1
    again = medsilo.power(dict(zip(SITES, sizes, strict=True)), seeds=range(4), difference=0.05)
    assert again == lines and again[0].least < again[-1].least
    with pytest.raises(medsilo.MedsiloError, match="b has fewer than two test patients"):
        medsilo.power({"a": 20, "b": 1})


@pytest.mark.slow
def test_power_after_a_comparison_follows_from_its_scores(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = make_plan("fedavg", "task.persons=40", "task.windows=5", "task.steps=32", "training.rounds=1")
    cells = cells_of(plan, [Row.parse("local"), Row.parse("fedavg")], [0, 1, 2, 3], [], tmp_path / "study")
    for cell in cells:
        assert run_cell(cell, SiteSettings(device="cpu")) == ""
    Study(tmp_path / "study", About(title="x"), cells).conclude([])
    assert main(["compare", "--power", "-o", str(tmp_path / "study"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["power"]
    assert told[0]["whose"] == "all hospitals" and len(told) == 1 + len(SITES)
    lines = medsilo.Comparison(tmp_path / "study").power(0.02)
    assert [one.least for one in lines] == [one["least"] for one in told]
    first, gain = lines[0], read_verdict(tmp_path / "study").first
    assert gain and first.reach == pytest.approx((gain.high - gain.low) / 2, rel=0.2)
    assert first.least is None or first.least > first.reach
    assert first.needed.difference == 0.02


def test_a_comparison_again_is_written_beside(finished: Path) -> None:
    before = everything_in(finished / "study")
    assert main(["compare", *compared(finished), "--set", "training.learning_rate=0.02", "--again"]) == 0
    assert everything_in(finished / "study") == before
    assert read_verdict(finished / "study-2").about.cells == 2
    # If the first comparison's command is repeated, no run starts, and only the verdict and the report change.
    assert main(["compare", *compared(finished)]) == 0
    assert {name for name, content in everything_in(finished / "study").items() if before[name] != content} <= {
        "verdict.json",
        "report.html",
    }


def test_a_folder_of_other_things_is_no_comparisons(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    notes = tmp_path / "notes"
    (notes / "fedavg-0").mkdir(parents=True)
    (notes / "paper.md").write_text("mine")
    assert main(["compare", "--methods", "fedavg,local", "--seeds", "0", "-o", str(notes)]) == 1
    said = capsys.readouterr().err
    assert "paper.md" in said and "-o" in said
    assert sorted(path.name for path in notes.rglob("*")) == ["fedavg-0", "paper.md"]


def test_a_run_of_another_plan_is_never_removed(tmp_path: Path) -> None:
    """Neither a comparison nor the command for a single run removes another plan's unfinished run."""
    settings, changes = SiteSettings(device="cpu"), ["training.rounds=3"]
    (cell,) = cells_of(make_plan("fedavg", *SMALL), [Row.parse("fedavg")], [0], changes, tmp_path)

    def ends(line: Round) -> None:
        raise Killed

    with pytest.raises(Killed):
        inprocess.run(
            cell.plan.with_changes(["training.learning_rate=0.02"]),
            folder=cell.folder,
            settings=settings,
            on_round=ends,
        )
    before = everything_in(cell.folder)
    said = run_cell(cell, settings)
    assert "training.learning_rate 0.02, now 0.05" in said and "--again" in said
    assert everything_in(cell.folder) == before


HOLDER = """
import sys, time
from pathlib import Path
from medsilo_server.record import alone
with alone(Path(sys.argv[1]), "x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_two_comparisons_never_work_in_one_folder(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A second comparison in the same folder ends at once with an error.

    If the first comparison is killed, the operating system releases the comparison's lock on the folder.
    """
    out = tmp_path / "study"
    command = ["compare", "--plan", str(plan), "--methods", "local", "--seeds", "0", "--out", str(out)]
    command += ["--at-once", "1", "--device", "cpu"]
    package = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "custom")}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out / ".locks/comparison")], stdout=subprocess.PIPE, env=package
    )
    try:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        assert main(command) == 1
        assert (
            "study: another comparison runs it now; wait for its end, or give another --out" in capsys.readouterr().err
        )
        assert not (out / "local-0").exists()
    finally:
        holder.kill()
        holder.wait()
    assert main(command) == 0


@pytest.mark.long
def test_images_are_read_once_for_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output announces that medsilo reads images once for all runs, which changes no score and leaves no file."""
    for site in SITES:
        for number in range(12):
            for kind, pixels in zip(("images", "labels"), photograph(number), strict=True):
                write_pixels(tmp_path / "data" / site / kind / f"{number:02}.png", pixels)
    task = {
        "name": "image-folder",
        "labels": ["square"],
        "size": [16, 16],
        "colours": "rgb",
        "shares": [0.5, 0.25, 0.25],
    }
    network = {"name": "unet", "features": [4, 8]}
    values = {"algorithm": {"name": "fedavg"}, "task": task, "network": network, "participation": {"sites": SITES}}
    plan = parse_plan({**values, "training": {"rounds": 1, "batch_size": 4, "learning_rate": 0.01}})
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    own = {"data": {"folder": str(tmp_path / "data")}, "min_patients_per_metric": 1, "device": "cpu"}
    (tmp_path / "medsilo.yaml").write_text(json.dumps(own))
    read, usual = Counter[Path](), Scan.read
    monkeypatch.setattr(Scan, "read", lambda path, *more: read.update([path]) or usual(path, *more))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "rest"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "rest").mkdir()
    line = (
        f"compare --plan {tmp_path}/plan.yaml --methods fedavg,local --seeds 0,1 --settings {tmp_path} --at-once 1 -o "
    )
    assert main([*line.split(), str(tmp_path / "out")]) == 0
    assert len(read) == 2 * 12 * len(SITES) and set(read.values()) == {1}
    assert f"read 1/{len(SITES)}  {SITES[0]}: 12 cases" in capsys.readouterr().out
    assert not list((tmp_path / "rest").iterdir())
    own["data"]["cache_memory"] = 0  # type: ignore[index]
    (tmp_path / "medsilo.yaml").write_text(json.dumps(own))
    read.clear()
    assert main([*line.replace("0,1", "0").split(), str(tmp_path / "again")]) == 0
    assert min(read.values()) > 1, "a hospital that keeps nothing reads again"
    for row in ("fedavg-0", "local-0"):
        assert read_summary(tmp_path / "again" / row).mean_test == read_summary(tmp_path / "out" / row).mean_test
