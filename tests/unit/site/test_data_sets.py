"""`medsilo data` makes a data set from a folder or a table; a person accepts the data set, and medsilo detects later
changes.
"""

import hashlib
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from medsilo.check.hospital_checks import KitAtHome
from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo.plan import load_plan, parse_plan
from medsilo.runs import paths
from medsilo.runs.messages import Request
from medsilo.runs.own_files import Weighed
from medsilo.runs.reading import read_of_sites
from medsilo.site.data_set import (
    ACCEPTED,
    INVENTORY,
    DataSet,
    accept,
    check_accepted,
    inventory_text,
    read_inventory,
    scan,
)
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.case_index import SPECIAL, CaseIndex
from medsilo_lab.jobs import write_job
from medsilo_lab.report.page import report_of
from medsilo_lab.start.dataset_layout import DatasetLayout
from medsilo_lab.start.making import make_each
from medsilo_lab.start.questions import Question
from medsilo_page.pages import serve
from tests import inprocess
from tests.conftest import make_plan
from tests.hospital import write_photos, write_table
from tests.sites import site_of
from tests.unit.cli.test_houserules import modules_after
from tests.unit.medsilo_page.test_site_page import Visitor, serving
from tests.unit.site.test_approvals import Home

PATIENTS = 40


def table(folder: Path, patient: str | None = "Patient ID", lines: int = 2) -> Path:
    drawn = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {
            **({patient: f"MUSTER-{who}"} if patient else {}),
            "age": int(drawn.integers(30, 80)) + visit,
            "outcome": ("no", "yes")[who % 2],
        }
        for who in range(PATIENTS)
        for visit in range(lines)
    ]
    write_table(folder / "registry.csv", rows)
    return folder


def made(folder: Path, out: Path, *more: str) -> DataSet:
    assert main(["data", str(folder), "-o", str(out), "--yes", *more]) == 0
    return DataSet.read(out)


def test_a_data_set_says_who_is_a_patient_and_what_it_tells(tmp_path: Path) -> None:
    own = made(table(tmp_path / "data"), tmp_path / "set", "--target", "outcome")
    assert (own.patients.known, own.patients.count, own.patients.most_cases) == (True, PATIENTS, 2)
    assert "'Patient ID'" in own.patients.by
    told = {part: (one.patients, one.cases) for part, one in own.tells.items()}
    assert told == {"train": (25, 50), "validation": (10, 20), "test": (10, 20)}
    assert {"age", "outcome", "no", "yes"} == {*own.words}
    # the data set's file and the inventory contain no patient's name
    assert "MUSTER" not in (tmp_path / "set" / DataSet.FILE).read_text()
    assert [*read_inventory(tmp_path / "set")] == ["registry.csv"]


def test_what_may_be_mailed_has_no_exact_number_of_patients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two versions of a data set that differ by one patient have the same shareable output of `medsilo check`."""
    kit, out = hospital(tmp_path)
    own = DataSet.read(out)
    count = own.patients.count + 1
    (out / DataSet.FILE).write_text((out / DataSet.FILE).read_text().replace(f"count: {PATIENTS}", f"count: {count}"))
    private = ["--private", str(tmp_path / "private.txt")]
    for words in (["check", "--json", *private], ["disclosure", str(tmp_path / "job")]):
        capsys.readouterr()
        main([*words, "--kit", str(kit)])
        text = capsys.readouterr().out
        assert "about 45" in text and not any(f"{number}, at most" in text for number in (PATIENTS, count))


def test_nobody_is_taken_for_a_patient_without_being_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In earlier versions, each row silently became a patient, so a patient's rows were in training and test data."""
    folder = table(tmp_path / "data", patient=None, lines=1)
    assert main(["data", str(folder), "-o", str(tmp_path / "set"), "--yes"]) == 1
    said = capsys.readouterr().err
    assert "nothing names the patient of 40 lines" in said and "--set" in said and "\n" not in said.strip()
    assert not (tmp_path / "set").exists()
    own = made(folder, tmp_path / "set", "--set", "patients=each line is a patient")
    assert not own.patients.known and "said by the person" in own.patients.by
    assert own.answers == {"patients": "each line is a patient"}


