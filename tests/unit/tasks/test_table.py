"""Test a hospital's table: reading, errors, training, and a model's predictions for the rows of another table."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

import medsilo
from medsilo.check.data import data_findings
from medsilo.check.result import Report
from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError, PlanError
from medsilo.federation.protection import UNFIT
from medsilo.federation.refusals import public_reason
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import make_settings
from medsilo.tasks import columns
from medsilo.tasks.site_data import Cases
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import Problem
from medsilo.tasks.table_reader import TableReader
from tests import inprocess
from tests.conftest import over_all
from tests.sites import site_of

SITES = ("a", "b", "c")
COLUMNS = ["age", {"name": "sex", "levels": ["m", "f"]}]
HEAD = ("pid", "age", "sex", "outcome", "score", "time", "event", "site", "crea")


def lines(patients: int = 30, seed: int = 0) -> list[list[Any]]:
    drawn = np.random.default_rng(seed)
    age, sex = drawn.normal(60, 10, patients).round(1), drawn.integers(0, 2, patients)
    risk = (age - 60) / 10 + sex - 0.5
    times = (100 * np.exp(-risk) * drawn.uniform(0.8, 1.2, patients)).round(1)
    return [
        [
            f"SECRET-{seed}-{n}", age[n], "MF"[sex[n]], int(risk[n] > 0), round(50 + 10 * risk[n], 1), times[n],
            int(drawn.random() < 0.7), SITES[n % 3], n,
        ]
        for n in range(patients)
    ]  # fmt: skip


def write(folder: Path, rows: Sequence[Sequence[Any]], head: Sequence[str] = HEAD, name: str = "cases.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    return folder / name


def described(folder: Path, **more: Any) -> dict[str, Any]:
    levels = {"sex": {"M": "m", "F": "f"}}
    return {"folder": str(folder), "columns": {"patient": "pid"}, "levels": levels, **more}


def source_of(folder: Path, **more: Any) -> DataSource:
    source = make_settings({"data": described(folder, **more)}, "a test").data
    assert source
    return source


def plan_of(method: str = "fedavg", network: str = "linear", **task: Any) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": {"name": "table", "columns": COLUMNS, **task},
            "network": {"name": network},
            "training": {"rounds": 5, "batch_size": 8, "learning_rate": 0.3},
            "participation": {"sites": list(SITES)},
        }
    )


KINDS: dict[str, dict[str, Any]] = {
    "classification": {"kind": "classification"},
    "regression": {"kind": "regression", "target": "score", "range": [0, 100]},
    "survival": {"kind": "survival"},
}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for number, site in enumerate(SITES):
        write(folder / site, lines(seed=number))
    return folder


# -------------------------------------------------------------------------------------------------------------- reading
def test_cases_are_encoded_alike_and_standardised_by_the_training_part(hospitals: Path) -> None:
    data = plan_of(missing="mark").task.site_data("a", SITES, 0, source_of(hospitals))
    rows = {f"{row[0]}": row for row in lines()}
    own = [float(rows[patient][1]) for patient in data.train.patients]
    assert [len(getattr(data, part)) for part in ("train", "validation", "test")] == [18, 6, 6]
    for part in (data.train, data.test):
        for patient, inputs, target in zip(part.patients, part.inputs, part.targets, strict=True):
            _, age, sex, outcome, *_ = rows[patient]
            expected = [(age - np.mean(own)) / np.std(own, ddof=1), sex == "M", sex == "F", 0, 0]
            assert np.allclose(inputs, expected, atol=1e-6) and target == outcome
    assert data.survey.scales["age"] == pytest.approx((np.mean(own), np.std(own, ddof=1)))


def test_missing_values_follow_the_plans_rule_and_are_counted(tmp_path: Path) -> None:
    rows = lines()
    rows[3][1], rows[4][2] = "", "NA"
    write(tmp_path, rows)
    left = plan_of().task.survey("a", SITES, 0, source_of(tmp_path))
    assert sum(part.cases for part in left.parts.values()) == 30
    assert {p.what.partition(";")[0]: (p.severity, p.private) for p in left.problems} == {
        "lines have no value of 'age'": ("note", ("line 5",)),
        "lines have no value of 'sex'": ("note", ("line 6",)),
    }
    asked = plan_of().task.survey("a", SITES, 0, source_of(tmp_path, required=["age"]))
    assert sum(part.cases for part in asked.parts.values()) == 29
    data = plan_of(missing="mark").task.site_data("a", SITES, 0, source_of(tmp_path))
    found = {
        patient: inputs.tolist()
        for part in (data.train, data.validation, data.test)
        for patient, inputs in zip(part.patients, part.inputs, strict=True)
    }
    assert found["SECRET-0-3"][0] == 0 and found["SECRET-0-3"][3:] == [1, 0]
    assert found["SECRET-0-4"][1:] == [0, 0, 0, 1]


def test_numbers_may_be_written_with_a_comma(tmp_path: Path) -> None:
    rows = [[str(cell).replace(".", ",") for cell in row] for row in lines()]
    write(tmp_path / "comma", rows)
    write(tmp_path / "point", lines())
    told = {
        (kind, place): plan_of(**KINDS[kind]).task.site_data("a", SITES, 0, source_of(tmp_path / place, decimal=mark))
        for kind in ("regression", "survival")
        for place, mark in (("comma", ","), ("point", "."))
    }
    for kind in ("regression", "survival"):
        assert torch.equal(told[kind, "comma"].train.inputs, told[kind, "point"].train.inputs)
        assert torch.equal(told[kind, "comma"].train.targets, told[kind, "point"].train.targets)


@over_all("decimal, write", [(",", "{:,.1f}"), (".", "{:,.2f}")])
def test_blanks_and_apostrophes_between_thousands_are_read(decimal: str, write: str) -> None:
    """French and Swiss programs separate thousands by a space or an apostrophe.

    A point or a comma in a number can be ambiguous, but a space or an apostrophe is not.
    """
    for mark in (" ", "\u00a0", "\u202f", "'", "\u2019"):
        for value in (1365.5, -250000.0, 12345678.5):
            text = write.format(value).replace(".", "+").replace(",", mark).replace("+", decimal)
            assert mark in text and TableReader.number(text, decimal) == value
        for text in (f"12{mark}5", f"0{mark}171", f"1{mark}23456", f"1{mark}234{mark}56"):
            assert TableReader.number(text, decimal) is None, "no number in groups of three"


def test_a_code_for_not_known_is_noted_where_it_would_be_a_number(tmp_path: Path) -> None:
    """In earlier versions, the code -9 for an unknown age was silently read as an age of -9 years."""
    rows = lines()
    for number, row in enumerate(rows):
        row[1] = "-9" if number in (3, 7) else row[1]
    write(tmp_path, rows)

    def survey_of(folder: Path, **more: Any) -> Sequence[Problem]:
        return plan_of().task.survey("a", SITES, 0, source_of(folder, **more)).problems

    noted = {p.what.partition(";")[0]: (p.severity, p.private) for p in survey_of(tmp_path)}
    assert [(what, told) for what, told in noted.items() if "'age'" in what] == [
        (
            "lines have the same negative number of 'age', as registries write 'not known'",
            ("note", ("line 5", "line 9")),
        )
    ]
    assert not any("negative" in p.what for p in survey_of(tmp_path, missing=["", "NA", "-9"]))
    rows[3][1] = "-3.5"  # negative numbers with several different values are real measurements
    write(tmp_path, rows)
    assert not any("negative" in p.what for p in survey_of(tmp_path))


def test_a_line_of_totals_is_no_patient(tmp_path: Path) -> None:
    """In earlier versions, a row of totals was read as a patient with values a hundred times too large."""
    rows = lines()
    totals = [[patient, age, sex, *rows[0][3:]] for patient, age, sex in (("Summe", 2000, "M"), ("P", "", ""))]
    write(tmp_path, rows + totals)
    survey = plan_of().task.survey("a", SITES, 0, source_of(tmp_path))
    # values outside of the plan's columns remove no patient
    assert sum(part.cases for part in survey.parts.values()) == 31
    left = {p.what.partition(";")[0]: p.private for p in survey.problems if p.severity == "left out"}
    assert left == {"lines have no patient, or are totals": ("line 32",)}


def test_points_between_thousands_are_read_where_a_column_shows_what_they_are(tmp_path: Path) -> None:
    """In earlier versions, the German number 1.365,5 was not read, and the German 1.365 was silently read as 1.365."""
    plain, german = lines(), lines()
    for number, (one, other) in enumerate(zip(plain, german, strict=True)):
        one[1] = 980.5 if number % 3 == 0 else 1365.5 + number if number % 3 == 1 else 12000 + number
        text = f"{one[1]:,}".replace(",", "+").replace(".", ",").replace("+", ".")
        other[1] = text.removesuffix(",0")
    assert [row[1] for row in german[:3]] == ["980,5", "1.366,5", "12.002"]
    write(tmp_path / "plain", plain)
    write(tmp_path / "german", german)
    first, second = (
        plan_of().task.site_data("a", SITES, 0, source_of(tmp_path / place, decimal=mark)).train.inputs
        for place, mark in (("plain", "."), ("german", ","))
    )
    assert torch.equal(first, second)
    for other in (["1.365", "2.410"], ["1.365,5", "12.5"]):
        for number, row in enumerate(german):
            row[1] = other[number % 2]
        write(tmp_path / "unclear", german)
        with pytest.raises(DataError, match="'age': points may stand for thousands or for decimals"):
            plan_of().task.site_data("a", SITES, 0, source_of(tmp_path / "unclear", decimal=","))
        for row in german:
            row[1], row[8] = "60,5", row[1]
        write(tmp_path / "unclear", german)
        assert len(plan_of().task.site_data("a", SITES, 0, source_of(tmp_path / "unclear", decimal=",")).train) == 18


BAD: list[tuple[Callable[[list[list[Any]], int], Any], str, str]] = [
    (lambda rows, at: rows[at].__setitem__(1, "nan "), "note", "no value of 'age'"),
    (lambda rows, at: rows[at].__setitem__(1, "1e999"), "note", "'age' that is not a number"),
    (lambda rows, at: rows[at].__setitem__(1, "sixty"), "note", "'age' that is not a number"),
    (lambda rows, at: rows[at].__setitem__(1, "1_0"), "note", "'age' that is not a number"),
    (lambda rows, at: rows[at].__setitem__(2, "X"), "note", "level of 'sex' that the plan does not know"),
    (lambda rows, at: rows[at].__setitem__(3, "maybe"), "stops", "a label that is not the plan's (no, yes)"),
    (lambda rows, at: rows[at].__setitem__(0, ""), "left out", "no patient"),
    (lambda rows, at: rows[at].append("surplus"), "left out", "more or fewer cells"),
    (lambda rows, at: rows[at].__setitem__(8, "x" * 2000), "note", ""),
    (lambda rows, at: rows[at].__setitem__(0, "x" * 2000), "left out", "no patient"),
    (lambda rows, at: rows.append(rows[at]), "note", "lines of one patient are there twice"),
]


def test_lines_that_are_alike_are_no_patients_lines_where_nobody_is_named(tmp_path: Path) -> None:
    head, *rows = ([cell for place, cell in enumerate(row) if place not in (0, 8)] for row in [[*HEAD], *lines()])
    write(tmp_path, [*rows, rows[2], rows[2]], head)
    survey = plan_of().task.survey("a", SITES, 0, source_of(tmp_path, columns={}))
    (alike,) = [problem for problem in survey.problems if "alike" in problem.what]
    assert alike.count == 2 and "of one patient" not in alike.what
    assert sum(part.patients for part in survey.parts.values()) == len(rows)


@pytest.mark.parametrize(("spoil", "severity", "words"), BAD, ids=[words or "not read" for _, _, words in BAD])
def test_a_bad_line_is_named_privately(spoil: Callable, severity: str, words: str, tmp_path: Path) -> None:
    rows = lines()
    spoil(rows, 2)
    write(tmp_path, rows)
    survey = plan_of().task.survey("a", SITES, 0, source_of(tmp_path))
    found = [problem for problem in survey.problems if words and words in problem.what]
    assert [(problem.severity, problem.count) for problem in found] == ([(severity, 1)] if words else [])
    assert "SECRET" not in json.dumps([problem.what for problem in survey.problems])
    if words and "twice" not in words:
        assert found[0].private == ("line 4",)
    assert survey.usable == (severity != "stops")


@pytest.mark.parametrize(("spoil", "severity", "words"), BAD, ids=[words or "not read" for _, _, words in BAD])
def test_nobody_outside_learns_how_few_lines_are_bad(
    spoil: Callable, severity: str, words: str, tmp_path: Path
) -> None:
    """The check's texts are the same for each number of bad lines below `min_patients_per_metric`."""
    plan, told = plan_of(), dict[int, str]()
    for bad in (1, 3, 4, 5):
        rows = lines(60)
        for at in range(bad):
            spoil(rows, at)
        write(tmp_path, rows)
        findings = data_findings(plan.task.survey("a", SITES, 0, source_of(tmp_path)), plan, 5)
        report = Report({}, [one for one in findings if one.severity != "ok"])  # "ok" counts the good cases
        told[bad] = report.as_text() + json.dumps(report.as_json())
    assert told[1] == told[3] == told[4]
    assert ("(fewer than 5)" in told[4] and "(5)" in told[5]) == bool(words)


