"""Test scores by subgroup: their declaration in a data set, their disclosure, and their display."""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import medsilo
from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError, Refused
from medsilo.core.yaml_text import dump_yaml, load_yaml
from medsilo.federation.protection import with_own_split
from medsilo.federation.subgroup_scores import reveals_few, safe_levels
from medsilo.plan import Plan, parse_plan
from medsilo.runs import paths
from medsilo.runs.messages import Tested
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Summary
from medsilo.site.data_set import DataSet, accept
from medsilo.site.query_budget import QueryBudget, data_set
from medsilo.site.settings import EachSites, SiteSettings, make_settings, read_settings_of_all
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.subgroups import HOSPITAL, Subgroup, members_of
from medsilo_lab.study import subgroups
from medsilo_lab.study.cells import Row, cells_of, run_cell
from medsilo_lab.study.evidence import Scores, parts_of_concordance
from medsilo_lab.study.subgroups import DisclosedScore, of_row, of_run
from medsilo_lab.study.verdict import Statistics
from medsilo_lab.study.verdict_file import About
from tests import inprocess
from tests.hospital import write_photos, write_table

SITES = ["a", "b"]
BY = ["--subgroup", "sex=Geschlecht", "--subgroup", "age=Alter:45,65", "--call", "w=female", "--call", "m=male"]
ASKED = ["--target", "outcome", *BY]
STUDY: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "labels": ["no", "yes"], "target": "outcome", "columns": [{"name": "marker"}]},
    "training": {"rounds": 15, "learning_rate": 0.6, "batch_size": 32},
    "participation": {"sites": SITES},
}


def registry(folder: Path, seed: int, patients: int = 300, women: float = 0.5, survival: bool = False) -> Path:
    """Write a table whose column "marker" predicts the outcome of women well and the outcome of men badly."""
    drawn = np.random.default_rng(seed)
    rows = []
    for number in range(patients):
        sex, outcome = "mw"[int(drawn.random() < women)], int(drawn.integers(2))
        marker = outcome + drawn.normal(0, 0.3 if sex == "w" else 3)
        age, event = int(drawn.integers(20, 90)), int(drawn.random() < 0.7)
        learned = {"time": round(float(drawn.exponential(100) / (1 + outcome)), 2), "event": event}
        rows.append(
            {"Patient ID": f"MUSTER-{seed}-{number}", "marker": round(float(marker), 3), "Alter": age,
             "Geschlecht": sex, **(learned if survival else {"outcome": ("no", "yes")[outcome]})}
        )  # fmt: skip
    write_table(folder / "registry.csv", rows)
    return folder


def made(folder: Path, out: Path, *more: str) -> DataSet:
    assert main(["data", str(folder), "-o", str(out), "--yes", *more]) == 0
    accept(out, "A. Person")
    return DataSet.read(out)


def hospitals(root: Path, *more: str, **of: Any) -> Path:
    for seed, site in enumerate(SITES):
        made(registry(root / "data" / site, seed, **of), root / "sets" / site, *(more or ASKED))
        (root / "settings" / site).mkdir(parents=True)
        own = {"device": "cpu", "data": str(root / "sets" / site)}
        (root / "settings" / site / "medsilo.yaml").write_text(dump_yaml(own))
    return root / "settings"


def levels_of(summary: Summary, site: str) -> dict[tuple[str, str], Any]:
    return {(one.subgroup, one.level): one for one in summary.sites[site].subgroups}


def section(page: Path) -> str:
    found = re.search(r'<section id="subgroups".*?</section>', page.read_text(), re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0])) if found else ""


def cases_by_sex(run: Path, site: str, folder: Path) -> dict[str, list[float]]:
    with (folder / "registry.csv").open(newline="") as file:
        outcome = {row["Patient ID"]: row for row in csv.DictReader(file)}
    plan = medsilo.Run(run).plan
    source = read_settings_of_all(run.parents[1] / "settings").of(site).data
    whole = plan.task.site_data(site, SITES, plan.seed, source)
    with (paths.site_folder(run, site) / paths.CASES).open(newline="") as file:
        scores = [float(row["accuracy"]) for row in csv.DictReader(file)]
    found: dict[str, list[float]] = {"w": [], "m": []}
    for patient, score in zip(whole.test.patients, scores, strict=True):  # type: ignore[attr-defined]
        found[outcome[patient]["Geschlecht"]].append(score)
    return found