def test_a_wrong_answer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = table(tmp_path / "data", patient=None, lines=1)
    assert main(["data", str(folder), "-o", str(tmp_path / "set"), "--yes", "--set", "patients=nosuch"]) == 1
    assert "nosuch" not in (said := capsys.readouterr().err) or said.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- acceptance
def test_a_person_accepts_what_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    assert main(["data", "accept", str(out)]) == 1 and "--by" in capsys.readouterr().err
    assert main(["data", "accept", str(out), "--by", "A. Person"]) == 0
    assert main(["data", "check", str(out)]) == 0
    with (folder / "registry.csv").open("a") as file:
        file.write("MUSTER-99,50,no\n")
    assert main(["data", "check", str(out)]) == 1
    assert "1 file changed" in capsys.readouterr().out
    assert main(["data", "accept", str(out), "--by", "A. Person"]) == 1
    assert "make the data set again" in capsys.readouterr().err


def test_diff_says_what_is_another_since_a_person_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    assert main(["data", "diff", str(out)]) == 1 and "nobody has accepted" in capsys.readouterr().err
    assert main(["data", "accept", str(out), "--by", "A. Person"]) == 0
    assert main(["data", "diff", str(out)]) == 0 and "nothing changed" in capsys.readouterr().out
    lines = (folder / "registry.csv").read_text().splitlines()
    head, *rows = [f"{line},{['smoker', 9, 5][min(place, 1 + place % 2)]}" for place, line in enumerate(lines)]
    rows += [f"MUSTER-{who},{50 + who % 9},no,{who % 3}" for who in range(900, 920)]
    (folder / "registry.csv").write_text("\n".join([head, *rows]) + "\n")
    made(folder, out)
    assert main(["data", "check", str(out)]) == 1, "nobody accepted this version"
    capsys.readouterr()
    assert main(["data", "diff", str(out), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == {"new": [], "gone": [], "changed": ["registry.csv"]} and told["accepted"] == "A. Person"
    assert "word 'smoker': may leave now" in told["data_set"]
    assert "patients.count: 40 -> 60" in told["data_set"] and "tells.train.patients: 25 -> 35" in told["data_set"]
    assert not [line for line in told["data_set"] if "inventory" in line or "MUSTER" in line]
    assert main(["data", "accept", str(out), "--by", "B. Person"]) == 0
    assert main(["data", "diff", str(out)]) == 0 and main(["data", "check", str(out)]) == 0


STUDY: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "columns": ["age"], "labels": ["no", "yes"]},
    "network": {"name": "linear"},
    "training": {"rounds": 1, "batch_size": 8},
    "participation": {"sites": ["a"]},
}


def joined(settings: SiteSettings, folder: Path, **place: Any) -> dict[str, Any]:
    plan = parse_plan(STUDY)
    site = site_of(plan, "a", ["a"], settings, folder / "sites/a", **place)
    return site.answer(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({})).facts


def test_a_hospital_takes_part_with_what_was_accepted(tmp_path: Path) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    own = made(folder, out)
    settings = make_settings({"device": "cpu", "data": str(out), "state_dir": str(tmp_path / "state")}, "a test")
    assert settings.data and settings.data.folder == folder and settings.data.outcome == ("outcome",)
    with pytest.raises(MedsiloError, match="nobody has accepted"):
        joined(settings, tmp_path / "one")
    accept(out, "A. Person")
    facts = joined(settings, tmp_path / "two")
    assert facts["patients"] == {part: told.patients for part, told in own.tells.items()}
    assert facts["cases"] == {part: told.cases for part, told in own.tells.items()}
    changed = (out / DataSet.FILE).read_text().replace("registry.csv", "registry2.csv")
    (out / DataSet.FILE).write_text(changed)
    with pytest.raises(MedsiloError, match="differs from the accepted version"):
        joined(settings, tmp_path / "three")


