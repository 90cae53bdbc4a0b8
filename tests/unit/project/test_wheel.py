"""Two builds of the same commit give wheels with the same bytes. A hospital installs one of the two wheels."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.version import Version

from medsilo import __version__
from medsilo.check.machine import required_versions

SOURCES = ("custom", "docs", "jobs", "provisioning", "site_configs", "pyproject.toml", "README.md", "LICENSE")


def build(root: Path, place: Path, changed: float) -> list[Path]:
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


@pytest.mark.long
def test_two_builds_have_the_same_bytes(root: Path, tmp_path: Path) -> None:
    one = build(root, tmp_path / "one", 1_600_000_000)
    other = build(root, tmp_path / "other" / "place", 1_650_000_000)
    wheels = [f"{name}-{__version__}-py3-none-any.whl" for name in ("medsilo", "medsilo_lab")]
    assert [wheel.name for wheel in one] == wheels == [wheel.name for wheel in other]
    assert [wheel.read_bytes() for wheel in one] == [wheel.read_bytes() for wheel in other]
    names, lab = (set(zipfile.ZipFile(wheel).namelist()) for wheel in one)
    packages = {path.parent.name for path in (root / "custom").glob("*/__init__.py")}
    assert {f"{package}/py.typed" for package in packages} <= names | lab
    assert {
        "nvflare_reliability/message_limits.py",
        "nvflare_reliability/upstream/known.json",
        "medsilo/tested.txt",
        "medsilo/pages.json.bz2",
        "medsilo_pretrained/paper_networks.py",
        "medsilo_dicom/header.py",
        "medsilo_nnunet/fingerprint.py",
        "medsilo_page/page.css",
        "medsilo_page/style.html",
        "medsilo_script/client.py",
    } <= names
    # below 1 MB, with room for changes
    assert one[0].stat().st_size < 999_500
    assert {
        "medsilo/lab_pages.json.bz2",
        "medsilo_lab/report/base.html",
        "medsilo_lab/consortium/medsilo.service",
        "medsilo_papers/nuclei.py",
    } <= lab
    jobs = {f"medsilo/{path.relative_to(root).as_posix()}" for path in (root / "jobs").rglob("*") if path.is_file()}
    assert jobs and {name for name in names | lab if name.startswith("medsilo/jobs/")} == jobs <= lab
    assert "medsilo_server/coordinator.py" in lab
    assert "medsilo_lab/site_configs/strict-hospital/privacy.json" in lab
    assert {name.partition("/")[0] for name in lab & names} == set()
    # the wheels do not contain patches and mails for NVFlare
    assert not [name for name in names if name.endswith((".mbox", ".patch", ".md"))]
    for wheel in one:
        index_takes(wheel)
    for wheel, place in zip(one, ("hospital", "lead"), strict=True):
        zipfile.ZipFile(wheel).extractall(tmp_path / place)
    assert refused(tmp_path / "hospital") and not refused(tmp_path / "hospital", tmp_path / "lead")
    assert "medsilo-lab" in checks_fedavg(tmp_path / "hospital")
    # pip can install both wheels into one folder
    shutil.copytree(tmp_path / "hospital", tmp_path / "lead", dirs_exist_ok=True)
    assert checks_fedavg(tmp_path / "lead") == ""


@pytest.mark.long
def test_the_image_and_the_conda_package_have_what_both_wheels_have(root: Path, tmp_path: Path) -> None:
    wheels = build(root, tmp_path / "build", 1_600_000_000)
    checkout, installed = tmp_path / "build", tmp_path / "installed"
    shutil.rmtree(checkout / "build", ignore_errors=True)
    subprocess.run([sys.executable, "provisioning/package_data.py", "."], cwd=checkout, check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", installed, "."], cwd=checkout, check=True)
    wanted = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    found = {name for name in found if ".dist-info/" not in name and not name.startswith("bin/")}
    assert wanted - found == {"medsilo/lab_pages.json.bz2"} and not found - wanted
    assert checks_fedavg(installed) == ""
    told = subprocess.run(
        [sys.executable, "-m", "medsilo", "docs", "study/consortium"],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0 and "consortium" in told.stdout, told.stderr


def index_takes(wheel: Path) -> None:
    """Assert that PyPI accepts the wheel, and that the links in the wheel's README work."""
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told, left = parse_email(archive.read(name))
    assert not left and told["license_expression"] == "Apache-2.0" and "Typing :: Typed" in told["classifiers"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} == told["project_urls"].keys()
    targets = re.findall(r"\]\(([^)\s]+)\)", told["description"])
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets)
    assert f"{told['project_urls']['Repository']}/blob/v{__version__}/CHANGELOG.md" in targets


