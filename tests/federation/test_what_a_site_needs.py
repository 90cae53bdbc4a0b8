"""A hospital's installation contains exactly the packages that the hospital's processes import."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from medsilo.core.package import PLACE, canonical, is_ours
from tests.federation.test_without_the_lab import HIDDEN
from tests.hospital import NAMES, write_balls, write_photos, write_table
from tests.unit.site.test_approvals import Home

# Each new Python process records the third-party modules that medsilo's modules import.
RECORDED = """
import builtins, os, sys
imported, own, seen = builtins.__import__, os.environ["SEEN"], set()


def recorded(name, globals=None, locals=None, fromlist=(), level=0):
    asking, root = (globals or {}).get("__name__", ""), name.partition(".")[0]
    others = asking.startswith(("medsilo_lab", "medsilo_server"))
    ours = asking.startswith(("medsilo", "nvflare_reliability")) and not others
    if not level and root not in seen and ours:
        seen.add(root)
        with open(own, "a") as file:
            print(root, file=file)
    return imported(name, globals, locals, fromlist, level)


builtins.__import__ = recorded
"""
ONE = {"algorithm": {"name": "fedavg"}, "participation": {"sites": ["hospital-a"]}}
FEW = {"rounds": 1, "batch_size": 4}
PLANS = {
    "volumes": {
        "task": {
            **{"name": "nifti-folder", "kind": "segmentation", "labels": ["ball"], "modalities": ["ct"]},
            **{"dimensions": 3, "size": [16, 16, 8], "target_spacing": [1.5, 1.5, 2.5]},
        },
        "network": {"name": "unet", "dimensions": 3, "features": [4, 8]},
        "training": FEW,
    },
    "photos": {
        "task": {"name": "image-folder", "kind": "classification", "labels": ["low", "high"], "size": [16, 16]},
        "network": {"name": "small-cnn", "width": 2, "norm": "group"},
        "training": FEW,
        "privacy": {"epsilon": 4.0, "delta": 1e-3},
    },
    "table": {
        "task": {
            **{"name": "table", "kind": "classification", "target": "again", "labels": ["no", "yes"]},
            "columns": [{"name": "age", "low": 0, "high": 120}],
        },
        "network": {"name": "linear"},
        "training": FEW,
    },
}


PROGRAM = """
import json, os
from pathlib import Path
import medsilo.flare.executor
from medsilo.cli import main
from medsilo.plan import load_plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess

assert main(json.loads(os.environ["COMMAND"])) == 0
for name in json.loads(os.environ["PLANS"]):
    settings = SiteSettings.read(Path(f"{name}-local"))
    inprocess.run(load_plan(Path(f"{name}.yaml")), settings=settings, folder=Path(f"{name}-run"))
"""


def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


def modules_of(names: set[str]) -> set[str]:
    brought = importlib.metadata.packages_distributions()
    return {module for module, own in brought.items() if {canonical(one) for one in own} & names}


def typed(folder: Path, command: list[str]) -> set[str]:
    (folder / "hook").mkdir()
    (folder / "hook/sitecustomize.py").write_text(RECORDED + os.environ["HIDING"])
    pid, terminal = os.forkpty()
    if not pid:
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": f"{folder / 'hook'}{os.pathsep}{PLACE}", "SEEN": str(folder / "seen.txt")}
        os.environ |= {"TERM": "xterm", "COMMAND": json.dumps(command), "PLANS": json.dumps([*PLANS])}
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    told = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:
            break
        if not read:
            break
        told += read
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, told.decode()
    return set((folder / "seen.txt").read_text().split())


@pytest.mark.slow
def test_a_hospital_installs_what_its_own_processes_import(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on volumes, photographs and tables, and giving approvals, imports every required package, and no package
    of an extra.
    """
    needed = {canonical(Requirement(line).name) for line in project(root)["dependencies"]}
    extras = [line for own in project(root)["optional-dependencies"].values() for line in own]
    absent = modules_of({canonical(Requirement(line).name) for line in extras} - needed)
    hiding = HIDDEN.replace(
        '("medsilo_lab", "medsilo_papers", "medsilo_server")', str(("medsilo_page", *sorted(absent)))
    )
    assert hiding != HIDDEN
    monkeypatch.setenv("HIDING", hiding)
    assert {"starlette", "uvicorn", "jinja2", "matplotlib", "pydicom"} <= absent
    write_balls(tmp_path / "volumes", NAMES)
    write_photos(tmp_path / "photos", NAMES)
    rows = [
        {"patient": name, "age": 30 + number, "again": "yes" if number % 2 else "no"}
        for number, name in enumerate(NAMES)
    ]
    write_table(tmp_path / "table/cases.csv", rows)
    home = Home(tmp_path / "kit")
    for name, plan in PLANS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**ONE, **plan}))
        (tmp_path / f"{name}-local").mkdir()
        demands = {"epsilon": 9.0, "delta": 1e-3, "public": {"counts": "in our report"}}
        data = {"folder": str(tmp_path / name)} | ({"outcome": ["again"]} if name == "table" else {})
        own = {"device": "cpu", "data": data} | ({"privacy": demands} if "privacy" in plan else {})
        (tmp_path / f"{name}-local/medsilo.yaml").write_text(yaml.safe_dump(own))
    approve = ["approve", home.plan.hash, "--kit", str(home.folder), "--yes"]
    seen = {name for name in typed(tmp_path, approve) if name not in sys.stdlib_module_names and not is_ours(name)}
    seen -= {"pydantic_core"}  # pydantic requires pydantic_core in one exact version
    assert seen == modules_of(needed) & seen, "no dependency of [project] brings these"
    lacking = {name for name in needed if not modules_of({name}) & seen}
    lacking -= {"rich"}  # medsilo.cli uses rich to show slow commands of medsilo-lab
    assert lacking == set(), "no process of a site imports these: make them extras"


# Remove functions and constants that Python has on Linux and lacks on macOS. Libraries are imported before the names
# are removed, because the macOS builds of these libraries do not need the names.
AS_ON_A_MAC = """
import os, pathlib, select, signal, socket, sys
import monai, nibabel, numpy, psutil, pyarrow, scipy, SimpleITK, torch

ONLY_LINUX = {
    os: ("copy_file_range", "eventfd", "getrandom", "memfd_create", "O_TMPFILE", "pidfd_open", "posix_fadvise",
         "sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare"),
    select: ("epoll",),
    signal: ("pidfd_send_signal",),
    socket: ("AF_NETLINK", "AF_PACKET", "SO_PEERCRED", "TCP_KEEPIDLE"),
}
for module, names in ONLY_LINUX.items():
    for name in names:
        vars(module).pop(name, None)
sys.platform, read = "darwin", pathlib.Path.read_text


def read_text(path, *given, **more):
    if path.parts[:2] == ("/", "proc"):
        raise FileNotFoundError(path)
    return read(path, *given, **more)


pathlib.Path.read_text = read_text
from medsilo.cli import main
sys.exit(main(["run", "fedavg", "--engine", "inprocess", "--device", "cpu", "--set", "training.rounds=1"]))
"""


@pytest.mark.slow
def test_training_in_one_process_needs_nothing_that_linux_alone_has(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", AS_ON_A_MAC], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [summary] = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"
