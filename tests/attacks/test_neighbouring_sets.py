"""Compare the answers to an attacker's random plans on two data sets that differ in one patient.

The messages and rejections are byte-identical, except that counts of patients may differ by rounding steps.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.core.errors import MedsiloError, Refused
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import VARYING, Request
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.shares import PARTS
from tests.conftest import slow_but
from tests.hospital import photograph, write_pixels, write_table
from tests.sites import site_of
from tests.unit.federation.test_protection import STUDY

STRICT = 32
KNOWN = 27
UNLIMITED = 10_000_000
Row = dict[str, Any]


def answer(plan: Plan, settings: SiteSettings, folder: Path) -> str:
    try:
        site = site_of(plan, "a", ["a"], settings, folder / "sites/a")
        facts = site.answer(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({})).facts
    except MedsiloError as error:
        return f"refused: {error}"
    return json.dumps({name: own for name, own in facts.items() if name not in VARYING}, sort_keys=True)


def settings_of(folder: Path, data: Any, **more: Any) -> SiteSettings:
    return make_settings({"device": "cpu", "data": data, "state_dir": str(folder / "state"), **more}, "x")


# ---------------------------------------------------------------------------------------------------- tables
def registry(folder: Path, known: Row | None) -> dict[str, Any]:
    drawn = np.random.default_rng(3)
    rows: list[Row] = [
        {"patient": f"p{number}", "age": 30 + number % 60, "creatinine": round(drawn.normal(90, 20), 1), "hiv": "no"}
        | {"outcome": number % 2}
        for number in range(120)
    ]
    rows[KNOWN] |= {"creatinine": 134.0, **(known or {})}
    write_table(folder / "cases.csv", rows if known is not None else [*rows[:KNOWN], *rows[KNOWN + 1 :]])
    return {"folder": str(folder), "outcome": ["outcome"]}


def drawn_plan(drawn: np.random.Generator) -> Plan | None:
    """Return a random plan of an attacker who looks for a patient; return None if the plan is invalid."""

    def some(*values: Any) -> Any:
        return values[int(drawn.integers(len(values)))]

    columns: list[Row] = []
    for name in drawn.permutation(["age", "creatinine"])[: drawn.integers(0, 3)].tolist():
        low = float(drawn.uniform(0, 150))
        columns.append({"name": name, "low": low, "high": low + float(drawn.uniform(0.01, 80))})
    if drawn.integers(2):
        columns.append(
            {"name": "hiv", "levels": some(["no", "yes"], ["yes", "unknown"], ["no", "x"], ["positive", "no"])}
        )
    task: Row = {"name": "table", "columns": columns, "missing": some("mean", "mark"), "kind": "classification"}
    task["labels"] = some(
        ["0", "1"], ["1", "0"], ["0", "1", "2"], ["0", "1", "9"], ["0", "2"], ["no", "yes"], ["a", "b"]
    )
    task["score"] = some("accuracy", "auroc", "balanced_accuracy")
    if drawn.integers(2):
        task |= {"shares": some([0.5, 0.25, 0.25], [0.8, 0.1, 0.1]), "split": int(drawn.integers(9))}
    if not drawn.integers(8):
        task["fold"] = {"number": int(drawn.integers(3)), "of": 3}
    if not drawn.integers(8):
        task["target"] = some("hiv", "creatinine", "nothing")
    values = {**STUDY, "task": task, "network": None, "seed": int(drawn.integers(99))}
    values["training"] = {"rounds": some(1, 3), "batch_size": some(1, 64)}
    try:
        return parse_plan(values)
    except MedsiloError:
        return None


@pytest.mark.parametrize("score", ["accuracy", "auroc", "balanced_accuracy"])
def test_the_steps_of_a_score_tell_nobody_that_one_patient_has_a_rare_class(
    score: str, tmp_path: Path, known_key: None
) -> None:
    """In an earlier version, rounding steps were wider if one patient had the third class, so a lead could detect this
    patient.
    """
    task = {"name": "table", "columns": [{"name": "age"}], "labels": ["0", "1", "2"], "score": score}
    plan = parse_plan({**STUDY, "task": task, "network": None, "training": {"rounds": 1}})
    rows: list[Row] = [
        {"patient": f"p{number}", "age": 30 + number % 60, "outcome": number % 2, "part": PARTS[number // 2 % 3]}
        for number in range(126)
    ]
    for row in [row for row in rows if row["part"] == "train"][-10:]:
        row["outcome"] = 2  # the hospital would leave out a class with fewer than five patients

    def steps(rare: str) -> Any:
        place = next((number for number, row in enumerate(rows) if row["part"] == rare), None)
        own = [row | ({"outcome": 2} if number == place else {}) for number, row in enumerate(rows)]
        write_table(tmp_path / f"data {rare}" / "cases.csv", own)
        data = {"folder": str(tmp_path / f"data {rare}"), "outcome": ["outcome"]}
        settings = settings_of(tmp_path / f"of {rare}", data, answers=UNLIMITED)
        for part, found in plan.task.survey("a", ["a"], 0, settings.data).parts.items():
            assert found.patients == 42 and (part == "train" or found.classes.get("2", 0) == (part == rare))
        return json.loads(answer(plan, settings, tmp_path / f"site {rare}"))["steps"]

    told = steps("nobody")
    assert {*told} == {"validation", "test"}
    assert [steps(part) for part in PARTS] == [told] * 3


VALUES: dict[str, list[Row | None]] = {
    "a value": [{}, {"creatinine": 41.0}, {"creatinine": ""}, {"creatinine": 9e99}, {"creatinine": "see letter"}],
    "a level": [{}, {"hiv": "yes"}, {"hiv": "x"}, {"hiv": ""}],
    "a label": [None, {"outcome": 2}, {"outcome": "x"}, {"outcome": ""}, {"outcome": 9e99}],
}


@pytest.mark.parametrize(
    ("kind", "questions"),
    slow_but([(kind, 40) for kind in VALUES], [(kind, number) for number in (40, 667) for kind in VALUES], [*VALUES]),
)
def test_drawn_plans_see_no_difference_of_two_tables(
    kind: str, questions: int, tmp_path: Path, known_key: None
) -> None:
    sets = {
        number: settings_of(tmp_path / f"of{number}", registry(tmp_path / f"data{number}", known), answers=UNLIMITED)
        for number, known in enumerate(VALUES[kind])
    }
    drawn = np.random.default_rng(len(kind))
    seen: set[tuple[int, bool]] = set()
    while len(seen) < questions:
        if (plan := drawn_plan(drawn)) is None:
            continue
        told = {answer(plan, own, tmp_path / f"of{number}/{len(seen)}") for number, own in sets.items()}
        assert len(told) == 1, (plan.resolved(), told)
        seen.add((len(seen), told.pop().startswith("refused")))
    assert {refused for _, refused in seen} == {True, False}


# ---------------------------------------------------------------------------------------------------- the attacks
def bisected(ask: Callable[[float, float], str], questions: int) -> set[float]:
    known: dict[float, str] = {}
    edges, places = set(), [(0.0, 200.0)]
    # bisection starts from two questions with different answers; the search on a grid finds these two questions
    for step in range(0, 200, 2):
        places.append((float(step), float(step + 2)))

    def at(high: float) -> str:
        if high not in known and len(known) < questions:
            known[high] = ask(0.0, high)
        return known.get(high, "")

    while places and len(known) < questions:
        low, high = places.pop()
        if at(low) == at(high):
            continue
        if high - low < 0.01:
            edges.add(round(high, 2))
        else:
            places += [(low, (low + high) / 2), ((low + high) / 2, high)]
    for value in np.random.default_rng(0).uniform(0, 200, questions - len(known)).tolist():
        at(value)
    assert len(known) == questions
    return edges if len({*known.values()}) > 1 else set()


def test_a_bisection_finds_a_value_that_answers_depend_on() -> None:
    """The attack succeeds against a hospital that counts only rows within the plan's bounds."""
    for questions in (100, 1000):
        assert 134.0 in {round(edge, 1) for edge in bisected(lambda low, high: str(high >= 134.0), questions)}


