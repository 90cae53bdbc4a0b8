"""The files that this version writes, frozen for later ones (tests/unit/project/test_artefacts.py).

    python -m tests.artefacts.make     # writes a folder beside this file, once for each release

Of keys only the kit's is kept (startup/client.key), which was made for this and opens nothing: it signed the ledger, an
approval and a data set.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from medsilo.cli import main as medsilo
from medsilo.core.version import __version__
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import make_settings
from medsilo_lab.engines import inprocess
from tests.hospital import NAMES, write_photos, write_table
from tests.unit.test_account import DEMANDS, PRIVATE

HERE = Path(__file__).parent
HOSPITAL = "st-anna"
PEOPLE = 40
LEFT_OUT = ("lead.pem", "key.pem", "key", "checkpoints", "state-*.safetensors", "*.html", "*.ipynb")
KEPT = {  # of the working folder, and what else of it is left out
    "runs/run": (),
    "runs/super-model": ("sites",),
    "job": (),
    "release": (),
    "data-set": (),
    "comparison": ("*.safetensors", ".locks"),
    f"kits/{HOSPITAL}": ("transfer", "running"),
}
PLACE = Path("/tmp/medsilo-artefacts")  # a data set names its folder, and its acceptance signs that name
SITES = [HOSPITAL, "university-clinic"]
ACTIVITY = {"name": "synthetic-activity", "persons": 8, "windows": 10, "steps": 32}
SMALL = {"task": ACTIVITY, "network": {"name": "activity-cnn", "hidden": 4}, "participation": {"sites": SITES}}


def asked(*words: object) -> None:
    """Run a command of medsilo."""
    if medsilo([str(word) for word in words]) != 0:
        raise SystemExit(f"medsilo {' '.join(map(str, words))} failed")


def write_people(folder: Path) -> Path:
    """Write a hospital's table."""
    rows = [
        {"patient": f"SAMPLE-{who}", "age": 30 + who * 7 % 50, "marker": who * 13 % 10 / 4, "outcome": who % 2}
        for who in range(PEOPLE)
    ]
    write_table(folder / "cases.csv", rows)
    return folder


def write_all(out: Path) -> None:
    """Write each kind of folder that people keep, by commands that people use."""
    people, kit = write_people(Path("people")), Path("kits") / HOSPITAL
    asked("kits", "make", "consortium.yaml", "-o", "kits")
    (kit / "local/medsilo.yaml").write_text("device: cpu\napproval: required\n")
    for name, method in (("run", "fedavg"), ("super-model", "fedsm")):
        inprocess.run(plan_of(method), folder=Path("runs") / name)
    Path("plan.yaml").write_text(plan_of("fedavg").to_yaml())
    asked("submit", "fedavg", "--plan", "plan.yaml", "--out", "job")
    asked("release", "make", "runs/run", "--key", "lead.pem", "-o", "release")
    rows = ["--methods", "local,fedavg", "--seeds", "0,1", "--plan", "plan.yaml"]
    asked("compare", *rows, "--set", "training.rounds=1", "--at-once", 1, "--out", "comparison")
    asked("data", people, "--target", "outcome", "--name", HOSPITAL, "--yes", "-o", "data-set")
    asked("data", "accept", "data-set", "--kit", kit, "--by", "a test")

    photos = {"folder": str(write_photos(Path("photos"), NAMES))}
    settings = make_settings({"device": "cpu", "data": photos, "privacy": DEMANDS}, "x")
    inprocess.run(parse_plan(PRIVATE), folder=Path("medsilo/study"), settings=settings)
    shutil.copytree(Path("medsilo/_hospital/a"), kit / "medsilo/_hospital" / HOSPITAL)
    asked("ledger", "accept", "--kit", kit)
    asked("approve", "job", "--kit", kit, "--yes", "--by", "a test")

    (kit / "startup/client.key.txt").write_text("client.key was made for tests of medsilo. It opens nothing.\n")
    for name, more in KEPT.items():
        shutil.copytree(name, out / Path(name).name, ignore=shutil.ignore_patterns(*LEFT_OUT, *more))


def plan_of(method: str) -> Plan:
    """A small study of two synthetic hospitals."""
    training = {"rounds": 2, "batch_size": 16}
    chosen = {"algorithm": {"name": method}, "training": training, "model_selection": {"keep": "last"}}
    return parse_plan({**SMALL, **chosen})


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Inside, work in a new folder, which goes afterwards."""
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def main(out: Path) -> None:
    """Write what this version writes."""
    if out.exists():
        raise SystemExit(f"{out.name} is there; what a version wrote stays as it is")
    consortium = (HERE.parents[1] / "provisioning/consortium.yaml").read_text("utf-8")
    torch.manual_seed(0)
    with working_in(PLACE):
        Path("consortium.yaml").write_text(consortium)
        write_all(out.absolute())


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else HERE / __version__)
