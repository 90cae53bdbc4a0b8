"""A study as if a hospital, or a patient, had never joined: bit for bit, with a certificate and a list of copies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo import cli
from medsilo.core.errors import Refused
from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.federation.participant import Participant
from medsilo.flare import simulator
from medsilo.plan import Plan, parse_plan
from medsilo.runs.reading import read_rounds
from medsilo.sealing.signed import read_signed
from medsilo.site.owner import ALL_MINE
from medsilo.site.settings import SiteSettings, read_settings_of_all
from medsilo_release.leaving import LeavingCertificate

HOSPITALS = ("a", "b", "c", "late")
STUDY: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "columns": ["age", "marker"]},
    "training": {"rounds": 6},
    "participation": {"sites": list(HOSPITALS), "minimum": 3, "when_missing": "continue"},
}


def tables(folder: Path, lines: int = 60) -> Path:
    """Write a hospital's table for each, and settings of each; returns the folder of these."""
    for place, site in enumerate(HOSPITALS):
        drawn = torch.Generator().manual_seed(place)
        values = torch.randn(lines, 2, generator=drawn)
        rows = [f"{site}-{n},{x:.4f},{y:.4f},{n % 2}" for n, (x, y) in enumerate(values.tolist())]
        (folder / site).mkdir(parents=True)
        (folder / site / "cases.csv").write_text("\n".join(["patient,age,marker,outcome", *rows]) + "\n")
        data = f"data:\n  folder: {folder / site}\n  table: cases.csv\n"
        (folder / site / "medsilo.yaml").write_text(data + "public_data: true\ndevice: cpu\n")
    (folder / "medsilo.yaml").write_text("device: cpu\n")
    return folder