PUBLIC = {"counts": "they stand in our annual report", "validation": "so do these", "test": "and these"}
HOSPITALS: dict[str, Row] = {
    "defaults": {},
    "strict floor": {"min_patients_per_metric": STRICT},
    "epsilon of 1": {"privacy": {"epsilon": 1.0, "delta": 1e-3, "public": PUBLIC}},
}


@pytest.mark.parametrize(
    ("hospital", "questions"),
    slow_but([(own, 100) for own in HOSPITALS], [(own, number) for number in (100, 1000) for own in HOSPITALS], []),
)
def test_who_bisects_a_column_finds_nobody(hospital: str, questions: int, tmp_path: Path) -> None:
    """In an earlier version, a plan's bounds chose the counted rows, so 323 questions read the known patient's value,
    134.0, to two decimals.

    The hospital counts the rows of the whole data set.
    """
    private = hospital == "epsilon of 1"
    settings = settings_of(tmp_path, registry(tmp_path / "data", {}), answers=UNLIMITED, **HOSPITALS[hospital])
    more = {"privacy": {"epsilon": 1.0, "delta": 1e-3}} if private else {}

    def ask(low: float, high: float) -> str:
        column = {"name": "creatinine", "low": low, "high": max(high, low + 1e-6)}
        task = {"name": "table", "kind": "classification", "labels": ["0", "1"], "columns": [column]}
        task |= {"standardise": "none", "missing": "mark"} if private else {}
        told = answer(parse_plan({**STUDY, "task": task, "network": None, **more}), settings, tmp_path / f"{high}")
        assert not told.startswith("refused"), told
        return told

    assert bisected(ask, questions) == set()