# --------------------------------------------------------------------------------------------------------- the data set
def test_a_person_declares_subgroups_in_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = made(registry(tmp_path / "data", 0), tmp_path / "set", *ASKED)
    said = capsys.readouterr().out
    assert "sex: male, female; age: under 45, 45 to under 65, 65 and over" in said
    assert own.reading["subgroups"]["sex"]["levels"] == {"m": "male", "w": "female"}
    assert {"sex", "female", "age", "under 45"} <= {*own.words}
    again = made(tmp_path / "data", tmp_path / "set", "--target", "outcome")
    assert again.reading["subgroups"] == own.reading["subgroups"] and again.words == own.words
    gone = made(tmp_path / "data", tmp_path / "set", "--target", "outcome", "--subgroup", "age=")
    assert [*gone.reading["subgroups"]] == ["sex"] and "under 45" not in gone.words


def test_a_subgroup_that_divides_nobody_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = registry(tmp_path / "data", 0)
    wrong = {
        "id=Patient ID": "bands",
        "x=Nothing": "lacks the column",
        "sex": "NAME=COLUMN",
        "hospital=Geschlecht": "in every data set already",
    }
    command = ["data", str(folder), "-o", str(tmp_path / "set"), "--yes", "--target", "outcome", "--subgroup"]
    for text, told in wrong.items():
        assert main([*command, text]) == 1
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert told in said and not (tmp_path / "set").exists()


def test_a_word_that_is_taken_back_takes_its_subgroup_back(tmp_path: Path) -> None:
    made(registry(tmp_path / "data", 0), tmp_path / "set", *ASKED)
    path = tmp_path / "set" / DataSet.FILE
    values = load_yaml(path.read_text())
    values["words"].remove("female")
    path.write_text(dump_yaml(values))
    with pytest.raises(DataError, match="subgroup 'sex' has names that the key words lacks"):
        make_settings({"data": str(tmp_path / "set")}, "a test")


def test_images_take_subgroups_from_a_table_of_the_folder(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "data", [f"p{number}" for number in range(40)])
    with (folder / "cases.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    write_table(
        folder / "cases.csv", [row | {"scanner": ("Alpha", "Beta")[int(row["patient"][1:]) % 3 > 0]} for row in rows]
    )
    made(folder, tmp_path / "set", "--subgroup", "scanner=cases.csv/scanner")
    source = make_settings({"data": str(tmp_path / "set")}, "a test").data
    assert source and source.subgroups["scanner"].table == "cases.csv"
    who = members_of(source, source.folder)["scanner"]
    listed = CaseIndex.of_cases(source, source.folder, masks=False)
    assert {entry.patient: ("Alpha", "Beta")[int(entry.patient[1:]) % 3 > 0] for entry in listed.entries} == who


def test_bands_and_levels_name_a_patient() -> None:
    assert Subgroup(column="x", bands=(40, 60)).named(("39.9", "40", "60", "?"), ".") == [
        "under 40", "40 to under 60", "60 and over", None
    ]  # fmt: skip
    assert Subgroup(column="x", levels={1: "yes"}).named(("1.0", "0"), ".") == ["yes", None]
    for odd in ({"bands": (60, 40)}, {}, {"bands": (1,), "levels": {"a": "b"}}):
        with pytest.raises(ValueError, match="x"):
            Subgroup(column="x", **odd)


# ---------------------------------------------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a study on one machine, whose owner gets exact scores."""
    root = tmp_path_factory.mktemp("own")
    settings = hospitals(root)
    (root / "plan.yaml").write_text(dump_yaml(STUDY))
    done = ["run", "fedavg", "--plan", str(root / "plan.yaml"), "--engine", "inprocess", "--settings", str(settings)]
    assert main([*done, "-o", str(root / "runs"), "--name", "one"]) == 0
    return root / "runs/one"


