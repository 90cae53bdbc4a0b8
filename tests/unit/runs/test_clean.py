"""Only the account that runs medsilo can read private files.

`medsilo prune` removes old files of a run, except files that another run or command still needs.
"""

import os
import shutil
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from medsilo.cli import main
from medsilo.core.files import load_tensors, make_folder, save_tensors, write_json, write_text
from medsilo.flare.leftovers import find_in_kit
from medsilo.runs.clean import find_old, remove
from medsilo_lab.engines import inprocess
from tests.conftest import SITES, make_plan
from tests.sites import CPU


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = os.umask(0o000)  # with this umask, all accounts could read new files
    try:
        folder = tmp_path_factory.mktemp("clean") / "runs" / "one"
        inprocess.run(make_plan(), folder=folder, settings=CPU)
    finally:
        os.umask(before)
    return folder


def others_may(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o077


def test_nobody_else_reads_a_run(run: Path) -> None:
    assert others_may(run) == 0 and others_may(run.parent) == 0
    assert [path.name for path in run.rglob("*.safetensors") if others_may(path)] == []
    assert others_may(run / "summary.json") == others_may(run / "sites/hospital-a/test.csv") == 0


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_text(tmp_path / "new/inner/file.txt", "x")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert others_may(tmp_path / "new") == others_may(tmp_path / "new/inner/file.txt") == 0
    make_folder(tmp_path / "new/inner")


def aged(folder: Path, days: float = 10) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - days * 86_400,) * 2)
    return folder


def test_what_a_finished_run_no_longer_needs_is_listed_and_then_goes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs/one")
    (tmp_path / "runs/one/.summary.json.7.part").write_text("half")
    (tmp_path / "runs/one/sites/hospital-a/state-9.safetensors").symlink_to("/etc/passwd")
    assert find_old(tmp_path / "runs", 7) == []
    aged(tmp_path / "runs")
    kept = {path for path in (tmp_path / "runs").rglob("*") if path.is_file() and "state-" not in path.name}
    kept = {path for path in kept if path.parent.name != "checkpoints" and not path.name.endswith(".part")}
    old = find_old(tmp_path / "runs", 7)
    total = sum(one.bytes for one in old)
    assert main(["prune", str(tmp_path / "runs")]) == 0
    assert f"files and folders that may go: {len(old)}, {total:,} bytes" in capsys.readouterr().out
    assert all(one.path.exists() for one in old) and len(old) >= 3 + 1 + 1
    assert main(["prune", str(tmp_path / "runs"), "--yes"]) == 0
    assert f"files and folders removed: {len(old)}, {total:,} bytes" in capsys.readouterr().out
    left = {path for path in (tmp_path / "runs").rglob("*") if path.is_file() and not path.is_symlink()}
    assert left == kept
    assert main(["report", str(tmp_path / "runs/one")]) == 0


@pytest.mark.parametrize("summary", ['{"status": "failed"}', None, "damaged"])
def test_what_a_run_goes_on_from_stays(summary: str | None, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "one")
    (tmp_path / "one/summary.json").unlink()
    if summary:
        (tmp_path / "one/summary.json").write_text(summary)
    assert find_old(aged(tmp_path), 7) == []


def test_a_hospitals_own_part_goes_by_its_test(run: Path, tmp_path: Path) -> None:
    """A study's files at a hospital are old once they include test results, because a hospital has no summary."""
    for site in ("hospital-a", "hospital-b"):
        shutil.copytree(run / "sites" / site, tmp_path / "study/sites" / site)
    (tmp_path / "study/sites/hospital-b/test.csv").unlink()
    old = find_old(aged(tmp_path), 7)
    assert {one.path.parent.name for one in old} == {"hospital-a"}
    assert {one.path.name.partition("-")[0] for one in old} == {"state"}


def test_what_a_run_that_was_left_would_go_on_from_goes_when_asked(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "one")
    (tmp_path / "one/summary.json").unlink()
    assert find_old(aged(tmp_path), 7, 30) == []
    places = {one.path.parent.name for one in find_old(tmp_path, 7, 9)}
    assert places == {"checkpoints", *SITES}
    (tmp_path / "one/sites/hospital-a/metrics.csv").touch()
    assert find_old(tmp_path, 7, 9) == []


def test_a_servers_kit_gives_back_what_jobs_left(run: Path, tmp_path: Path) -> None:
    """`medsilo prune` removes the files of ended jobs from a server's kit.

    `medsilo prune` keeps the files of waiting or running jobs, and files that are needed to resume a study.
    """
    kit, names = tmp_path / "kit", ("done", "open", "left", "waits", "runs")
    ids = {name: str(uuid.uuid4()) for name in names}
    write_json(kit / "startup/fed_server.json", {})
    manager = {"id": "job_manager", "args": {"uri_root": str(tmp_path / "storage/jobs")}}
    write_json(kit / "local/resources.json", {"components": [manager]})
    states = ("FINISHED:COMPLETED", "FINISHED:ABORTED", "RUNNING", "SUBMITTED", "RUNNING")
    for (name, job), status in zip(ids.items(), states, strict=True):
        write_json(tmp_path / "storage/jobs" / job / "meta", {"status": status})
        write_text(kit / job / "meta.json", "{}")
        write_text(kit / job / "app/log.txt", "x" * 100)
        write_text(kit / job / "audit.log", "medsilo refused: the plan is not approved")
        if name in ("done", "open"):
            shutil.copytree(run, kit / "medsilo" / name)
            write_text(kit / "medsilo" / name / "jobs.txt", job + "\n")
    (kit / "medsilo/open/summary.json").unlink()
    assert find_in_kit(kit, 7) == []
    aged(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()", ids["runs"]], stdin=subprocess.PIPE) as process:
        old = find_in_kit(kit, 7)
        process.communicate(b"\n")
    own = {one.path.name: one.bytes for one in old if one.path.parent == kit}
    assert own == {ids[name]: 102 for name in ("done", "open", "left", "waits")}
    assert {one.path.name for one in old if one.path.parent.name == "jobs"} == {ids["done"], ids["left"]}
    assert all(9.9 < one.days < 10.1 for one in old)
    assert "open" not in {path.name for one in old for path in one.path.parents}
    assert ids["open"] in {one.path.name for one in find_in_kit(kit, 7, 9) if one.path.parent.name == "jobs"}
    remove(old)
    assert (kit / ids["runs"]).exists() and (kit / "medsilo/done/global").exists()
    assert [path.name for path in (kit / ids["done"]).iterdir()] == ["audit.log"], "the audit log must stay"
    assert ids["done"] not in {one.path.name for one in find_in_kit(kit, 0)}


def test_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_tensors_of_others_are_as_readable_to_us(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {}, {"a": 1})
    assert load_tensors(tmp_path / "x.safetensors")[1] == {"a": 1} and others_may(tmp_path / "x.safetensors") == 0
