"""Test users' own data as hospitals: data frames, text labels, survival data, and networks with one output."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import medsilo
from medsilo.core.errors import DataError, MedsiloError
from medsilo.tasks.classification import Classification
from medsilo.tasks.regression import Regression
from medsilo.tasks.survival import Survival
from medsilo_lab.findings import Findings
from tests.hospital import photograph, write_pixels

COUNT = 60
ONCE = {"training.rounds": 2, "training.batch_size": 16}


def frame(**more: Any) -> pandas.DataFrame:
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=COUNT)
    whose = [f"p{number // 3}" for number in range(COUNT)]
    known = {"age": drawn.normal(60, 9, COUNT), "x": x, "who": whose, "clinic": ["north", "south"] * (COUNT // 2)}
    return pandas.DataFrame({**known, "diagnosis": np.where(x > 0, "malignant", "benign"), **more})


def read(given: Any, **how: Any) -> Any:
    return medsilo.data(given, **{"patient": "who", "hospital": "clinic", "target": "diagnosis", **how})


def test_one_frame_of_all_hospitals_with_words_as_labels_is_learned() -> None:
    own = read(frame())
    assert list(own) == ["north", "south"] and len(own["north"][0]) == COUNT // 2
    assert isinstance(own.goal, Classification) and own.goal.label_names == ("benign", "malignant")
    done = medsilo.run(sites=own, changes=ONCE, device="cpu")
    assert done.summary.status == "finished" and sorted(done.summary.sites) == ["north", "south"]
    assert {"benign", "malignant"} == {*done.plan.task.goal.label_names}


def test_a_model_with_one_logit_learns_two_classes() -> None:
    done = medsilo.run(sites=read(frame()), model=nn.Linear(2, 1), changes=ONCE, device="cpu")
    assert done.summary.status == "finished"


def test_survival_is_a_time_and_an_event_of_a_frame_or_of_arrays() -> None:
    drawn = np.random.default_rng(1)
    table = frame(time=drawn.exponential(9, COUNT), event=drawn.integers(0, 2, COUNT)).drop(columns="diagnosis")
    for own in (
        read(table, target=("time", "event")),
        medsilo.data((table[["age", "x"]], table[["time", "event"]]), hospital=table["clinic"], patient=table["who"]),
    ):
        assert isinstance(own.goal, Survival)
        done = medsilo.run(sites=own, changes=ONCE, device="cpu")
        assert done.summary.status == "finished"


@pytest.mark.parametrize("swapped", [False, True])
def test_survival_arrays_of_other_libraries_are_read(swapped: bool) -> None:
    """In earlier versions, medsilo read scikit-survival's structured array as labels, and each time became a class."""
    drawn = np.random.default_rng(1)
    x, time, event = drawn.normal(size=(COUNT, 2)), drawn.exponential(9, COUNT), drawn.integers(0, 2, COUNT) == 1
    kinds: list[tuple[str, type]] = [("event", bool), ("time", float)]
    pairs = zip(event, time, strict=True) if swapped else zip(time, event, strict=True)
    own = medsilo.data((x, np.array([*pairs], dtype=kinds if swapped else kinds[::-1])))
    assert isinstance(own.goal, Survival)
    assert np.allclose(own["site"][1], np.stack([time, event], 1))
    done = medsilo.run(task="survival", sites={"a": (x, np.stack([time, event], 1))}, changes=ONCE, device="cpu")
    assert done.summary.metric == "concordance"


FINDINGS = ("effusion", "cardiac oedema", "nodule")


