"""`medsilo resume` and `medsilo report` end with an error of one line if a file of the run is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.core.text import LONGEST
from medsilo_lab.engines import inprocess
from medsilo_lab.report.page import write
from tests.conftest import make_plan
from tests.sites import CPU

HOSTILE = "\x1b[31mred\x1b]0;owned\x07\u202e" + "x" * 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    inprocess.run(make_plan(), folder=folder, settings=CPU)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def stop(record: dict) -> None:
        raise MedsiloError("stopped by the test")

    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.raises(MedsiloError, match="by the test"):
        inprocess.run(make_plan(), folder=folder, settings=CPU, on_round=stop)
    return folder


Damage = Callable[[Path], None]


def text(name: str, content: str) -> Damage:
    return lambda run: (run / name).write_text(content, "utf-8") and None


def folder(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def facts(**changes: object) -> Damage:
    def damage(run: Path) -> None:
        (path,) = run.glob("checkpoints/round-*.safetensors")
        tensors, known = load_tensors(path)
        save_tensors(path, tensors, {key: value for key, value in {**known, **changes}.items() if value != "absent"})

    return damage


def without_tensors(run: Path) -> None:
    (path,) = run.glob("checkpoints/round-*.safetensors")
    save_tensors(path, {}, load_tensors(path)[1])


def of_a_wider_network(run: Path) -> None:
    (path,) = run.glob("checkpoints/round-*.safetensors")
    tensors, known = load_tensors(path)
    save_tensors(path, {name: torch.cat([one, one]) if one.ndim else one for name, one in tensors.items()}, known)


def odd_name(run: Path) -> None:
    (path,) = run.glob("checkpoints/round-*.safetensors")
    path.rename(path.with_name("round-x.safetensors"))


FOR_RESUME: dict[str, Damage] = {
    "rounds are no JSON": text("rounds.jsonl", "{\n"),
    "rounds are lists": text("rounds.jsonl", "[]\n"),
    "rounds have no number": text("rounds.jsonl", '{"round": null}\n'),
    "rounds are deep": text("rounds.jsonl", "[" * 100_000 + "\n"),
    "rounds are a folder": folder("rounds.jsonl"),
    "summary is a number": text("summary.json", "7"),
    "summary has no status": text("summary.json", "{}"),
    "summary is no text": lambda run: (run / "summary.json").write_bytes(b"\xff\xfe") and None,
    "plan is a folder": folder("plan.yaml"),
    "plan is no plan": text("plan.yaml", "[]"),
    "checkpoint has no facts": facts(mixers="absent"),
    "checkpoint's round is a text": facts(round="2"),
    "checkpoint is of round 10^30": facts(round=10**30),
    "checkpoint's best is a list": facts(best=[]),
    "checkpoint's best has no scores": facts(best={"round": 1}),
    "checkpoint's mixers are numbers": facts(mixers={"model": 7}),
    "checkpoint without tensors": without_tensors,
    "checkpoint of another plan": facts(plan="0" * 64),
    "checkpoint of another network": of_a_wider_network,
    "checkpoint with an odd name": odd_name,
}


@pytest.mark.parametrize("name", FOR_RESUME)
def test_resume_says_in_one_line_what_is_damaged(
    name: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    FOR_RESUME[name](tmp_path / "run")
    assert_refused(["resume", str(tmp_path / "run"), "--device", "cpu"], capsys)


def assert_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    told = capsys.readouterr().err
    assert told.startswith("medsilo: ") and told.count("\n") == 1


FOR_REPORT: dict[str, Damage] = {
    "summary is a list": text("summary.json", "[]"),
    "rounds are deep": text("rounds.jsonl", "[" * 100_000 + "\n"),
    "provenance is deep": text("provenance.json", "[" * 100_000),
    "test scores are a table of others": text("sites/hospital-a/test.csv", "a,b\n1,2\n"),
    "test scores are cut off": text("sites/hospital-a/test.csv", 'patient,"accuracy\n'),
    "test scores are a folder": folder("sites/hospital-a/test.csv"),
}


@pytest.mark.parametrize("name", FOR_REPORT)
def test_report_says_in_one_line_what_is_damaged(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    FOR_REPORT[name](tmp_path / "run")
    assert_refused(["report", str(tmp_path / "run")], capsys)


def test_a_report_shows_no_control_characters_and_stays_small(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    summary["reason"], summary["status"] = HOSTILE, "failed"
    summary["sites"]["hospital-a"]["missed"] = {"1": f"refused: {HOSTILE}"}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    lines[0]["refused"] = {"hospital-a": HOSTILE}
    (tmp_path / "run/rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = write([finished], tmp_path / "whole.html", "whole").stat().st_size
    page = write([tmp_path / "run"], tmp_path / "page.html", "damaged").read_text("utf-8")
    assert "red xxx" in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)
    assert len(page.encode()) < whole + 20 * LONGEST
