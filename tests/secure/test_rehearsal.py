"""The walk through a whole consortium on one machine: medsilo kits rehearse."""

import json
from pathlib import Path

import psutil
import pytest
import yaml

from medsilo.cli import main
from tests.secure.consortium import EXAMPLES, LEAD

KEYS = {
    "name": "tried",
    "server": {"host": "fl.example.org", "organisation": "clinic"},
    "hospitals": [
        {"name": name, "organisation": name[-1], "contact": f"it@{name}.org", "policies": str(EXAMPLES / policies)}
        for name, policies in (("hospital-a", "strict-hospital"), ("hospital-b", "teaching-hospital"))
    ],
    "people": [{"name": LEAD, "organisation": "clinic", "role": "lead"}],
}
SMALL = ["training.rounds=2", "task.name=synthetic-activity", "task.persons=8", "task.windows=10"]
SHORT = [part for change in SMALL for part in ("--set", change)]


def written(folder: Path, **changed: object) -> Path:
    (folder / "consortium.yaml").write_text(yaml.safe_dump({**KEYS, **changed}))
    return folder / "consortium.yaml"


def left_running(folder: Path) -> list[str]:
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.mark.slow
def test_a_consortium_is_walked_through_by_the_commands_that_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rehearsal"
    assert main(["kits", "rehearse", str(written(tmp_path)), "-o", str(out), *SHORT, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    summary = json.loads((Path(said["run"]) / "summary.json").read_text("utf-8"))
    assert summary["rounds"]["done"] == 2 and set(summary["sites"]) == {"hospital-a", "hospital-b"}
    acts = [command.split()[1] for command in said["commands"] if command.startswith("medsilo")]
    assert acts == ["kits", "submit", "check", "check", "approve", "submit", "status", "download"]
    assert not left_running(out)


@pytest.mark.slow
def test_what_fails_ends_the_walk_before_anybody_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rehearsal"
    assert main(["kits", "rehearse", str(written(tmp_path)), "-o", str(out), "--set", "training.rounds=none"]) == 1
    shown = capsys.readouterr()
    assert "training.rounds" in shown.out and str(out / "logs") in shown.err
    assert not left_running(out)


def test_a_consortium_without_a_lead_or_a_folder_in_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = [{**KEYS["people"][0], "role": "member"}]
    assert main(["kits", "rehearse", str(written(tmp_path, people=nobody)), "-o", str(tmp_path / "new")]) == 1
    assert "'lead'" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["kits", "rehearse", str(written(tmp_path)), "-o", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
