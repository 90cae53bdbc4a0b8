"""A hospital's side without medsilo_lab and medsilo_page: what is installed there is the engine alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core.package import PLACE
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from tests.unit.test_approvals import Home

# Every Python that is started, NVFlare's too, finds neither the packages nor what they say to others.
HIDDEN = """
import importlib.metadata
from importlib.machinery import PathFinder

HIDDEN = ("medsilo_lab", "medsilo_page")
find, entries = PathFinder.find_spec, importlib.metadata.entry_points


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find(name, path, target)


def entry_points(**chosen):
    return importlib.metadata.EntryPoints(one for one in entries(**chosen) if not one.value.startswith(HIDDEN))


PathFinder.find_spec, importlib.metadata.entry_points = find_spec, entry_points
"""


def alone(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing but the engine is."""
    (folder / "hidden").mkdir(exist_ok=True)
    (folder / "hidden/sitecustomize.py").write_text(HIDDEN)
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'hidden'}{os.pathsep}{PLACE}"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


@pytest.mark.slow
def test_a_hospital_decides_without_the_lab(tmp_path: Path) -> None:
    home = Home(tmp_path / "kit")
    kit, command = ["--kit", str(home.folder)], ("-m", "medsilo")
    shown = alone(tmp_path, *command, "--help").stdout
    assert all(f"  {name} " in shown for name in ("run", "check", "approve", "ledger", "disclosure", "list"))
    assert "  compare " not in shown and "  submit " not in shown
    assert "medsilo-lab" in alone(tmp_path, *command, "compare", code=2).stderr
    approved = json.loads(alone(tmp_path, *command, "approve", home.plan.hash, *kit, "--json").stdout)
    assert (approved["verdict"], approved["plan"]) == ("approved", home.plan.hash)
    home.permission().check()
    assert "--page" in alone(tmp_path, *command, "approve", "--page", *kit, code=1).stderr


def test_a_name_of_the_lab_says_what_to_install(tmp_path: Path) -> None:
    program = "import medsilo; print(medsilo.MedsiloError.__name__); from medsilo import compare"
    done = alone(tmp_path, "-c", program, code=1)
    assert done.stdout == "MedsiloError\n"
    assert done.stderr.splitlines()[-1].startswith("ImportError: compare") and "medsilo-lab" in done.stderr
    assert "medsilo-lab" in alone(tmp_path, "-c", "from medsilo.extend import Predictor", code=1).stderr


@pytest.mark.long
def test_a_hospital_checks_and_trains_without_the_lab(root: Path, tmp_path: Path) -> None:
    job, small = str(root / "jobs/fedavg"), ("--set", "task.patients=4", "--set", "training.rounds=2")
    site = ("--site", "hospital-a")
    checked = alone(tmp_path, "-m", "medsilo", "check", job, *small, *site, "--json")
    assert json.loads(checked.stdout)["go"] is True
    ran = alone(tmp_path, "-m", "medsilo", "run", job, *small, "--name", "study", "--device", "cpu")
    run = tmp_path / "runs/study"
    summary = read_summary(run)
    assert (summary.finished, summary.engine, summary.rounds.done) == (True, "simulator", 2)
    assert all(site.contributed == 2 for site in summary.sites.values())
    assert str(Path("runs/study") / paths.SUMMARY) in ran.stdout and not (run / paths.REPORT).exists()
    alone(tmp_path, "-c", "import medsilo.client, medsilo.recipes")