def test_files_that_change_after_it_was_accepted_stop_a_study(tmp_path: Path) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    accept(out, "A. Person")
    settings = make_settings({"device": "cpu", "data": str(out)}, "a test")
    with (folder / "registry.csv").open("a") as file:
        file.write("MUSTER-99,50,no\n")
    with pytest.raises(MedsiloError, match="differ from its data set"):
        joined(settings, tmp_path / "one")


def test_an_inventory_that_was_written_to_fit_changed_files_stops_a_study(tmp_path: Path) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    accept(out, "A. Person")
    with (folder / "registry.csv").open("a") as file:
        file.write("MUSTER-99,50,no\n")
    (out / INVENTORY).write_text(inventory_text(scan({"registry.csv": folder / "registry.csv"}, {})))
    with pytest.raises(MedsiloError, match="does not match its digest in data.yaml"):
        joined(make_settings({"device": "cpu", "data": str(out)}, "a test"), tmp_path / "one")
    assert main(["data", "check", str(out)]) == 1


def test_an_acceptance_that_was_written_by_hand_is_refused_with_a_kit(tmp_path: Path) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    accept(out, "A. Person")
    with pytest.raises(MedsiloError, match="accepted without its kit.*--kit KIT"):
        check_accepted(out, key)
    accept(out, "A. Person", other)
    with pytest.raises(MedsiloError, match="another key"):
        check_accepted(out, key)
    accept(out, "A. Person", key)
    assert check_accepted(out, key).by == "A. Person"


# ---------------------------------------------------------------------------------------------------- versions
def test_versions_share_their_lineage_and_read_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_photos(tmp_path / "data", [f"p{number}" for number in range(30)]), tmp_path / "set"
    first = made(folder, out)
    assert first.inventory.files == 31
    (folder / "images/p3.png").write_bytes((folder / "images/p4.png").read_bytes())
    read: list[Path] = []
    opened = os.open

    def noted(path: Path, *more: Any, **others: Any) -> Any:
        read.append(Path(path))
        return opened(path, *more, **others)

    known = read_inventory(out)
    monkeypatch.setattr(os, "open", noted)
    scan(CaseIndex.files_below(folder)[0], known)
    assert [path.name for path in read] == ["p3.png"]
    monkeypatch.undo()
    second = made(folder, out)
    assert second.lineage == first.lineage and second.identity != first.identity


def test_a_data_set_keeps_no_images_ready_that_nobody_trains_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = write_photos(tmp_path / "data", [f"p{number}" for number in range(30)]), tmp_path / "scratch"
    (folder / "images/p3.png").write_bytes((folder / "images/p5.png").read_bytes())
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    written: dict[str, int] = {}

    def ask(question: Question) -> str:
        written[question.key] = len([*scratch.rglob("*.safetensors")])
        return question.proposed

    found = make_each(DatasetLayout(folder, "hospital-a", said={"alone": True}), ask)
    assert written["copies"] == 0
    assert found.sets[""].data_set.patients.count == 29