def test_nobody_outside_learns_how_few_lines_are_good(tmp_path: Path) -> None:
    """57 of 60 lines without a value would disclose that 3 lines have one."""
    plan, told = plan_of(), dict[int, str]()
    for bad in (55, 56, 57, 59):
        rows = lines(60)
        for at in range(bad):
            rows[at][1] = ""
        write(tmp_path, rows)
        findings = data_findings(plan.task.survey("a", SITES, 0, source_of(tmp_path)), plan, 5)
        told[bad] = next(one.what for one in findings if "no value of 'age'" in one.what)
    assert "(55)" in told[55] and told[56] == told[57] == told[59]


def test_a_refusal_does_not_tell_the_server_how_many_patients_are_in_two_parts(tmp_path: Path) -> None:
    """The exact count is in the error's private text, which stays at the hospital."""
    for several in (1, 7):
        head, rows = (
            (*HEAD, "part"),
            [[*row, ("train", "validation", "test")[at % 3]] for at, row in enumerate(lines())],
        )
        rows += [[*row[:-1], "test" if row[-1] == "train" else "train"] for row in rows[:several]]
        write(tmp_path / str(several), rows, head)
        columns = {"patient": "pid", "part": "part"}
        data = described(tmp_path / str(several), outcome=["outcome"]) | {"columns": columns}
        settings = make_settings({"device": "cpu", "data": data}, "a test")
        with pytest.raises(DataError) as refused:
            site_of(plan_of(), "a", SITES, settings, tmp_path / f"{several}/study/sites/a")
        assert public_reason(refused.value) == UNFIT and "two parts by the table" in refused.value.private
        assert f"known patients ({several}); " in refused.value.private