@pytest.mark.parametrize("least", [None, STRICT])
def test_the_account_ends_an_attack_of_many_studies(least: int | None, tmp_path: Path) -> None:
    """By default, a lead may run a hundred studies on one data set."""
    more = {"min_patients_per_metric": least} if least else {}
    settings = settings_of(tmp_path, registry(tmp_path / "data", {}), **more)
    plan = parse_plan({**STUDY, "task": {"name": "table", "labels": ["0", "1"], "columns": ["age"]}, "network": None})
    begun = 0
    with pytest.raises(Refused, match="the hospital allows 100"):
        for begun in range(200):
            site_of(plan, "a", ["a"], settings, tmp_path / f"studies/{begun}/sites/a")
    assert begun == settings.most_studies == 100


# ---------------------------------------------------------------------------------------------------- images
IMAGES = 24


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(IMAGES):
        pixels, mask = photograph(number)
        write_pixels(folder / f"images/p{number}.png", pixels)
        write_pixels(folder / f"labels/p{number}.png", mask // 255)
    return folder


@pytest.mark.parametrize("odd", ["class", "structure", "visit"])
def test_plans_see_no_class_structure_or_visit_of_one_patient(
    odd: str, images: Path, tmp_path: Path, known_key: None
) -> None:
    """In an earlier version, a hospital rejected a study if only one patient belonged to a class, and thereby disclosed
    this patient.
    """
    told: list[list[str]] = []
    kind = "segmentation" if odd == "structure" else "classification"
    for having in (False, True):
        data = tmp_path / f"data{having}"
        rows = [
            {"image": f"images/p{number}.png", "patient": f"p{number}", "label": f"labels/p{number}.png"}
            if odd == "structure"
            else {"image": f"images/p{number}.png", "patient": f"p{number}", "label": str(number % 2)}
            for number in range(IMAGES)
        ]
        for name in ("images", "labels"):
            (data / name).mkdir(parents=True)
            for path in (images / name).iterdir():
                (data / name / path.name).write_bytes(path.read_bytes())
        if odd == "class" and having:
            write_pixels(data / "images/odd.png", photograph(99)[0])
            rows.append({"image": "images/odd.png", "patient": "odd", "label": "2"})
        if odd == "structure" and having:
            write_pixels(data / "labels/p3.png", photograph(3)[1] // 255 * 2)
        if odd == "visit" and having:
            write_pixels(data / "images/more.png", photograph(98)[0])
            rows.append({"image": "images/more.png", "patient": "p3", "label": "1"})
        write_table(data / "cases.csv", rows)
        settings = settings_of(tmp_path / f"of{having}", str(data), answers=UNLIMITED)
        own = []
        sets = [["0", "1"], ["0", "1", "2"], ["1", "0"], ["0", "2"], ["no", "yes"]]
        for number, labels in enumerate([["one"], ["one", "two"]] if kind == "segmentation" else sets):
            task = {**STUDY["task"], "kind": kind, "labels": labels}
            network = STUDY["network"] if kind == "classification" else None
            plan = parse_plan({**STUDY, "task": task, "network": network})
            own.append(answer(plan, settings, tmp_path / f"of{having}/{number}"))
        told.append(own)
    if odd == "visit":  # the rounding step depends on the patient with the most images
        told = [[without_cases(one) for one in own] for own in told]
    assert told[0] == told[1]
    assert sum(not one.startswith("refused") for one in told[0]) >= 2


def without_cases(text: str) -> str:
    if text.startswith("refused"):
        return text
    facts = json.loads(text)
    return json.dumps({name: own for name, own in facts.items() if name not in ("cases", "steps")})
