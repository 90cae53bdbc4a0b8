"""The adviser: its rules by hand, records that are wrong or say little, and a measuring study from the command line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.advise import federations, making
from benchmarks.advise.__main__ import DOCUMENT, TRIES, write_tries
from benchmarks.advise.making import Trial
from benchmarks.advise.outcomes import COMMITTEE, TABLES, Outcome, Score, read_outcomes, write_outcomes
from benchmarks.advise.page import document
from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.study.adviser import Tries, advise, measuring_cells, tried_together, tries
from medsilo.study.adviser_rules import CLOSE, EVERY_RULE, RULES
from medsilo.study.measurement import PROBES, MeasuredHospital, Measurement, read_measured
from tests.conftest import make_plan


def hospital(**losses: float) -> MeasuredHospital:
    """Return a hospital of 100 training and 40 validation cases."""
    return MeasuredHospital(100, 40, {name.replace("_", "-"): loss for name, loss in losses.items()})


def measured(*hospitals: MeasuredHospital) -> Measurement:
    """Return a measuring study of these hospitals."""
    return Measurement(5, {f"hospital-{place}": own for place, own in enumerate(hospitals)})


LOOKS = hospital(local=0.4, fedavg=0.5, fedbn=0.2, fedper=0.3, ditto=0.35, fine_tuning=0.4, adafed=0.25)


@pytest.mark.parametrize("method", PROBES)
def test_a_method_that_is_clearly_ahead_answers_alone(method: str) -> None:
    ahead = replace(LOOKS, losses={**LOOKS.losses, method: 0.1})
    told = advise(measured(ahead, ahead, ahead))
    (rule,) = [rule for rule in RULES if method in rule.leaders]
    assert told.first == method and told.train == (method,) and (told.rule, told.answer) == (rule.name, rule.answer)
    assert told.second == ("fedbn" if method != "fedbn" else "adafed") and not told.unknown


def test_where_none_is_clearly_ahead_the_four_with_the_least_loss_answer_together() -> None:
    near = replace(LOOKS, losses={**LOOKS.losses, "fedper": 0.21})
    told = advise(measured(near, near, near))
    assert told.train == ("fedbn", "fedper", "adafed", "ditto") and told.answer == "answer together"
    assert told.first == "fedbn" and told.rule == CLOSE.name and "a close call: fedper's loss" in told.unknown[-1]
    two = replace(LOOKS, losses={"local": 0.4, "fedavg": 0.39})
    assert advise(measured(two, two)).train == ("fedavg", "local")


def test_every_method_has_one_rule_and_every_rule_was_counted() -> None:
    assert sorted(method for rule in RULES for method in rule.leaders) == sorted(PROBES)
    assert {rule.name for rule in EVERY_RULE} == set(tries())


def test_a_rule_is_sure_by_what_it_was_not_made_from() -> None:
    assert Tries((0, 9), (3, 4)).often
    assert not Tries((9, 9), (2, 2)).often and not Tries((9, 9), (2, 3)).often


def test_the_worst_hospital_counts_for_a_third_more() -> None:
    told = advise(measured(hospital(local=0.3, fedavg=0.1), hospital(local=0.3, fedavg=0.48)))
    assert told.losses["local"] == pytest.approx(0.3)
    assert told.losses["fedavg"] == pytest.approx((2 * 0.29 + 0.48) / 3)  # less in the mean, more at the worst
    assert told.first == "local" and told.second == "fedavg"


def test_what_is_not_told_is_said() -> None:
    mute = MeasuredHospital(None, None, {})
    assert any("hospital-1 told no losses" in line for line in advise(measured(LOOKS, mute, LOOKS)).unknown)
    two = hospital(local=0.4, fedavg=0.5)
    told = advise(measured(LOOKS, two))
    assert told.first == "local" and any("adafed would do, which was not measured" in line for line in told.unknown)
    nothing = advise(measured(mute, mute))
    assert nothing.answer is None and nothing.first is None and nothing.sure == "cannot be known"


def test_few_cases_and_close_calls_are_said() -> None:
    few = replace(LOOKS, validation=3, train=0)
    lines = " ".join(advise(measured(few, LOOKS)).unknown)
    assert "fewer than 20 validation cases" in lines and "no training cases" in lines
    near = replace(LOOKS, losses={**LOOKS.losses, "adafed": 0.21})
    assert any("close call" in line for line in advise(measured(near, near, near)).unknown)
    slow, quick = replace(LOOKS, untrained=0.6), replace(LOOKS, untrained=5.0)
    assert not any("--rounds" in line for line in advise(measured(quick, quick)).unknown)
    assert any("still 83% of the untrained" in line for line in advise(measured(slow, slow)).unknown)
    assert any("hospitals, and here are" in line for line in advise(measured(LOOKS, LOOKS)).unknown)


def test_one_hospital_has_nobody_to_learn_with() -> None:
    with pytest.raises(MedsiloError, match="one hospital only"):
        advise(measured(LOOKS))


# ------------------------------------------------------------------------------------------------ records
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measuring study that the command line made."""
    folder = tmp_path_factory.mktemp("advise") / "runs"
    root = Path(__file__).resolve().parents[2]
    small = ["task.name=synthetic-activity", "task.persons=6", "task.windows=5", "participation.sites=[a,b]"]
    options = [word for change in small for word in ("--set", change)]
    job = str(root / "jobs/fedavg")
    assert main(["advise", "--measure", job, "--rounds", "2", "--out", str(folder), "--device", "cpu", *options]) == 0
    return folder