def test_a_run_tells_each_subgroups_score_of_its_patients(own_run: Path) -> None:
    summary = read_summary(own_run)
    for site in SITES:
        found = cases_by_sex(own_run, site, own_run.parents[1] / "data" / site)
        for level, letter in (("female", "w"), ("male", "m")):
            one = levels_of(summary, site)["sex", level]
            assert one.patients == len(found[letter]) and one.score == pytest.approx(np.mean(found[letter]))
            assert one.spread == pytest.approx(np.var(found[letter], ddof=1))
        ages = [one.patients for (name, _), one in levels_of(summary, site).items() if name == "age"]
        assert sum(ages) == 60 == levels_of(summary, site)["hospital", site].patients


def test_a_runs_page_json_and_python_have_the_same_subgroups(own_run: Path) -> None:
    run = medsilo.Run(own_run)
    told = json.loads((own_run / paths.SUMMARY).read_text())["sites"]["a"]["subgroups"]
    assert {(one["subgroup"], one["level"]) for one in told} >= {("sex", "female"), ("age", "65 and over")}
    frame, shown = run.subgroups, section(run.report())
    assert [*dict.fromkeys(frame.index.get_level_values(0))] == ["sex", "age", "hospital"]
    women, men = frame.loc["sex", "female"], frame.loc["sex", "male"]
    assert women.low < women.score < women.high and women.score - men.score > 0.2
    assert women.differs == "male" and men.differs == "female"
    assert f"female {women.patients} {women.score:.2f}" in shown and "Differences by sex" in shown
    (sex,) = (one for one in of_run(run.summary) if one.subgroup == "sex")
    assert sex.pairs[0].sure and sex.pairs[0].mean == pytest.approx(men.score - women.score)


# ----------------------------------------------------------------------------------------------------- disclosed scores
def protected(root: Path, **of: Any) -> Summary:
    settings = read_settings_of_all(hospitals(root, **of))
    return inprocess.run(parse_plan(STUDY), folder=root / "runs/one", settings=settings).summary


def test_a_hospital_rounds_what_it_tells_of_subgroups(tmp_path: Path) -> None:
    summary = protected(tmp_path)
    for site in SITES:
        for one in levels_of(summary, site).values():
            if one.score is not None:
                assert one.step > 0 and one.patients % 5 == 0
                assert one.score / one.step == pytest.approx(round(one.score / one.step))
    shown = section(medsilo.Run(tmp_path / "runs/one").report())
    assert " to " in shown and "MUSTER" not in shown


def test_a_small_level_and_the_one_that_would_tell_it_stay(tmp_path: Path) -> None:
    """One to four of 60 test patients are men; readers could compute their score from the women's and the overall
    score.
    """
    for number in range(20):  # in two of three attempts, a hospital's random key assigns one to four men to the test
        root = tmp_path / f"draw {number}"
        summary = protected(root, women=0.95)
        if all(0 < _men_tested(root, site) < 5 for site in SITES):
            break
    for site in SITES:
        assert 0 < _men_tested(root, site) < 5
        told = levels_of(summary, site)
        assert told["sex", "male"].score is None and told["sex", "male"].patients == 0
        assert told["sex", "female"].score is None, "it would tell that of few men"
        assert told["hospital", site].score is not None
        members = subgroups.read_members(root / "runs/one", site)
        assert not len(members["sex", "female"]) and not len(members["sex", "male"])
    frame = medsilo.Run(root / "runs/one").subgroups
    assert frame.loc["sex", "female"].kind == "suppressed"
    assert "suppressed" in section(medsilo.Run(root / "runs/one").report())


def _men_tested(root: Path, site: str) -> int:
    with (root / "data" / site / "registry.csv").open(newline="") as file:
        men = {row["Patient ID"] for row in csv.DictReader(file) if row["Geschlecht"] == "m"}
    return len(men & {*_test_patients(root, parse_plan(STUDY), site)})


def follows(groups: Sequence[frozenset[str]], least: int) -> bool:
    people = sorted(frozenset[str]().union(*groups))
    known = np.array([[who in own for who in people] for own in groups], float)
    whole = np.linalg.matrix_rank(known)
    few = (several for number in range(1, least) for several in combinations(range(len(people)), number))
    return any(np.linalg.matrix_rank(np.delete(known, several, 1)) < whole for several in few)


