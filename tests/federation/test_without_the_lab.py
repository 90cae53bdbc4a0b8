"""A hospital's processes work with the hospital's wheel alone, without the packages in the wheel medsilo-lab."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core.package import PLACE
from tests.unit.site.test_approvals import Home

OLD_RUN = Path(__file__).parents[1] / "fixtures/run-of-schema-1"
# No Python process that starts, including NVFlare's, finds the packages of medsilo-lab or their entry points.
HIDDEN = """
import importlib.metadata
from importlib.machinery import PathFinder

HIDDEN = ("medsilo_lab", "medsilo_papers", "medsilo_server")
find, entries = PathFinder.find_spec, importlib.metadata.entry_points


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find(name, path, target)


def entry_points(**chosen):
    found = entries(**chosen) if chosen else [one for group in entries().values() for one in group]
    return importlib.metadata.EntryPoints(one for one in found if not one.value.startswith(HIDDEN))


PathFinder.find_spec, importlib.metadata.entry_points = find_spec, entry_points
"""


def alone(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
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
    assert all(f"  {name} " in shown for name in ("check", "approve", "ledger", "disclosure", "list"))
    assert not any(f"  {name} " in shown for name in ("run", "compare", "submit"))
    assert "medsilo-lab" in alone(tmp_path, *command, "compare", code=2).stderr
    approved = json.loads(alone(tmp_path, *command, "approve", home.plan.hash, *kit, "--yes", "--json").stdout)
    assert (approved["verdict"], approved["plan"]) == ("approved", home.plan.hash)
    home.permission().check()
    alone(tmp_path, "-c", "import medsilo_page.pages, medsilo.client")
    assert "medsilo-lab" in alone(tmp_path, "-c", "import medsilo.recipes", code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "extra"),
    [("page --kit kit", "page"), (f"report {OLD_RUN} -o page", "lab")],
    ids=["page", "lab"],
)
def test_a_package_that_is_missing_is_named_by_its_extra(words: str, extra: str, tmp_path: Path) -> None:
    program = (
        "import sys; from medsilo.cli import main; sys.modules |= {'jinja2': None, 'starlette.applications': None}"
    )
    command = [sys.executable, "-c", f"{program}; sys.exit(main(sys.argv[1:]))", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and f"install medsilo[{extra}]" in done.stderr and done.stderr.count("\n") == 1


def test_a_name_of_the_lab_says_what_to_install(tmp_path: Path) -> None:
    program = "import medsilo; print(medsilo.MedsiloError.__name__); from medsilo import compare"
    done = alone(tmp_path, "-c", program, code=1)
    assert done.stdout == "MedsiloError\n"
    assert done.stderr.splitlines()[-1].startswith("ImportError: compare") and "medsilo-lab" in done.stderr


@pytest.mark.long
def test_a_hospital_checks_without_the_lab(root: Path, tmp_path: Path) -> None:
    job, small = str(root / "jobs/fedavg"), ("--set", "task.patients=4", "--set", "training.rounds=2")
    checked = alone(tmp_path, "-m", "medsilo", "check", job, *small, "--site", "hospital-a", "--json")
    assert json.loads(checked.stdout)["go"] is True
