"""The wheel of a commit has the same bytes whoever builds it, and when."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCES = ("custom", "pyproject.toml", "README.md", "LICENSE", "requirements.txt")


def build(root: Path, place: Path, changed: float) -> Path:
    """Build the wheel from a copy whose files were changed at this time, as `make wheel` does."""
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
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, umask=0o022)
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(root: Path, tmp_path: Path) -> None:
    one = build(root, tmp_path / "one", 1_600_000_000)
    other = build(root, tmp_path / "other" / "place", 1_650_000_000)
    assert one.name == other.name and one.read_bytes() == other.read_bytes()
    names = set(zipfile.ZipFile(one).namelist())
    assert {
        "medsilo/py.typed",
        "medsilo_zoo/py.typed",
        "nvflare_reliability/message_limits.py",
        "nvflare_reliability/upstream/deliver_once.patch",
        "nvflare_reliability/upstream/known.json",
        "medsilo_dicom/header.py",
        "medsilo_nnunet/planning.py",
    } <= names