def test_an_unusable_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = plan_of().task
    path = write(tmp_path, lines())

    def words(**more: Any) -> str:
        with pytest.raises(DataError) as told:
            task.site_data("a", SITES, 0, source_of(tmp_path, **more))
        assert "pid" not in str(told.value) and "SECRET" not in str(told.value)
        return str(told.value)

    assert "lacks 1 column of the plan, first 'age'" in words(columns={"patient": "pid", "age": "years"})
    assert "a column that the plan does not read" in words(columns={"patient": "pid", "years": "age"})
    assert "which this site reads as patient, part, site" in words(columns={"patient": "pid", "age": "pid"})
    # column names are compared without regard to upper and lower case
    assert "which this site reads as patient, part, site" in words(columns={"patient": "pid", "age": "PID"})
    assert "two columns of one name" in words(columns={"patient": "pid", "age": "SEX"})
    assert "two columns of the plan" in words(columns={"patient": "pid", "age": "sex"})
    assert "not among the plan's labels" in words(label_map={"2": "dead"})
    assert "there is no table" in words(table="other.csv")
    assert "a table has no images" in words(images="*.png")
    # neither UTF-8 nor the Windows code page can decode the appended byte 0x81
    path.write_bytes(path.read_bytes() + b"\x81")
    assert "not in UTF-8" in words()
    write(tmp_path, lines(), [*HEAD[:-1], "age"])
    assert "two columns of one name" in words()
    write(tmp_path, lines())
    monkeypatch.setattr(columns, "MOST_LINES", 5)
    columns._read.cache_clear()
    assert "divide it" in words()
    monkeypatch.setattr(columns, "MOST_CHARACTERS", 9)
    columns._read.cache_clear()
    assert "a line of more than" in words()
    monkeypatch.setattr(columns, "MOST_BYTES", 5)
    assert "leave out columns" in words()
    path.unlink()
    path.symlink_to(write(tmp_path.parent / "elsewhere", lines()))
    assert "leads out of the data folder" in words()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"columns": ["age", "outcome"]}, "named twice"),
        ({"columns": ["age", "age"]}, "named twice"),
        ({"columns": [{"name": "sex", "levels": ["1", "1.0"]}]}, "each once"),
        ({"columns": [{"name": "age", "low": 3, "high": 2}]}, "low has to be below high"),
        ({"columns": [{"name": "age", "levels": ["a", "b"], "low": 2}]}, "no low, high, mean or deviation"),
        ({"standardise": "plan"}, "needs mean and deviation"),
        ({"kind": "regression", "range": [1, 1]}, "the least and the greatest possible"),
        ({"columns": ["a\x1b[2J"]}, "columns"),
    ],
)
def test_plans_that_make_no_sense_are_refused(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(**numbers)


@pytest.mark.parametrize(
    ("method", "network", "kind", "words"),
    [
        ("harmofl", "mlp", "classification", "columns have no spectrum"),
        ("fedper", "linear", "classification", "needs features"),
        ("fedbn", "linear", "classification", "but this network has none"),
        ("moon", "linear", "classification", "needs features"),
        ("fedsm", "mlp", "survival", "a single case has no concordance"),
        ("fedsm-ensemble", "mlp", "classification", "one number"),
    ],
)
def test_methods_that_cannot_work_on_a_table_say_why(method: str, network: str, kind: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(method, network, **KINDS[kind])


def test_no_promise_of_privacy_is_made_for_coxs_loss() -> None:
    private = ["privacy.epsilon=8", "privacy.delta=0.001", "privacy.clip=1"]
    assert plan_of("fedavg", standardise="none").with_changes(private).privacy
    with pytest.raises(PlanError, match="compares the cases of a batch"):
        plan_of("fedavg", **KINDS["survival"]).with_changes(private)


# -------------------------------------------------------------------------------------------------------------- by hand


def test_a_patients_share_of_the_pairs_decides_how_finely_it_is_told() -> None:
    task = plan_of(**KINDS["survival"]).task
    target = torch.tensor([[1.0, 1], [2, 0], [3, 0], [4, 0]])
    assert task.goal.sway(Cases(torch.zeros(4, 1), target, "abcd"), "abcd") == 1
    target[:, 1] = 1
    assert task.goal.sway(Cases(torch.zeros(4, 1), target, "abcd"), "abcd") == pytest.approx(3 / 6)
    drawn, names = np.random.default_rng(0), "aabbcdefgh"
    for _ in range(20):
        times, events = drawn.integers(1, 6, 10), drawn.integers(0, 2, 10)
        pairs = [
            {names[i], names[j]} if names[i] != names[j] else {names[i], names[i] * 2}
            for i in range(10)
            for j in range(10)
            if events[i] and (times[j] > times[i] or (times[j] == times[i] and not events[j]))
        ]
        most = max((sum((name in pair) + (name * 2 in pair) for pair in pairs) for name in set(names)), default=0)
        cases = Cases(torch.zeros(10, 1), torch.tensor(np.stack([times, events], 1)).float(), names)
        assert task.goal.sway(cases, names) == pytest.approx(min(1, most / len(pairs)) if pairs else math.inf)


def test_a_plan_writes_no_formula_into_predictions() -> None:
    """A class name that a lead chose could run as a formula when a hospital opens the predictions in a spreadsheet
    program.
    """
    assert plan_of(labels=["-1", "+1", "3.5"]).task.labels == ("-1", "+1", "3.5")
    for name in ("=1+1", "@SUM(A1)", "+cmd", "-2+3+cmd|' /C calc'!A0"):
        with pytest.raises(PlanError, match="task.labels"):
            plan_of(labels=["no", name])


def test_one_output_is_the_second_classes_score() -> None:
    task = plan_of().task
    output, target = torch.tensor([[0.7], [-0.2]]), torch.tensor([1, 1])
    assert task.goal.outputs == 1 and plan_of(labels=["x", "y", "z"]).task.goal.outputs == 3
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output[:, 0], target.float())
    assert float(task.goal.loss(output, target)) == pytest.approx(float(expected))
    assert task.goal.case_scores(output, target).tolist() == [1, 0]


def test_regression_is_scored_in_its_own_unit() -> None:
    task = plan_of(**KINDS["regression"]).task
    output, target = torch.tensor([[0.5], [1.2]]), torch.tensor([40.0, 70.0])
    figures = task.goal.figures(task.goal.counts(task.goal.measures(output, target), ["p", "q"], 1))
    assert figures["mae"] == pytest.approx(20) and figures["rmse"] == pytest.approx(np.sqrt(500))
    assert figures["closeness"] == pytest.approx(0.8)
    assert float(task.goal.loss(output, target)) == pytest.approx((0.1**2 + 0.5**2) / 2)


# -------------------------------------------------------------------------------------------------------------- a study
@pytest.mark.parametrize(
    "kind",
    [
        "classification",
        pytest.param("regression", marks=pytest.mark.slow),
        pytest.param("survival", marks=pytest.mark.slow),
    ],
)
def test_a_study_learns_predicts_and_exports(kind: str, hospitals: Path, tmp_path: Path) -> None:
    plan, run = plan_of(**KINDS[kind]), tmp_path / "fedavg-table"
    settings = make_settings(
        {"data": described(hospitals), "min_patients_per_metric": 1, "public_data": True}, "a test"
    )
    study = inprocess.run(plan, folder=run, settings=settings)
    metric = plan.task.goal.metric
    assert study.summary.pooled[metric] > 0.7
    assert "SECRET" not in (run / "summary.json").read_text() + (run / "rounds.jsonl").read_text()

    rows = [[row[0], row[1], row[2]] for row in lines(6, seed=9)]
    rows[2][1] = "old"
    table, out = write(tmp_path, rows, HEAD[:3], "new.csv"), tmp_path / "out"
    write_settings(tmp_path / "local", hospitals / "a")
    command = ["predict", str(run), str(table), "-o", str(out), "--settings", str(tmp_path / "local")]
    assert main([*command, "--site", "a"]) == 1
    found = list(csv.DictReader((out / "predictions.csv").open()))
    assert [(row["line"], row["patient"]) for row in found[:2]] == [("2", "SECRET-9-0"), ("3", "SECRET-9-1")]
    assert "not a number" in found[2]["error"] and not any(row["error"] for row in found if row["line"] != "4")
    cases = medsilo.predict(run, table, tmp_path / "python", site="a", device="cpu", settings=tmp_path / "local")
    assert cases == json.loads((out / "predictions.json").read_text())["cases"]
    mean, deviation = json.loads((run / "sites/a/data.json").read_text())["scales"]["age"]
    weights = load_file(run / "sites/a/best.safetensors")
    inputs = torch.tensor([(rows[0][1] - mean) / deviation, rows[0][2] == "M", rows[0][2] == "F"]).float()
    output = float(weights["0.weight"][0] @ inputs + weights["0.bias"][0])
    expected = {"classification": 1 / (1 + np.exp(-output)), "regression": 100 * output, "survival": output}[kind]
    name = {"classification": "probability_yes", "regression": "score", "survival": "log_risk"}[kind]
    assert float(found[0][name]) == pytest.approx(expected, rel=1e-4)

    assert main(["release", "export", str(run), "-o", str(tmp_path / "bundle")]) == 1


def write_settings(local: Path, folder: Path) -> None:
    local.mkdir(exist_ok=True)
    (local / "medsilo.yaml").write_text(json.dumps({"data": described(folder)}))


def test_a_model_whose_numbers_are_each_hospitals_own_asks_whose(hospitals: Path, tmp_path: Path) -> None:
    from medsilo_lab.deploy.predicted_rows import TablePredictor
    from medsilo_lab.deploy.source import Source

    plan = plan_of()
    source = Source(plan.algorithm.whole(plan.build_networks()), plan, {})
    with pytest.raises(MedsiloError, match="give --settings"):
        given = [hospitals / "a/cases.csv"]
        TablePredictor(source, given, tmp_path, torch.device("cpu"), print, None, tmp_path).predict()


def test_a_hospital_that_protects_its_patients_tells_coarsely(hospitals: Path) -> None:
    settings = make_settings({"data": described(hospitals, outcome=["time", "event"])}, "a test")
    study = inprocess.run(plan_of(**KINDS["survival"]), settings=settings)
    for site in study.summary.sites.values():
        told = site.test and site.test.get("concordance")
        assert told is None or told in (0, 0.5, 1)


@pytest.mark.slow
def test_check_and_disclosure_tell_no_patient(
    hospitals: Path, tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path / "local", hospitals / "a")
    (tmp_path / "plan.yaml").write_text(plan_of().to_yaml())
    job = [str(root / "jobs/fedavg"), "--plan", str(tmp_path / "plan.yaml")]
    local = str(tmp_path / "local")
    assert main(["check", job[0], *job[1:], "--settings", local, "--site", "a"]) == 0
    assert main(["disclosure", *job, "--settings", local]) == 0
    told = capsys.readouterr().out
    assert "18 train" in told and "0.weight" not in told and "SECRET" not in told


def test_one_table_is_dealt_to_simulated_sites(tmp_path: Path) -> None:
    write(tmp_path, lines(60))
    task = plan_of(partition={"kind": "column"}).task
    data = task.site_data("b", SITES, 0, source_of(tmp_path))
    known = {row[0]: row[7] for row in lines(60)}
    assert {known[patient] for patient in (*data.train.patients, *data.test.patients)} == {"b"}


@over_all(
    "before, middle, ends, line",
    [
        ("", "", "\n", 4),
        ("", "", "\r\n", 4),
        ("", "\n", "\n", 5),
        ("", '1,"a\nb"\n', "\n", 6),
        ("A title\n\n", "", "\n", 6),
    ],
)
def test_a_line_is_called_by_its_number_in_the_file(
    before: str, middle: str, ends: str, line: int, tmp_path: Path
) -> None:
    """The file has empty lines, quoted cells and titles, and its last line may end without a newline."""
    text = before + "x,name\n1,ann\n" + middle + "2,\n3,cy"
    for end in ("", "\n"):
        (tmp_path / "cases.csv").write_bytes((text + end).replace("\n", ends).encode())
        own = columns.read_columns(tmp_path / "cases.csv")
        empty = np.flatnonzero(own.column("name").isin({""}))
        assert own.lines_called(empty) == (f"line {line - 1}",)


def test_a_dealt_table_is_the_same_for_each_site_in_any_order(tmp_path: Path) -> None:
    """medsilo reads the table once for all sites, but each site gets only the notes about its own rows.

    After a change of the file, medsilo reads the table again.
    """
    rows = lines(60)
    rows[3][1] = rows[7][1] = ""
    write(tmp_path, rows)
    task = plan_of(partition={"kind": "column"}).task

    def of(site: str) -> tuple[Any, ...]:
        own = task.site_data(site, SITES, 0, source_of(tmp_path))
        assert own.survey
        parts = [(part.inputs.tolist(), part.targets.tolist(), part.patients) for part in (own.train, own.test)]  # type: ignore[attr-defined]
        return parts, own.survey.problems, own.survey.parts

    once = {site: of(site) for site in SITES}
    assert {site: of(site) for site in ("c", "c", "a", "b", "a")} == once
    write(tmp_path, rows[3:])
    assert all(of(site) != once[site] for site in SITES)


def test_folds_are_standardised_by_their_own_training_part(hospitals: Path) -> None:
    task = plan_of(fold={"number": 2, "of": 3}).task
    data = task.site_data("a", SITES, 0, source_of(hospitals))
    assert float(data.train.inputs[:, 0].mean()) == pytest.approx(0, abs=1e-6)
    assert float(data.train.inputs[:, 0].std()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("ending", ["parquet", "xlsx"])
def test_a_file_has_the_same_lines_for_a_table_of_images_and_of_patients(ending: str, tmp_path: Path) -> None:
    """In earlier versions, two readers numbered rows differently, because only one reader counted empty rows."""
    frame = pandas.DataFrame({"image": ["a.png", None, "b.png"], "label": ["x", None, "y"], "age": [1.5, None, 2.0]})
    path = tmp_path / f"cases.{ending}"
    getattr(frame, "to_excel" if ending == "xlsx" else "to_parquet")(path, index=False)
    table = columns.read_columns(path)
    by_column = [*zip(*(table.column(name).texts() for name in table.names), strict=True)]
    sheet = TableReader().read(path, {}, None)
    assert [tuple(cells) for _, cells in sheet.lines] == by_column and len(by_column) == 2
    assert TableReader.first_lines(path, 1) == [["image", "label", "age"], list(by_column[0])]


def test_parquet_is_read_as_csv(hospitals: Path, tmp_path: Path) -> None:
    columns = {name: list(values) for name, values in zip(HEAD, zip(*lines(), strict=True), strict=True)}
    parquet.write_table(arrow.table(columns), tmp_path / "cases.parquet")
    task = plan_of().task
    own = task.site_data("a", SITES, 0, source_of(tmp_path, table="cases.parquet"))
    other = task.site_data("a", SITES, 0, source_of(hospitals))
    assert torch.equal(own.train.inputs, other.train.inputs) and own.test.patients == other.test.patients
    own = task.site_data("a", SITES, 0, source_of(tmp_path, table="cases.parquet", columns={}))
    # a row's identifier depends on all cells of the row
    other = task.site_data("a", SITES, 0, source_of(hospitals, columns={}))
    assert own.train.patients == other.train.patients and "SECRET-0-0" not in own.train.patients


def test_settings_that_were_written_out_read_the_same_table(tmp_path: Path) -> None:
    write(tmp_path, [row[1:] for row in lines()], HEAD[1:])
    said = make_settings({"data": {**described(tmp_path), "columns": {}}}, "a test")
    again = make_settings(said.model_dump(mode="json"), "a test")
    one, other = (plan_of().task.site_data("a", SITES, 0, settings.data) for settings in (said, again))
    assert torch.equal(one.train.inputs, other.train.inputs) and one.test.patients == other.test.patients


def test_a_hospital_says_which_numbers_mean_not_known_and_what_holds_for_later_lines(tmp_path: Path) -> None:
    """In earlier versions, the code 999 was read as an age, and rows of later visits lacked the values of the first
    visit.
    """
    head = ("pid", "age", "sex", "diagnosed", "seen", "event")
    rows = [
        ("a", 61, "M", "2020-01-31", "", ""),
        ("b", 999, "F", "2020-02-01", "", ""),
        ("a", "", "", "2020-01-31", "2020-03-01", 1),
        ("c", "", "", "2021-12-31", "2022-01-01", 0),
        ("b", "", "", "2020-02-01", "2020-02-01", 0),
    ]
    more = {"codes": {"age": ["999"]}, "spans": {"time": ["diagnosed", "seen"]}, "fill": ["age", "sex"]}
    source = source_of(tmp_path, **more)
    task = plan_of(kind="survival").task
    found = task.rows(write(tmp_path, rows, head), source)  # type: ignore[attr-defined]
    assert found.places == ("line 4", "line 5", "line 6")
    assert found.outcomes.tolist() == [[30.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    np.testing.assert_equal(found.inputs, [[61.0, 1.0, 0.0], [np.nan] * 3, [np.nan, 0.0, 1.0]])


def test_dates_that_could_be_two_days_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, spans={"time": ["diagnosed", "seen"]})
    table = write(
        tmp_path, [("a", 61, "M", "3/4/2020", "5/6/2020", 1)], ("pid", "age", "sex", "diagnosed", "seen", "event")
    )
    with pytest.raises(DataError, match="whether the day or the month is first"):
        plan_of(kind="survival").task.rows(table, source)  # type: ignore[attr-defined]
