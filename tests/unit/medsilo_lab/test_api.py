"""Test the Python interface: its names and signatures, its time to import, and the texts of its objects."""

import ast
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from monai.data import Dataset as MonaiData
from monai.data import MetaTensor
from monai.losses import DiceCELoss, DiceLoss
from pandas import DataFrame
from safetensors.torch import load_file
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
    roc_curve,
)
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import medsilo
from medsilo import extend
from medsilo.cli import main
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.text import counted
from medsilo.extend import Algorithm, Group, Phase
from medsilo.registry import NETWORKS
from medsilo.tasks.metrics import BINS
from medsilo_lab import in_memory
from medsilo_lab.cli import comparing
from medsilo_lab.in_memory import source_hash
from medsilo_lab.report.class_rates import AT_RATE
from tests.conftest import SITES, make_plan, slow_but
from tests.hospital import write_balls

SMALL = ["task.persons=6", "task.windows=20", "training.rounds=2"]
SIGNATURES = {
    "load_plan": "path changes allowed method",
    "run": "plan task sites model method loss engine folder changes rounds lr optimizer groups data device on_round",
    "compare": "methods plan task sites model loss seeds folds folder changes rounds lr optimizer groups baseline data "
    "device say",
    "power": "patients plan sites seeds difference changes data",
    "predict": "model images out site device settings",
    "Run": "folder",
    "Comparison": "folder",
    "AmplitudeNorm": "shape decay band start",
    "PerturbedOptimizer": "base alpha eps module",
}
MEMBERS = {
    "Run": {"folder", "plan", "summary", "history", "models", "table", "report", "warnings"}
    | {"cases", "classes", "subgroups", "rounds", "plot", "predict", "figures", "more", "export"},
    "Comparison": {"folder", "verdict", "headline", "warnings", "failures", "power", "runs", "table", "report"}
    | {"figures", "subgroups"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> medsilo.Run:
    return medsilo.run(make_plan("fedbn", *SMALL), folder=tmp_path_factory.mktemp("api") / "run", device="cpu")


# ---------------------------------------------------------------------------------------------------- names
def test_a_dozen_names_are_public_and_documented(root: Path) -> None:
    assert len(medsilo.__all__) <= 14 and list(medsilo.__all__) == sorted(medsilo.__all__)
    page = (root / "docs/research/python.md").read_text("utf-8")
    for name in medsilo.__all__:
        found = getattr(medsilo, name)
        assert name == "__version__" or inspect.getdoc(found)
        assert re.search(rf"^\|[^|]*`{name}\b", page, re.M), f"docs/research/python.md does not name {name}"
    with pytest.raises(AttributeError, match="has no attribute 'fun'"):
        medsilo.fun  # type: ignore[attr-defined]  # noqa: B018
    assert set(medsilo.__all__) <= set(dir(medsilo))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name: str) -> None:
    parameters = inspect.signature(getattr(medsilo, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())


@pytest.mark.parametrize("name", MEMBERS)
def test_members_stay(name: str) -> None:
    found = {member for member in dir(getattr(medsilo, name)) if not member.startswith("_")}
    assert found | {"folder"} == MEMBERS[name]


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import time; started = time.process_time(); import medsilo; spent = time.process_time() - started\n"
        "import sys; heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'pandas', 'nvflare'} & set(sys.modules)\n"
        "assert not heavy, heavy; assert spent < 1, spent\n"
        "assert medsilo.MedsiloError.__name__ == 'MedsiloError' and 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(medsilo.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def names_for_a_type_checker(place: ModuleType) -> dict[str, str | None]:
    block = next(
        node for node in ast.parse(Path(place.__file__ or "").read_text("utf-8")).body if isinstance(node, ast.If)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


def test_a_type_checker_sees_medsilo_s_own_names_and_entry_points_bring_the_lab_s() -> None:
    told = names_for_a_type_checker(medsilo)
    assert told == medsilo.PLACES
    assert {*told, *medsilo.LAB} == set(medsilo.__all__) and not {*told} & {*medsilo.LAB}
    assert {entry.name for entry in entry_points(group="medsilo.names")} == {*medsilo.LAB}
    assert all(getattr(medsilo, name).__module__.startswith("medsilo.") for name in told.keys() - {"__version__"})
    assert all(getattr(medsilo, name).__module__.startswith("medsilo_lab.") for name in medsilo.LAB)
    assert names_for_a_type_checker(extend) == extend.PLACES


# ---------------------------------------------------------------------------------------------------- a run
def test_a_run_shows_what_its_folder_holds(small: medsilo.Run, tmp_path: Path) -> None:
    summary = small.summary
    table = small.table
    assert list(table.index) == SITES and table.index.name == "site"
    for site in SITES:
        assert table.loc[site, "accuracy"] == summary.sites[site].test["accuracy"]
        assert table.loc[site, "train"] == summary.sites[site].cases["train"]
        assert table.loc[site, "round"] == summary.selected.rounds[site]
    assert [line.round for line in small.history] == [1, 2]
    raw = " untrained" if 0 in summary.selected.rounds.values() else ""
    assert repr(small) == (
        f"<Run FedBN on synthetic-activity, 3 sites, finished: mean test accuracy {summary.mean_test:.3f}{raw}, "
        f"{counted(len(small.warnings), 'warning')}>"
    )
    assert small.report(tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    again = medsilo.Run(str(small.folder))
    assert again.summary == summary and again.plan == small.plan


def test_keywords_are_the_plans_keys_and_a_wrong_one_names_the_right_one(tmp_path: Path) -> None:
    given = {"sites": {name: (torch.randn(24, 3), torch.arange(24) % 2) for name in "ab"}, "model": LINEAR}
    groups = {name: [number // 2 for number in range(24)] for name in "ab"}
    run = medsilo.run(**given, groups=groups, rounds=2, lr=0.2, optimizer="adam", device="cpu")
    training = run.plan.training
    assert (training.rounds, training.learning_rate, training.optimizer) == (2, 0.2, "adam")
    assert run.cases["patient"].nunique() == run.table["test"].sum() // 4
    for wrong, words in (
        ({"epochs": 3}, r"'epochs'; the plan has training\.local_epochs: changes="),
        ({"batch_size": 3}, r"the plan has training\.batch_size"),
        ({"optimiser": "adam"}, "did you mean optimizer="),
        ({"round": 3}, "did you mean rounds="),
        ({"optimizer": "adamm"}, "training.optimizer"),
        ({"rounds": 0}, "training.rounds"),
        ({"groups": {"a": [1]}}, "groups: give a list with the patient of each case"),
        ({"groups": {name: [1] for name in "ab"}}, "groups of a: give one patient for each case"),
    ):
        with pytest.raises(MedsiloError, match=words):
            medsilo.run(**given, **wrong, device="cpu")
    found = medsilo.compare(
        ["local", "fedavg"], **given, seeds=[0], folds=3, rounds=1, lr=0.1, groups=groups, device="cpu"
    )
    assert found.verdict.folds == 3 and len(found.verdict.runs) == 6
    assert len(repr(found)) < 160 and "2 rows" in repr(found)
    assert [*found.figures] == ["scores", "differences", "learning"]
    for form, begin in (("pdf", b"%PDF-"), ("svg", b"<?xml")):
        paths = found.figures.save(tmp_path / form, form)
        assert [path.name for path in paths] == [f"{name}.{form}" for name in found.figures]
        first = [path.read_bytes() for path in paths]
        assert all(content.startswith(begin) for content in first)
        assert first == [path.read_bytes() for path in found.figures.save(tmp_path / "again", form)]
    assert "single-site" in (tmp_path / "svg/scores.svg").read_text()
    axes = found.figures["scores"].axes[0]
    named = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    score = {row.title: row.score.mean for row in found.verdict.rows}
    assert named["single-site"] == score["local"] and named["federated"] == pytest.approx(score["fedavg"])
    with pytest.raises(MedsiloError, match="choose pdf, svg, png"):
        found.figures.save(tmp_path, "bmp")


LINEAR = nn.Linear(3, 2)


def test_a_run_goes_on_and_predicts_a_dataset(tmp_path: Path) -> None:
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    cases = TensorDataset(inputs, torch.arange(24) % 2)
    plan = {"sites": {"a": cases, "b": cases}, "model": LINEAR, "device": "cpu"}
    run = medsilo.run(**plan, rounds=1)
    longer = run.more(2, folder=tmp_path / "longer")
    at_once = medsilo.run(**plan, rounds=3)
    assert longer.plan.rounds == 3 and longer.folder == tmp_path / "longer" and run.plan.rounds == 1
    for name, tensor in at_once.models["a"].state_dict().items():
        assert longer.models["a"].state_dict()[name].equal(tensor)
    assert longer.predict(cases).equal(longer.predict(inputs))
    assert longer.predict([{"image": values, "label": 0} for values in inputs]).equal(longer.predict(inputs))
    for wrong in ([], [1, 2], ["a"], 3):
        with pytest.raises(MedsiloError, match="images: give"):
            longer.predict(wrong)
    assert [*run.figures] == ["scores", "learning"] and repr(run.figures) == "<Figures: scores, learning>"
    assert run.figures["learning"].axes[0].get_xlabel() == "rounds"
    assert repr(run.models) == "<Models: a, b>"
    assert (
        repr(run.plan)
        == f"<Plan {run.summary.title} on {run.plan.task.name}, 2 sites, 1 round, hash {run.plan.hash[:12]}>"
    )
    assert "limits=Picture()" in repr(run.plot) and len(repr(run.plot)) < 400


def test_each_class_of_a_hospital_has_its_cases_its_rates_and_its_area(small: medsilo.Run) -> None:
    """The expected rates come from scikit-learn, with probabilities rounded to 200 bins.

    A hospital's area under the ROC curve is the mean over the classes' areas.
    """
    classes, cases = small.classes, small.cases
    assert classes.index.names == ["site", "class"] and list(classes.columns) == [
        *("cases", "sensitivity", "specificity", "precision", "f1", "auroc", "pr_auc"),
        *("sensitivity_at_90_specificity", "specificity_at_90_sensitivity"),
        *(f"{rate}_{end}" for rate in ("sensitivity", "specificity", "precision", "f1") for end in ("low", "high")),
        *(f"{rate}_{end}" for rate in ("auroc", "pr_auc", *AT_RATE) for end in ("low", "high")),
    ]
    for site in SITES:
        own = cases.loc[site]
        names = classes.loc[site].index
        for label, name in enumerate(names):
            here, found = own["label"] == label, own["found"] == label
            told = classes.loc[(site, name)]
            assert told["cases"] == here.sum()
            assert told["specificity"] == pytest.approx(recall_score(~here, ~found))
            if here.any() or found.any():
                assert told["f1"] == pytest.approx(f1_score(here, found))
            if found.any():
                assert told["precision"] == pytest.approx(precision_score(here, found))
            if here.any():
                bins = own[f"p{label}"] * BINS // 1
                false, true, _ = roc_curve(here, bins, drop_intermediate=False)
                assert told["pr_auc"] == pytest.approx(average_precision_score(here, bins))
                assert told["sensitivity_at_90_specificity"] == pytest.approx(true[false <= 0.1].max())
                assert told["specificity_at_90_sensitivity"] == pytest.approx(1 - false[true >= 0.9].min())
                assert all(told[f"{rate}_low"] <= told[rate] <= told[f"{rate}_high"] for rate in ("auroc", "pr_auc"))
                assert told["sensitivity"] == pytest.approx(recall_score(here, found))
                assert told["auroc"] == pytest.approx(roc_auc_score(here, own[f"p{label}"] * BINS // 1))
            else:
                assert told[["sensitivity", "auroc"]].isna().all()
        assert classes.loc[site]["auroc"].mean() == pytest.approx(small.table.loc[site, "auroc"])
        assert "auroc_0" not in small.table.columns
        assert small.table.loc[site, "balanced_accuracy"] == pytest.approx(classes.loc[site]["sensitivity"].mean())


def test_the_models_of_a_run_are_those_that_were_tested(small: medsilo.Run) -> None:
    assert list(small.models) == SITES and len(small.models) == 3
    for site, model in small.models.items():
        assert not model.training
        kept = load_file(small.folder / "sites" / site / "best.safetensors")
        assert all(tensor.equal(kept[name]) for name, tensor in model.state_dict().items())
    assert "nobody" not in small.models


def test_central_gives_every_site_the_one_model() -> None:
    run = medsilo.run(make_plan("central", *SMALL), device="cpu")
    assert list(run.models) == SITES == list(run.table.index)
    assert run.plan.hash == run.summary.plan_hash and run.plan.participation.sites == tuple(SITES)
    one, other = (run.models[site].state_dict() for site in SITES[:2])
    assert all(tensor.equal(other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("method", "file"), [("central", "pooled"), ("fedbn", SITES[0])])
def test_a_model_of_another_study_is_refused_though_it_fits(method: str, file: str, tmp_path: Path) -> None:
    """A checkpoint of another study may have equal tensor shapes, and would then load and give plausible scores."""
    plan = make_plan(method, *SMALL, "training.rounds=1")
    runs = [
        medsilo.run(plan.with_changes([f"seed={seed}"]), folder=tmp_path / f"{seed}", device="cpu") for seed in (0, 1)
    ]
    shutil.copy(*(run.folder / "sites" / file / "best.safetensors" for run in runs))
    assert runs[0].models[SITES[0]]
    with pytest.raises(MedsiloError, match="(not made by|not belong to) the plan.yaml"):
        runs[1].models[SITES[0]]


@pytest.mark.slow
def test_a_plan_may_be_given_in_every_form(tmp_path: Path, root: Path) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=1")
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    seen: list[int] = []
    for one in (plan, plan.resolved(), tmp_path / "plan.yaml", str(tmp_path / "plan.yaml")):
        done = medsilo.run(one, sites=["a", "b"], device="cpu", on_round=lambda record: seen.append(record.round))
        assert done.plan == plan.with_changes(["participation.sites=[a, b]"])
    assert seen == [1, 1, 1, 1]
    few = ["task.name=synthetic-activity", *SMALL, "training.rounds=1"]
    assert medsilo.run(root / "jobs/fedbn", changes=few, device="cpu").plan.algorithm.name == "fedbn"


def test_a_run_without_a_folder_goes_when_its_result_goes() -> None:
    done = medsilo.run(make_plan("local", *SMALL, "training.rounds=1"), device="cpu")
    folder = done.folder
    assert (folder / "summary.json").is_file()
    del done
    assert not folder.exists()


def looks_too_far(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets[:, 7])


class Breaks(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, case: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), {name: name % 2 for name in range(1, 9)}[case]


class Named(nn.Linear):
    """A network that returns its logits in a dictionary, as networks of several libraries do."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(inputs)}


def cases() -> tuple[Any, Any]:
    return [[0.0]] * 40, [0, 1] * 20


def test_a_program_s_own_error_keeps_its_traceback_and_is_told_with_its_line() -> None:
    for attempt, function in (
        (lambda: medsilo.run(sites={"a": cases()}, loss=looks_too_far, device="cpu"), looks_too_far),
        (lambda: medsilo.run(sites={"a": Breaks()}), Breaks.__getitem__),
    ):
        with pytest.raises(MedsiloError) as caught:
            attempt()
        line = function.__code__.co_firstlineno + 1
        assert f"{Path(__file__).name}, line {line}, in {function.__name__}" in str(caught.value)
        first: BaseException = caught.value
        while first.__cause__:
            first = first.__cause__
        assert not isinstance(first, MedsiloError)
        assert line in [frame.lineno for frame in traceback.extract_tb(first.__traceback__)]


def test_a_model_that_returns_a_dictionary_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match="network.name: .* returns a dict; .*one tensor"):
        medsilo.run(sites={"a": cases()}, model=lambda: Named(1, 2), device="cpu")


def test_what_is_wrong_is_one_line(tmp_path: Path, small: medsilo.Run, monkeypatch: Any) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: medsilo.Run(tmp_path), "is not a finished run: it has no summary.json"),
        (lambda: medsilo.Comparison(tmp_path), "is not a comparison: it has no verdict.json"),
        (lambda: medsilo.run(small.plan, engine="slow"), "engine 'slow' is not known; choose 'inprocess'"),  # type: ignore[arg-type]
        (lambda: medsilo.run(small.plan, device="gpu"), "medsilo.run: device: 'gpu' is not known"),
        (lambda: medsilo.run(small.plan, folder=small.folder, device="cpu"), "exists; choose another name"),
        (lambda: medsilo.run(tmp_path / "no.yaml"), "cannot be read"),
        (lambda: medsilo.compare(["fedavgg"]), "did you mean 'fedavg'?"),
        (lambda: medsilo.compare("fedavgg"), "did you mean 'fedavg'?"),
        (lambda: medsilo.compare(["local"], against="fedavg"), "did you mean baseline=?"),  # type: ignore[call-arg]
        (lambda: medsilo.compare(["local"], baseline="fedbn"), "baseline= 'fedbn': no row has this title"),
        (lambda: medsilo.run(small.plan, changes="rounds"), "changes: 'rounds': write it as key.subkey=value"),
        (lambda: medsilo.run(task="prostate"), "or give data="),
        (
            lambda: medsilo.run(sites={"a": ([[0.0]] * 9, [0, 1, 0] * 3)}, model=nn.Linear(3, 2)),
            "can't read the inputs",
        ),
        (
            lambda: medsilo.run(
                sites={"a": ([[0.0]] * 9, [0, 1, 0] * 3)},
                model=nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)),
                changes="training.batch_size=1",
            ),
            "its numbers, training.batch_size or",
        ),
        (
            lambda: medsilo.run(small.plan, model=nn.Conv2d),
            "takes in_channels, out_channels, kernel_size; it must take",
        ),
        (
            lambda: medsilo.run(sites={"a": ([[0.0]] * 40, [0, 1] * 20)}, loss=of_each_case),
            "loss: of_each_case gives a tensor of shape (8,); return the batch's mean",
        ),
        (lambda: medsilo.run(small.plan, loss=len), "only for your own data"),
        (lambda: medsilo.run(small.plan, method=dict), "dict is no Algorithm with a name"),
        (lambda: medsilo.run(sites={"a": [1, 2]}), "the data of a can't be read"),
        (lambda: medsilo.run(sites={"a": ([[float("nan")]] * 9, [0, 1, 0] * 3)}), "inputs of a are NaN or infinite"),
        (lambda: medsilo.run(sites=[([0], [1])]), "give the names of the sites"),
        (lambda: medsilo.run(sites={"a": ([[0.0]] * 9, [0, 1, 0] * 3)}, loss="ce"), "'ce' can't be called"),
        (lambda: medsilo.run(sites={"a": ([[0.0]] * 9, [0] * 9)}, loss=nn.CrossEntropyLoss), "CrossEntropyLoss(...)"),
        (lambda: medsilo.run(sites={"a": [{"img": [0.0], "label": 1}] * 9}), "a sample has no image but img, label"),
        (lambda: medsilo.run(sites={"a": ([[0.0]] * 9, ["ill"] * 9)}), "all labels are 'ill'"),
        (lambda: medsilo.run(sites={"a": [([0.0], "ill")] * 9}), "targets must be numbers"),
        (lambda: medsilo.run(small.plan, method=Nameless), "Nameless is no Algorithm with a name"),
        (lambda: medsilo.run(sites={"a": ([[1.0], [2.0]], [0, 1])}), "a has 2 patients; give 3 or more"),
        (lambda: medsilo.run(sites={"a": ([[1.0]] * 4, [0, 1, 0.5, 1])}), "give classes as whole numbers"),
        (
            lambda: medsilo.run(sites={"a": ([[1.0]] * 4, [0, 1, 1, 1])}, engine="simulator"),
            "choose engine='inprocess'",
        ),
    ]
    for attempt, words in wrong:
        with pytest.raises(MedsiloError, match=re.escape(words)) as caught:
            attempt()
        assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MedsiloError, match="pip install pandas"):
        small.table  # noqa: B018


def test_a_selector_that_cannot_read_the_cases_is_refused_before_anything_starts() -> None:
    """The selector's convolutions cannot read the rows of a table."""
    sites = {site: (torch.zeros(10, 1, 4, 4), [0, 1] * 5) for site in "ab"}
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(MedsiloError, match=r"algorithm\.selector:.*\[1, 4, 4\].*larger cases"):
        medsilo.run(method="fedsm", task="classification", sites=sites, model=flat, device="cpu")


# ---------------------------------------------------------------------------------------------------- own classes
WIDTH = 8


class Windows(Dataset):
    def __init__(self, seed: int) -> None:
        self.values = torch.randn(40, 4, generator=torch.Generator().manual_seed(seed))
        self.patients = [f"patient {case // 2}" for case in range(40)]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, case: int) -> tuple[torch.Tensor, int]:
        return self.values[case], int(self.values[case].sum() > 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class HeadStays(Algorithm):
    """A method as a user could define it in a notebook: the method shares all layers except the last layer."""

    title = "Head stays"
    paper = "none"
    personal = True
    name: Literal["head-stays"] = "head-stays"

    def phases(self, rounds: int) -> Sequence[Phase]:
        return [Phase("train", rounds, (Group("body", body, title="body"),))]


def body(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in modules["model"].state_dict().items() if "layers.0" in name}


class Nameless(Algorithm):
    title, paper = "Without a name", "none"


def doubled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * nn.functional.cross_entropy(outputs, targets)


def of_each_case(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


OWN: dict[str, Any] = {"sites": {"a": Windows(1), "b": Windows(2)}, "model": Net, "device": "cpu"}


def test_a_module_data_a_method_and_a_loss_of_ones_own_run_without_a_package(tmp_path: Path) -> None:
    changes = {"training.rounds": 6, "training.learning_rate": 0.2}
    run = medsilo.run(**OWN, task="classification", method=HeadStays, loss=doubled, changes=changes)
    assert run.summary.mean_test > 0.8
    first, second = (run.models[site].state_dict() for site in "ab")
    assert not first["layers.2.weight"].equal(second["layers.2.weight"])
    assert {name.removeprefix("source-of-") for name in run.plan.packages} >= {"head-stays"}
    assert run.predict(OWN["sites"]["a"].values[:3], site="a").equal(run.models["a"](OWN["sites"]["a"].values[:3]))
    for wrong in (OWN["sites"]["a"].values[0], OWN["sites"]["a"].values[:3, :1]):
        with pytest.raises(MedsiloError, match="the model reads"):
            run.predict(wrong, site="a")
    train, validation, test = (
        set(part.patients)
        for part in vars(run.plan.task.read("a", ["a"], 0, None)).values()
        if part and hasattr(part, "patients")
    )
    assert not train & validation and not train & test and not validation & test
    assert list(run.table["train"]) == [20, 20] and len(run.cases) == run.table["test"].sum()
    assert run.rounds.loc[(2, "a"), "validation"] == run.history[1].sites["a"].validation
    picture = run.plot.learning
    assert picture.html.count("<section") == 1 and "<iframe srcdoc=" in picture._repr_html_()
    assert '<details class="whole" open>' in picture.html
    other = medsilo.compare([HeadStays, "local"], **OWN, changes="training.rounds=1", seeds=[0])
    assert [row.title for row in other.verdict.rows] == ["head-stays", "local"]


def test_the_hash_follows_the_source_and_all_that_it_names(tmp_path: Path, monkeypatch: Any) -> None:
    before = source_hash(Net), source_hash(HeadStays), source_hash(doubled)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 9)
    assert source_hash(Net) != before[0] and source_hash(doubled) == before[2]
    monkeypatch.setattr(sys.modules[__name__], "body", doubled)
    assert source_hash(HeadStays) != before[1]
    (tmp_path / "modules.py").write_text("Odd = type('Odd', (), {'f': eval('lambda self: 1')})")
    # this folder makes `modules` look like a package that pip has installed into a folder of PYTHONPATH
    (tmp_path / "modules-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    own = type("Own", (import_module("modules").Odd,), {"__module__": __name__, "g": doubled})
    assert source_hash(own)


@pytest.mark.long
def test_a_run_of_ones_own_classes_says_elsewhere_what_is_missing(tmp_path: Path) -> None:
    medsilo.run(**OWN, folder=tmp_path / "run", changes={"training.rounds": 1})
    code = f"import medsilo; medsilo.Run({str(tmp_path / 'run')!r}).plan"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert (
        "it was a class of a Python program" in told.splitlines()[-1]
        and "python -m medsilo_lab.new" in told.splitlines()[-1]
    )


def test_frames_and_arrays_are_sites_too() -> None:
    frame = DataFrame(Windows(1).values.numpy(), columns=list("abcd")).assign(patient=Windows(1).patients)
    frame["label"] = [Windows(1)[case][1] for case in range(40)]
    arrays = (frame[list("abcd")].to_numpy(), frame["label"].to_numpy(), Windows(1).patients)
    runs = [medsilo.run(sites={"a": one}, device="cpu", changes={"training.rounds": 1}) for one in (frame, arrays)]
    assert runs[0].summary.mean_test == runs[1].summary.mean_test and runs[0].plan.hash == runs[1].plan.hash
    turned = {"a": frame, "b": frame[["patient", "d", "b", "label", "a", "c"]]}
    alike, same = (
        medsilo.run(sites=own, device="cpu", changes={"training.rounds": 1})
        for own in (turned, {"a": frame, "b": frame})
    )
    assert alike.summary.sites["b"].test == same.summary.sites["b"].test, "columns count by their names"
    with pytest.raises(MedsiloError, match="'c' is not in all frames"):
        medsilo.run(sites={"a": frame, "b": frame.drop(columns="c")}, device="cpu")
    volumes = (torch.rand(9, 1, 16, 16), torch.rand(9, 16, 16).round())
    small = medsilo.run(task="segmentation", sites={"a": volumes}, device="cpu", changes={"training.rounds": 1})
    assert small.summary.metric == "dice" and small.plan.network.name == "unet"
    numbers = (arrays[0], arrays[0].sum(1))
    assert medsilo.run(task="regression", sites={"a": numbers}, device="cpu").summary.metric == "closeness"


# ---------------------------------------------------------------------------------------------------- as in MONAI
def samples(seed: int, axes: int = 2, cases: int = 20) -> list[dict[str, Any]]:
    """Return cases as MONAI's transforms give them: MetaTensors with file names, and float labels of shape [1, ...]."""
    drawn = torch.Generator().manual_seed(seed)
    masks = torch.rand(cases, 1, *[16] * axes, generator=drawn).round()
    images = masks + 0.3 * torch.randn(masks.shape, generator=drawn)
    return [{"image": MetaTensor(image), "label": MetaTensor(mask)} for image, mask in zip(images, masks, strict=True)]


def pairs(given: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, masks = (torch.stack([sample[key].as_tensor() for sample in given]) for key in ("image", "label"))
    return images, masks[:, 0].long()


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


MASKS: dict[str, Any] = {"task": "segmentation", "changes": {"training.rounds": 1}, "device": "cpu"}


def weights(run: medsilo.Run, site: str = "a") -> torch.Tensor:
    return torch.cat([value.flatten() for value in run.models[site].state_dict().values()])


@pytest.mark.slow
def test_monais_samples_and_labels_with_an_axis_are_cases_as_pairs_are() -> None:
    net = normed()
    of = [MonaiData(samples(1)), pairs(samples(1)), samples(1)]
    runs = [medsilo.run(sites={"a": one}, model=net, **MASKS) for one in of]
    assert all(weights(run).equal(weights(runs[0])) for run in runs) and len({run.plan.hash for run in runs}) == 1
    assert runs[0].summary.mean_test == runs[1].summary.mean_test > 0
    thick = nn.Conv3d(1, 2, 1)
    volumes = medsilo.run(sites={"a": MonaiData(samples(1, axes=3))}, model=thick, **MASKS)
    assert volumes.summary.mean_test is not None and volumes.plan.task.shape == (1, 16, 16, 16)
    named = [{**sample, "patient": f"patient {number // 2}"} for number, sample in enumerate(samples(1))]
    dealt = medsilo.run(sites={"a": MonaiData(named)}, model=net, **MASKS)
    assert dealt.cases["patient"].nunique() == 3 and len(dealt.cases) == 6


@pytest.mark.slow
def test_a_loss_object_gets_the_targets_that_it_can_take() -> None:
    net, both = normed(), DiceCELoss(to_onehot_y=True, softmax=True)
    with_axis, without = MonaiData(samples(1)), pairs(samples(1))
    for loss in (both, nn.CrossEntropyLoss(), partial(nn.functional.cross_entropy, label_smoothing=0.1)):
        found = [medsilo.run(sites={"a": one}, model=net, loss=loss, **MASKS) for one in (with_axis, without)]
        assert weights(found[0]).equal(weights(found[1])), loss
    seen: list[tuple[int, ...]] = []

    def watching(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(targets.shape[1:]))
        return both(outputs, targets)

    medsilo.run(sites={"a": with_axis}, model=net, loss=watching, **MASKS)
    assert set(seen) == {(1, 16, 16)}
    with pytest.raises(MedsiloError, match="loss:.*shape .*different shape"):
        medsilo.run(sites={"a": with_axis}, model=net, loss=DiceLoss(softmax=True), **MASKS)
    numbers = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    # torch itself would broadcast targets of shape [8] against outputs of shape [8, 1]
    for sums in (numbers.sum(1), numbers.sum(1, keepdim=True)):
        far = medsilo.run(task="regression", sites={"a": (numbers, sums)}, loss=nn.MSELoss(), device="cpu")
        assert far.summary.mean_test > 0.7
    tasks = [in_memory.task("segmentation", {"a": without}, loss)["name"] for loss in (both, DiceCELoss(softmax=True))]
    assert tasks[0] != tasks[1] and tasks[0] == in_memory.task("segmentation", {"a": without}, both)["name"]


def test_all_sites_begin_with_the_weights_of_a_module() -> None:
    net = normed()
    still = medsilo.run(sites={"a": pairs(samples(1)), "b": pairs(samples(2))}, model=net, **MASKS)
    begun = still.plan.build_networks()["model"].state_dict()
    assert all(begun[name].equal(value) for name, value in net.state_dict().items())
    assert not weights(still).equal(torch.cat([value.flatten() for value in begun.values()]))
    names = [
        in_memory.model(net)["name"],
        in_memory.model(deepcopy(net).eval())["name"],
        in_memory.model(normed(1))["name"],
    ]
    assert names[0] == names[1] == still.plan.network.name != names[2]
    with torch.no_grad():
        net[0].weight += 1
    assert not still.plan.build_networks()["model"][0].weight.equal(net[0].weight)
    tied = nn.Sequential(layer := nn.Linear(4, 4), layer)
    with torch.device("meta"):
        empty = NETWORKS[in_memory.model(tied)["name"]]().build(4, 4)
    assert empty[0].weight is empty[1].weight and empty[0].weight.is_meta


@pytest.mark.slow
def test_an_objects_hash_is_the_same_in_every_process() -> None:
    code = (
        "import torch; from torch import nn; from medsilo_lab.in_memory import state_hash; torch.manual_seed(0); "
        "net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)); net.words = {'one', 'two', 'three'}; "
        "print(state_hash(net), state_hash(nn.CrossEntropyLoss(torch.ones(2))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    with redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert here.getvalue() == done.stdout


def test_adafed_pretrains_on_a_share_of_data_that_a_notebook_has() -> None:
    sites = {site: MonaiData(samples(seed)) for seed, site in enumerate("ab")}
    changes = {"training.rounds": 2, "algorithm.pretraining.epochs": 2}
    run = medsilo.run("adafed", **{**MASKS, "changes": changes}, sites=sites, model=normed())
    assert run.summary.details.pretraining["source"] == "share"
    assert run.summary.details.pretraining["cases"] == 4
    assert run.summary.mean_test > 0


# ---------------------------------------------------------------------------------------------------- as commands


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["method"], ["method", "task", "network"], ()))
def test_a_new_package_works_as_it_is_written(kind: str, tmp_path: Path) -> None:
    written = [sys.executable, "-m", "medsilo_lab.new", kind, f"my-{kind}", "-o", str(tmp_path / "new")]
    subprocess.run(written, check=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(medsilo.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q"]
    subprocess.run(command, cwd=tmp_path / "new", env=environment, check=True)


# ---------------------------------------------------------------------------------------------------- a comparison
def test_python_and_the_command_line_have_one_word_and_one_default() -> None:
    """In earlier versions, an option of the command line could have a different name or a different default value in
    Python.
    """
    python, command = (signature(does).parameters for does in (medsilo.compare, comparing.compare))
    assert {"seeds", "folds", "baseline", "task", "plan", "methods", "data", "device"} <= python.keys() & command.keys()
    seeds = comparing.seeds_of(command["seeds"].default)
    assert seeds == python["seeds"].default == signature(medsilo.power).parameters["seeds"].default
    assert "settings" in signature(medsilo.predict).parameters


@pytest.mark.slow
def test_a_comparison_is_that_of_the_command_line(tmp_path: Path) -> None:
    said: list[str] = []
    rows = ["local", "fedavg", "little: algorithm.name=fedavg training.learning_rate=0.001"]
    values = {"plan": make_plan("fedavg", *SMALL), "seeds": [0, 1], "folder": tmp_path / "c", "device": "cpu"}
    found = medsilo.compare(rows, **values, say=said.append)  # type: ignore[arg-type]
    assert len(said) == 7 and found.failures == []
    assert found.headline.splitlines() == [found.verdict.headline, *map(str, found.warnings)]
    assert list(found.table.index) == ["local", "fedavg", "little"]
    assert found.table.loc["fedavg", "mean"] == found.verdict.rows[1].score.mean
    assert found.table.loc["little", "difference"] == found.verdict.rows[2].difference.mean.mean
    assert len(found.runs) == 6 and found.runs["local", 1].plan.seed == 1
    assert "little: algorithm.name=fedavg training.learning_rate=0.001" in found.report().read_text("utf-8")
    again = medsilo.compare(rows, **values, say=said.append)  # type: ignore[arg-type]
    assert len(said) == 8 and again.verdict.rows == found.verdict.rows


def test_runs_of_a_comparison_outlive_it_and_other_norms_get_a_local_row() -> None:
    other = "grouped: algorithm.name=fedavg network.norm=group"
    plan = make_plan("local", *SMALL, "training.rounds=1")
    runs = medsilo.compare(["local", other], plan=plan, seeds=[0], device="cpu").runs
    assert {title for title, _ in runs} == {"local", "grouped", "local (group)"}
    assert all(run.folder.is_dir() for run in runs.values())


# ---------------------------------------------------------------------------------------------------- prediction
def test_images_are_predicted_as_by_the_command_line(tmp_path: Path) -> None:
    small = ["task.name=synthetic-prostate", "task.patients=4", "task.size=32", "training.rounds=1"]
    run = medsilo.run(make_plan("fedavg", *small, "training.batch_size=8"), folder=tmp_path / "run", device="cpu")
    assert run.export(tmp_path / "bundle") == tmp_path / "bundle"
    assert (tmp_path / "bundle/configs/metadata.json").is_file()
    with pytest.raises(MedsiloError, match="the folder exists"):
        run.export(tmp_path / "bundle")
    images = write_balls(tmp_path, ["one"]) / "images"
    (images / "broken.nii.gz").write_bytes(b"no image")
    found = medsilo.predict(run.folder, images, tmp_path / "out", device="cpu")
    broken, one = sorted(found, key=lambda row: row["image"])
    assert broken["error"] and one["error"] is None and (tmp_path / "out" / one["mask"]).is_file()
    command = ["predict", str(run.folder), str(images), "-o", str(tmp_path / "other"), "--device", "cpu"]
    assert main(command) == 1
    assert json.loads((tmp_path / "other/predictions.json").read_text("utf-8"))["cases"] == found


# ---------------------------------------------------------------------------------------------------- pages
@pytest.mark.slow
def test_the_pages_code_runs(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "__main__"}
    blocks = re.findall(r"^```python\n(.*?)^```$", (root / "docs/research/python.md").read_text("utf-8"), re.S | re.M)
    assert len(blocks) == 6
    for number, block in enumerate(blocks):
        (tmp_path / f"block{number}.py").write_text(block)
        exec(compile(block, str(tmp_path / f"block{number}.py"), "exec"), known)
    assert known["page"].is_file() and isinstance(known["model"], torch.nn.Module)


@pytest.mark.slow
def test_the_notebook_runs(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    import nbformat  # importing nbformat takes four seconds, and only this test needs nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(root / "docs/notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "clear its outputs before git"
    assert code[1].source.count('"rounds": 12, "local_epochs": 2') == 1
    code[1].source = code[1].source.replace('"rounds": 12, "local_epochs": 2', '"rounds": 2, "local_epochs": 1')
    monkeypatch.setenv("PYTHONPATH", str(root / "custom"))
    here = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=here).execute()
    outputs = [output.get("data", {}) for cell in code for output in cell.outputs]
    shown = [data["text/html"] for data in outputs if "text/html" in data]
    assert len(shown) == 5 and all("hospital-a" in html for html in shown)
    assert "did you mean 'fedavg'?" in code[-1].outputs[0]["text"]