def models(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of every model of a run, by file and name."""
    files = [
        *run.glob("global/*.safetensors"),
        *run.glob("sites/*/best.safetensors"),
        *run.glob("sites/*/last.safetensors"),
    ]
    return {f"{path.relative_to(run)} {name}": value for path in files for name, value in load_tensors(path)[0].items()}


def same(one: Path, other: Path) -> bool:
    own, others = models(one), models(other)
    return bool(own) and own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)


class Late(Participant):
    """A hospital that answers from the third round on."""

    def find(self, *asked: Any) -> Any:
        if self.place.site == "late" and self.__dict__.setdefault("times", 0) < 2:
            self.times += 1
            raise Refused("our machine is not there yet")
        return super().find(*asked)


def settings_in(folder: Path, *left: str) -> SiteSettings:
    settings: Any = read_settings_of_all(folder)
    settings = settings.changed(ALL_MINE, "a test")
    return settings.model_copy(update={"sites": {k: own for k, own in settings.sites.items() if k not in left}})  # type: ignore[no-any-return]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tables(tmp_path / "hospitals")
    return tmp_path


def without(plan: Plan, hospital: str) -> Plan:
    left = [site for site in plan.participation.sites if site != hospital]
    return plan.with_changes([f"participation.sites=[{','.join(left)}]", "participation.minimum=2"])


@pytest.mark.parametrize(("kind", "method"), [(Late, "fedavg"), (Participant, "fedavg"), (Late, "ditto")])
def test_leaving_is_the_study_without_the_hospital(
    kind: type, method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the last round before it came, but not where hospitals keep models of their own between rounds."""
    plan, settings = parse_plan({**STUDY, "algorithm": {"name": method}}), settings_in(here / "hospitals")
    kept = kind is Late and method == "fedavg"
    inprocess.run(plan, folder=here / "runs/study", settings=settings, kind=kind)
    inprocess.run(without(plan, "late"), folder=here / "fresh", settings=settings_in(here / "hospitals", "late"))
    first = next(line.round for line in read_rounds(here / "runs/study") if "late" in line.answered)
    assert first == (2 if kind is Late else 1)
    assert not same(here / "runs/study", here / "fresh")
    shutil.copytree(here / "runs/study/global", here / "runs/elsewhere")
    words = ["leave", "runs/study", "late", "-o", "runs/new", "--settings", "hospitals"]
    assert cli.main(words) == 1, "nobody agreed to the price"
    told = capsys.readouterr()
    assert "--yes" in told.err and f"{5 if kept else 6} rounds" in told.out
    assert ("though late came in round 2" in told.out) == (kind is Late and not kept)
    assert not (here / "runs/new").exists()
    assert cli.main([*words, "--yes"]) == 0
    assert same(here / "runs/new", here / "fresh")
    gone, _ = read_signed(here / "runs/new/leaving.json", LeavingCertificate)
    assert gone.begun_after == (1 if kept else 0)
    assert ("global/best.safetensors" in gone.models) == (method == "fedavg")
    assert gone.plan == without(plan, "late").hash and gone.plan_before == plan.hash
    assert "elsewhere/last.safetensors" in gone.copies and "study/sites/late/last.safetensors" in gone.copies
    assert not any(name.startswith("new/") for name in gone.copies)
    summary = [json.loads((here / run / "summary.json").read_text()) for run in ("runs/new", "fresh")]
    assert summary[0]["sites"].keys() == summary[1]["sites"].keys() == {"a", "b", "c"}
    assert [line.answered for line in read_rounds(here / "runs/new")] == [["a", "b", "c"]] * 6
    assert cli.main(["leave", "runs/study", "late", "-o", "fresh"]) == 0, "as a consortium's run, which started again"
    assert read_signed(here / "fresh/leaving.json", LeavingCertificate)[0].begun_after == 0


@pytest.mark.slow
def test_leaving_in_the_simulator_gives_the_models_of_the_loop(here: Path) -> None:
    plan, settings = parse_plan({**STUDY, "training": {"rounds": 2}}), settings_in(here / "hospitals")
    simulator.run(plan, here / "runs/study", settings)
    assert cli.main(["leave", "runs/study", "late", "-o", "runs/new", "--yes"]) == 0
    assert (here / "runs/new/job").is_dir(), "it was not run in the simulator"
    inprocess.run(without(plan, "late"), folder=here / "fresh", settings=settings_in(here / "hospitals", "late"))
    assert same(here / "runs/new", here / "fresh")


def test_a_patient_leaves_as_if_never_listed(here: Path) -> None:
    plan, settings = parse_plan({**STUDY, "participation": {"sites": list(HOSPITALS)}}), settings_in(here / "hospitals")
    inprocess.run(plan, folder=here / "runs/study", settings=settings)
    own = here / "hospitals/b"
    (own / "left.txt").write_text("b-7\nb-31\n")
    before = (own / "medsilo.yaml").read_text()
    (own / "medsilo.yaml").write_text(before.replace("  table:", f"  leave_out: {own / 'left.txt'}\n  table:"))
    words = ["leave", "runs/study", "b", "-o", "runs/new", "--patients", "--yes", "--settings", "hospitals"]
    assert cli.main(words) == 0
    (own / "medsilo.yaml").write_text(before)
    lines = (own / "cases.csv").read_text().splitlines()
    (own / "cases.csv").write_text("\n".join(line for line in lines if not line.startswith(("b-7,", "b-31,"))) + "\n")
    inprocess.run(plan, folder=here / "fresh", settings=settings_in(here / "hospitals"))
    assert same(here / "runs/new", here / "fresh") and not same(here / "runs/study", here / "fresh")
    assert cli.main(["leave", "runs/study", "b", "-o", "runs/study", "--patients"]) == 1, "the old run is certified"
    for path in (here / "runs/new").rglob("*.json*"):
        assert "b-31" not in path.read_text(), path


def test_nobody_leaves_who_was_never_in_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inprocess.run(parse_plan(STUDY), folder=here / "runs/study", settings=settings_in(here / "hospitals"))
    for who, why in (("nobody", "answered no round"), ("a", "--yes")):
        capsys.readouterr()
        assert cli.main(["leave", "runs/study", who, "-o", "runs/new"]) == 1
        assert why in capsys.readouterr().err