def refused(*installed: Path) -> bool:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, installed))}
    command = [sys.executable, "-m", "medsilo", "compare", "--help"]
    done = subprocess.run(command, cwd=installed[0], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 or "'compare' is no command" in done.stderr, done.stderr
    return done.returncode != 0


def checks_fedavg(installed: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = "from medsilo.flare.job_source import find_job; print(find_job('fedavg'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=installed, env=environment, capture_output=True, text=True)
    assert str(installed) in done.stdout or done.returncode
    return done.stderr.strip().rpartition("\n")[2]


def interpreter(version: str) -> str:
    """Return the path of a Python interpreter with this version, from PATH or from the folders of pyenv and uv."""
    home = Path.home()
    places = [*home.glob(f".pyenv/versions/{version}.*"), *home.glob(f".local/share/uv/python/cpython-{version}.*")]
    for path in (shutil.which(f"python{version}"), *(place / "bin" / f"python{version}" for place in places)):
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return str(path)
    pytest.skip(f"this machine has no Python {version}")


def oldest_of(root: Path) -> dict[str, str]:
    """Return the lowest version that pyproject.toml allows for each requirement of medsilo."""
    bounds = map(Requirement, tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"])
    return {own.name: next(one.version for one in own.specifier if one.operator == ">=") for own in bounds}


ASK = "import json, torch, numpy; print(json.dumps([torch.__version__.partition('+')[0], numpy.__version__]))"


@pytest.mark.long
@pytest.mark.parametrize(
    ("python", "torch", "others"),
    [
        ("3.11", "oldest", "oldest"),
        ("3.11", "other", "oldest"),
        ("3.12", "newest", "newest"),
        ("3.13", "newest", "numpy"),
    ],
)
def test_it_runs_in_a_user_s_own_environment(root: Path, tmp_path: Path, python: str, torch: str, others: str) -> None:
    """The test installs both wheels in an empty environment, and runs `medsilo run fedavg`."""
    program = interpreter(python)
    wheels, tested, oldest = build(root, tmp_path / "build", 1_600_000_000), required_versions(), oldest_of(root)
    wanted = [f"{name}=={old}" for name, old in oldest.items() if name != "torch"] if others == "oldest" else []
    wanted += [f"numpy<{tested['numpy']}"] if others == "numpy" else []
    wanted += {"oldest": [f"torch=={oldest['torch']}"], "other": [f"torch!={tested['torch']}"], "newest": []}[torch]
    subprocess.run([program, "-m", "venv", tmp_path / "venv"], check=True)
    programs, place = tmp_path / "venv/bin", tmp_path / "empty"
    place.mkdir()
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", *wheels, *wanted]
    if (made := subprocess.run(install, env=bare, capture_output=True, text=True)).returncode:
        assert "ResolutionImpossible" not in made.stderr and "Requires-Python" not in made.stderr, made.stderr[-2000:]
        pytest.skip(f"the packages can't be had here: {made.stderr[-300:]}")
    subprocess.run([programs / "python", "-m", "pip", "check"], env=bare, check=True)
    told = subprocess.run([programs / "python", "-c", ASK], env=bare, capture_output=True, text=True, check=True)
    with_torch, with_numpy = json.loads(told.stdout)
    assert (
        Version(with_torch) == Version(oldest["torch"]) if torch == "oldest" else Version(with_torch) > Version("2.12")
    )
    assert with_torch != tested["torch"] or torch == "newest"
    assert with_numpy != tested["numpy"] or others == "newest"
    wrong = [programs / "medsilo", "run", "fedavg", "--threads", "0"]
    refused = subprocess.run(wrong, cwd=place, env=bare, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--threads" in refused.stderr
    job = [programs / "medsilo", "run", "fedavg", "--device", "cpu", "--json"]
    done = subprocess.run(job, cwd=place, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [summary] = place.glob("runs/*/summary.json")
    found = json.loads(summary.read_text())
    assert found["status"] == "finished" and found["rounds"]["done"] == found["rounds"]["planned"]
    assert {site["machine"]["torch"].partition("+")[0] for site in found["sites"].values()} == {with_torch}
