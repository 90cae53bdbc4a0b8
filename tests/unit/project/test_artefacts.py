"""The present version reads each file of an earlier version, or names the remedy in one line."""

import json
import shutil
from pathlib import Path

import pytest

from medsilo.cli import main
from medsilo_lab.study.verdict_file import Verdict, read_verdict
from tests.commands import lead_of

ARTEFACTS = Path(__file__).parents[2] / "artefacts"
VERSIONS = sorted(path.name for path in ARTEFACTS.iterdir() if path.is_dir() and path.name[0].isdecimal())
KIT = ["--kit", "st-anna"]
LOADED = [
    ["report", "run"],
    ["report", "super-model"],
    ["report", "comparison"],
    ["disclosure", "job"],
    ["disclosure", "run"],
    ["data", "show", "data-set"],
    ["ledger", "show", *KIT],
    ["approve", *KIT],
]
ONE_LINE = {
    # the repository does not contain the data set of this run
    ("data", "check", "data-set"): "correct 'data' in this site's medsilo.yaml, or --data",
    ("resume", "run"): "there is nothing to resume",
    # the repository does not contain the checkpoints of this run
    ("run", "run", "--more", "1"): "start a new run with training.rounds set",
    ("status", *KIT): "give the kit of a person",
    ("predict", "super-model", "job", "-o", "found"): "give a model of images, tables or recordings",
    ("release", "export", "run", "-o", "bundle"): "medsilo release make hands the model on",
}


@pytest.fixture(params=VERSIONS)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for path in (ARTEFACTS / request.param).rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(ARTEFACTS / request.param)
            copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    return request.param


def test_each_command_reads_what_was_written(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in LOADED:
        assert main(command) == 0, (command, capsys.readouterr().err)


def test_a_verdict_under_earlier_names_is_read_and_written_under_todays(written: str, tmp_path: Path) -> None:
    """A verdict.json of an earlier version has the keys `against`, `gains`, `gain` and `joining`."""
    old = json.loads(Path("comparison/verdict.json").read_text())
    verdict = read_verdict(Path("comparison"))
    assert verdict.baseline == old["against"] is not None
    assert (
        {site: one.difference.mean for site, one in verdict.hospitals.items()}
        == {site: one["gain"]["mean"] for site, one in old["gains"].items()}
        != {}
    )
    for row, before in zip(verdict.rows, old["rows"], strict=True):
        assert row.baseline == before["against"] and set(row.from_single_site) == set(before["joining"])
    new = json.dumps(verdict.as_json())
    assert not any(f'"{name}":' in new for name in ("against", "gains", "gain", "joining"))
    assert Verdict.model_validate_json(new, strict=True) == verdict


def test_what_it_says_is_what_was_measured(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"0.1.0": ("1.998", "eadae333bcc8")}[written]
    assert main(["ledger", "show", *KIT]) == 0 and f"ε = {known[0]} at δ = 0.001" in capsys.readouterr().out
    assert main(["approve", *KIT]) == 0 and f"{known[1]}  approved" in capsys.readouterr().out
    assert main(["release", "test", "release", "--as", "elsewhere", "--lead", lead_of("release")]) == 0
    assert "accuracy 0.14, 80 cases" in capsys.readouterr().out


def test_what_cannot_be_done_is_one_line_with_the_remedy(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, remedy in ONE_LINE.items():
        assert main([*command]) == 1, command
        told = capsys.readouterr().err.strip().splitlines()
        assert len(told) == 1 and remedy in told[0], (command, told)


def test_a_later_format_and_a_changed_byte_are_refused_in_one_line(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads(Path("run/summary.json").read_text())
    Path("run/summary.json").write_text(json.dumps({**summary, "schema": 99}))
    model = next(Path("release").rglob("*.safetensors"))
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    book = next(Path("st-anna").rglob("ledger/*.jsonl"))
    book.write_bytes(book.read_bytes().replace(b"round 1", b"round 7", 1))
    for command in (
        ["report", "run"],
        ["release", "test", "release", "--as", "elsewhere", "--lead", lead_of("release")],
        ["ledger", "show", *KIT],
    ):
        assert main(command) == 1, command
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, command


def test_what_is_frozen_is_small_and_holds_no_key_that_opens_anything(written: str) -> None:
    files = [path for path in (ARTEFACTS / written).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    secret = [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    assert [path.name for path in secret] == ["client.key"]
    assert "opens nothing" in secret[0].with_name("client.key.txt").read_text()