def test_no_sum_or_difference_of_what_is_told_is_of_few_patients() -> None:
    drawn, floored = np.random.default_rng(0), 0
    for _ in range(60):
        people = [f"p{number}" for number in range(int(drawn.integers(6, 13)))]
        levels = {
            (f"s{place}", str(number)): frozenset(np.array(people)[which == number].tolist())
            for place in range(3)
            for which in [drawn.integers(drawn.integers(2, 4), size=len(people))]
            for number in range(3)
        }
        whole = frozenset(people)
        told = [levels[key] for key in safe_levels(levels, [whole], 4, lambda level: True)]
        assert not follows([whole, *told], 4) and not reveals_few([whole, *told], 4)
        only_floor = [own for own in levels.values() if len(own) >= 4]
        floored += follows([whole, *only_floor], 4)
        assert reveals_few([whole, *only_floor], 4) == follows([whole, *only_floor], 4)
    # if medsilo limited only the number of patients, more than 30 of the random tables would disclose a few patients'
    # score
    assert floored > 30


@pytest.mark.parametrize("classes", [1, 2])
def test_nobody_learns_whether_a_level_has_one_patient_or_none(classes: int) -> None:
    """In earlier versions, medsilo suppressed the women's score only if the test data contained a man."""
    women = [f"w{number}" for number in range(30)]
    found = set()
    for men in ([], ["m0"], ["m0", "m1", "m2"]):
        people = [*women, *men]
        levels = {("sex", "f"): frozenset(women), ("sex", "m"): frozenset(men), (HOSPITAL, "a"): frozenset(people)}
        groups = [frozenset(people[place::classes]) for place in range(classes)]
        found.add(tuple(safe_levels(levels, [frozenset(people), *groups], 5, lambda level: True)))
    assert found == {((HOSPITAL, "a"),)}


def test_a_data_set_that_lost_few_patients_tells_nothing_new(tmp_path: Path) -> None:
    settings = hospitals(tmp_path)
    plan = parse_plan(STUDY)

    def tells(name: str) -> dict[tuple[str, str], Any]:
        own = read_settings_of_all(settings)
        return levels_of(inprocess.run(plan, folder=tmp_path / "runs" / name, settings=own).summary, "a")

    first = tells("one")
    assert first["sex", "female"].score is not None and tells("two")["sex", "female"] == first["sex", "female"]
    table = tmp_path / "data/a/registry.csv"
    lines = table.read_text().splitlines()
    with (tmp_path / "runs/one/sites/a" / paths.SUBGROUPS).open(newline="") as file:
        women = [row for row in csv.DictReader(file) if row["level"] == "female"]
    assert women
    gone = next(place for place, line in enumerate(lines) if ",w," in line and _tested(tmp_path, plan, line))
    table.write_text("\n".join(line for place, line in enumerate(lines) if place != gone) + "\n")
    made(tmp_path / "data/a", tmp_path / "sets/a", *ASKED)
    assert "female" not in {level for (_, level), one in tells("three").items() if one.score is not None}


def _tested(root: Path, plan: Plan, line: str) -> bool:
    known = json.loads((root / "runs/one/sites/a" / paths.DATA).read_text())
    return known is not None and line.split(",")[0] in _test_patients(root, plan)


def _test_patients(root: Path, plan: Plan, site: str = "a") -> Iterable[str]:
    source = read_settings_of_all(root / "settings").of(site).data
    assert source
    book = QueryBudget(paths.hospital_folder(root / "runs/one/sites" / site) / site)
    own = with_own_split(source, book, data_set(source, "table"), writes=False)
    return plan.task.site_data(site, SITES, plan.seed, own).test.patients


