"""Reading a study's record gives the values that were written, and rejects values outside of their range.

Run folders of earlier versions remain readable.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.core.text import LONGEST, plain
from medsilo.runs import paths
from medsilo.runs.rounds import Progress, Round, SiteRound
from medsilo.runs.schema import Details, Summary
from medsilo_lab.report import page
from medsilo_lab.report.read import cases_tested, read, read_all
from medsilo_server.record import Record
from tests.unit.medsilo_lab.test_report import round_line, save, summary_of

OLD = Path(__file__).parents[2] / "fixtures" / "run-of-schema-1"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    told = {"a": {"missed": {2: "lost: asleep"}, "figures": {"hd95": None}, "classes": {"train": [3, 4], "test": None}}}
    summary = summary_of("fedavg", "FedAvg", {"a": 0.5, "b": None}, told, details=Details(warnings=["beware"], own=[1]))
    line = round_line(1, ["a", "b"]).changed(sites={"a": SiteRound(validation=0.5, train_loss=-0.25, samples=7)})
    record = Record(save(tmp_path, summary, [line]))
    assert record.summary() == summary and record.rounds() == [line]
    written = json.loads((record.folder / paths.SUMMARY).read_text())
    assert written["schema"] == 1 and written["sites"]["a"]["missed"] == {"2": "lost: asleep"}
    assert written["sites"]["a"]["test"]["cases"] == 40 and written["details"] == {"warnings": ["beware"], "own": [1]}


def test_a_text_is_cut_between_letters() -> None:
    assert plain("ä" * 1000) == "ä" * 1000
    shortened = plain("ä" * 1001)
    assert shortened == "ä" * 998 + "…" and len(shortened.encode()) <= LONGEST


def test_a_line_that_is_cut_short_does_not_count_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    record = Record(save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5})))
    with (record.folder / paths.ROUNDS).open("a") as file:
        file.write('{"round": 3, "asked"')
    assert [line.round for line in record.rounds()] == [1, 2]
    assert [line.round for line in record.forget_after(1)] == [line.round for line in record.rounds()] == [1]
    (record.folder / paths.ROUNDS).write_text('{"round": 1}\n{"round": -1}\n')
    with pytest.raises(MedsiloError, match=r"rounds\.jsonl .*'fedavg-seed0', line 2: round: "):
        record.rounds()


def test_progress_travels_as_json() -> None:
    told = Progress(planned=2, metric="dice", absent={"b": "asleep"}, rounds=[round_line(1, ["a"])])
    assert Progress.model_validate(json.loads(json.dumps(told.as_json(), allow_nan=False))) == told


# run folders of earlier versions


def says(new: Any, old: Any) -> bool:
    """Return True if the new JSON value contains everything that the old JSON value contains, and possibly additional
    keys.
    """
    if isinstance(old, dict):
        return all(key in new and says(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(says, new, old))
    return bool(new == old)


def test_a_folder_of_the_state_before_the_models_is_read_without_a_loss(tmp_path: Path) -> None:
    folder = shutil.copytree(OLD, tmp_path / "old")
    record, before = Record(folder), json.loads((OLD / paths.SUMMARY).read_text())
    summary = record.summary()
    assert summary is not None and says(summary.as_json(), before)
    assert summary.details.super_model is not None and summary.details.super_model.threshold is not None
    lines = [json.loads(line) for line in (OLD / paths.ROUNDS).read_text().splitlines()]
    assert says([line.as_json() for line in record.rounds()], lines)
    record.write_summary(summary)
    assert says(json.loads((folder / paths.SUMMARY).read_text()), before)
    text = page.render(read_all([folder]), "Title")
    assert f">{summary.mean_test:.2f}<" in text and str(before["plan_hash"])[:12] in text


def test_a_site_that_never_answered_has_no_cases(tmp_path: Path) -> None:
    run = read(save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5, "b": None}, {"b": {"cases": None}})))
    assert run.site("b").cases is None and cases_tested(run.summary, "b") is None
    assert "None" not in page.render([run], "Title")


@pytest.mark.parametrize("schema", [0, 2, "1", None, True, [1] * 10_000])
def test_another_schema_is_refused_in_one_line_that_names_the_version(schema: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(OLD, tmp_path / "old")
    content = json.loads((folder / paths.SUMMARY).read_text())
    (folder / paths.SUMMARY).write_text(json.dumps({**content, "schema": schema}))
    for reader in (read, lambda place: Record(place).summary()):
        with pytest.raises(MedsiloError, match=r"medsilo 0\.1\.0\), but this medsilo reads schema 1") as caught:
            reader(folder)
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [Round, Summary])
def test_unknown_keys_pass_so_that_a_newer_medsilo_may_add_some(model: Any) -> None:
    known = round_line(1, ["a"]) if model is Round else summary_of("fedavg", "FedAvg", {"a": 0.5})
    assert model.model_validate({**known.as_json(), "new": 1}) == known
