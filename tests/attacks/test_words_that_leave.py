"""Only names of columns and classes that a person at the hospital accepted leave the hospital.

A lead cannot read a name that nobody accepted, neither by putting the name in a plan nor by provoking an error. The
names of a hospital's own columns stay at the hospital.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save

from medsilo.cli import main
from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.yaml_text import dump_yaml, load_yaml
from medsilo.federation.protection import UNFIT
from medsilo.federation.refusals import public_reason
from medsilo.plan import Plan, parse_plan
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.site.data_set import DataSet, accept
from medsilo.site.settings import SiteSettings, make_settings
from medsilo_lab.report.page import report_of
from tests import inprocess
from tests.hospital import write_table
from tests.sites import site_of

PATIENTS = 60
# all names of columns and classes that nobody accepted, and of patients, files and folders, contain this text
SECRET = "geheim"
STUDY: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "network": {"name": "linear"},
    "training": {"rounds": 1, "batch_size": 16},
    "participation": {"sites": ["a"]},
}
COLUMNS = [{"name": "age"}, {"name": "sex", "levels": ["male", "female"]}]
TABLE: dict[str, Any] = {"name": "table", "columns": COLUMNS, "target": "course", "labels": ["good", "bad"]}


def registry(folder: Path, out: Path, **changes: Any) -> SiteSettings:
    """Write and accept a data set whose columns, levels and classes have names that differ from the plan's names."""
    drawn = np.random.default_rng(0)
    rows = [
        {
            "Geheimnummer": f"geheim-{who}",
            "Geheimalter": int(drawn.integers(30, 80)),
            "Geheimgeschlecht": ("geheim-m", "geheim-w")[who % 2],
            "Geheimlabor": round(drawn.normal(90, 20), 1),
            "Geheimverlauf": ("geheim-gut", "geheim-schlecht")[who // 2 % 2],
        }
        for who in range(PATIENTS)
    ]
    write_table(folder / "geheim.csv", rows)
    answers = ["--target", "Geheimverlauf", "--set", "patients=Geheimnummer", "--name", "geheim-2026"]
    assert main(["data", str(folder), "-o", str(out), "--yes", *answers]) == 0
    said = load_yaml((out / DataSet.FILE).read_text())
    said["reading"] |= {
        "columns": {"patient": "Geheimnummer", "age": "Geheimalter", "sex": "Geheimgeschlecht"}
        | {"course": "Geheimverlauf"},
        "levels": {"sex": {"geheim-m": "male", "geheim-w": "female"}},
        "label_map": {"geheim-gut": "good", "geheim-schlecht": "bad"},
    }
    said["words"] = ["age", "sex", "male", "female", "course", "good", "bad"]
    (out / DataSet.FILE).write_text(dump_yaml(changed(said, changes)))
    accept(out, "Dr. Geheim")
    return make_settings({"device": "cpu", "data": str(out), "state_dir": str(out / "state")}, "a test")


def changed(said: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        said[key] = changed(said[key], value) if isinstance(value, dict) and key in said else value
    return said


def plan_of(**task: Any) -> Plan:
    return parse_plan({**STUDY, "task": {**TABLE, **task}})


def answered(plan: Plan, settings: SiteSettings, folder: Path) -> str:
    try:
        site = site_of(plan, "a", ["a"], settings, folder / "study/sites/a")
        reply = site.answer(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({}))
    except MedsiloError as error:
        return public_reason(error)
    return json.dumps(reply.facts)


@pytest.fixture
def hospital(tmp_path: Path) -> SiteSettings:
    return registry(tmp_path / "geheim", tmp_path / "set-geheim")


def test_a_plan_has_its_own_words_for_a_hospitals_columns(hospital: SiteSettings, tmp_path: Path) -> None:
    """Two hospitals whose tables are in different languages train one model, even if a plan reads only some of the
    columns.
    """
    for number, columns in enumerate((COLUMNS, COLUMNS[:1], COLUMNS[1:])):
        done = inprocess.run(plan_of(columns=columns), folder=tmp_path / f"run{number}", settings=hospital)
        assert done.summary.sites["a"].patients["train"] == 35


ASKED: dict[str, dict[str, Any]] = {
    "a column that is there": {"columns": [*COLUMNS, "Geheimlabor"]},
    "a column that is not there": {"columns": [*COLUMNS, "Laktat"]},
    "a column under its own name": {"columns": ["age", "Geheimgeschlecht"]},
    "a level that is there": {"columns": ["age", {"name": "sex", "levels": ["geheim-m", "female"]}]},
    "a level that is not there": {"columns": ["age", {"name": "sex", "levels": ["divers", "female"]}]},
    "an outcome that is there": {"target": "Geheimlabor", "kind": "regression", "range": [0, 200]},
    "an outcome that is not there": {"target": "Laktat", "kind": "regression", "range": [0, 200]},
    "a class that is there": {"labels": ["geheim-gut", "bad"]},
    "a class that is not there": {"labels": ["good", "bad", "middling"]},
}


def test_a_word_that_was_not_accepted_is_refused_before_data_are_read(hospital: SiteSettings, tmp_path: Path) -> None:
    """In an earlier version, a hospital's answer depended on the existence of a column, so a lead could guess the
    table's header.
    """
    assert "refused" not in answered(plan_of(), hospital, tmp_path / "fits")
    table = tmp_path / "geheim/geheim.csv"
    told = {what: answered(plan_of(**task), hospital, tmp_path / what) for what, task in ASKED.items()}
    assert {*told.values()} == {UNFIT}, told
    table.unlink()  # the text of the rejection must not depend on the table
    with pytest.raises(DataError) as refused:
        site_of(plan_of(columns=["Laktat"]), "a", ["a"], hospital, tmp_path / "unread/sites/a")
    assert str(refused.value) == UNFIT and "words" in refused.value.private and "'Laktat'" in refused.value.private


# ---------------------------------------------------------------------------------------- all that leaves the hospital
STUMBLES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a column that is gone": {"reading": {"columns": {"age": "Geheimfehlt"}}},
    "a class that no plan has": {"reading": {"label_map": {"geheim-gut": "geheim-klasse"}}},
    "a column that nobody measured": {"reading": {"unannotated": ["geheim-spalte"]}},
    "a column that a line needs": {"reading": {"required": ["Geheimfehlt"]}},
    "a column with points": {"reading": {"decimal": ",", "columns": {"age": "Geheimlabor"}}},
    "two columns in one": {"reading": {"columns": {"age": "Geheimlabor", "sex": "Geheimlabor"}}},
    "the patients as an input": {"reading": {"columns": {"age": "Geheimnummer"}}},
    "days between no dates": {"reading": {"spans": {"age": ["Geheimalter", "Geheimlabor"]}}},
    "patients in no file": {"reading": {"exclude_patients": "/geheim/geheim.txt"}},
    "another outcome": {"reading": {"outcome": ["Geheimlabor"]}},
}


@pytest.mark.parametrize("stumble", STUMBLES)
def test_no_own_word_is_in_what_a_hospital_says(stumble: str, tmp_path: Path) -> None:
    settings = registry(tmp_path / "geheim", tmp_path / "set-geheim", **STUMBLES[stumble])
    for what, task in {"the plan": {}, **(ASKED if stumble == "nothing" else {})}.items():
        plan = plan_of(**{key: own for key, own in task.items() if SECRET not in json.dumps(own).lower()})
        told = answered(plan, settings, tmp_path / what)
        assert SECRET not in told.lower(), told


@pytest.mark.parametrize("damage", ["changed", "damaged", "unaccepted", "moved", "a file changed", "unread"])
def test_no_own_word_is_said_of_a_data_set_that_does_not_hold(
    damage: str, hospital: SiteSettings, tmp_path: Path
) -> None:
    """In an earlier version, the lead received the name of the person who had accepted the data set."""
    out, table = tmp_path / "set-geheim", tmp_path / "geheim/geheim.csv"
    text = (out / DataSet.FILE).read_text()
    {
        "changed": lambda: (out / DataSet.FILE).write_text(text.replace("words:", "words:\n- more")),
        "damaged": lambda: (out / DataSet.FILE).write_text(text.replace("reading:", "geheim: 3\nreading:")),
        "unaccepted": lambda: (out / "accepted.json").unlink(),
        "moved": lambda: table.rename(table.with_name("geheim-2.csv")),
        "a file changed": lambda: table.write_text(table.read_text() + "geheim,1\n"),
        "unread": lambda: (out / "inventory.csv").write_text("geheim"),
    }[damage]()
    told = answered(plan_of(), hospital, tmp_path / "study")
    assert not told.startswith("{") and SECRET not in told.lower(), told


def test_no_own_word_is_in_any_byte_of_a_study(
    hospital: SiteSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test searches the answers, the answers' tensors, the server's record, and the run's page for names from
    the hospital's data.
    """
    sent: list[bytes] = []
    answer = inprocess.Loop.answer

    def noted(loop: inprocess.Loop, site: str, message: StudyMessage) -> StudyMessage:
        reply = answer(loop, site, message)
        sent.append(json.dumps(reply.facts).encode())
        for group, tensors in reply.groups.items():
            sent.extend((group.encode(), save(dict(tensors))))
        return reply

    monkeypatch.setattr(inprocess.Loop, "answer", noted)
    run = tmp_path / "run"
    more = {"training": {"rounds": 2, "batch_size": 16}, "task": {**TABLE, "missing": "mark"}}
    inprocess.run(parse_plan({**STUDY, **more}), folder=run, settings=hospital)
    page = report_of(run).page
    files = [path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] != "sites"]
    assert len(sent) > 8 and page in files and (run / paths.SUMMARY) in files
    assert b"female" in page.read_bytes() or b"course" in b"".join(path.read_bytes() for path in files)
    for content in (*sent, *(path.read_bytes() for path in files)):
        assert SECRET.encode() not in content.lower()
