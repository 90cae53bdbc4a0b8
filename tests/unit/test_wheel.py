"""The wheels of a commit have the same bytes whoever builds them, and when; a hospital installs one."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from medsilo import __version__
from medsilo.check.machine import required_versions

SOURCES = ("custom", "pyproject.toml", "README.md", "LICENSE")


def build(root: Path, place: Path, changed: float) -> list[Path]:
    """Build the wheels from a copy whose files were changed at this time, as `make wheel` does."""
    for name in SOURCES:
        source, target = root / name, place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    for path in place.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        os.utime(path, (changed, changed))
    command = [sys.executable, str(root / "provisioning/wheels.py"), ".", "dist"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, umask=0o022)
    return sorted((place / "dist").glob("*.whl"))


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(root: Path, tmp_path: Path) -> None:
    one = build(root, tmp_path / "one", 1_600_000_000)
    other = build(root, tmp_path / "other" / "place", 1_650_000_000)
    wheels = [f"{name}-{__version__}-py3-none-any.whl" for name in ("medsilo", "medsilo_lab")]
    assert [wheel.name for wheel in one] == wheels == [wheel.name for wheel in other]
    assert [wheel.read_bytes() for wheel in one] == [wheel.read_bytes() for wheel in other]
    names, lab = (set(zipfile.ZipFile(wheel).namelist()) for wheel in one)
    assert {
        "medsilo/py.typed",
        "medsilo_zoo/py.typed",
        "nvflare_reliability/message_limits.py",
        "nvflare_reliability/upstream/deliver_once.patch",
        "nvflare_reliability/upstream/known.json",
        "medsilo/tested.txt",
        "medsilo_dicom/header.py",
        "medsilo_nnunet/planning.py",
    } <= names
    assert {"medsilo_lab/report/style.html", "medsilo_lab/consortium/medsilo.service", "medsilo_page/page.css"} <= lab
    assert {name.partition("/")[0] for name in lab & names} == set()
    for wheel, place in zip(one, ("hospital", "lead"), strict=True):
        zipfile.ZipFile(wheel).extractall(tmp_path / place)
    assert refused(tmp_path / "hospital") and not refused(tmp_path / "hospital", tmp_path / "lead")


def refused(*installed: Path) -> bool:
    """Return whether a command of the lab is not known where these were installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, installed))}
    command = [sys.executable, "-m", "medsilo.cli", "compare", "--help"]
    done = subprocess.run(command, cwd=installed[0], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 or "'compare' is no command" in done.stderr, done.stderr
    return done.returncode != 0


@pytest.mark.long
def test_it_runs_beside_another_torch_and_the_oldest_of_all_else(root: Path, tmp_path: Path) -> None:
    """As in a user's own environment, from the wheel alone. The newest torch that there is but the tested one."""
    wheels, tested = build(root, tmp_path / "build", 1_600_000_000), required_versions()
    bounds = map(Requirement, tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"])
    oldest = {own.name: next(one.version for one in own.specifier if one.operator == ">=") for own in bounds}
    wanted = [f"torch!={tested['torch']}", *(f"{name}=={old}" for name, old in oldest.items() if name != "torch")]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv/bin"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheels[0], *wanted]
    if (made := subprocess.run(install, env=bare, capture_output=True, text=True)).returncode:
        pytest.skip(f"the packages can't be had here: {made.stderr[-300:]}")
    ask = "import json; from importlib.metadata import version; print(json.dumps([version('torch'), version('numpy')]))"
    told = subprocess.run([programs / "python", "-c", ask], env=bare, capture_output=True, text=True, check=True)
    torch, numpy = json.loads(told.stdout)
    assert torch.partition("+")[0] != tested["torch"]
    assert Version(numpy) == Version(oldest["numpy"]) != Version(tested["numpy"])
    job = ["run", "fedavg", "--set", "training.rounds=2", "--device", "cpu", "--json", "-o", "runs"]
    done = subprocess.run([programs / "medsilo", *job], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [summary] = (tmp_path / "runs").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert found["status"] == "finished" and found["rounds"]["done"] == 2
    assert {site["machine"]["torch"] for site in found["sites"].values()} == {torch}