def answer(**changes: Any) -> dict[str, Any]:
    counted = {"train": 60, "validation": 20, "test": 20}
    own = {"subgroup": "sex", "level": "female", "patients": 10, "score": 0.5, "spread": 0.1, "step": 0.0}
    return {
        "task": "test", "round": 4, "study": "x", "packages": {}, "cases": counted, "patients": counted,
        "seconds": 1.0, "memory": 1.0, "warnings": [], "suppressed": [], "test": 0.5, "test_loss": 0.5, "selected": 4,
        "counts": {}, "outcome": None, "subgroups": [own | changes],
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"patients": 21}, {"score": float("nan")}, {"spread": 5.0}, {"level": "a\nb"}, {"level": "x" * 100},
        {"spread": None}, {"patients": -1}, {"step": -1.0}, {"more": 1},
    ],
)  # fmt: skip
def test_a_lying_answer_costs_its_sender(changes: dict[str, Any]) -> None:
    assert Tested.received(answer()).subgroups[0].level == "female"
    with pytest.raises(Refused):
        Tested.received(answer(**changes))
    twice = answer()
    twice["subgroups"] *= 2
    with pytest.raises(Refused, match="occurs twice"):
        Tested.received(twice)


# ------------------------------------------------------------------------------------------------------------- survival
def test_survival_has_concordance_by_subgroup(tmp_path: Path) -> None:
    settings = hospitals(tmp_path, "--set", "survival=survival", *BY, survival=True)
    task = {"name": "table", "kind": "survival", "columns": [{"name": "marker"}]}
    plan = parse_plan({**STUDY, "task": task, "training": {"rounds": 2, "learning_rate": 0.1}})
    own = SiteSettings(device="cpu", public_data=True)
    each = {site: read_settings_of_all(settings).of(site).model_copy(update={"public_data": True}) for site in SITES}
    summary = inprocess.run(plan, folder=tmp_path / "runs/one", settings=of_each(own, each)).summary
    with (tmp_path / "runs/one/sites/a" / paths.CASES).open(newline="") as file:
        cases = [*csv.DictReader(file)]
    with (tmp_path / "runs/one/sites/a" / paths.SUBGROUPS).open(newline="") as file:
        women = {row["patient"] for row in csv.DictReader(file) if row["level"] == "female"}
    ranked = [
        np.array([float(row[name]) for row in cases if row["patient"] in women]) for name in ("time", "event", "risk")
    ]
    parts = parts_of_concordance(*ranked)
    told = levels_of(summary, "a")["sex", "female"]
    assert summary.metric == "concordance" and told.score == pytest.approx(parts.mean())
    assert told.spread == pytest.approx(parts.var(ddof=1))
    assert told.score != pytest.approx(levels_of(summary, "a")["sex", "male"].score)


def of_each(own: SiteSettings, sites: dict[str, SiteSettings]) -> SiteSettings:
    return EachSites(**{name: getattr(own, name) for name in SiteSettings.model_fields}, sites=sites)


# --------------------------------------------------------------------------------------------------------- a comparison
def test_a_comparison_tells_of_subgroups_what_differs(tmp_path: Path) -> None:
    settings = hospitals(tmp_path)
    (tmp_path / "plan.yaml").write_text(dump_yaml(STUDY))
    done = ["compare", "--plan", str(tmp_path / "plan.yaml"), "--methods", "local,fedavg", "--at-once", "1"]
    assert main([*done, "--settings", str(settings), "-o", str(tmp_path / "compared")]) == 0
    found = medsilo.Comparison(tmp_path / "compared")
    tables = {one.subgroup: one for one in found.verdict.subgroups}
    assert [*tables] == ["sex", "age", "hospital"] and {one.row for one in tables.values()} == {"fedavg"}
    (pair,) = tables["sex"].pairs
    assert pair.sure and (pair.first, pair.second) == ("male", "female") and pair.high < 0
    assert not any(one.sure for name in ("age", "hospital") for one in tables[name].pairs)
    women = found.subgroups.loc["sex", "female"]
    assert women.difference_low <= women.difference <= women.difference_high and women.low < women.score < women.high
    exact = [cell for cell in found.runs.values() if cell.plan.algorithm.name == "fedavg"]
    each = []
    for run in exact:
        told = [levels_of(run.summary, site)["sex", "female"] for site in SITES]
        each.append(sum(one.score * one.patients for one in told) / women.patients)
    assert women.score == pytest.approx(np.mean(each))
    shown = section(found.report())
    assert "Difference from local" in shown and f"female {women.patients} {women.score:.2f}" in shown
    told = json.loads((tmp_path / "compared" / paths.VERDICT).read_text())["subgroups"]
    assert [one["subgroup"] for one in told] == [*tables]