def test_the_command_measures_and_reads_the_same_runs_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["losses"]) == set(PROBES) and len(told["runs"]) == len(PROBES)
    assert told["sure"] in ("not sure", "cannot be known")  # two rounds, two hospitals
    assert main(["advise", str(runs)]) == 0
    said = capsys.readouterr().out
    right, asked = tried_together()
    assert "why: " in said and f"all rules: right on {right} of {asked} federations" in said


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"status": "failed", "reason": "no"}, "failed: no"),
        ({"task": "other"}, "another task"),
        ({"seed": 7}, "another seed"),
        ({"sites": {}}, "other hospitals"),
        ({"method": "moon"}, "no finished run of fedavg"),
        ({"method": "local"}, "two runs are of local"),
        ({"rounds": {"planned": 2, "done": 1}}, "needs 2 rounds at least"),
        ({"mean_test": 7}, "damaged or was changed"),
    ],
)
def test_records_that_are_wrong(changes: dict[str, Any], answer: str, runs: Path, tmp_path: Path) -> None:
    copies = []
    for run in sorted(runs.glob("*/summary.json")):
        copy = tmp_path / run.parent.name
        copy.mkdir()
        summary = json.loads(run.read_text("utf-8"))
        if summary["method"] == "fedavg":
            summary |= changes
        (copy / "summary.json").write_text(json.dumps(summary), "utf-8")
        (copy / "rounds.jsonl").write_bytes((run.parent / "rounds.jsonl").read_bytes())
        copies.append(copy)
    with pytest.raises(MedsiloError, match=answer) as error:
        read_measured(copies)
    assert "\n" not in str(error.value)


def test_a_loss_that_is_no_number_is_one_that_was_not_told(runs: Path, tmp_path: Path) -> None:
    for run in sorted(runs.glob("*/summary.json")):
        copy = tmp_path / run.parent.name
        copy.mkdir()
        (copy / "summary.json").write_bytes(run.read_bytes())
        lines = [json.loads(line) for line in (run.parent / "rounds.jsonl").read_text("utf-8").splitlines()]
        for line in lines:
            line["sites"]["a"]["validation_loss"] = math.nan
        (copy / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    told = advise(read_measured(list(tmp_path.iterdir())))
    assert "a told no losses, so nothing here is about them" in told.unknown


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in ([], [str(tmp_path), "--measure", "jobs/fedavg"], [str(tmp_path)]):
        assert main(["advise", *words]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_network_without_batch_norm_is_measured_without_it(tmp_path: Path) -> None:
    plan = make_plan("fedavg", "network.name=activity-cnn", "network.norm=group", "training.rounds=12")
    with pytest.raises(MedsiloError, match="needs 2 rounds"):
        measuring_cells(plan, 1, tmp_path)
    cells, passed = measuring_cells(plan, None, tmp_path)
    assert [cell.row.method for cell in cells] == [method for method in PROBES if method not in ("fedbn", "adafed")]
    assert [line.split(" is not measured")[0] for line in passed] == ["fedbn", "adafed"]
    assert {cell.plan.training.rounds for cell in cells} == {6}


# ------------------------------------------------------------------------------------------------ the benchmark
def test_what_the_page_and_the_adviser_say_is_what_the_tables_say(tmp_path: Path) -> None:
    made, held = (read_outcomes(path) for path in TABLES.values())
    assert DOCUMENT.read_text("utf-8") == document(made, held), "python -m benchmarks.advise --write makes it anew"
    write_tries(made, held, tmp_path / "tries.csv")
    assert (tmp_path / "tries.csv").read_bytes() == TRIES.read_bytes()


def test_held_out_federations_are_others() -> None:
    assert not set(federations.MADE) & set(federations.HELD_OUT) and len(federations.HELD_OUT) == 12
    both = [federations.drawn(number) for number in (*federations.MADE, *federations.HELD_OUT)]
    assert len({(own.cases, own.words) for own in both}) == len(both)
    assert {own.kind for own in both} == {"table", "image"}


@pytest.mark.parametrize("kind", ["table", pytest.param("image", marks=pytest.mark.slow)])
def test_a_tiny_federation_goes_through_the_benchmark(
    kind: federations.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federations, "TESTED", {kind: 20})
    monkeypatch.setattr(making, "METHODS", PROBES)
    monkeypatch.setattr(making, "OF_IMAGES", ())
    short = dict(federations.TRAINING[kind]) | {"rounds": 2, "local_epochs": 1}
    monkeypatch.setattr(federations, "TRAINING", {kind: short})
    shifts = {"looks": 0.5, "question": 0.9} | ({"labels": 0.5} if kind == "table" else {})
    trial = Trial.of(federations.Federation(999, kind, (12, 16), shifts), [0], tmp_path)
    assert not trial.done and Outcome.of(trial) is None
    assert list(trial.run(None)) == [] and trial.done and tuple(trial.methods) == PROBES
    outcome = Outcome.of(trial)
    assert outcome and outcome.right(outcome.best) and set(outcome.losses) == set(PROBES)
    assert set(outcome.scores) == {*PROBES, COMMITTEE} and len({*outcome.scores.values()}) > 2
    write_outcomes([outcome], tmp_path / "table.csv")
    (again,) = read_outcomes(tmp_path / "table.csv")
    assert again.scores == outcome.scores and again.rule == outcome.rule


def test_right_means_within_a_point_in_both() -> None:
    scores = {"one": Score(0.9, 0.8), "near": Score(0.895, 0.8), "worse": Score(0.9, 0.7)}
    outcome = Outcome("x", "1 2", "nothing", 1, {}, scores)
    assert outcome.best == "one" and outcome.right("near") and not outcome.right("worse")
