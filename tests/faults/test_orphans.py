"""Processes end when their parent process ends for any reason, so that no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.secure.consortium import wait_until

LONG = "training.rounds=2000"


def named(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(
                str(folder) in word for word in [process.cwd(), *process.cmdline()]
            ):
                found.append(process)
    return found


def living(family: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def forks(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the sites' processes that a fork server below `process` has forked, even if a process has no name yet."""
    family, found = psutil.Process(process.pid).children(recursive=True), []
    for member in family:
        with suppress(psutil.Error):
            parent = member.parent()
            if parent and any("multiprocessing.forkserver" in word for word in parent.cmdline()):
                found.append(member)
    return found


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "medsilo", *arguments], stdout=said, stderr=said)
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        for member in {*family, *named(folder)}:
            with suppress(psutil.Error):
                member.kill()
        process.kill()
        process.wait()


def killed(process: subprocess.Popen, sign: signal.Signals, folder: Path, most: int = 60) -> str:
    """Send a signal to a process, assert that the process and all child processes end within `most` seconds, and return
    the process's output.
    """
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 2
    process.send_signal(sign)
    deadline = time.monotonic() + most
    process.wait(timeout=most)
    wait_until(lambda: not living(family), deadline - time.monotonic(), "the family's end")
    assert named(folder) == []
    return (folder / "said.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "sign"),
    [
        pytest.param("before the sites are there", signal.SIGKILL, marks=pytest.mark.long),
        ("in a round", signal.SIGTERM),
        pytest.param("before the sites are there", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("in a round", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_the_simulator_ends_with_its_command(moment: str, sign: signal.Signals, tmp_path: Path) -> None:
    write_job(tmp_path / "job", make_plan("fedavg", LONG, sites=SITES[:2]))
    record = Record(tmp_path / "runs" / "left")
    with command(tmp_path, "run", str(tmp_path / "job"), "--out", str(tmp_path / "runs"), "--name", "left") as process:
        if moment == "in a round":
            wait_until(lambda: len(record.rounds()) >= 2, 600, "round 2")
        else:
            wait_until(lambda: forks(process), 600, "a site's process")
        said = killed(process, sign, tmp_path)
    if sign == signal.SIGTERM:
        assert process.returncode == 130 and f"medsilo resume {record.folder}" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_the_runs_of_a_comparison_end_with_it(sign: signal.Signals, tmp_path: Path) -> None:
    arguments = ["--task", "synthetic-activity", "--methods", "local,fedavg", "--seeds", "0", "--set", LONG]
    arguments += ["--set", "task.persons=8", "--set", "task.windows=10"]
    where = ["--out", str(tmp_path / "study"), "--at-once", "2"]
    with command(tmp_path, "compare", *arguments, *where) as process:
        cells = [Record(tmp_path / "study" / name) for name in ("local-0", "fedavg-0")]
        wait_until(lambda: all(len(cell.rounds()) >= 1 for cell in cells), 600, "a round of both")
        said = killed(process, sign, tmp_path)
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.slow
def test_what_the_command_started_ends_when_only_the_simulator_is_killed(tmp_path: Path) -> None:
    write_job(tmp_path / "job", make_plan("fedavg", LONG, sites=SITES[:2]))
    record = Record(tmp_path / "runs" / "left")
    with command(tmp_path, "run", str(tmp_path / "job"), "--out", str(tmp_path / "runs"), "--name", "left") as process:
        wait_until(lambda: len(record.rounds()) >= 2, 600, "round 2")
        (simulator,) = psutil.Process(process.pid).children()
        family = simulator.children(recursive=True)
        assert len(family) >= 3
        os.kill(simulator.pid, signal.SIGKILL)
        wait_until(lambda: not living(family), 60, "the family's end")
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in (tmp_path / "said.txt").read_text()