def findings() -> pandas.DataFrame:
    drawn = np.random.default_rng(3)
    x, age, count = drawn.normal(size=300), drawn.normal(size=300), np.arange(300)
    whose = {"who": count // 3, "clinic": np.where(count // 3 % 2, "north", "south")}
    shown = {"effusion": x > 0, "cardiac oedema": (age > 0).astype(int), "nodule": 0}
    return pandas.DataFrame({"age": age, "x": x, **whose, **shown})


def test_several_labels_of_a_case_are_learned_together() -> None:
    """In earlier versions, medsilo rejected cases with several labels, or mistook two binary columns for a time and an
    event.
    """
    own = read(findings(), target=FINDINGS)
    assert isinstance(own.goal, Findings) and own.goal.label_names == FINDINGS
    assert isinstance(read(findings().drop(columns="nodule"), target=FINDINGS[:2]).goal, Findings)
    changes = {"training.rounds": 20, "training.learning_rate": 1.0, "training.batch_size": 8}
    done = medsilo.run(sites=own, changes=changes, device="cpu")
    cases = done.cases
    for site in ("north", "south"):
        test = done.summary.sites[site].test or {}
        here, own_cases = cases.loc[site], done.summary.sites[site].figures
        for name in FINDINGS[:2]:
            there, said = here[f"there_{name}"] == 1, here[f"probability_{name}"] > 0.5
            assert own_cases[f"sensitivity_{name}"] == pytest.approx(said[there].mean())
            assert own_cases[f"specificity_{name}"] == pytest.approx((~said[~there]).mean())
        right = [(here[f"there_{name}"] == 1) == (here[f"probability_{name}"] > 0.5) for name in FINDINGS]
        assert test["label_accuracy"] == pytest.approx(np.mean(right))
    assert done.summary.pooled["sensitivity_effusion"] > 0.8 and done.summary.pooled["sensitivity_nodule"] is None
    assert "label_accuracy" in done.report().read_text()
    compared = medsilo.compare(["local", "fedavg"], sites=own, changes=ONCE, seeds=[0], device="cpu")
    assert not compared.failures and sorted(compared.runs) == [("fedavg", 0), ("local", 0)]


@pytest.mark.parametrize("form", ["arrays", "sites", "pairs"])
def test_several_labels_are_learned_however_they_are_given(form: str) -> None:
    own = findings()
    inputs, targets = own[["age", "x"]].to_numpy(np.float32), own[[*FINDINGS]].astype(int).to_numpy()
    pairs = TensorDataset(torch.tensor(inputs), torch.tensor(targets))
    given = {"arrays": medsilo.data((inputs, targets)), "sites": {"a": (inputs, targets)}, "pairs": {"a": pairs}}[form]
    loss, model = nn.BCEWithLogitsLoss(), nn.Linear(2, 3)
    done = medsilo.run(sites=given, model=model, loss=loss, changes=ONCE, device="cpu")
    assert done.plan.task.goal.outputs == 3 and done.summary.metric == "label_accuracy"


def test_each_hospital_may_give_its_own_frame() -> None:
    """In earlier versions, a dictionary of hospitals raised KeyError: 'train'.

    Each hospital may order its columns differently.
    """
    whole = frame()
    alone = {site: part.drop(columns="clinic") for site, part in whole.groupby("clinic")}
    alone["south"] = alone["south"][["diagnosis", "who", "x", "age"]]
    own, joint = medsilo.data(alone, patient="who", target="diagnosis"), read(whole)
    assert own.goal.label_names == joint.goal.label_names  # type: ignore[union-attr]
    for site in joint:
        assert all(np.array_equal(one, other) for one, other in zip(own[site], joint[site], strict=True))
    assert medsilo.run(sites=own, changes=ONCE, device="cpu").summary.status == "finished"
    raw = {site: part.rename(columns={"who": "patient", "diagnosis": "label"}) for site, part in alone.items()}
    done = medsilo.run(sites=raw, changes=ONCE, device="cpu")
    assert done.plan.task.goal.label_names == ("benign", "malignant")
    parts = dict.fromkeys(("train", "validation", "test"), alone["north"])
    for given in (parts, {"a": parts, "b": alone["south"]}):
        mixed = medsilo.data(given, patient="who", target=["diagnosis"])
        assert medsilo.run(sites=mixed, changes=ONCE, device="cpu").summary.status == "finished"


def test_a_column_that_may_name_patients_is_asked_about() -> None:
    """In earlier versions, a column that may name patients became an input, and one patient's rows were split between
    training and test data.
    """
    own = frame(pid=range(100, 100 + COUNT)).drop(columns="who")
    with pytest.raises(DataError, match="does column 'pid' name the patient"):
        read(own, patient=None)
    assert len(read(own, patient=False)["north"][0][0]) == 3
    assert read(own.rename(columns={"pid": "patient"}), patient=None)["north"][2][:2] == ["100", "102"]


def test_codes_from_one_on_are_classes_by_themselves() -> None:
    """In earlier versions, the labels 1 and 2 became three classes, so a model with two outputs was rejected."""
    x = np.random.default_rng(0).normal(size=(COUNT, 2))
    own = medsilo.data((x, (x[:, 0] > 0) + 1))
    assert own.goal.label_names == ("1", "2")  # type: ignore[union-attr]
    assert medsilo.run(sites=own, model=nn.Linear(2, 2), changes=ONCE, device="cpu").summary.status == "finished"


def test_a_model_with_one_logit_learns_by_its_usual_loss() -> None:
    """In earlier versions, BCEWithLogitsLoss rejected integer labels."""
    how: dict[str, Any] = {"model": nn.Linear(2, 1), "loss": nn.BCEWithLogitsLoss()}
    assert medsilo.run(sites=read(frame()), **how, changes=ONCE, device="cpu").summary.status == "finished"


def test_methods_are_compared_on_it() -> None:
    found = medsilo.compare(["local", "fedavg"], sites=read(frame()), changes=ONCE, seeds=[0], device="cpu")
    assert sorted(found.runs) == [("fedavg", 0), ("local", 0)]


def test_numbers_with_digits_are_a_regression_and_a_dataset_is_divided() -> None:
    drawn = np.random.default_rng(2).normal(size=COUNT)
    assert isinstance(read(frame(dose=drawn).drop(columns="diagnosis"), target="dose").goal, Regression)
    given = TensorDataset(torch.zeros(6, 2), torch.arange(6) % 2)
    assert {name: len(own) for name, own in medsilo.data(given, hospital=[*"aabbab"]).items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        (lambda: frame(), {"target": "outcome"}, "no column 'outcome'"),
        (lambda: frame(more="text"), {}, "'more' is not numeric"),
        (lambda: frame(age=[np.nan] * COUNT), {}, "'age' has missing values"),
        (lambda: frame(a=0.0, b=1.5, diagnosis=2), {"target": ["a", "b", "diagnosis"]}, "several labels"),
        (lambda: (np.zeros((4, 2)), np.full((4, 5), "y")), {"patient": None, "hospital": None}, "several labels"),
        (lambda: (np.zeros((4, 2)), np.full((4, 5), np.nan)), {"patient": None, "hospital": None}, "missing"),
        (
            lambda: (np.full((4, 2), "y"), [0, 1, 0, 1]),
            {"patient": None, "hospital": None},
            "numbers of the same shape",
        ),
        (lambda: {"a": frame(), "b": frame()}, {}, "the keys name the hospitals"),
        (lambda: {"a": frame(clinic=0), "b": frame(clinic=0, c=0)}, {"hospital": None}, "'c' is not in all"),
        (lambda: (np.zeros((4, 2)), [0, 1, 0]), {"patient": None, "hospital": None}, "3 values for 4 cases"),
        (lambda: 7, {}, "can't be read"),
        (lambda: "nowhere", {}, "does not exist"),
    ],
)
def test_what_can_not_be_learned_is_said_in_a_line(given: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read(given(), **how)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- folders
def test_a_table_s_file_is_read_as_medsilo_data_reads_it(tmp_path: Path) -> None:
    """In earlier versions, `data` and `run` did not read a table's file."""
    clinics = [["north", "south"][number // 3 % 2] for number in range(COUNT)]
    frame(clinic=clinics).to_csv(tmp_path / "export.csv", index=False)
    with pytest.raises(DataError, match=r"nothing names the patient.*answers=\{'patients': ...\}"):
        medsilo.data(tmp_path / "export.csv")
    own = medsilo.data(tmp_path / "export.csv", patient="who", target="diagnosis", answers={"telling": "keep them"})
    assert repr(own) == "<data of 2 hospitals, patients of each: north: 10, south: 10>"
    done = medsilo.run(sites=own, changes=ONCE, device="cpu")
    assert sorted(done.summary.sites) == ["north", "south"] and done.plan.task.name == "table"
    assert {"benign", "malignant"} == {*done.plan.task.goal.label_names}
    found = medsilo.compare(["local", "fedavg"], sites=own, changes=ONCE, seeds=[0], device="cpu")
    assert sorted(found.runs) == [("fedavg", 0), ("local", 0)]
    with pytest.raises(MedsiloError, match="determines the task"):
        medsilo.run(sites=own, task="regression")


def test_a_table_s_words_are_called_as_plans_call_them(tmp_path: Path) -> None:
    frame().drop(columns="clinic").rename(columns={"age": "Alter"}).to_csv(tmp_path / "export.csv", index=False)
    called = {"Alter": "age", "malignant": "cancer"}
    how = {"patient": "who", "target": "diagnosis", "answers": {"telling": "keep them"}}
    plan = medsilo.run(sites=medsilo.data(tmp_path / "export.csv", called=called, **how), changes=ONCE).plan
    assert {"age", "cancer", "benign"} <= {*plan.task.words} and not {"Alter", "malignant"} & {*plan.task.words}
    with pytest.raises(DataError, match="the plan does not contain this name"):
        medsilo.data(tmp_path / "export.csv", called={"weight": "kg"}, **how)
    with pytest.raises(DataError, match="only for a folder"):
        medsilo.data(frame(), called=called)


def test_a_folder_of_images_with_hospitals_is_run(tmp_path: Path) -> None:
    for site in ("hospital-a", "hospital-b"):
        for number in range(12):
            for label, name in enumerate(("benign", "malignant")):
                image = photograph(len(site) * 100 + ord(site[-1]) * 50 + 20 * label + number)[0]
                write_pixels(tmp_path / site / name / f"patient-{label}{number:02}.png", image)
    own = medsilo.data(tmp_path)
    assert own.patients == {"hospital-a": 24, "hospital-b": 24}  # type: ignore[attr-defined]
    done = medsilo.run("fedprox", sites=own, changes={"training.rounds": 1, "training.local_epochs": 1}, device="cpu")
    assert done.plan.algorithm.name == "fedprox" and done.plan.task.name == "image-folder"
    assert sorted(done.summary.sites) == ["hospital-a", "hospital-b"]


def test_what_is_given_as_data_is_sent_to_sites() -> None:
    """In earlier versions, medsilo mistook the result of medsilo.data for a description of a folder."""
    with pytest.raises(MedsiloError, match="pass this object as sites="):
        medsilo.run("fedavg", data=read(frame()))  # type: ignore[arg-type]