@pytest.mark.slow
def test_a_comparison_names_levels_whose_scores_stay(tmp_path: Path) -> None:
    """In earlier versions, the page omitted suppressed subgroups, so tested men did not appear on the page."""
    settings = hospitals(tmp_path, *ASKED, women=0.98)
    (tmp_path / "plan.yaml").write_text(dump_yaml({**STUDY, "training": {"rounds": 2}}))
    done = ["compare", "--plan", str(tmp_path / "plan.yaml"), "--methods", "local,fedavg", "--seeds", "0"]
    assert main([*done, "--settings", str(settings), "-o", str(tmp_path / "compared")]) == 0
    found = medsilo.Comparison(tmp_path / "compared")
    (sex,) = (one for one in found.verdict.subgroups if one.subgroup == "sex")
    assert [one.level for one in sex.levels] == ["male", "female"]
    assert sex.levels[0].score.kind == "suppressed" and sex.levels[0].patients == 0 and not sex.pairs
    assert "male too few suppressed" in section(found.report())


def test_a_damaged_list_of_subgroups_is_one_line(tmp_path: Path, own_run: Path) -> None:
    cells = cells_of(parse_plan(STUDY), [Row.parse("local")], [0], [], tmp_path / "cmp")
    settings = read_settings_of_all(own_run.parents[1] / "settings")
    public = {site: settings.of(site).model_copy(update={"public_data": True}) for site in SITES}
    assert run_cell(cells[0], of_each(SiteSettings(device="cpu"), public)) == ""
    path = cells[0].folder / "sites/a" / paths.SUBGROUPS
    path.write_text("subgroup,level,patient\nsex,female,x\n")
    with pytest.raises(MedsiloError, match="damaged: repeat the run"):
        Statistics(cells, None).verdict(About(title="x"), [])


# ----------------------------------------------------------------------------------------------------------- statistics
def study_of(drawn: np.random.Generator, people: Sequence[int], gap: float, seeds: int = 4) -> list[dict[str, Any]]:
    own = [drawn.normal(0.8 - gap * place, 0.06, size) for place, size in enumerate(people)]
    luck = drawn.normal(0, 0.01, seeds)
    study = []
    for more in luck:
        each = [np.clip(values + more + drawn.normal(0, 0.02, len(values)), 0, 1) for values in own]
        study.append({"a": {("s", str(place)): Scores(one, np.arange(len(one))) for place, one in enumerate(each)}})
    return study


def test_differences_between_levels_hold_their_error_and_find_what_is_there() -> None:
    drawn = np.random.default_rng(1)
    false = sum(any(one.sure for one in of_row("r", study_of(drawn, (20, 15, 30), 0.0))[0].pairs) for _ in range(300))
    assert false <= 0.05 * 300 + 2 * (0.05 * 0.95 * 300) ** 0.5
    found = sum(of_row("r", study_of(drawn, (30, 30), 0.06))[0].pairs[0].sure for _ in range(60))
    assert found > 50  # Student's t-test finds the difference in 96 of 100 studies
    few = of_row("r", study_of(drawn, (5, 40), 0.5))[0]
    assert few.levels[0].few and not few.pairs[0].sure


def test_a_runs_interval_covers_with_what_hospitals_told() -> None:
    drawn, missed = np.random.default_rng(2), dict.fromkeys(("share", "score"), 0)
    for _ in range(1000):
        for kind, mean in (("share", 0.8), ("score", 0.75)):
            values = (drawn.random(30) < 0.8).astype(float) if kind == "share" else drawn.beta(6, 2, 30)
            disclosed = DisclosedScore(values.mean(), values.mean(), float(values.var(ddof=1)) / 30, 30, 1)
            low, high = disclosed.within(0.05)
            missed[kind] += not low <= mean <= high
    assert all(number <= 70 for number in missed.values()), missed
