"""A run in NVFlare's simulator as a person watches it: words at once and never long silence."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from medsilo.cli import main
from medsilo.runs import paths
from medsilo.runs.progress import Moment
from medsilo.runs.reading import read_summary
from tests.conftest import SITES

pytestmark = pytest.mark.slow
# A round that takes longer than people like to wait for a line.
LONG = ["training.rounds=1", "training.local_epochs=90", "task.patients=12", "task.size=32"]


@pytest.mark.long
def test_a_simulation_is_never_silent_for_ten_seconds(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-m", "medsilo.cli", "run", "fedavg", "--out", str(tmp_path), "--name", "run"]
    (own := tmp_path / "config" / SITES[1]).mkdir(parents=True)  # a site with settings of its own
    (own / "medsilo.yaml").write_text("min_patients_per_metric: 1000\n")
    command += ["--settings", str(tmp_path / "config")]
    changes = [part for change in LONG for part in ("--set", change)]
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, *changes, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root
    )
    deeds = set[str]()

    def watch() -> None:
        while process.poll() is None:
            deeds.update({one.deed for one in Moment.of_run(tmp_path / "run").doing.values()})
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    lines, at, work = [], [started], 0.0
    assert process.stdout
    for line in process.stdout:
        if not lines:
            work = sum(psutil.Process(process.pid).cpu_times()[:2])
        lines.append(line.rstrip("\n"))
        at.append(time.monotonic())
    assert process.wait() == 0, lines
    watcher.join()
    assert lines[0] == "reading the plan of fedavg" and work < 1, work  # seconds of work, on whatever machine
    silences = [after - before for before, after in zip(at, [*at[1:], time.monotonic()], strict=True)]
    assert max(silences) < 10, (silences, lines)
    assert "training" in deeds
    page = tmp_path / "run" / paths.REPORT
    first = page.read_bytes()
    assert main(["report", str(tmp_path / "run")]) == 0 and page.read_bytes() == first
    tests = [read_summary(tmp_path / "run").sites[site].test for site in SITES]
    assert [test["loss"] is None for test in tests if test] == [False, True, False]
    assert not list((tmp_path / "run").rglob(paths.NOW))
