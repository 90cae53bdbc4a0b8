"""Each patient is tested in exactly one fold, and the statistics treat all folds of a seed as one test."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

from medsilo.cli import main
from medsilo.core.errors import DataError, PlanError
from medsilo.federation.evaluation import check_inputs
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import Cases, SiteData, folded, labels_of, patients_of, places_in
from medsilo.tasks.splits import parts_by_draw
from medsilo.tasks.task import Fold
from medsilo_lab.study.evidence import Scores, joined
from medsilo_lab.study.verdict_file import read_verdict
from tests.conftest import SITES, make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.rounds=1"]


def test_each_patient_is_tested_once_and_in_one_part_only() -> None:
    plan = make_plan("fedavg", *SMALL)
    tested: Counter[str] = Counter()
    whole = plan.task.read(SITES[0], SITES, 0, None)
    everyone = {patient for part in PARTS for patient in patients_of(getattr(whole, part))}
    for number in (1, 2, 3):
        task = make_plan("fedavg", *SMALL, f"task.fold={{number: {number}, of: 3}}").task
        data = task.site_data(SITES[0], SITES, 0, None)
        parts = [set(patients_of(getattr(data, part))) for part in PARTS]
        assert set.union(*parts) == everyone and sum(map(len, parts)) == len(everyone)
        tested.update(parts[2])
    assert tested == dict.fromkeys(everyone, 1)


def test_a_site_s_folds_depend_on_its_patients_and_its_own_number_alone() -> None:
    patients = [f"patient-{number}" for number in range(12) for _ in range(2)]
    fold = Fold(number=2, of=4)
    test = {patients[place] for place in places_in(fold, patients, 0)[2]}
    assert {patients[::-1][place] for place in places_in(fold, patients[::-1], 0)[2]} == test and len(test) == 3
    assert {patients[place] for place in places_in(fold, patients, 1)[2]} != test
    with pytest.raises(DataError, match="4 folds need.*site has fewer"):
        places_in(fold, ["a", "b", "c"], 0)


def test_data_that_are_read_when_needed_keep_patients_and_classes() -> None:
    data = make_plan("fedavg", *SMALL).task.read(SITES[0], SITES, 0, None)
    lazy = SiteData(*(ConcatDataset([getattr(data, part)]) for part in PARTS))
    one, other = (folded(each, Fold(number=1, of=3), 0) for each in (data, lazy))
    for part in PARTS:
        mine, theirs = getattr(one, part), getattr(other, part)
        assert list(patients_of(mine)) == list(patients_of(theirs))
        assert labels_of(mine).tolist() == labels_of(theirs).tolist()  # type: ignore[union-attr]
        assert all((mine[place][0] == theirs[place][0]).all() for place in range(len(mine)))


def test_a_fold_is_part_of_the_plan() -> None:
    plan = make_plan("fedavg", *SMALL)
    assert make_plan("fedavg", *SMALL, "task.fold={number: 1, of: 3}").hash != plan.hash
    with pytest.raises(PlanError, match="fold 4 of 3 does not exist; there are 3"):
        make_plan("fedavg", *SMALL, "task.fold={number: 4, of: 3}")


def test_a_seed_s_folds_are_one_test() -> None:
    one, other = Scores(np.array([0.1, 0.3]), np.array([0, 1])), Scores(np.array([0.5]), np.array([0]))
    both = joined([one, other])
    assert both.values.tolist() == [0.1, 0.3, 0.5] and both.patients.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_comparison_with_folds_is_resumed_and_tells_each_patient_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "plan.yaml").write_text(make_plan("fedavg", *SMALL).to_yaml())
    out = tmp_path / "study"
    command = ["compare", "--plan", str(tmp_path / "plan.yaml"), "--methods", "fedavg,local", "--seeds", "0,1"]
    command += ["--folds", "3", "--at-once", "1", "--device", "cpu", "--out", str(out)]
    assert main(command) == 0
    assert "12/12" in capsys.readouterr().out
    verdict = read_verdict(out)
    assert (verdict.folds, verdict.seeds, len(verdict.runs)) == (3, [0, 1], 12)
    assert {run.fold for run in verdict.runs} == {1, 2, 3}
    assert {row.title: row.seeds for row in verdict.rows} == {"fedavg": [0, 1], "local": [0, 1]}
    assert "3 folds" in (out / "report.html").read_text()
    made = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    gone = out / "local-1-fold-2"
    (gone / "summary.json").unlink()
    assert main(command) == 0
    again = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    assert {path for path in again if again[path] != made[path]} == {gone / "summary.json"}


def test_a_refusal_of_folds_or_inputs_tells_no_count() -> None:
    """The lead may read the hospital's refusal, so its text must not depend on a single patient."""

    def folds(patients: int) -> None:
        places_in(Fold(number=1, of=10), [f"p{number}" for number in range(patients)], 0)

    def parts(patients: int) -> None:
        parts_by_draw([f"p{number}" for number in range(patients)], (0.6, 0.2, 0.2), 0)

    def inputs(patients: int) -> None:
        check_inputs("test", Cases(torch.full((patients, 2), torch.nan), torch.zeros(patients), [""] * patients), (2,))

    for refused, counts in ((folds, (3, 4)), (parts, (1, 2)), (inputs, (3, 4))):
        texts = []
        for count in counts:
            with pytest.raises(DataError) as caught:
                refused(count)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