def test_an_inventory_is_in_the_order_of_names_however_large_files_are(tmp_path: Path) -> None:
    contents = {f"{number:03}": bytes([number]) * (3 << 20 if number % 7 == 3 else number) for number in range(80)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seen: list[int] = []
    found = scan({name: tmp_path / name for name in reversed(contents)}, {}, seen.append)
    assert {own.name: own.sha256 for own in found} == {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
    }
    assert [own.name for own in found] == [*contents] and sum(seen) == sum(map(len, contents.values()))


def test_a_file_that_grows_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "slow.png", os.read
    path.write_bytes(b"first")

    def grown(place: int, size: int) -> bytes:
        piece = reads(place, size)
        with path.open("ab") as file:
            file.write(piece[:1])
        return piece

    monkeypatch.setattr(os, "read", grown)
    with pytest.raises(DataError, match="changed while it was read") as raised:
        scan({"slow.png": path}, {})
    assert "slow.png" in raised.value.private


def test_a_table_in_csv_needs_no_pandas(tmp_path: Path, root: Path) -> None:
    """Importing pandas would take a third of the time of `medsilo data` for a long table."""
    given = ["data", str(table(tmp_path / "data")), "-o", str(tmp_path / "set"), "--yes"]
    assert "pandas" not in modules_after(root, given)


def test_a_damaged_inventory_is_one_line(tmp_path: Path) -> None:
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    for text in ("", "file,bytes\n", "file,bytes,changed,sha256\nx,y,z,w\n"):
        (out / INVENTORY).write_text(text)
        with pytest.raises(DataError, match="missing or damaged"):
            read_inventory(out)
    before = DataSet.read(out)
    assert made(folder, out) == before and [*read_inventory(out)] == ["registry.csv"]
    (out / INVENTORY).write_text("")
    for text in ("{", "[]", json.dumps({"identity": "x"})):
        (out / ACCEPTED).write_text(text)
        with pytest.raises(MedsiloError):
            joined(make_settings({"device": "cpu", "data": str(out)}, "a test"), tmp_path / "one")


# ---------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("weighting", ["patients", "cases", "uniform"])
def test_a_hospital_reads_what_its_updates_count_by(tmp_path: Path, weighting: str) -> None:
    """In earlier versions, one patient with twenty rows silently changed the disclosed number of cases."""
    rows = [
        {"patient": f"p{number}", "age": 30 + number + line, "outcome": ("no", "yes")[number % 2], "part": part}
        for number, part in enumerate(["train"] * 21 + ["validation"] * 10 + ["test"] * 10)
        for line in range(20 if number == 3 else 1)
    ]
    write_table(tmp_path / "data/cases.csv", rows)
    data = {"folder": str(tmp_path / "data"), "outcome": ["outcome"]}
    settings = make_settings({"device": "cpu", "data": data}, "a test")
    plan, run = parse_plan(STUDY, [f"algorithm.weighting={weighting}"]), tmp_path / "run"
    inprocess.run(plan, folder=run, settings=settings)
    own = read_of_sites(Weighed, run, paths.WEIGHT)["a"]
    assert (own.patients, own.cases, own.told_patients) == (21, 40, 20)
    assert own.weight == {"patients": 21, "cases": 40, "uniform": 1}[weighting]
    record = json.loads((run / paths.SUMMARY).read_text())["sites"]["a"]
    assert (record["patients"]["train"], record["cases"]["train"]) == (own.told_patients, own.told_cases)
    assert own.told_weight == {"patients": 20, "cases": own.told_cases, "uniform": 1}[weighting]
    assert paths.WEIGHT not in paths.PUBLISHED
    page = report_of(run).page.read_text()
    assert "Weights of the hospital" in page and (own.off >= 0.1) == (weighting == "cases") == (
        "Rounded weight" in page
    )


def test_nothing_is_weighed_where_numbers_leave_exactly(tmp_path: Path) -> None:
    inprocess.run(make_plan("fedavg", "training.rounds=1"), folder=tmp_path / "run")
    assert not [*(tmp_path / "run").rglob(paths.WEIGHT)]


# ---------------------------------------------------------------------------------------------------- its words
WORDS = {"Geschlecht": "sex", "m": "male", "w": "female", "Alter": "age", "Verlauf": "course", "schlecht": "bad"}
WORDS |= {"gut": "good"}


def registry_in(folder: Path, words: dict[str, str]) -> Path:
    drawn, rows = np.random.default_rng(0), []
    for who in range(PATIENTS):
        told = {"age": int(drawn.integers(30, 80)), "sex": ("male", "female")[who % 2], "course": "good"}
        told["course"] = ("good", "bad")[int(told["age"] + drawn.normal(0, 9) > 55)]
        rows.append({"patient": f"p{who}"} | {words.get(key, key): words.get(own, own) for key, own in told.items()})
    write_table(folder / "registry.csv", rows)
    return folder


def test_hospitals_with_other_words_take_part_in_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hospital's data set maps the hospital's names to the plan's names, and no hospital discloses its own names."""
    own = {plans: here for here, plans in WORDS.items()}
    folder, out = registry_in(tmp_path / "hier", own), tmp_path / "sets/hier"
    call = [part for here, plans in WORDS.items() for part in ("--call", f"{here}={plans}")]
    german = made(folder, out, "--target", "Verlauf", *call)
    english = made(registry_in(tmp_path / "there", {}), tmp_path / "sets/there", "--target", "course")
    assert {*german.words} == {*english.words} == {*WORDS.values()} and german.tells == english.tells
    again = made(folder, out, "--target", "Verlauf")
    assert again.words == german.words and again.called == WORDS, "what was said once holds for the next version"
    runs = []
    for number, place in enumerate(("hier", "there")):
        accept(tmp_path / "sets" / place, "A. Person")
        data = {"device": "cpu", "data": str(tmp_path / "sets" / place), "state_dir": str(tmp_path / "state")}
        task = {"name": "table", "columns": ["age", {"name": "sex", "levels": ["female", "male"]}], "target": "course"}
        plan = parse_plan({**STUDY, "task": {**task, "labels": ["good", "bad"]}, "network": {"name": "linear"}})
        folder = tmp_path / f"run{number}"
        runs.append(inprocess.run(plan, folder=folder, settings=make_settings(data, "a test")).summary)
    assert runs[0].sites["a"].cases == runs[1].sites["a"].cases
    assert runs[0].sites["a"].test is not None and "Geschlecht" not in runs[0].model_dump_json()
    for wrong in ("nosuch=sex", "Geschlecht", "=sex"):
        capsys.readouterr()
        assert main(["data", str(tmp_path / "hier"), "-o", str(tmp_path / "x"), "--yes", "--call", wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_that_init_proposes_speaks_the_called_names(tmp_path: Path) -> None:
    """In earlier versions, `init` lacked the option --call, so its plan contained the hospital's own column names."""
    folder = registry_in(tmp_path / "hier", {plans: here for here, plans in WORDS.items()})
    lines = (folder / "registry.csv").read_text().splitlines()
    noted = [lines[0] + ",Bemerkung", *(f"{line},seit {number} Tagen müde" for number, line in enumerate(lines[1:]))]
    (folder / "registry.csv").write_text("\n".join(noted))
    call = [part for here, plans in WORDS.items() for part in ("--call", f"{here}={plans}")]
    out = tmp_path / "study"
    assert main(["init", str(folder), "-o", str(out), "--target", "Verlauf", "--device", "cpu", "--yes", *call]) == 0
    text = (out / "job/app/config/plan.yaml").read_text()
    assert not [word for word in (*WORDS, "Bemerkung") if re.search(rf"(?<!\w){word}(?!\w)", text)]
    task, own = load_plan(out / "job/app/config/plan.yaml").task, DataSet.read(out / "data-set")
    assert {*task.words} == {*own.words} == {*WORDS.values()} and own.called == WORDS
    assert json.loads((out / "trial" / paths.SUMMARY).read_text())["status"] == "finished"
    found = "\n".join(own.found)
    assert "Bemerkung" in found and "Bemerkung" not in text


# ---------------------------------------------------------------------------------------------------- beside a plan
def hospital(tmp_path: Path, key: str | None = "Patient ID") -> tuple[Path, Path]:
    answers = [] if key else ["--set", "patients=each line is a patient"]
    home, out = Home(tmp_path / "kit", "a"), tmp_path / "set"
    made(table(tmp_path / "data", key), out, "--name", "registry-2026", *answers)
    assert main(["data", "accept", str(out), "--by", "A. Person", "--kit", str(home.folder)]) == 0
    (home.folder / "local/medsilo.yaml").write_text(f"device: cpu\napproval: required\ndata: {out}\n")
    write_job(tmp_path / "job", parse_plan(STUDY))
    return home.folder, out


def test_a_check_without_a_plan_loads_nothing_that_trains(tmp_path: Path, root: Path) -> None:
    """In earlier versions, `medsilo check` took two seconds of processor time, mostly for importing PyTorch."""
    kit, _ = hospital(tmp_path)
    loaded = modules_after(root, ["check", "--kit", str(kit), "--private", str(tmp_path / "private.txt")], code=1)
    assert "medsilo.tasks.case_index" in loaded and loaded & {"torch", "numpy", "nvflare", "medsilo.plan"} == set()


def test_whoever_decides_reads_which_words_of_a_plan_nobody_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lead learns only that the hospital's data do not fit the plan.

    Before approving a plan, the hospital learns which columns of the plan are missing in the hospital's data.
    """
    kit, _ = hospital(tmp_path)
    write_job(tmp_path / "other", parse_plan(STUDY, ['task.columns=["age","hiv"]']))
    private = ["--private", str(tmp_path / "private.txt")]
    for command in (["check", str(tmp_path / "other"), *private], ["approve", str(tmp_path / "other"), "--yes"]):
        capsys.readouterr()
        assert main([*command, "--kit", str(kit)]) == 1
        printed = "".join(capsys.readouterr())
        assert "words that this hospital's data set does not: 'hiv'" in printed


@pytest.mark.parametrize("key", ["Patient ID", None])
def test_whoever_decides_reads_the_data_set_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str | None
) -> None:
    kit, out = hospital(tmp_path, key)
    own = DataSet.read(out)
    capsys.readouterr()

    def shows(text: str) -> None:
        assert "registry-2026" in text and own.identity[:12] in text and "A. Person" in text
        assert ("Patient ID" in text) == bool(key)
        assert ("not named: said by the person who made it: each line is a patient" in text) == (not key)
        assert f"train {own.tells['train'].patients} patients" in text and "age, outcome, no, yes" in text

    job = str(tmp_path / "job")
    main(["check", job, "--kit", str(kit), "--private", str(tmp_path / "private.txt")])
    shows(capsys.readouterr().out)
    assert main(["disclosure", job, "--kit", str(kit)]) == 0
    shows(capsys.readouterr().out)
    assert main(["approve", job, "--kit", str(kit), "--yes"]) == 0
    shows(capsys.readouterr().out)
    with serving(serve(kit, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        for page in ("/", f"/plan/{parse_plan(STUDY).hash}"):
            shows(visitor.page(page))
    (out / ACCEPTED).unlink()
    assert main(["check", job, "--kit", str(kit), "--private", str(tmp_path / "private.txt")]) == 1
    assert "nobody has accepted this hospital's data set" in capsys.readouterr().out


def test_a_kit_whose_settings_describe_the_data_by_keys_is_shown_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit, out = hospital(tmp_path)
    keys = {"folder": str(tmp_path / "data"), "table": "registry.csv", "columns": {"patient": "Patient ID"}}
    for data, job, severities in (
        (keys, [], ["note"]),
        (keys, [str(tmp_path / "job")], ["stops"]),
        (str(out), [str(tmp_path / "job")], []),
    ):
        (kit / "local/medsilo.yaml").write_text(json.dumps({"device": "cpu", "approval": "none", "data": data}))
        capsys.readouterr()
        main(["check", *job, "--kit", str(kit), "--json", "--private", str(tmp_path / "private.txt")])
        found = json.loads(capsys.readouterr().out)["findings"]
        assert [one["severity"] for one in found if "medsilo data FOLDER" in one["remedy"]] == severities
    files = KitAtHome.read(kit).files
    own = {"device": "cpu", "data": {**keys, "outcome": ["outcome"]}}
    with pytest.raises(MedsiloError, match="describes its data by keys"):
        joined(make_settings(own, "a test"), tmp_path / "one", kit=files)
    for number, other in enumerate([own | {"public_data": True}, {"device": "cpu", "data": str(out)}]):
        joined(make_settings(other, "a test"), tmp_path / f"other-{number}", kit=files)
    joined(make_settings(own, "a test"), tmp_path / "own")


def test_each_page_says_that_nobody_approves_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kit, out = hospital(tmp_path)
    job = str(tmp_path / "job")
    for approval, said in (("none", True), (None, False), ("required", False)):
        own = {"device": "cpu", "data": str(out)} | ({"approval": approval} if approval else {})
        (kit / "local/medsilo.yaml").write_text(json.dumps(own))
        main(["check", job, "--kit", str(kit), "--accept", "--private", str(tmp_path / "private.txt")])
        assert ("nobody at this hospital has approved" in capsys.readouterr().out) == said
        main(["disclosure", job, "--kit", str(kit)])
        assert ("nobody at this hospital has approved" in capsys.readouterr().out) == said
        with serving(serve(kit, 0)) as gate:
            visitor = Visitor(gate)
            visitor.begin()
            assert ("plans run at this hospital without an approval" in visitor.page("/")) == said


# ---------------------------------------------------------------------------------- files that medsilo finds in folders
def test_a_table_that_lies_beside_other_data_is_looked_at_again_after_an_answer(tmp_path: Path) -> None:
    """In earlier versions, after a user's answer to a question, `medsilo data` read the whole folder, so images
    replaced the chosen table.
    """
    rows = [
        {"patient": f"p{n}", "age": 30 + n % 7, "outcome": ("no", "yes")[n % 2], "discharge": ("home", "morgue")[n % 2]}
        for n in range(60)
    ]
    write_table(tmp_path / "exports/registry.csv", rows)
    write_photos(tmp_path / "exports/photos", [f"q{number}" for number in range(9)])
    own = made(tmp_path / "exports/registry.csv", tmp_path / "set", "--target", "outcome")
    assert own.patients.count == 60 and "discharge" not in own.words and own.answers


def test_a_patient_whose_leading_zeros_a_spreadsheet_lost_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"MRN": f"{n // 2:04d}" if n % 2 else n // 2, "age": 30 + n % 40, "outcome": ("no", "yes")[n // 2 % 2]}
        for n in range(80)
    ]
    write_table(tmp_path / "data/registry.csv", rows)
    words = ["data", str(tmp_path / "data"), "-o", str(tmp_path / "set"), "--yes", "--target", "outcome"]
    assert main(words) == 1 and "spelling" in (said := capsys.readouterr().err) and "0001 and 1" in said


def test_a_class_that_a_person_accepted_counts_also_when_few_have_it(tmp_path: Path) -> None:
    """medsilo ignores a label of few patients unless an accepted data set declares the label."""
    folder, out = table(tmp_path / "data", lines=1), tmp_path / "set"
    made(folder, out)
    write_table(
        folder / "registry.csv",
        [{"Patient ID": f"q{n}", "age": 30 + n % 7, "outcome": "yes" if n < 3 else "no"} for n in range(40)],
    )
    source = DataSet.read(out).source(out).drawn_by(1)
    data = parse_plan(STUDY).task.site_data("a", ["a"], 0, source)
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == 40
    undeclared = source.model_copy(update={"label_map": {}})
    data = parse_plan(STUDY).task.site_data("a", ["a"], 0, undeclared)
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == 37


def test_a_hospital_with_a_larger_floor_reads_what_it_discloses(tmp_path: Path) -> None:
    """In earlier versions, the data set's file rounded counts to multiples of five, whatever the hospital's settings
    were.
    """
    folder = table(tmp_path / "data", lines=1)
    (tmp_path / "local").mkdir()
    (tmp_path / "local/medsilo.yaml").write_text("min_patients_per_metric: 8\n")
    own = made(folder, tmp_path / "set", "--settings", str(tmp_path / "local"))
    assert {part: told.patients for part, told in own.tells.items()} == {"train": 24, "validation": 8, "test": 8}


def test_no_plan_learns_an_outcome_as_something_else(tmp_path: Path) -> None:
    """If a plan reads a class as a number, an unreadable label would remove a patient and thereby disclose one bit."""
    rows = [{"patient": f"p{n}", "age": 30 + n % 7, "outcome": n % 2} for n in range(40)]
    write_table(tmp_path / "data/registry.csv", rows)
    own, out = made(tmp_path / "data", tmp_path / "set", "--target", "outcome"), tmp_path / "set"
    assert own.learns["kind"] == "classification"
    source = own.source(out)
    parse_plan(STUDY).task.site_data("a", ["a"], 0, source)
    other = parse_plan({**STUDY, "task": {"name": "table", "columns": ["age"], "kind": "regression"}})
    with pytest.raises(
        DataError, match="kind of prediction is regression, but this hospital's data set declares classification"
    ):
        other.task.site_data("a", ["a"], 0, source)


def test_every_outcome_of_a_set_makes_a_case_whichever_a_plan_learns(tmp_path: Path) -> None:
    """Comparing two studies would reveal a missing outcome that removes a patient from only one of them."""
    rows: list[dict[str, Any]] = [
        {"patient": f"p{n}", "age": 30 + n % 7, "first": "no", "second": ("no", "yes")[n % 2]} for n in range(40)
    ]
    rows[3]["first"] = ""
    for row in rows[::3]:
        row["first"] = row["first"] and "yes"
    write_table(tmp_path / "data/registry.csv", rows)
    described = {"folder": str(tmp_path / "data"), "table": "registry.csv", "outcome": ["first", "second"]}
    settings = make_settings({"device": "cpu", "data": described, "state_dir": str(tmp_path / "state")}, "x")
    assert settings.data
    who = []
    for target in ("first", "second"):
        task = parse_plan({**STUDY, "task": {**STUDY["task"], "target": target}}).task
        data = task.site_data("a", ["a"], 0, settings.data)
        who.append({name for part in (data.train, data.validation, data.test) for name in part.patients})
    assert who[0] == who[1] and len(who[0]) == 39


def test_one_data_set_is_no_two_hospitals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In earlier versions, two sites could read one data set: 18 test patients counted as 36, and intervals were too
    narrow.
    """
    rows = [{"patient": f"p{n}", "age": 30 + n % 60, "relapse": ("no", "yes")[n % 3 == 0]} for n in range(80)]
    write_table(tmp_path / "data/registry.csv", rows)
    answers = ["--yes", "--target", "relapse"]
    assert main(["init", str(tmp_path / "data"), "-o", str(tmp_path / "study"), *answers]) == 0
    run = ["run", str(tmp_path / "study/job"), "--settings", str(tmp_path / "study"), "--set", "training.rounds=1"]
    run += ["--engine", "inprocess", "-o", str(tmp_path / "runs")]
    capsys.readouterr()
    assert main([*run, "--set", "participation.sites=[a,b]"]) == 1
    assert "a and b have the same data set" in capsys.readouterr().err
    assert main([*run, "--set", "participation.sites=[a]"]) == 0


def test_only_a_new_set_needs_a_folder_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person accepts a data set while the current working folder is not writable."""
    folder, out = table(tmp_path / "data"), tmp_path / "set"
    made(folder, out)
    monkeypatch.chdir("/proc")
    assert main(["data", "accept", str(out), "--by", "A. Person"]) == 0
    assert main(["data", "check", str(out)]) == 0
    assert main(["data", str(folder), "--yes"]) == 2
    assert "data-set can't be written" in capsys.readouterr().err


def test_links_that_lead_to_themselves_or_out_and_pipes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_photos(tmp_path / "data", [f"p{number}" for number in range(12)])
    (folder / "cases.csv").unlink()
    for number, path in enumerate(sorted((folder / "images").iterdir())):
        place = folder / ("benign", "malignant")[number % 2]
        place.mkdir(exist_ok=True)
        path.rename(place / path.name)
    (folder / "images").rmdir()
    (folder / "benign/p90.png").symlink_to("p90.png")
    (folder / "benign/p91.png").symlink_to("/etc/passwd")
    (folder / "malignant/again").symlink_to(folder)
    os.mkfifo(folder / "malignant/p92.png")  # opening a pipe without a writer would wait forever
    (folder / "malignant/p93.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as service:
        monkeypatch.chdir(folder / "malignant")  # the path of a socket may have at most 107 characters
        service.bind("p94.png")
    make = ["data", str(folder), "-o", str(tmp_path / "set"), "--yes", "--set"]
    assert main([*make, "patients=/(p[0-9]+)[.]"]) == 1
    assert "paths without endings" in (said := capsys.readouterr().err) and "benign/p0," in said
    assert main([*make, "patients=/(p[0-9]+)"]) == 0
    told = DataSet.read(tmp_path / "set")
    assert told.patients.count == 12 and "links that lead out" in " ".join(told.left_out)
    assert told.left_out[SPECIAL] == 3
    shown = capsys.readouterr()
    assert f"left out: {SPECIAL} (3)\n" in shown.out and "Traceback" not in shown.err
