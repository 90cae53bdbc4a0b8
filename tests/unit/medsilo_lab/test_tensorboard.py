"""`--tensorboard` writes the scores and losses of runs to event files."""

import sys
from pathlib import Path

import pytest

import medsilo
from medsilo.cli import main
from medsilo.runs.rounds import Round
from medsilo_lab.engines import inprocess
from medsilo_lab.engines.tensorboard import event_files
from tests.conftest import SITES, SMALL, TINY, make_plan
from tests.events import assert_same_curves, curves_in, curves_of
from tests.unit.project.test_published import A, B, C, rounding_study


def test_a_run_and_its_continuation_have_the_curves_of_all_rounds(tmp_path: Path) -> None:
    place = ["--engine", "inprocess", "--out", str(tmp_path), "--device", "cpu", "--tensorboard"]
    small = ["--set", "task.patients=6", "--set", "task.size=32", "--set", "training.rounds=1"]
    run, longer = tmp_path / "run", tmp_path / "longer"
    assert main(["run", "fedavg", *place, "--name", "run", *small]) == 0
    assert main(["run", str(run), "--more", "1", *place, "--name", "longer"]) == 0
    for folder, steps in ((run, [0, 1]), (longer, [0, 1, 2])):
        curves = curves_in(folder / "tensorboard")
        assert_same_curves(curves, curves_of(folder))
        assert [*curves["hospital-a"]["mean/accuracy"]] == steps


def test_a_resumed_run_has_each_round_once(tmp_path: Path) -> None:
    plan, run, seen = make_plan("fedbn", *SMALL, "training.rounds=3"), tmp_path / "run", []

    def stop(line: Round) -> None:
        seen.append(line.round)
        if line.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), event_files(run, "accuracy", True, stop) as on_round:
        inprocess.run(plan, folder=run, on_round=on_round)
    assert seen == [1, 2] and {*curves_in(run / "tensorboard")} == {*SITES}
    # The resumed run repeats round 2, because the checkpoint of round 2 was not written. The resumed run writes event
    # files, because the interrupted run has event files.
    with event_files(run, "accuracy", False) as on_round:
        inprocess.run(plan, folder=run, resume=True, on_round=on_round)
    assert_same_curves(curves_in(run / "tensorboard"), curves_of(run))


def test_a_run_gets_event_files_only_if_they_are_wanted(tmp_path: Path) -> None:
    with event_files(tmp_path / "run", "accuracy", False) as on_round:
        inprocess.run(make_plan("fedavg", *SMALL, "training.rounds=1"), folder=tmp_path / "run", on_round=on_round)
    assert not (tmp_path / "run/tensorboard").exists()


def test_each_run_of_a_comparison_has_curves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = [f"task.{key}={value}" for key, value in TINY.items() if key != "name"]
    words = [word for change in [*changes, "training.rounds=1"] for word in ("--set", change)]
    command = ["compare", "--task", TINY["name"], "--methods", "fedavg,central", "--seeds", "0", "-o", str(out)]
    assert main([*command, *words, "--at-once", "1", "--device", "cpu", "--tensorboard"]) == 0
    assert_same_curves(curves_in(out / "fedavg-0/tensorboard"), curves_of(out / "fedavg-0"))
    pooled = curves_in(out / "central-0/tensorboard")
    assert {"site/accuracy", "site/train_loss"} <= {tag for tags in pooled.values() for tag in tags}


def test_curves_show_ranges_of_rounded_scores_and_no_score_that_stays(
    photos: Path, known_key: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rounding_study(photos, run)
    with event_files(run, "accuracy", True):
        pass
    curves = curves_in(run / "tensorboard")
    scores = {site: {tag for tag in tags if "accuracy" in tag} for site, tags in curves.items()}
    ends = {f"{of}/accuracy_{end}" for of in ("site", "mean") for end in ("low", "high")}
    means = {"mean/accuracy_low", "mean/accuracy_high"}
    assert scores == {A: ends, B: means, C: {"site/accuracy", *means}}
    assert all([*points] == [0, 1, 2] for tags in curves.values() for tag, points in tags.items() if "accuracy" in tag)


def test_without_the_package_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for command in (["run", "fedavg", "--out", str(tmp_path)], ["compare", "-o", str(tmp_path / "out")]):
        assert main([*command, "--tensorboard"]) == 1
        assert "install medsilo[tensorboard]" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_page_s_function_sends_the_norms_of_a_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs/reference/run-folder/rounds.md").read_text("utf-8")
    lines = page[page.index("    from torch.utils.tensorboard") :].partition("\n## ")[0].splitlines()
    code = "\n".join(line.removeprefix("    ") for line in lines)
    monkeypatch.chdir(tmp_path)
    run = medsilo.run(make_plan("fedavg", *SMALL, "training.rounds=2"), folder="runs/my-study", device="cpu")
    names: dict[str, object] = {"medsilo": medsilo}
    exec(code, names)
    names["writer"].close()
    assert len(run.history) == 2
    (tmp_path / "of").mkdir()
    (tmp_path / "norms").rename(tmp_path / "of/norms")
    norms = curves_in(tmp_path / "of")["norms"]
    assert {*norms} == {f"{group}/{site}" for site in SITES for group in run.history[0].sites[site].updates}
    assert all({*points} == {1, 2} for points in norms.values())
