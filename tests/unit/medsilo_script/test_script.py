"""A user's training script gives the same tensors as medsilo's standard job."""

import doctest
import json
import math
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from enum import StrEnum
from functools import partial, reduce
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import nvflare.client as flare
import pytest
import safetensors.torch
import torch
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType, LogWriterName
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.executors.task_script_runner import TaskScriptRunner
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.widgets.convert_to_fed_event import FED_EVENT_PREFIX
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe as StockRecipe
from nvflare.job_config.api import FedJob
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.utils import add_cross_site_evaluation, add_final_global_evaluation, set_per_site_config
from torch import Tensor, nn

from medsilo.cli import main
from medsilo.client import super_model
from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, ParticipationError, Refused, WeightsMissing
from medsilo.core.files import load_tensors
from medsilo.core.package import machine_facts
from medsilo.exchange.acceptance import Acceptance
from medsilo.federation.script_bits import bits_of, most_bits
from medsilo.flare import script_process
from medsilo.flare.script_wire import flat
from medsilo.flare.wire import LACKS, unflat
from medsilo.learning import layers
from medsilo.learning.compute import Compute
from medsilo.learning.loop import batches
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.plan import Plan, load_plan
from medsilo.registry import METHODS
from medsilo.runs import paths
from medsilo.runs.messages import FILES, PARTS, Request, StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo.tasks.objective import Objective
from medsilo_lab import recipes
from medsilo_lab.engines.inprocess import Line
from medsilo_lab.engines.simulator_workspace import failure_in
from medsilo_lab.report import page
from medsilo_lab.report.read import read_all
from medsilo_lab.script_plan import INITIAL, plan_of_script
from medsilo_script import client
from medsilo_script.data import Data
from medsilo_script.network import ScriptNetwork, skeleton
from medsilo_script.site import ScriptSite
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan, mounted, over_all, slow_but
from tests.inprocess import run
from tests.unit.flare.test_executor import at_site
from tests.unit.site.test_approvals import make_kit

BATCH, RATE = 32, 0.05
IMAGES = ("task.name=synthetic-histology", "task.patients=6", "task.size=32")
GIVES_LOSS = ("moon", "apfl", "pfedme", "fedsm-extra", "harmofl")


class Shuffled:
    """A data loader that gives the same batches as medsilo's standard job."""

    def __init__(self, plan: Plan, site: str, cases: torch.utils.data.Dataset) -> None:
        self.plan, self.site, self.dataset, self.round = plan, site, cases, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = generator_for(self.plan.seed, self.site, "shuffle", self.round, 0)
        return batches(self.dataset, BATCH, Compute(), order)

    def __len__(self) -> int:
        return -(-len(self.dataset) // BATCH)  # type: ignore[arg-type]


class Loss(nn.Module):
    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.goal = objective

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.goal.loss(output, target)


class Script:
    def __init__(
        self, own: Plan, plan: Plan, site: str, folder: Path, restarts: bool, given: Mapping[str, Any]
    ) -> None:
        self.own, self.plan, self.name, self.folder, self.restarts, self.given = (
            own,
            plan,
            site,
            folder,
            restarts,
            given,
        )
        self.data = own.task.site_data(site, SITES, own.seed, None)
        self.started: ScriptSite | None = None

    def start(self) -> ScriptSite:
        torch.manual_seed(7)  # the weights in the recipe replace the network's initial weights
        self.model = self.own.network.build(self.own.task.channels, self.own.task.goal.outputs)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.loader = Shuffled(self.own, self.name, self.data.train)
        validation = list(batches(self.data.validation, 64, Compute()))
        self.loss = Loss(self.own.task.goal)
        given = self.loss if self.own.algorithm.name in GIVES_LOSS else None
        more = {"validation": validation, "loss": given, "evaluate": self.evaluate, "test": self.test, **self.given}
        data = Data(self.loader, **more)
        return ScriptSite(self.plan, self.name, self.folder, self.model, optimizer, data)

    def evaluate(self, net: nn.Module) -> float:
        right = [(net(x).argmax(1) == y).double() for x, y in batches(self.data.validation, 64, Compute())]
        return float(torch.cat(right).mean())

    def test(self, net: nn.Module) -> float:
        return float(
            torch.cat([(net(x).argmax(1) == y).double() for x, y in batches(self.data.test, 64, Compute())]).mean()
        )

    def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
        site = self.started = self.start() if self.restarts or not self.started else self.started
        self.loader.round = message.facts["round"]
        if (reply := site.ask(message)) is not None:
            return reply
        for net, optimizer in site.networks():
            net.train()
            for x, y in self.loader:
                optimizer.zero_grad()
                self.loss(net(x), y).backward()
                optimizer.step()
        return site.finish()


def scripted(
    own: Plan, folder: Path, restarts: bool = False, by: type[Script] = Script, **given: Any
) -> tuple[Record, dict[str, dict[str, Tensor]]]:
    model = own.build_networks()["model"]
    method = own.algorithm.model_dump(mode="json")
    shape = own.task.shape if own.algorithm.amplitude else None
    plan = plan_of_script(
        model, folder / "job", method, rounds=own.training.rounds, minimum=2, sites=SITES, input_shape=shape
    )
    model_folders.look_in(folder / "job")
    sites = {site: by(own, plan, site, folder / site, restarts, given) for site in SITES}
    record = Record(folder / "runs" / "study")
    Coordinator(plan, SITES, Line(sites), record, "in-process").run()
    kept = paths.site_folder
    return record, {site: load_tensors(kept(folder / site / "study", site) / paths.LAST)[0] for site in SITES}


def check_equal(own: Plan, folder: Path, nearly: float = 0.0, restarts: bool = False) -> Record:
    """Assert that the scripts' tensors equal the tensors of medsilo's standard job."""
    study = run(own)
    expected = study.models
    record, found = scripted(own, folder, restarts)
    summary = record.summary()
    assert summary
    for site, own_result in study.summary.sites.items():
        if own_result.test:
            assert summary.sites[site].test["accuracy"] == pytest.approx(own_result.test["accuracy"], abs=1e-6 + nearly)
    for site, model in expected.items():
        for name, tensor in model.state_dict().items():
            assert (found[site][name].double() - tensor.double()).abs().max() <= nearly, f"{site} {name}"
    return record


@pytest.mark.parametrize(
    ("method", "restarts"),
    [("fedbn", False)]
    + [(name, True) for name in ("fedbn", "scaffold", "ditto")]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in ("fednova", "fedadam", "moon")]
    + [pytest.param(name, False, marks=pytest.mark.long) for name in ("ditto", "scaffold")]
    + [pytest.param(name, True, marks=pytest.mark.long) for name in ("fedper", "fedprox", "feddyn")],
)
def test_a_script_ends_with_the_tensors_of_medsilos_own_job(method: str, restarts: bool, tmp_path: Path) -> None:
    check_equal(make_plan(method, "training.rounds=3"), tmp_path, restarts=restarts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["apfl", pytest.param("pfedme", marks=pytest.mark.long), "fedsm-extra"])
def test_methods_that_train_networks_together_pass_over_the_scripts_loader(method: str, tmp_path: Path) -> None:
    check_equal(make_plan(method, "training.rounds=3"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [pytest.param(False, marks=pytest.mark.long), True])
def test_harmofl_of_a_script_is_medsilos_own(restarts: bool, tmp_path: Path) -> None:
    check_equal(make_plan("harmofl", *IMAGES, "training.rounds=3"), tmp_path, restarts=restarts)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fedsm_of_a_script_ends_with_a_super_model(restarts: bool, tmp_path: Path) -> None:
    record = check_equal(make_plan("fedsm", "training.rounds=3"), tmp_path, restarts=restarts)
    told = record.summary().details.super_model
    assert sum(sum(own.values()) for own in told.validated.values()) > 0
    own = make_plan("fedsm", "training.rounds=3")
    model = super_model(record.folder / paths.SUPER_MODEL, own.network.build(own.task.channels, own.task.goal.outputs))
    inputs = torch.stack([own.task.site_data(site, SITES, own.seed, None).test[0][0] for site in SITES])
    _, names, _ = model.answer(inputs)
    assert set(names) <= {*SITES, "global"} and model(inputs).shape == (3, own.task.goal.outputs)


class Tiny:
    def __init__(self, plan: Plan, site: str, folder: Path, model: nn.Module, size: int) -> None:
        torch.manual_seed(len(site))
        precision = next(model.parameters()).dtype
        images, classes = torch.rand(24, 1, size, size, dtype=precision) + (site == "a"), torch.arange(24) % 2
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, classes), batch_size=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.loss = nn.CrossEntropyLoss()
        data = Data(self.loader, validation=[*self.loader], loss=self.loss, evaluate=self.score, test=self.score)
        self.site = ScriptSite(plan, site, folder, model, optimizer, data)

    def score(self, net: nn.Module) -> float:
        return float(torch.cat([(net(x).argmax(1) == y).double() for x, y in self.loader]).mean())

    def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
        if (reply := self.site.ask(message)) is not None:
            return reply
        for net, optimizer in self.site.networks():
            for x, y in self.loader:
                optimizer.zero_grad()
                self.loss(net(x), y).backward()
                optimizer.step()
        return self.site.finish()


def tiny_study(
    method: dict[str, Any], size: int, precision: torch.dtype, folder: Path
) -> tuple[Record, dict[str, Tiny], nn.Module]:
    def model() -> nn.Module:
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        return nn.Sequential(*layers).to(precision)

    shape = (1, size, size) if method["name"] == "harmofl" else None
    plan = plan_of_script(model(), folder / "job", method, rounds=3, minimum=2, sites=["a", "b"], input_shape=shape)
    model_folders.look_in(folder / "job")
    sites = {site: Tiny(plan, site, folder / site, model(), size) for site in "ab"}
    record = Record(folder / "runs" / "study")
    Coordinator(plan, ["a", "b"], Line(sites), record, "in-process").run()
    return record, sites, model()


FEDSM, TRAINED = {"name": "fedsm"}, {"name": "fedsm", "selector_sync": "server-adam"}
SMALLEST = [
    (FEDSM, 16, torch.float64),
    (FEDSM, 5, torch.float32),
    (TRAINED, 8, torch.float64),
    ({"name": "fedsm-extra"}, 5, torch.float64),
]


@pytest.mark.parametrize(("method", "size", "precision"), slow_but(SMALLEST[:2], SMALLEST), ids=str)
def test_fedsm_of_a_script_takes_its_precision_and_small_images(
    method: dict[str, Any], size: int, precision: torch.dtype, tmp_path: Path
) -> None:
    record, sites, model = tiny_study(method, size, precision, tmp_path)
    told = record.summary().details.super_model
    assert sum(sum(own.values()) for own in told.validated.values()) == 48
    whole = super_model(record.folder / paths.SUPER_MODEL, model)
    images, _ = next(iter(sites["a"].loader))
    assert whole(images).dtype == whole.selector(images).dtype == precision


@pytest.mark.parametrize(("precision", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_the_amplitude_of_a_script_has_its_precision(precision: torch.dtype, error: float, tmp_path: Path) -> None:
    _, sites, _ = tiny_study({"name": "harmofl"}, 8, precision, tmp_path)
    shared = [own.site.state.modules["amplitude"].amplitude for own in sites.values()]
    ends = []
    for own in sites.values():
        first, *others = (torch.fft.rfftn(images.double(), dim=(-2, -1)).abs().mean(0) for images, _ in own.loader)
        ends.append(reduce(lambda mean, batch: 0.9 * mean + 0.1 * batch, others, first))
    assert all(own.dtype == precision for own in shared)
    assert all(torch.allclose(own.double(), sum(ends) / 2, rtol=error) for own in shared)


@pytest.mark.parametrize("method", slow_but(["f-adafed"], ["f-adafed", "adafed", "d-adafed"], ()))
def test_adafeds_of_a_script_are_medsilos_own_but_for_the_order_of_sums(method: str, tmp_path: Path) -> None:
    source = [] if method == "f-adafed" else ["algorithm.pretraining.source=initial"]
    check_equal(make_plan(method, "training.rounds=3", *source), tmp_path, nearly=1e-6)


def ends_of(method: str, folder: Path, scheduled: bool, restarts: bool = False, times: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    cases = torch.utils.data.TensorDataset(torch.randn(24, 2), torch.tensor([0, 1] * 12))
    plan, site, sent, given = None, None, {}, {}
    for number in (number for number in range(1, 4) for _ in range(times)):
        if restarts or site is None:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
            plan = plan or plan_of_script(model, folder, {"name": method}, rounds=3, minimum=1, sites=["a"], seed=0)
            model_folders.look_in(folder)
            groups = [
                {"params": model[0].parameters(), "lr": 0.1},
                {"params": [*model[1].parameters(), *model[3].parameters()]},
            ]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.02], 9) if scheduled else None
            loader = torch.utils.data.DataLoader(cases, batch_size=6, shuffle=True)
            site = ScriptSite(plan, "a", folder, model, optimizer, Data(loader), scheduler=schedule)
            given.setdefault(
                1, {name: {key: own.clone() for key, own in model.state_dict().items()} for name in GIVEN[method]}
            )
        asked = Request(task="round", round=number, study="s", plan=plan.hash, sites=("a",), last=number - 1)
        assert site.ask(asked.message(given[number])) is None
        for net, stepping in site.networks():
            net.train()
            for inputs, targets in loader:
                stepping.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(net(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                stepping.step()
        if schedule:
            schedule.step()
        for group in optimizer.param_groups:
            group["lr"] *= 1.0 if scheduled else 0.5
        sent = given[number + 1] = site.finish().groups
    own = {f"own/{name}": tensor.clone() for name, tensor in site.state.modules["model"].state_dict().items()}
    return own | {name: tensor for tensors in sent.values() for name, tensor in tensors.items()}


GIVEN = {"fedavg": ["model"], "ditto": ["global"]}


@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduler", "by hand"])
@pytest.mark.parametrize("disturbed", [{"restarts": True}, {"times": 2}, {"restarts": True, "times": 2}], ids=str)
@pytest.mark.parametrize("method", list(GIVEN))
def test_a_script_with_a_schedule_and_mixed_precision_goes_on_after_each_start(
    method: str, disturbed: dict[str, Any], scheduled: bool, tmp_path: Path
) -> None:
    """In earlier versions, repeating round 1 used later learning rates, and a restart lost the script's own changes."""
    steady = ends_of(method, tmp_path / "steady", scheduled)
    other = ends_of(method, tmp_path / "disturbed", scheduled, **disturbed)
    assert steady.keys() == other.keys()
    assert all(torch.equal(steady[name], other[name]) for name in steady)


@pytest.mark.slow
def test_fedsm_extra_of_a_script_that_sends_scores_and_has_no_evaluate_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, sites had no best model after a study whose last rounds train only the selector."""
    own, finish = make_plan("fedsm-extra", "training.rounds=3"), ScriptSite.finish
    monkeypatch.setattr(ScriptSite, "finish", lambda site: finish(site, {"accuracy": 0.5}))
    record, _ = scripted(own, tmp_path, evaluate=None)
    last = run(make_plan("fedsm-extra", "training.rounds=3", "model_selection.keep=last")).summary
    for site, found in record.summary().sites.items():
        assert found.test["accuracy"] == pytest.approx(last.sites[site].test["accuracy"], abs=1e-6)


class OtherUnits(Script):
    """A script whose metric is a percentage (as in NVFlare's hello-pt) or a loss, instead of a score between 0 and
    1.
    """

    factor = 100.0

    def evaluate(self, net: nn.Module) -> float:
        return self.factor * super().evaluate(net)

    def test(self, net: nn.Module) -> float:
        return self.factor * super().test(net)


@pytest.mark.slow
@pytest.mark.parametrize("lower_is_better", [False, True])
def test_a_metric_may_be_of_any_size(lower_is_better: bool, tmp_path: Path) -> None:
    own = make_plan("fedavg")
    expected = run(own).summary
    model = own.build_networks()["model"]
    further = {"task": {"lower_is_better": lower_is_better}}
    plan = plan_of_script(
        model, tmp_path / "job", {"name": "fedavg"}, rounds=2, minimum=2, sites=SITES, further=further
    )
    model_folders.look_in(tmp_path / "job")
    record = Record(tmp_path / "runs" / "study")
    sites = {site: OtherUnits(own, plan, site, tmp_path / site, False, {}) for site in SITES}
    Coordinator(plan, SITES, Line(sites), record, "in-process").run()
    found = record.summary().mean_test
    assert found and (-100 <= found < 0 if lower_is_better else found == pytest.approx(100 * expected.mean_test))
    assert f"{found:.3f}" in page.render(read_all([record.folder]), "A script of its own")


# ------------------------------------------------------------------------------------------------------ the description
def networks() -> list[nn.Module]:
    from monai.networks import nets

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.register_buffer("unsaved", torch.ones(2), persistent=False)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)

    return [
        nets.UNet(2, 1, 2, (4, 8, 16), (2, 2)),
        nets.SegResNet(spatial_dims=3, init_filters=8),
        nets.DenseNet121(2, 3, 2),
        nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12),
        nets.ViT(1, (32, 32), (16, 16), hidden_size=24, mlp_dim=24, num_layers=1, num_heads=2, spatial_dims=2),
        nn.TransformerEncoderLayer(8, 2),
        nn.LSTM(3, 4, 2),
        nn.ParameterList(torch.zeros(1) for _ in range(1200)),
        Tied(),
    ]


@pytest.mark.slow
def test_a_description_has_the_tensors_norms_and_head_of_its_network() -> None:
    for model in networks():
        found = skeleton(ScriptNetwork.model_validate_json(json.dumps(described(model))).layers)
        assert list(found.state_dict()) == list(model.state_dict())
        for (name, own), other in zip(model.state_dict().items(), found.state_dict().values(), strict=True):
            assert own.shape == other.shape and own.dtype == other.dtype, name
        for names in (layers.local_norm_names, layers.head_names, layers.batch_norm_buffer_names):
            assert names(found) == names(model)
        assert [own.requires_grad for own in found.parameters()] == [own.requires_grad for own in model.parameters()]


def described(model: nn.Module) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        return ScriptNetwork.section(model, Path(folder) / "initial.safetensors")


def test_another_model_than_the_recipes_is_refused_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    plan = plan_of_script(nn.Linear(2, 3), tmp_path, {"name": "fedavg"}, rounds=1, minimum=1)
    for other in (nn.Linear(2, 4), nn.ModuleDict({"_orig_mod": nn.Linear(2, 3)})):
        with pytest.raises(MedsiloError, match="weight.*compiled"):
            plan.network.make_by(other)


class Stateful(nn.Linear):
    """A layer whose state dict also contains values that are not tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def with_buffer(own: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("own", own)
    return model


def hooked(change: Callable[[dict[str, Tensor]], object]) -> nn.Module:
    """Return a layer whose state dict differs from the layer's tensors, as the state dict of a quantised layer does."""

    def changed(module: nn.Module, kept: dict[str, Tensor], prefix: str, meta: object) -> None:
        change(kept)

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(changed)
    return model


def test_weights_that_can_not_travel_are_refused_by_their_names() -> None:
    """In earlier versions, torch's error named no layer, and a mask of minus infinity counted as diverged training."""
    odd, masked = nn.Linear(2, 2), nn.Linear(2, 2)
    odd.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    masked.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    for model, told in (
        (nn.Sequential(nn.LazyLinear(2)), "0.weight.*batch"),
        (odd, "weight has the type complex64"),
        (masked, "mask is NaN or infinite.*persistent=False"),
        (nn.Sequential(Stateful(2, 2)), "0._extra_state cannot be sent"),
        (with_buffer(torch.ones(3).to_sparse()), "own is not a dense tensor"),
        (with_buffer(torch.zeros([1] * 9)), "own is not a dense tensor with at most 8 dimensions"),
        (hooked(lambda kept: kept.update(more=torch.ones(2))), "more cannot be sent"),
        (hooked(lambda kept: kept.pop("bias")), "bias cannot be sent"),
    ):
        with pytest.raises(MedsiloError, match=f"model: {told}"):
            described(model)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "ditto"])
def test_a_layer_that_a_network_uses_under_two_names_is_trained_once(method: str, tmp_path: Path) -> None:
    """In earlier versions, the server rejected the first round of a network in which one layer has two names."""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.Sequential(block, block, nn.Linear(2, 2))
    batch = (torch.randn(6, 2), torch.tensor([0, 1] * 3))
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=1, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    site = ScriptSite(plan, "a", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), Data([batch]))

    class Answers:
        def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
            if (reply := site.ask(message)) is not None:
                return reply
            for net, optimizer in site.networks():
                nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
                optimizer.step()
            return site.finish({"accuracy": 0.5})

    record = Record(tmp_path / "study")
    Coordinator(plan, ["a"], Line({"a": Answers()}), record, "in-process").run()
    kept, _ = load_tensors(site.state.folder / paths.LAST)
    assert record.summary().status == "finished" and torch.equal(kept["0.0.weight"], kept["1.0.weight"])


class Flare:
    """Stand in for NVFlare's Client API at a site in a study of two rounds; the site receives its own first weights."""

    def __init__(self, plan: Plan, groups: dict[str, dict[str, Tensor]]) -> None:
        tasks = [("join", 0), ("round", 1), ("round", 2), ("deliver", 2)]
        self.asked = [
            Request(task=task, round=number, study="study", plan=plan.hash, sites=("a",), last=2).message(groups)
            for task, number in tasks
        ]
        self.sent: list[FLModel] = []

    def __getattr__(self, name: str) -> object:
        return getattr(flare, name)

    def get_site_name(self) -> str:
        return "a"

    def is_running(self) -> bool:
        return len(self.sent) < len(self.asked)

    def init(self, rank: str | None = None) -> None:
        pass

    def receive(self) -> FLModel:
        tensors, meta = flat(self.asked[len(self.sent)])
        return FLModel(params=tensors, meta=meta)

    def send(self, model: FLModel) -> None:
        self.sent.append(model)


def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    (tmp_path / "app/custom").mkdir(parents=True)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([True, False]))
    plan = plan_of_script(model, tmp_path, {"name": "fedavg"}, rounds=2, minimum=1)
    (tmp_path / "app/config").mkdir()
    (tmp_path / "app/config" / paths.PLAN).write_text(plan.to_yaml())
    (tmp_path / INITIAL).rename(tmp_path / "app/config" / INITIAL)
    monkeypatch.syspath_prepend(tmp_path / "app/custom")
    for name, value in {"_site": None, "_follows": None, "_rank": "0"}.items():
        monkeypatch.setattr(client, name, value)
    monkeypatch.setattr(client, "before_script_connects", lambda begin: None)
    monkeypatch.setattr(client, "flare", Flare(plan.among(("a",)), {"model": deepcopy(model).state_dict()}))
    loader = [(torch.randn(6, 2), torch.tensor([0, 1] * 3))]

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        **vars(client),
        **{"model": model, "optimizer": optimizer, "loader": loader, "train": train, "evaluate": lambda net: 0.5},
    }


STATED = [name for name in client.__all__ if ">>>" in getattr(client, name).__doc__ and name != "super_model"]


@pytest.mark.parametrize("name", STATED)
def test_the_example_of_a_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = words(tmp_path, monkeypatch)
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(client, name), name, globs=known)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_what_is_received_is_the_model_as_it_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts for NVFlare load received weights into their network by name, so the names must be the network's.

    In earlier versions, the names of received weights began with the name of their group.
    """
    known = words(tmp_path, monkeypatch)
    model = known["model"]
    client.join(model, known["optimizer"], known["loader"])
    assert client.is_running()
    before = {name: own.clone() for name, own in model.state_dict().items()}
    known["train"](model, known["optimizer"])
    arrived = client.receive().params
    assert list(arrived) == list(before) and all(torch.equal(arrived[name], before[name]) for name in before)
    assert not torch.equal(arrived["0.weight"], model.state_dict()["0.weight"])


def test_a_script_whose_job_lacks_the_weights_has_them_from_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, a network above 4 MB did not run in PocEnv, whose sites accept jobs of at most 4 MB over
    http.
    """
    known = words(tmp_path, monkeypatch)
    file = tmp_path / "app/config" / INITIAL
    content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    file.unlink()
    client.join(known["model"], known["optimizer"], known["loader"])
    site = client._site
    asked = client.flare.asked
    ((name, _),) = site.plan.network.files.items()
    asked.insert(
        1,
        StudyMessage(
            {**asked[0].groups, FILES: {f"{name}.{n}": own for n, own in enumerate(content.split(100))}}, asked[0].facts
        ),
    )
    assert client.is_running() and site.asked.round == 1
    with pytest.raises(WeightsMissing, match="pre-trained file"):
        unflat(client.flare.sent[0].params, client.flare.sent[0].meta)
    assert (site.output / paths.MODELS / name).read_bytes() == content.numpy().tobytes()


def test_sites_whose_names_are_known_have_a_job_without_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text("")

    class Poc(PocEnv):
        def deploy(self, job: FedJob) -> str:
            job.export_job("jobs")
            return "job"

    needed = {"name": "it", "model": nn.Linear(2, 3), "min_clients": 2, "train_script": "client.py"}
    for number, (sites, env) in enumerate([((), Poc(num_clients=2)), (("site-1", "site-2"), None)]):
        recipe = recipes.FedAvgRecipe(**needed, sites=sites)
        place = tmp_path / f"jobs-{number}"
        recipe.export(str(place)) if env is None else (recipe.execute(env), Path("jobs").rename(place))
        apps = {file.parents[1].name for file in place.rglob(INITIAL)}
        assert apps == {"app_server"} and len(list(place.rglob(paths.PLAN))) == 3
        assert len(list(place.rglob("app_*/custom/client.py"))) == 3
    Path("jobs").mkdir()
    anywhere = Poc(num_clients=2)
    anywhere.num_clients = None
    recipes.FedAvgRecipe(**needed | {"model": nn.Linear(1100, 1000)}).execute(anywhere)
    assert "4 MB" in (told := capsys.readouterr().out) and "sites=" in told


def test_only_the_model_that_joined_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that shares memory with a tensor of the model is not the model's tensor."""
    known = words(tmp_path, monkeypatch)
    model = known["model"]
    client.join(model, known["optimizer"], known["loader"])
    assert client.is_running()
    whole, name = model.state_dict(), "0.weight"
    others = [whole[name] + 1, whole[name].as_strided((4, 2), (1, 4)), whole[name].T, (whole[name] + 1).numpy()]
    for params in (*({name: other} for other in others), {"more": whole[name]}):
        with pytest.raises(MedsiloError, match="send: (0.weight|more) differs from the joined model"):
            client.send(FLModel(params=params))
    known["train"](model, known["optimizer"])
    given = {**whole, name: whole[name].numpy(), "2.bias": whole["2.bias"].clone()}
    client.send(FLModel(params=given, metrics={"accuracy": 0.5}))
    assert client.flare.sent[-1].metrics == {"validation": 0.5}


@pytest.mark.slow
def test_the_example_of_a_super_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_plan("fedsm")
    run(own, folder=tmp_path / "study")
    monkeypatch.chdir(tmp_path)
    inputs = torch.stack([own.task.site_data(SITES[0], SITES, own.seed, None).test[0][0]])
    known = {"super_model": super_model, "model": None, "inputs": inputs, "classes": own.task.goal.outputs}
    (test,) = doctest.DocTestFinder().find(super_model, "super_model", globs=known)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_the_recipes_are_methods_of_the_registry_and_their_example_runs() -> None:
    ran = doctest.testmod(recipes)
    kinds = [kind for kind in vars(recipes).values() if isinstance(kind, type) and kind.__name__ != "MethodRecipe"]
    own = [kind.algorithm for kind in kinds if issubclass(kind, recipes.MethodRecipe)]
    assert len(own) == len(set(own)) > 20 and set(own) < set(METHODS)
    assert ran.failed == 0 and ran.attempted > 3 * len(own)


def test_a_checkpoint_is_where_the_study_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text("")
    model = nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "start.pt")
    given = {"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 3}}
    recipe = recipes.FedAvgRecipe(
        model=given, initial_ckpt=str(tmp_path / "start.pt"), min_clients=2, train_script="client.py"
    )
    recipe.export(str(tmp_path / "jobs"))
    (plan,) = {path.read_text() for path in (tmp_path / "jobs").rglob(paths.PLAN)}
    (initial,) = {path.read_bytes() for path in (tmp_path / "jobs").rglob("initial.safetensors")}
    assert torch.equal(safetensors.torch.load(initial)["weight"], model.weight) and "script" in plan


@pytest.mark.parametrize(
    ("recipe", "given", "told", "key"),
    [
        ("FedBNRecipe", {}, "nn.BatchNorm2d", "network.norm"),
        ("HarmoFLRecipe", {}, "input_shape=", "task.size"),
        ("FedProxRecipe", {"mu": -1}, "mu: -1", "algorithm"),
        ("FedAvgRecipe", {"num_rounds": 0}, "num_rounds: 0", "training"),
        ("FedAvgRecipe", {"key_metric_mode": "lowest"}, "key_metric_mode: 'lowest'", "task"),
        ("FedAvgRecipe", {"plan": {"participation": 3}}, "participation", "algorithm"),
    ],
)
def test_what_is_wrong_is_told_by_the_recipes_arguments(
    recipe: str, given: dict[str, Any], told: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(MedsiloError, match=re.escape(told)) as error:
        getattr(recipes, recipe)(model=nn.Conv2d(1, 2, 3), min_clients=2, train_script="client.py", **given)
    assert key not in str(error.value)


def test_the_page_s_change_of_hello_pt_makes_its_network_one_for_fedbn(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs/research/own-script.md").read_text("utf-8")
    [change] = re.findall(r"(?s)```diff\n( class SimpleNetwork.*?)```", page)
    head = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n"
    for name, left_out in (("before_fedbn", "+"), ("with_fedbn", "-")):
        kept = [line[1:] for line in change.splitlines() if not line.startswith(left_out)]
        (tmp_path / f"{name}.py").write_text(head + "\n".join(kept))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before, after = (import_module(name).SimpleNetwork() for name in ("before_fedbn", "with_fedbn"))
    assert after(torch.zeros(2, 3, 32, 32)).shape == before(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(MedsiloError, match="batch norm"):
        recipes.FedBNRecipe(model=before, min_clients=2, train_script="client.py")
    assert recipes.FedBNRecipe(model=after, min_clients=2, train_script="client.py").plan.algorithm.name == "fedbn"


@over_all("model", [{}, {"class_path": ""}, {"class_path": "Net"}, {"class_path": "torch.nn.Nothing"}, "", [], None])
def test_what_is_no_model_is_told_with_what_to_give(model: Any) -> None:
    with pytest.raises(MedsiloError, match="^model: .*; give .*class") as error:
        recipes.FedBNRecipe(model=model, min_clients=2, train_script="client.py")
    named = model.get("class_path", "") if isinstance(model, dict) else type(model).__name__
    assert named in str(error.value) and len(str(error.value).splitlines()) == 1 and ": ." not in str(error.value)


def test_who_brings_an_aggregator_reads_what_takes_its_place_and_that_works() -> None:
    """The error names a replacement for the aggregator, and the recipe accepts the replacement."""
    given: dict[str, Any] = {"model": nn.Linear(2, 2), "min_clients": 3, "train_script": "client.py"}
    with pytest.raises(MedsiloError, match="^aggregator: .*medsilo docs research/extend") as error:
        recipes.FedAvgRecipe(aggregator=object(), **given)
    assert len(str(error.value).splitlines()) == 1
    told = re.search(r"plan=(\{.*\});", str(error.value))
    assert told
    recipe = recipes.FedAvgRecipe(plan=json.loads(told[1]), **given)
    assert recipe.plan.aggregation.robust.name == "median"


def test_a_model_of_more_layers_than_a_plan_can_name_is_told_where_the_recipe_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In earlier versions, each site rejected a plan with too many layers, such as MONAI's DenseNet264, after the job
    had started.
    """
    monkeypatch.setattr(recipes, "LARGEST_YAML", 3000)
    small, large = (nn.Sequential(*(nn.Linear(1, 1) for _ in range(number))) for number in (3, 20))
    recipes.FedAvgRecipe(model=small, min_clients=2, train_script="client.py")
    with pytest.raises(MedsiloError, match="model: .*more than 3000"):
        recipes.FedAvgRecipe(model=large, min_clients=2, train_script="client.py")


class Simulator(SimEnv):
    """Stand in for NVFlare's simulator: empty the workspace without training, and write the files in `left`."""

    left: Mapping[str, str] = {}

    def deploy(self, job: FedJob) -> str:
        workspace = Path(self.workspace_root) / job.name
        shutil.rmtree(workspace, ignore_errors=True)
        for name, text in self.left.items():
            (workspace / name).parent.mkdir(parents=True)
            (workspace / name).write_text(text)
        if any(name.endswith("log.txt") for name in self.left):
            raise RuntimeError("Simulation failed with return code 2.")
        return job.name


def test_a_recipe_ends_with_its_study_or_the_error_and_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In earlier versions, a second run of the same name deleted the first study, and the error was only a return
    code.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.py").write_text("import medsilo.client as flare")
    run(make_plan("fedavg", "training.rounds=1"), folder=tmp_path / "own")
    env = Simulator(num_clients=2, workspace_root="workspace")
    recipe = recipes.FedAvgRecipe(name="again", model=nn.Linear(2, 2), min_clients=2, train_script="client.py")
    study = tmp_path / "workspace/again/server/medsilo/one"
    env.left = {f"server/medsilo/one/{paths.SUMMARY}": (tmp_path / "own" / paths.SUMMARY).read_text()}
    env.left |= {"site-1/medsilo/one/last": "1"}
    recipe.execute(env)
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"medsilo report {study}")

    summary = json.loads((tmp_path / "own" / paths.SUMMARY).read_text())
    failed = json.dumps({**summary, "status": "failed", "reason": "aborted before site-1 answered"})
    lost = Simulator(num_clients=2, workspace_root="lost")
    lost.left = {f"server/medsilo/one/{paths.SUMMARY}": failed}
    with pytest.raises(MedsiloError, match="aborted before site-1 answered; logs: .*lost.again"):
        recipe.execute(lost)
    # NVFlare's command line splits arguments at spaces
    with pytest.raises(MedsiloError, match="' ': choose another workspace_root"):
        recipe.execute(Simulator(num_clients=2, workspace_root="my work"))

    raised = "medsilo.core.errors.MedsiloError: join: FedSM needs validation=\n"
    env.left = {"site-2/log.txt": f"2026-11-27 - ERROR - Traceback:\n  File a\nKeyError: 1\n\n{raised}\nmore\n"}
    with pytest.raises(MedsiloError, match="site-2: join: FedSM needs validation=; logs: .*again"):
        recipe.execute(env)
    with pytest.raises(MedsiloError, match="min_clients: 2 is more than the 1 clients of"):
        recipe.execute(Simulator(num_clients=1, workspace_root="workspace"))
    # medsilo raises an error, because NVFlare would otherwise empty the folder of the earlier run
    with pytest.raises(MedsiloError, match="name: 'again-earlier'"):
        recipes.FedAvgRecipe(name="again-earlier", model=nn.Linear(2, 2), min_clients=2, train_script="client.py")
    kept = tmp_path / "workspace/again-earlier/one"
    assert str(kept) in capsys.readouterr().out
    assert (kept / "server/medsilo/one" / paths.SUMMARY).is_file() and (kept / "site-1/medsilo/one/last").is_file()
    env.left = {"site-1/log.txt": "2026-11-27 - INFO - KeyError: 'image'\n"}
    with pytest.raises(MedsiloError, match="site-1: KeyError: 'image'"):
        recipe.execute(env)
    (tmp_path / "client.py").write_text("import nvflare.client as flare")
    with pytest.raises(MedsiloError, match="KeyError: 'image'; client.py does not join.*medsilo.client"):
        recipe.execute(env)


def configs(place: Path) -> dict[str, dict[str, object]]:
    found = sorted(place.rglob("config_fed_client.json"))
    return {file.parents[1].name: json.loads(file.read_text()) for file in found}


def test_a_recipe_takes_the_arguments_of_nvflares_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's examples pass many arguments to FedAvgRecipe, but most arguments have their default values."""
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text("")
    usual = {
        name: own.default
        for name, own in signature(StockRecipe).parameters.items()
        if own.default is not Parameter.empty
    }
    needed = {"model": nn.Linear(2, 3), "min_clients": 2, "train_script": "client.py"}
    recipe = recipes.FedAvgRecipe(**usual | needed | {"client_memory_gc_rounds": 2, "plan": {"seed": 3}})
    assert recipe.plan.seed == 3 and recipe.plan.task.repeats
    assert not recipes.FedAvgRecipe(**needed).plan.task.repeats
    recipe.export("jobs")
    (own,) = configs(tmp_path / "jobs").values()
    assert own["executors"][0]["executor"]["args"]["memory_gc_rounds"] == 2
    for name, value in {"patience": 3, "stop_cond": "accuracy >= 80", "exclude_vars": "bn"}.items():
        with pytest.raises(MedsiloError, match=name):
            recipes.FedAvgRecipe(**needed, **{name: value})
    numbers = {field for method in METHODS.values() for field in method.model_fields}
    assert numbers & usual.keys() == {"name"}
    assert {"train_args", "launch_external_process", "key_metric"} <= signature(recipes.FedBNRecipe).parameters.keys()


def test_sites_have_their_own_arguments_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier versions, medsilo ignored script arguments for single sites, so each site read the first site's
    data.
    """
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text("")
    recipe = recipes.FedAvgRecipe(model=nn.Linear(2, 3), min_clients=2, train_script="client.py", train_args="--all")
    with pytest.raises(MedsiloError, match="num_rounds"):
        set_per_site_config(recipe, {"site-1": {"num_rounds": 3}})
    set_per_site_config(recipe, {"site-1": {"train_args": "--data one"}, "site-2": {}})
    recipe.export("jobs")
    given = {
        app: own["executors"][0]["executor"]["args"]["task_script_args"]
        for app, own in configs(tmp_path / "jobs").items()
    }
    assert given == {"app_site-1": "--data one", "app_site-2": "--all"}
    assert len(list((tmp_path / "jobs").rglob(f"app_site-*/config/{paths.PLAN}"))) == 2


def test_what_a_script_logs_goes_to_the_servers_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MONAI's TensorBoardStatsHandler logs under an enum, which the server could not read in earlier versions."""
    told: list[tuple[str, Shareable]] = []
    plan = plan_of_script(nn.Linear(2, 2), tmp_path, {"name": "fedavg"}, rounds=1, minimum=1, logs=["loss"])
    (tmp_path / paths.PLAN).write_text(plan.to_yaml())
    monkeypatch.setattr(script_process, "file_of_job", lambda fl_ctx, name: tmp_path / name)
    process, context = script_process.ScriptProcess(), FLContext()
    monkeypatch.setattr(process, "fire_fed_event", lambda kind, data, fl_ctx: told.append((kind, data)))
    logged = AnalyticsData(StrEnum("Keys", {"LOSS": "loss"}).LOSS, 0.5, AnalyticsDataType.SCALAR, global_step=3)
    context.set_prop(FLContextKey.EVENT_DATA, logged.to_dxo().to_shareable(), private=True, sticky=False)
    process.handle_event(ANALYTIC_EVENT_TYPE, context)
    ((kind, data),) = told
    arrived = AnalyticsData.from_dxo(from_shareable(data))
    assert type(arrived.tag) is str  # another process does not know the enum's class
    assert (kind, arrived.tag, arrived.value, arrived.step) == (FED_EVENT_PREFIX + ANALYTIC_EVENT_TYPE, "loss", 0.5, 3)


PRINTING = """
import logging, sys
from types import SimpleNamespace
from nvflare.apis.event_type import EventType
from nvflare.app_common.executors.task_script_runner import TaskScriptRunner
from medsilo.flare import script_process

script_process.guard = script_process.file_of_job = script_process.kit_of = lambda *_: None
context = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_cell=lambda: None))
script_process.ScriptProcess().handle_event(EventType.ABOUT_TO_START_RUN, context)
TaskScriptRunner.logger.addHandler(logging.FileHandler("/dev/full"))
TaskScriptRunner.logger.setLevel(logging.INFO)
TaskScriptRunner(sys.argv[1], "client.py").run()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_script_prints_on_a_full_disk(tmp_path: Path) -> None:
    """In earlier versions, NVFlare printed the error of a full log file and logged this output again; the recursion
    ended the whole study.
    """
    (tmp_path / "client.py").write_text("print('round 1')\nopen(__file__ + '.done', 'w').close()\n")
    subprocess.run([sys.executable, "-c", PRINTING, str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "client.py.done").exists()


def test_a_script_starts_once_the_disk_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of_script(nn.Linear(2, 3), tmp_path / "job", {"name": "fedavg"}, rounds=1, minimum=1, sites=["a"])
    with mounted(tmp_path / "disk", "2m") as disk:
        (disk / paths.PLAN).write_text(plan.to_yaml())
        filled = disk / "filled"
        filled.write_bytes(bytes(7 << 18))
        freeing = threading.Timer(1.5, filled.unlink)
        freeing.start()
        script_process.await_room(disk / paths.PLAN)
        assert not filled.exists() and caplog.messages == [script_process.WAITS]


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "start.pt")
    with pytest.raises(MedsiloError, match="start.pt"):
        recipes.FedAvgRecipe(
            model=nn.Linear(2, 3), initial_ckpt=str(tmp_path / "start.pt"), min_clients=2, train_script="client.py"
        )


def test_a_checkpoint_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "start.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(MedsiloError, match="start.pt"):
        recipes.FedAvgRecipe(
            model=nn.Linear(2, 3), initial_ckpt=str(tmp_path / "start.pt"), min_clients=2, train_script="client.py"
        )
    assert not (tmp_path / "ran").exists()


# ----------------------------------------------------------------------------------------------------- rejected scripts
@pytest.mark.parametrize("section", ["privacy", "secure_aggregation"])
def test_what_a_script_cannot_promise_is_refused_where_the_recipe_is_made(section: str, tmp_path: Path) -> None:
    further = (
        {"privacy": {"epsilon": 3.0, "delta": 1e-5, "clip": 1.0}}
        if section == "privacy"
        else {"secure_aggregation": {"mode": "pairwise"}}
    )
    with pytest.raises(MedsiloError, match="script"):
        plan_of_script(nn.Linear(2, 3), tmp_path, {"name": "fedavg"}, rounds=1, minimum=3, sites=SITES, further=further)


def stepped(
    tmp_path: Path, method: str, numbers: dict[str, object] | None = None, loss: Any = None
) -> tuple[ScriptSite, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    method_of_plan = {"name": method, **(numbers or {})}
    plan = plan_of_script(model, tmp_path, method_of_plan, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = [(torch.randn(6, 2), torch.tensor([0, 1] * 3))]
    site = ScriptSite(plan, "a", tmp_path, model, optimizer, Data(batch, loss=loss))
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",))
    groups = {"model": dict(model.state_dict())} if method != "ditto" else {"global": dict(model.state_dict())}
    site.ask(asked.message(groups))
    return site, model, optimizer


def asked_of(site: ScriptSite, task: str, number: int, last: int) -> StudyMessage:
    shared = {name: own.clone() for name, own in site.plan.build_networks()["model"].state_dict().items()}
    groups = {"model": {name: own for name, own in shared.items() if not name.startswith("1.")}}
    return Request(task=task, round=number, study="s", plan=site.plan.hash, sites=("a",), last=last).message(groups)


def site_of_fedbn(tmp_path: Path, evaluate: Any = None) -> ScriptSite:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": "fedbn"}, rounds=4, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ScriptSite(
        plan, "a", tmp_path, model, optimizer, Data([(torch.randn(6, 2), torch.tensor([0, 1] * 3))], evaluate=evaluate)
    )


def test_scores_that_are_sent_after_training_choose_the_model_as_it_arrived(tmp_path: Path) -> None:
    site = site_of_fedbn(tmp_path)
    came: list[dict[str, Tensor]] = []
    for number, score in enumerate((0.4, 0.9, 0.6), 1):
        assert site.ask(asked_of(site, "round", number, number - 1)) is None
        came.append(site.weights())
        for net, optimizer in site.networks():
            nn.functional.cross_entropy(net(site.data.loader[0][0]), site.data.loader[0][1]).backward()
            optimizer.step()
        assert site.finish(score).facts["validation"] == score
    kept, facts = load_tensors(site.state.folder / paths.BEST)
    assert facts["round"] == 1 and all(torch.equal(kept[name], came[1][name]) for name in kept)
    assert any(not torch.equal(kept[name], came[2][name]) for name in kept)


@pytest.mark.parametrize("method", ["fedbn", "ditto"])
def test_layers_that_a_script_has_frozen_stay_frozen(method: str, tmp_path: Path) -> None:
    """In earlier versions, a batch norm that the script had set to evaluation mode still changed its statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=1, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    data = Data([(torch.randn(6, 2), torch.tensor([0, 1] * 3))], evaluate=lambda net: 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site = ScriptSite(plan, "a", tmp_path, model, optimizer, data)
    group = {"global": dict(model.state_dict())} if method == "ditto" else {}
    group = group or asked_of(site, "round", 1, 0).groups
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",))
    assert site.ask(asked.message(group)) is None
    for net, _ in site.networks():
        assert [layer.training for layer in net] == [True, False, True]


def test_a_script_scores_models_in_its_own_thread(tmp_path: Path) -> None:
    """medsilo must compute scores in the script's thread, because the script's GPU, logger or connection may belong to
    this thread.
    """
    threads = []

    def evaluate(net: nn.Module) -> float:
        threads.append(threading.current_thread())
        return 0.5

    site = site_of_fedbn(tmp_path, evaluate)
    site.ask(asked_of(site, "round", 1, 0))
    assert threads == [threading.main_thread()] and site.finish().facts["validation"] == 0.5


def test_a_script_whose_saved_state_is_gone_says_so(tmp_path: Path) -> None:
    """In earlier versions, a script that had lost its saved batch norm silently continued with different values."""
    site = site_of_fedbn(tmp_path)
    site.ask(asked_of(site, "round", 3, 2))
    (warning,) = site.finish().facts["warnings"]
    assert warning["kind"] == "state lost" and warning["numbers"][0] == 2


def test_a_closure_at_the_scripts_own_optimizer_meets_the_methods_correction(tmp_path: Path) -> None:
    """torch calls hooks before the closure, so a correction in a hook would change the previous batch's gradients."""
    ends = []
    for closes in (False, True):
        torch.manual_seed(0)
        site, model, optimizer = stepped(tmp_path / str(closes), "fedprox", {"mu": 0.5})
        (batch,) = site.data.loader
        for _ in range(3):

            def closure(model=model, optimizer=optimizer, batch=batch) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                return loss

            if closes:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
        ends.append([loss.detach(), *site.finish().groups["model"].values()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_an_optimizer_that_searches_along_a_line_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    plan = plan_of_script(model, tmp_path, {"name": "fedavg"}, rounds=2, minimum=1, sites=["a"])
    with pytest.raises(MedsiloError, match="LBFGS"):
        ScriptSite(plan, "a", tmp_path, model, torch.optim.LBFGS(model.parameters()), Data([]))


def test_an_optimizer_of_another_network_is_refused(tmp_path: Path) -> None:
    """In earlier versions, a script whose optimizer belongs to another network silently trained no weights."""
    model = nn.Linear(2, 2)
    plan = plan_of_script(model, tmp_path, {"name": "fedavg"}, rounds=2, minimum=1, sites=["a"])
    frozen = deepcopy(model).requires_grad_(False)
    for joins, own in ((model, nn.Linear(2, 2)), (frozen, frozen)):
        with pytest.raises(MedsiloError, match="join: the optimizer has none of the model's weights"):
            ScriptSite(plan, "a", tmp_path, joins, torch.optim.SGD(own.parameters(), lr=0.1), Data([]))


def test_weights_besides_the_models_have_no_second_network(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    plan = plan_of_script(model, tmp_path, {"name": "ditto"}, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    optimizer = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.zeros(()))])
    site = ScriptSite(plan, "a", tmp_path, model, optimizer, Data([(torch.ones(1, 2), torch.zeros(1))]))
    with pytest.raises(MedsiloError, match="besides the model"):
        site.ask(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({}))


def test_a_script_may_send_the_differences_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's cifar10 example sends differences of weights instead of weights."""
    known = words(tmp_path, monkeypatch)
    model = known["model"]
    client.join(model, known["optimizer"], known["loader"])
    assert client.is_running()
    before = {name: own.clone() for name, own in model.state_dict().items()}
    known["train"](model, known["optimizer"])
    model.mask.logical_not_()
    moved = {name: own - before[name] for name, own in model.state_dict().items() if name != "mask"}
    for params in (before, {**moved, "0.weight": 2 * moved["0.weight"]}):
        with pytest.raises(MedsiloError, match="the joined model"):
            client.send(client.FLModel(params=params, params_type=client.ParamsType.DIFF))
    client.send(client.FLModel(params=moved, params_type=client.ParamsType.DIFF, metrics={"accuracy": 0.5}))
    assert client.flare.sent[-1].metrics == {"validation": 0.5}


def test_a_round_that_is_not_sent_or_sent_twice_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = words(tmp_path, monkeypatch)
    client.join(known["model"], known["optimizer"], known["loader"])
    assert client.is_running() and client.receive() is client.receive()
    with pytest.raises(MedsiloError, match=r"is_running: .*not sent.*send\(\)"):
        client.is_running()
    client.send(0.5)
    client.send(0.7)  # in earlier versions, a script that logged a number before its first answer ended
    assert "send: this round was already sent" in caplog.text
    assert client.flare.sent[-1].metrics == {"validation": 0.5} and len(client.flare.sent) == 2
    assert client.is_running()


def test_nvflares_arguments_of_the_loop_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier versions, arguments of NVFlare's loop raised TypeError."""
    known = words(tmp_path, monkeypatch)
    client.join(known["model"], known["optimizer"], known["loader"])
    context = object()
    assert client.is_running(ctx=context) and client.is_train(context)
    assert not client.is_evaluate(ctx=context) and not client.is_submit_model(context)
    came = client.receive(timeout=5.0, ctx=context)
    assert came.current_round == 0
    client.send(client.FLModel(params=known["model"].state_dict(), metrics={"accuracy": 0.5}), False, ctx=context)
    assert client.flare.sent[-1].metrics == {"validation": 0.5}
    for own in (client.is_running, client.is_train, client.is_evaluate, client.receive, client.send):
        assert signature(own).parameters.keys() >= signature(getattr(flare, own.__name__)).parameters.keys()


def test_scores_of_monais_algorithm_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's script for MonaiAlgo sends scores among the statistics in `meta`."""
    known = words(tmp_path, monkeypatch)
    client.join(known["model"], known["optimizer"], known["loader"])
    assert client.is_running()
    client.send(client.FLModel(params=known["model"].state_dict(), meta={"accuracy": 0.7, "total_epochs": 3}))
    assert client.flare.sent[-1].metrics == {"validation": 0.7}


def test_a_second_join_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier versions, a second join replaced the model, but medsilo still corrected the steps of the first
    model.
    """
    known = words(tmp_path, monkeypatch)
    client.join(known["model"], known["optimizer"], known["loader"])
    other = deepcopy(known["model"])
    with pytest.raises(MedsiloError, match="join: this script has already joined"):
        client.join(other, torch.optim.SGD(other.parameters(), lr=0.1), known["loader"])


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "fednova", "ditto", "moon", "f-adafed"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_method_that_works_at_each_step_is_refused_where_several_processes_train_one_model(
    method: str, rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, only rank 0 applied the method's correction, so ranks silently got different models."""
    known = words(tmp_path, monkeypatch)
    plan = plan_of_script(known["model"], tmp_path, {"name": method}, rounds=2, minimum=1, sites=["a"])
    (tmp_path / "app/config" / paths.PLAN).write_text(plan.to_yaml())
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    client.init()
    with pytest.raises(MedsiloError, match="join: .* only on rank 0.*FedAvg"):
        client.join(known["model"], known["optimizer"], known["loader"])


def test_off_rank_0_the_words_of_the_loop_do_what_nvflares_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier versions, a script with several ranks died on all ranks but rank 0."""
    known = words(tmp_path, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    client.init(rank="1")
    client.join(known["model"], known["optimizer"], known["loader"])
    assert not client.is_running() and client.receive() is None and not client.is_train()
    assert list(client.networks()) == [(known["model"], known["optimizer"])]
    client.send(client.FLModel(params=known["model"].state_dict()))
    assert not client.flare.sent


def test_a_script_that_never_joined_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_site", None)
    for use in (client.is_running, client.receive, client.networks, client.send):
        with pytest.raises(MedsiloError, match=r"join\(model"):
            use()
    with pytest.raises(AttributeError, match="train"):
        client.train  # noqa: B018  of NVFlare's, whose loop would not be the method's


@pytest.mark.parametrize("study", ["../elsewhere", "/tmp/elsewhere", "a/../../b"])
def test_a_server_can_not_name_a_folder_outside_of_the_sites_own(study: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    plan = plan_of_script(model, tmp_path / "job", {"name": "fedavg"}, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path / "job")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site = ScriptSite(plan, "a", tmp_path / "site", model, optimizer, Data([(torch.ones(1, 2), torch.zeros(1))]))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MedsiloError, match="study"):
        site.ask(Request(task="join", round=0, study=study, plan=plan.hash, sites=("a",)).message({}))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"0.weight": torch.full((4, 2), math.nan)}, "NaN"),
        ({"0.weight": torch.zeros(4, 2, dtype=torch.float64)}, "float64"),
        ({"0.weight": torch.zeros(2, 4)}, "shape"),
        ({"another": torch.zeros(1)}, "another"),
    ],
)
def test_a_server_can_not_send_another_model_than_the_scripts(
    wrong: dict[str, Tensor], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, NaN from the server entered the model, and the site reported its training as diverged."""
    known = words(tmp_path, monkeypatch)
    client.join(known["model"], known["optimizer"], known["loader"])
    before = deepcopy(known["model"]).state_dict()
    asked = client.flare.asked[1]
    client.flare.asked[1] = StudyMessage({"model": asked.groups["model"] | wrong}, asked.facts)
    with pytest.raises(Refused, match=told) as error:
        client.is_running()
    assert "\n" not in str(error.value)
    assert all(torch.equal(own, before[name]) for name, own in known["model"].state_dict().items())


def test_a_plain_step_is_refused_where_the_methods_step_is_another(tmp_path: Path) -> None:
    """A plain step would silently turn HarmoFL into FedAvg."""
    loss = nn.CrossEntropyLoss()
    for number, given in enumerate((None, loss, loss)):
        site, model, optimizer = stepped(tmp_path / str(number), "harmofl", {"amplitude": None}, given)
        ((inputs, targets),) = site.data.loader
        outputs = model(inputs), model(inputs + 1)
        sum(loss(output * number, targets) for output in outputs).backward()
        with pytest.raises(MedsiloError, match="join loss="):
            optimizer.step()


def test_what_a_script_makes_of_gradients_it_makes_of_the_perturbed_ones(tmp_path: Path) -> None:
    """The script scales and clips one step of two accumulated batches, and autograd computes the expected weights."""
    loss = nn.CrossEntropyLoss()
    site, model, optimizer = stepped(tmp_path, "harmofl", {"amplitude": None, "perturbation": {"alpha": 0.5}}, loss)
    ((inputs, targets),) = site.data.loader
    batches_of_step = [(inputs, targets), (inputs.flip(1), 1 - targets)]
    names, start = zip(*model.named_parameters(), strict=True)
    start = [own.detach().clone() for own in start]

    def gradients(weights: list[Tensor], batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        weights = [own.clone().requires_grad_() for own in weights]
        found = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (batch[0],))
        return list(torch.autograd.grad(nn.functional.cross_entropy(found, batch[1]), weights))

    total = [torch.zeros_like(own) for own in start]
    for batch in batches_of_step:
        first = gradients(start, batch)
        norm = torch.cat([own.flatten() for own in first]).norm()
        moved = [own + 0.5 * step / norm for own, step in zip(start, first, strict=True)]
        total = [one + other / 2 for one, other in zip(total, gradients(moved, batch), strict=True)]
    clipped = min(1.0, 0.1 / float(torch.cat([own.flatten() for own in total]).norm()))
    assert clipped < 1

    scaler = torch.amp.GradScaler("cpu")
    for batch in batches_of_step:
        scaler.scale(loss(model(batch[0]), batch[1]) / 2).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    for own, before, gradient in zip(model.parameters(), start, total, strict=True):
        assert torch.allclose(own, before - 0.1 * clipped * gradient, atol=1e-6)


def test_a_copy_of_a_network_has_its_input_layer(tmp_path: Path) -> None:
    """Scripts for NVFlare compute scores with a copy of the model.

    In earlier versions, copying the model failed, because the model referred to the site.
    """
    own = make_plan("harmofl", *IMAGES)
    model = own.network.build(own.task.channels, own.task.goal.outputs)
    plan = plan_of_script(model, tmp_path, {"name": "harmofl"}, rounds=1, minimum=1, input_shape=own.task.shape)
    model_folders.look_in(tmp_path)
    passed: list[Tensor] = []
    model.register_forward_pre_hook(lambda *_: None)
    model.register_forward_hook(lambda _, inputs, __: passed.append(inputs[0]))
    site = Script(own, plan, SITES[0], tmp_path, False, {})
    started = ScriptSite(
        plan,
        "a",
        tmp_path,
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        Data(Shuffled(own, "a", site.data.train)),
    )
    begun = Request(task="join", round=0, study="s", plan=plan.among(("a",)).hash, sites=("a",))
    started.ask(begun.message({}))
    images = next(iter(started.data.loader))[0]
    model(images)
    assert not torch.equal(passed[-1], images)
    with torch.no_grad():
        assert torch.equal(deepcopy(model.eval())(images), model(images))


def test_monais_trainer_steps_by_harmofl(tmp_path: Path) -> None:
    from monai.engines import SupervisedTrainer

    loss = nn.CrossEntropyLoss()
    site, model, optimizer = stepped(tmp_path, "harmofl", {"amplitude": None}, loss)
    before = model[0].weight.clone()
    batch = {"image": torch.randn(6, 2), "label": torch.tensor([0, 1] * 3)}
    SupervisedTrainer(torch.device("cpu"), 1, [batch], network=model, optimizer=optimizer, loss_function=loss).run()
    assert not torch.equal(model[0].weight, before) and site.finish().groups


def test_a_loop_that_trains_one_network_of_two_is_told_to_train_both(tmp_path: Path) -> None:
    site, *_ = stepped(tmp_path, "ditto")
    with pytest.raises(MedsiloError, match=r"Ditto.*for net, optimizer in flare\.networks\(\):"):
        site.finish()


def rounds_of(site: ScriptSite, train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    for net, optimizer in site.networks():
        train(net, optimizer)
    site.finish()


def learn(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(torch.randn(6, 2)), torch.tensor([0, 1] * 3)).backward()
    optimizer.step()


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fednova", "feddyn", "ditto"])
def test_an_optimizer_that_did_not_join_is_refused_where_the_method_needs_its_steps(
    method: str, tmp_path: Path
) -> None:
    """In earlier versions, FedProx, FedDyn and Ditto trained as FedAvg, and SCAFFOLD counted as diverged."""
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    data = Data([(torch.randn(6, 2), torch.tensor([0, 1] * 3))])
    site = ScriptSite(plan, "a", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    first = plan.build_networks()
    groups = {own.name: dict(own.of(first)) for own in plan.course.phase_of(1).given}
    site.ask(Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",)).message(groups))
    train = partial(rounds_of, site, lambda net, _: learn(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    if method == "fedavg":
        train()
        return
    with pytest.raises(MedsiloError, match=r"optimizer.step: .* saw no step of '(model|global)' .*before join"):
        train()


def test_a_loop_over_networks_that_trains_another_network_is_refused(tmp_path: Path) -> None:
    """In earlier versions, a loop that trains another network left the shared model of Ditto or FedSM unchanged."""
    wrong: tuple[Callable[[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer], None], ...] = (
        lambda net, optimizer, model, own: learn(model, optimizer),
        lambda net, optimizer, model, own: learn(net, own),
    )
    for number, train in enumerate(wrong):
        site, model, own = stepped(tmp_path / str(number), "ditto")
        with pytest.raises(MedsiloError, match=r"optimizer.step: no gradient.*flare\.networks\(\).*train net"):
            rounds_of(site, lambda net, optimizer, train=train, model=model, own=own: train(net, optimizer, model, own))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "harmofl", "ditto", "moon"])
def test_a_method_with_steps_of_its_own_needs_all_weights_in_one_optimizer(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script has two optimizers, but registers only one of them with medsilo.

    In earlier versions, HarmoFL perturbed only the weights of the registered optimizer, which are half of all weights.
    """
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    numbers = {"amplitude": None} if method == "harmofl" else {}
    plan = plan_of_script(model, tmp_path, {"name": method, **numbers}, rounds=1, minimum=1, sites=["a"])

    def join() -> None:
        ScriptSite(plan, "a", tmp_path, model, torch.optim.SGD(model[1].parameters(), lr=0.1), Data([]))

    model_folders.look_in(tmp_path)
    if method != "fedavg":
        with pytest.raises(MedsiloError, match=r"join: the optimizer lacks 0.weight.*requires_grad_\(False\)"):
            join()
    else:
        # a script may register one of two optimizers; a warning says that a restart loses the other optimizer's state
        join()
        assert "0.weight" in caplog.text
        caplog.clear()
    model[0].requires_grad_(False)
    join()
    assert not caplog.text


@pytest.mark.parametrize("thaws", [False, True])
def test_weights_that_learn_in_the_script_alone_are_told(thaws: bool, tmp_path: Path) -> None:
    """In earlier versions, the server rejected each site for missing groups of tensors, and the script raised an error
    from round 3 on.
    """
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    model[0].requires_grad_(not thaws)
    plan = plan_of_script(model, tmp_path, {"name": "scaffold"}, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    model[0].requires_grad_(thaws)
    site = ScriptSite(
        plan, "a", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), Data([(1, 2)], samples=1)
    )
    with pytest.raises(MedsiloError, match="0.bias learns either here or in the recipe's model; SCAFFOLD"):
        site.ask(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a",)).message({}))


def test_a_network_that_can_not_be_copied_or_is_wrapped_is_told_with_what_to_do(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plan = plan_of_script(model, tmp_path, {"name": "fedavg"}, rounds=1, minimum=1)
    with pytest.raises(MedsiloError, match="inside of DataParallel"):
        plan.network.make_by(nn.DataParallel(model))
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    plan = plan_of_script(old, tmp_path, {"name": "fedavg"}, rounds=1, minimum=1)
    with pytest.raises(MedsiloError, match=r"model: .*copy.*torch\.nn\.utils\.parametrizations"):
        plan.network.make_by(old)


def test_layers_whose_weights_are_made_of_others_have_a_selector_and_a_head(tmp_path: Path) -> None:
    """In earlier versions, the recipe of FedSM raised an error without a remedy."""
    of = nn.utils.parametrizations
    model = nn.Sequential(
        of.spectral_norm(nn.Conv2d(1, 2, 3)), nn.BatchNorm2d(2), nn.Flatten(), of.weight_norm(nn.Linear(72, 2))
    )
    for method in ("fedsm", "fedper"):
        plan = plan_of_script(model, tmp_path, {"name": method}, rounds=1, minimum=1, sites=["a"])
        assert plan.algorithm.name == method


def test_a_head_that_is_also_in_the_body_is_refused_where_the_two_part(tmp_path: Path) -> None:
    """In earlier versions, FedPer averaged a head whose weights also have a name in the body."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(MedsiloError, match="fedper separates head and body, but these share a weight"):
        plan_of_script(model, tmp_path, {"name": "fedper"}, rounds=1, minimum=1)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": torch.ones(2, 2), "labels": torch.ones(2)}, "join: a batch has input_ids, labels; give batch="),
        (
            (torch.ones(2, 3), torch.ones(2)),
            "join: RuntimeError.*MOON calls.*separate pass over the data; give batch= and loss=",
        ),
    ],
)
def test_what_fails_in_a_methods_own_pass_is_told_in_a_line(batch: Any, told: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": "moon"}, rounds=1, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Data([batch], samples=2, loss=nn.CrossEntropyLoss())
    site = ScriptSite(plan, "a", tmp_path, model, optimizer, data)
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",))
    site.ask(asked.message({"model": dict(model.state_dict())}))
    with pytest.raises(MedsiloError, match=told):
        site.finish()


def counts_classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, torch.ones(3))


def test_what_fails_in_a_scripts_own_loss_is_told_with_its_line(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": "moon"}, rounds=1, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    data = Data([(torch.ones(2, 2), torch.tensor([0, 1]))], samples=2, loss=counts_classes)
    site = ScriptSite(plan, "a", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",))
    line = counts_classes.__code__.co_firstlineno + 1
    site.ask(asked.message({"model": dict(model.state_dict())}))
    with pytest.raises(MedsiloError, match=rf"\(test_script.py, line {line}, in counts_classes\)") as caught:
        site.finish()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_super_models_networks_return_one_tensor(tmp_path: Path) -> None:
    """In earlier versions, the study failed after its last round if a network returned several tensors."""

    class Several(nn.Linear):
        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(inputs)}

    model = Several(2, 2)
    plan = plan_of_script(model, tmp_path, {"name": "fedsm"}, rounds=1, minimum=1, sites=["a", "b"])
    model_folders.look_in(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site = ScriptSite(plan, "a", tmp_path, model, optimizer, Data([(1, 2)], [], 1))
    site.ask(Request(task="join", round=0, study="s", plan=plan.hash, sites=("a", "b")).message({}))
    assert "logits" in model(torch.ones(1, 2))
    with pytest.raises(MedsiloError, match="model: the network returns a dict.*one tensor"):
        model.eval()(torch.ones(1, 2))


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("method", ["moon", "apfl", "pfedme"])
def test_a_loop_that_trains_where_the_method_does_so_by_itself_is_refused(
    method: str, joined: bool, tmp_path: Path
) -> None:
    """In earlier versions, medsilo replaced the script's loop, and silently skipped the loop's clipping and
    differential privacy.
    """
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=2, minimum=1, sites=["a"])
    model_folders.look_in(tmp_path)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Data([(torch.randn(6, 2), torch.tensor([0, 1] * 3))], loss=nn.CrossEntropyLoss())
    site = ScriptSite(plan, "a", tmp_path, model, own, data)
    groups = {group.name: dict(group.of(plan.build_networks())) for group in plan.course.phase_of(1).given}
    assert site.ask(Request(task="round", round=1, study="s", plan=plan.hash, sites=("a",)).message(groups)) is None
    with pytest.raises(MedsiloError, match=r"optimizer.step: .* loop of its own.*flare\.networks\(\)"):
        learn(model, own if joined else torch.optim.SGD(model.parameters(), lr=0.1))
        site.finish()


def test_a_method_with_a_loop_of_its_own_takes_the_scores_of_the_model_as_it_arrived(tmp_path: Path) -> None:
    own = make_plan("moon", "training.rounds=3")

    class Scoring(Script):
        def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
            site = self.started = self.started or self.start()
            self.loader.round = message.facts["round"]
            if (reply := site.ask(message)) is not None:
                return reply
            score, before = self.evaluate(self.model.eval()), site.weights()
            assert not list(site.networks()) and not torch.equal(
                before["0.0.weight"], self.model.state_dict()["0.0.weight"]
            )
            return site.finish({"accuracy": score})

    record, _ = scripted(own, tmp_path, evaluate=None, by=Scoring)
    expected = run(own).summary
    for site, found in record.summary().sites.items():
        assert found.validation[:3] == pytest.approx(expected.sites[site].validation[:3], abs=1e-6)


BESIDE_OPACUS = ("fedavg", "fedprox", "fedbn", "ditto")
MORE = (*GIVES_LOSS, "fedsm", "adafed")  # methods that also use the training data outside of training steps


@pytest.mark.parametrize("method", [*BESIDE_OPACUS, *MORE])
def test_what_opacus_does_not_make_private_is_refused_in_the_first_round(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare's hello-dp once ran under MOON, which uses data beyond the steps that Opacus makes private."""
    monkeypatch.setitem(sys.modules, "opacus", SimpleNamespace())
    source = ["algorithm.pretraining.source=initial"] if method == "adafed" else []
    own = make_plan(method, *(IMAGES if method == "harmofl" else ()), *source, "training.rounds=3")
    if method in BESIDE_OPACUS:
        scripted(own, tmp_path)
        return
    with pytest.raises(MedsiloError, match="Opacus") as caught:
        scripted(own, tmp_path)
    assert "FedAvg" in str(caught.value)
    assert not any(line.answered for line in Record(tmp_path / "runs/study").rounds())


@pytest.mark.parametrize(
    ("method", "given", "lacks"), [("fedsm", {}, "validation="), ("fedsm-extra", {"validation": []}, "loss=")]
)
def test_what_the_end_of_a_study_needs_is_asked_for_at_the_join(
    method: str, given: dict[str, Any], lacks: str, tmp_path: Path
) -> None:
    """In earlier versions, the error about a missing argument appeared only after the last round."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=3, minimum=1, sites=["a"])
    with pytest.raises(MedsiloError, match=f"join: FedSM.*{lacks}"):
        ScriptSite(plan, "a", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), Data([], **given))


@pytest.mark.slow
def test_choices_over_validation_cases_are_not_called_choices_over_test_cases(tmp_path: Path) -> None:
    own = make_plan("fedsm", "training.rounds=1")
    record, _ = scripted(own, tmp_path, test=None)
    told = page.render(read_all([record.folder]), "study")
    assert "Test cases in FedSM" not in told and "with the chosen γ" in told


def test_cases_that_a_script_states_are_counted_and_no_others_are_made_up(tmp_path: Path) -> None:
    loader = [(torch.ones(6, 2), torch.zeros(6))]
    assert [Data(loader).cases(part) for part in PARTS] == [6, 0, 0]
    assert [Data(loader, validation=loader).cases(part) for part in PARTS] == [6, 6, 0]
    stated = {"validation": 40, "test": 200}
    assert [Data(loader, samples=stated).cases(part) for part in PARTS] == [6, 40, 200]
    assert [Data(iter([]), validation=iter([]), samples=7).cases(part) for part in PARTS] == [7, 0, 0]
    for odd in ({"tests": 4}, {"test": -4}):
        with pytest.raises(MedsiloError, match="test"):
            Data(loader, samples=odd)


@pytest.mark.parametrize("stated", [None, {"validation": 40, "test": 200}])
def test_the_page_of_a_script_has_the_cases_that_it_states_and_never_none(
    stated: dict[str, int] | None, tmp_path: Path
) -> None:
    own = make_plan("fedavg", "training.rounds=1")
    record, _ = scripted(own, tmp_path, validation=None, samples=stated)
    summary, told = record.summary(), page.render(read_all([record.folder]), "study")
    assert summary
    for result in summary.sites.values():
        found = [result.cases["validation"], result.cases["test"], result.test["cases"]]
        assert found == ([40, 200, 200] if stated else [None] * 3)
    assert not re.search(r"\b0 (\w+ )?cases", told) and ("validation cases not stated" in told) == (not stated)
    assert ("200 cases" in told and f"n = {40 * len(SITES)} validation cases" in told) == bool(stated)


def test_a_metric_that_the_recipe_does_not_name_is_told_with_those_that_came(tmp_path: Path) -> None:
    site, *_ = stepped(tmp_path, "fedavg")
    with pytest.raises(MedsiloError, match="dice"):
        site.finish({"dice": 0.5})


@pytest.mark.parametrize("value", ["good", None, torch.ones(2), 1e300, -math.inf, 10**400])
def test_a_metric_that_is_no_number_of_a_study_is_told(value: Any, tmp_path: Path) -> None:
    site, *_ = stepped(tmp_path, "fedavg")
    with pytest.raises(MedsiloError, match="metrics: accuracy is .*give a number"):
        site.finish({"accuracy": value})


def test_what_a_recipe_can_not_run_is_refused_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, only the sites reported a missing script, and cross-site evaluation raised an error of
    NVFlare.
    """
    monkeypatch.chdir(tmp_path)
    recipe = recipes.FedAvgRecipe(name="it", model=nn.Linear(2, 3), min_clients=2, train_script="client.py")
    with pytest.raises(MedsiloError, match=r"train_script: client\.py is not in the folder"):
        recipe.export("exported")
    for add in (add_cross_site_evaluation, add_final_global_evaluation):
        with pytest.raises(MedsiloError, match="evaluate= and test="):
            add(recipe)


@pytest.mark.parametrize("calls", ["", "    net.eval()\n"])
def test_a_recipe_tells_of_an_evaluation_that_changes_batch_norm(
    calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVFlare's hello-pt evaluates in training mode, so a batch norm's statistics would learn from test images."""
    monkeypatch.chdir(tmp_path)
    Path("client.py").write_text(f"def evaluate(net, loader):\n{calls}    with torch.no_grad():\n        ...\n")
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)):
        recipes.FedAvgRecipe(model=nn.Sequential(norm), min_clients=2, train_script="client.py").export("exported")
        told = "client.py never calls model.eval()" in capsys.readouterr().out
        assert told == (norm.track_running_stats and not calls)


def test_a_diverged_round_is_not_sent(tmp_path: Path) -> None:
    site, model, _ = stepped(tmp_path, "fedavg")
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.raises(MedsiloError, match="NaN"):
        site.finish()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import notthere", "No module named 'notthere'"),
        ("raise SystemExit('no data here')", "no data here"),
        ("raise SystemExit(0)", "call send()"),
    ],
)
def test_why_a_script_ended_is_in_the_sites_log(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In earlier versions, the server's message named a log that did not contain the script's failed import or exit."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(script_process.LOG, "disabled", False)  # in another test, NVFlare may have disabled this logger
    (tmp_path / "client.py").write_text(f"{line}\n")
    monkeypatch.setattr(script_process, "guard", lambda cell, plan: None)
    context = at_site(tmp_path / "kit", make_plan())
    context.set_prop(ReservedKey.ENGINE, SimpleNamespace(get_cell=lambda: None))
    process = script_process.ScriptProcess()
    process.handle_event(EventType.ABOUT_TO_START_RUN, context)
    script = threading.Thread(target=TaskScriptRunner(str(tmp_path), "client.py", redirect_print_to_log=False).run)
    script.start()
    script.join()
    # Return codes of NVFlare in three rounds, after the script's thread has ended.
    for code in (ReturnCode.OK, *[ReturnCode.EXECUTION_EXCEPTION] * 2):
        context.set_prop(FLContextKey.TASK_RESULT, make_reply(code), private=True, sticky=False)
        process.handle_event(EventType.AFTER_TASK_EXECUTION, context)
    (tmp_path / "workspace/site-1").mkdir(parents=True)
    (tmp_path / "workspace/site-1/log.txt").write_text("\n".join(caplog.messages))
    assert told in (failure_in(tmp_path / "workspace") or "") and "\n".join(caplog.messages).count("call send()") == 1


# --------------------------------------------------------------------------------------------------------- whose chance
class PrivateScript:
    """As in NVFlare's hello-dp, Opacus adds noise to training steps, and numpy adds noise to a number of patients."""

    def __init__(self, patients: torch.utils.data.TensorDataset) -> None:
        torch.manual_seed(11)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.patients = patients

    def begin(self) -> None:
        opacus = pytest.importorskip("opacus")
        loader = torch.utils.data.DataLoader(self.patients, batch_size=8)
        private = opacus.PrivacyEngine().make_private
        self.private, self.step, self.loader = private(
            module=self.model, optimizer=self.optimizer, data_loader=loader, noise_multiplier=2.0, max_grad_norm=1.0
        )

    def work(self) -> tuple[Tensor, Tensor, float]:
        before = self.weights()
        for rows, classes in self.loader:
            nn.functional.cross_entropy(self.private(rows), classes).backward()
            self.step.step()
            break
        told = torch.cat([own.summed_grad.flatten() for own in self.model.parameters()])
        return told, 8 * (before - self.weights()), len(self.patients) + float(np.random.laplace(scale=5.0))

    def weights(self) -> Tensor:
        return torch.cat([own.detach().flatten() for own in self.model.parameters()])


def asked_of_script(
    script: PrivateScript, folder: Path, seed: int | None, home: SiteSettings, site: str = "a"
) -> ScriptSite:
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of_script(script.model, folder, {"name": "fedavg"}, rounds=1, minimum=1, sites=[site], seed=seed)
    model_folders.look_in(folder)
    data = Data([(torch.zeros(2, 4), torch.zeros(2))])
    joined = ScriptSite(plan, site, folder, script.model, script.optimizer, data, home=home)
    script.begin()
    torch.manual_seed(SECRET), np.random.seed(SECRET), random.seed(SECRET)
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=(site,))
    joined.ask(asked.message({"model": {name: own.clone() for name, own in script.model.state_dict().items()}}))
    return joined


SECRET = 123_456_789
REAL, PUBLIC = SiteSettings(device="cpu"), SiteSettings(device="cpu", public_data=True)


@pytest.mark.parametrize(("seed", "home", "found"), [(None, REAL, False), (0, REAL, False), (0, PUBLIC, True)])
def test_a_server_draws_a_scripts_noise_again_only_where_repetition_is_asked_for_and_data_are_public(
    seed: int | None, home: SiteSettings, found: bool, tmp_path: Path
) -> None:
    """In earlier versions, the seed of all random generators followed from plan, site and round, which the server
    knows.
    """
    torch.manual_seed(5)
    rows, classes = torch.randn(64, 4), torch.randint(0, 2, (64,))
    script = PrivateScript(torch.utils.data.TensorDataset(rows, classes))
    joined = asked_of_script(script, tmp_path, seed, home)
    truth, sent, count = script.work()

    guess = PrivateScript(torch.utils.data.TensorDataset(torch.zeros_like(rows), classes))
    guess.begin()
    Data([]).seed(seed_for(joined.plan.seed, "a", "script", 1))
    own, drawn, guessed = guess.work()
    redrawn = (sent - drawn + own).allclose(truth, atol=1e-4)
    assert (redrawn, guessed == count) == (found, found)


@pytest.mark.parametrize("method", ["fedavg", "fedsm", "ditto"])
def test_a_script_that_asks_for_no_repetition_keeps_its_generators(method: str, tmp_path: Path) -> None:
    """In earlier versions, the start of round 1 replaced a secret seed that the script had set after init()."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))
    plan = plan_of_script(model, tmp_path, {"name": method}, rounds=2, minimum=2, sites=SITES)
    model_folders.look_in(tmp_path)
    cases = torch.utils.data.TensorDataset(torch.ones(6, 1, 16, 16), torch.tensor([0, 1] * 3))
    own = torch.Generator().manual_seed(SECRET)
    loader = torch.utils.data.DataLoader(cases, generator=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site = ScriptSite(plan, SITES[0], tmp_path, model, optimizer, Data(loader, validation=[cases[:2]]))
    random.seed(SECRET), np.random.seed(SECRET), torch.manual_seed(SECRET)

    def states() -> list[object]:
        numpy = [str(part) for part in np.random.get_state()]
        return [random.getstate(), numpy, torch.get_rng_state().tolist(), own.get_state().tolist()]

    before, fresh = states(), plan.build_networks()
    groups = {own.name: dict(own.of(fresh)) for own in plan.course.phase_of(1).given}
    for task, number in (("join", 0), ("round", 1)):
        asked = Request(task=task, round=number, study="s", plan=plan.hash, sites=tuple(SITES))
        assert (site.ask(asked.message(groups if number else {})) is None) == (task == "round")
    assert states() == before


def test_what_is_asked_to_repeat_repeats_at_each_site_with_numbers_of_its_own(tmp_path: Path) -> None:
    rows = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.randint(0, 2, (16,)))

    def work(folder: str, seed: int | None, home: SiteSettings, site: str = "a") -> tuple[float, ...]:
        script = PrivateScript(rows)
        asked_of_script(script, tmp_path / folder, seed, home, site)
        _, sent, count = script.work()
        return *sent.tolist(), count

    for home in (REAL, PUBLIC):
        place = str(home.public_data)
        assert work(place, 3, home) == work(place, 3, home) != work(place, 4, home)
        assert work(place, 3, home) != work(place, 3, home, "b")
    assert work("other", 3, PUBLIC) == work("True", 3, PUBLIC)
    assert work("other", 3, REAL) != work("False", 3, REAL)


@pytest.mark.parametrize(("approval", "runs"), [("required", False), ("except-canary", False), ("none", True)])
def test_a_script_joins_no_study_at_a_hospital_that_approves_plans(
    approval: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In earlier versions, the script ran although the hospital had not approved the plan."""
    known = words(tmp_path / "kit/job", monkeypatch)
    make_kit(tmp_path / "kit", "a")
    (tmp_path / "kit/local/medsilo.yaml").write_text(f"approval: {approval}\n")
    joins = partial(client.join, known["model"], known["optimizer"], known["loader"])
    if not runs:
        with pytest.raises(Refused, match="this hospital has not approved plan"):
            joins()
    else:
        joins()
        assert client._site and client._site.home.protects(False)


# ------------------------------------------------------------------------------------------ numbers that leave the site
def logged_by(name: object, value: object, kind: AnalyticsDataType, **more: Any) -> Shareable:
    return AnalyticsData(name, value, kind, **more).to_dxo().to_shareable()


def test_of_what_a_script_logs_only_numbers_that_the_plan_names_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In earlier versions, a patient's name could reach the server as a text or as the name of a logged number."""
    plan = plan_of_script(nn.Linear(2, 2), tmp_path, {"name": "fedavg"}, rounds=1, minimum=1, logs=["loss", "val"])
    (tmp_path / paths.PLAN).write_text(plan.to_yaml())
    monkeypatch.setattr(script_process, "file_of_job", lambda fl_ctx, name: tmp_path / name)
    monkeypatch.setattr(script_process.LOG, "disabled", False)
    told: list[Any] = []
    process, context = script_process.ScriptProcess(), FLContext()
    monkeypatch.setattr(process, "fire_fed_event", lambda kind, data, fl_ctx: told.append(from_shareable(data)))
    of = AnalyticsDataType
    for logged in (
        logged_by("Erna Schmidt, 1949-01-02", 0.5, of.SCALAR, global_step=1),
        logged_by("loss", "Erna Schmidt", of.TEXT, global_step=1),
        logged_by("loss", {"loss": 0.25, "Erna Schmidt": 1.0}, of.SCALARS, global_step=2),
        logged_by("val", 0.75, of.METRIC, global_step=3),
        logged_by("accuracy", 0.5, of.SCALAR, global_step=4),
    ):
        context.set_prop(FLContextKey.EVENT_DATA, logged, private=True, sticky=False)
        process.handle_event(ANALYTIC_EVENT_TYPE, context)
    arrived = [(own.tag, own.value, own.step) for own in map(AnalyticsData.from_dxo, told)]
    assert arrived == [("loss", {"loss": 0.25}, 2), ("val", 0.75, 3), ("accuracy", 0.5, 4)]
    assert "Schmidt" not in str([own.data | own.meta for own in told])
    assert "logs=" in caplog.text  # the site's log names the numbers that the site does not send


def test_log_calls_carry_no_more_than_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In earlier versions, 20,000 logged values could leave the site in a round, with free text as names."""
    plan = plan_of_script(nn.Linear(2, 2), tmp_path, {"name": "fedavg"}, rounds=1, minimum=1)
    (tmp_path / paths.PLAN).write_text(plan.to_yaml())
    monkeypatch.setattr(script_process, "file_of_job", lambda fl_ctx, name: tmp_path / name)
    monkeypatch.setattr(script_process.LOG, "disabled", False)
    told: list[Any] = []
    process, context = script_process.ScriptProcess(), FLContext()
    monkeypatch.setattr(process, "fire_fed_event", lambda kind, data, fl_ctx: told.append(from_shareable(data)))

    def log(times: int, step: int, tracker: Any = LogWriterName.MLFLOW) -> None:
        for _ in range(times):
            logged = logged_by("accuracy", 0.5, AnalyticsDataType.METRIC, global_step=step)
            dxo = from_shareable(logged)
            dxo.set_meta_prop("tracker_key", tracker)
            context.set_prop(FLContextKey.EVENT_DATA, dxo.to_shareable(), private=True, sticky=False)
            process.handle_event(ANALYTIC_EVENT_TYPE, context)

    log(1, 10**300, "Erna Schmidt")
    log(1, 7)
    assert "Schmidt" not in str([own.meta for own in told]) and "mlflow" in str(told[1].meta).lower()
    assert ["global_step" in own.data for own in told] == [False, True]
    monkeypatch.setattr(script_process, "MOST_LOGGED", 20)
    log(30, 1)
    assert len(told) == 20 and caplog.text.count("log fewer") == 1
    process.handle_event(EventType.BEFORE_TASK_EXECUTION, context)
    log(1, 1)
    assert len(told) == 21


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedsm"])
def test_no_message_of_a_script_holds_more_than_its_disclosure_says(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """medsilo limits the bits that a script sends of each kind, per round and per study; a weight of 32 bits counts
    fully.
    """
    heard: dict[str, list[StudyMessage]] = {}

    class Heard(Script):
        def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
            heard.setdefault(self.name, []).append(reply := super().answer(message, stop))
            return reply

    scripted(make_plan(method, "training.rounds=2"), tmp_path, by=Heard)
    plan = load_plan(tmp_path / f"runs/study/{paths.PLAN}")
    assert main(["disclosure", str(tmp_path / "runs/study"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["script"]
    most = {(one.task, number): one.bits for one in most_bits(plan) for number in range(one.first, one.last + 1)}
    for answers in heard.values():
        assert len(answers) == said["messages"] == 5
        left: Counter[str] = Counter()
        for reply in answers:
            task, number = reply.facts["task"], reply.facts["round"]
            bits = bits_of(reply)
            left += bits
            for kind, told in bits.items():
                assert told <= most[task, number if task == "round" else 0][kind], (task, kind)  # type: ignore[index]
            sent = sum(own.numel() for group in reply.groups.values() for own in group.values())
            assert bits["tensors"] >= 32 * sent
        assert all(left[kind] <= said["study"][kind] for kind in left)
        assert left["tensors"] == said["study"]["tensors"]


def test_a_site_warns_by_kinds_and_numbers(tmp_path: Path) -> None:
    """In earlier versions, nine lines of a site's free text reached the server's record in each round."""
    site = site_of_fedbn(tmp_path)
    site.ask(asked_of(site, "round", 3, 2))
    reply = site.finish()
    assert reply.facts["warnings"] == [{"kind": "state lost", "numbers": [2, 0]}]
    accept = Acceptance(site.plan.among(("a",)), "s", ["a"], ["a"]).accept
    (line,) = accept("a", reply, ("round", 3), ()).notes
    assert "state after round 2" in line and "initial one" in line
    for odd in ("Erna Schmidt", {"kind": "Erna Schmidt"}, {"kind": "near", "numbers": ["Erna", "Schmidt"]}):
        reply.facts["warnings"] = [odd]
        with pytest.raises(Refused, match="warnings"):
            accept("a", reply, ("round", 3), ())


def test_a_scripts_word_of_a_lacking_file_is_ours() -> None:
    with pytest.raises(WeightsMissing) as error:
        unflat({}, {LACKS: "Erna Schmidt"})
    assert "Schmidt" not in str(error.value)


@pytest.mark.parametrize("told", [{"python": "Erna Schmidt"}, {"Erna": "3.11.2"}, {"torch": "Schmidt"}])
def test_a_sites_versions_are_versions(told: dict[str, str], tmp_path: Path) -> None:
    own = make_plan("fedavg", "training.rounds=1")
    site = scripted_site(own, tmp_path)
    asked = Request(task="join", round=0, study="s", plan=site.plan.hash, sites=tuple(SITES))
    reply = site.answer(asked.message({}), lambda: None)
    accept = Acceptance(site.plan, "s", SITES, SITES).accept
    assert accept(SITES[0], reply, ("join", 0), ()).machine == machine_facts()
    reply.facts["machine"] |= told
    with pytest.raises(Refused, match="machine"):
        accept(SITES[0], reply, ("join", 0), ())


def scripted_site(own: Plan, folder: Path) -> Script:
    model, method = own.build_networks()["model"], own.algorithm.model_dump(mode="json")
    plan = plan_of_script(model, folder / "job", method, rounds=own.training.rounds, minimum=2, sites=SITES)
    model_folders.look_in(folder / "job")
    return Script(own, plan, SITES[0], folder / SITES[0], False, {})


def test_a_recipe_streams_no_log_and_adds_no_filter_for_tasks_that_its_job_lacks(tmp_path: Path) -> None:
    recipe = recipes.FedAvgRecipe(model=nn.Linear(2, 3), min_clients=2, train_script="client.py", logs=["loss"])
    assert recipe.plan.task.logs == ("loss",)
    with pytest.raises(MedsiloError, match="enable_log_streaming.*logs="):
        recipe.enable_log_streaming()
    for add in ("client_output", "client_input", "server_output", "server_input"):
        for tasks in (["validate"], ["*"], ["train", "submit_model"]):
            with pytest.raises(MedsiloError, match=r'tasks: this job has no .*"train"'):
                getattr(recipe, f"add_{add}_filter")(ExcludeVars(), tasks=tasks)


# ------------------------------------------------------------------------------------------------------ how much counts
def unequal(
    folder: Path,
    samples: Mapping[str, int],
    times: float = 1.0,
    part: float = 0.99,
    late: str = "",
    grows: bool = False,
    needed: int = 2,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> Record:
    """Run a study in which the third site multiplies its weights by `times` in round 1.

    `part` is the largest fraction of all cases that the plan allows a site to report.

    The site `late` answers without joining, and the site `grows` reports more cases in each round.
    """
    own = make_plan("fedavg", "training.rounds=2")
    model = own.build_networks()["model"]
    among = {"when_missing": "continue" if needed < len(SITES) else "stop", "max_share": part}
    rest = {**further, "participation": among | further.get("participation", {})}
    algorithm = {"name": "fedavg", **rest.pop("algorithm", {})}
    plan = plan_of_script(model, folder / "job", algorithm, rounds=2, minimum=needed, sites=SITES, further=rest)
    model_folders.look_in(folder / "job")

    class Far(Script):
        def answer(self, message: StudyMessage, stop: object) -> StudyMessage:
            number = message.facts["round"]
            if self.name == late and message.facts["task"] == "join":
                raise Refused("it is away")
            reply = super().answer(message, stop)
            if self.name == SITES[2] and number == 1:
                for name, own in reply.groups.get("model", {}).items():
                    if own.is_floating_point() and "running" not in name:
                        reply.groups["model"][name] = times * own
            if self.name == late and grows:
                reply.facts["cases"] = {**reply.facts["cases"], "train": samples[late] * number}
            return reply

    given = {site: {"samples": samples[site]} if site in samples else {} for site in SITES}
    sites = {site: Far(own, plan, site, folder / site, False, given[site]) for site in SITES}
    record = Record(folder / "runs" / "study")
    Coordinator(plan, SITES, Line(sites), record, "in-process").run()
    return record


@pytest.mark.slow
@pytest.mark.parametrize(("times", "taken"), [(-50.0, False), (1.0, True)])
def test_a_first_round_is_held_to_the_start(times: float, taken: bool, tmp_path: Path) -> None:
    first, second = unequal(tmp_path, {}, times).rounds()
    assert (SITES[2] in first.answered) == taken and SITES[2] in second.answered
    assert taken or "beyond any honest one" in first.refused[SITES[2]]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [10_000_000, None])
def test_a_site_that_states_nearly_all_cases_is_named_to_all(
    cases: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In earlier versions, a site that reported nearly all cases silently had a weight of 1.0."""
    caplog.set_level("INFO")
    record = unequal(tmp_path, {SITES[2]: cases} if cases else {}, part=1.0)
    said = [line for line in record.summary().details.warnings if SITES[2] in line]
    assert bool(said) == bool(cases) and all("10,000,000 of" in line for line in said)
    heard = [line for line in caplog.messages if line.startswith("training cases")]
    assert len(heard) == len(SITES) and all(site in line for site in SITES for line in heard)
    assert bool(cases) == any("10,000,000" in line for line in heard)


@pytest.mark.parametrize("late", [False, True])
def test_a_site_that_states_more_than_the_plans_part_of_all_cases_is_refused(late: bool, tmp_path: Path) -> None:
    """In earlier versions, a site that reported too many cases only caused a warning, and the site's model became the
    mean.
    """
    large = {SITES[2]: 200_000}
    record = unequal(tmp_path, large, late=SITES[2] if late else "")
    summary = record.summary()
    assert summary.status == "finished" and not any(SITES[2] in line for line in summary.details.warnings)
    for one in record.rounds():
        assert one.answered == SITES[:2] and "the site states 200,000 of all 200,0" in one.refused[SITES[2]]
        assert "participation.max_share is 0.99" in one.refused[SITES[2]]


def test_a_late_site_is_held_to_the_cases_that_it_stated_first(tmp_path: Path) -> None:
    first, second = unequal(tmp_path, {SITES[2]: 40}, late=SITES[2], grows=True).rounds()
    assert SITES[2] in first.answered and "differ from those at joining" in second.refused[SITES[2]]


def test_a_study_that_needs_all_sites_ends_where_one_states_too_many_cases(tmp_path: Path) -> None:
    with pytest.raises(ParticipationError, match=f"{SITES[2]} refused: the site states 200,000 of all"):
        unequal(tmp_path, {SITES[2]: 200_000}, needed=3)


@pytest.mark.parametrize(
    "further",
    [
        {"participation": {"max_share": 0.9}},
        {"algorithm": {"weighting": "uniform"}},
        {"aggregation": {"max_weight": 0.5}},
    ],
)
def test_numbers_of_cases_are_refused_only_where_they_buy_weight(further: dict[str, Any], tmp_path: Path) -> None:
    record = unequal(tmp_path, {SITES[2]: 1000}, further=further)
    taken = "participation" not in further
    assert all((SITES[2] in one.answered) == taken for one in record.rounds())


def test_no_round_counts_for_more_cases_than_its_site_joined_with(tmp_path: Path) -> None:
    own = make_plan("fedavg", "training.rounds=1")
    site = scripted_site(own, tmp_path)
    acceptance = Acceptance(site.plan, "s", SITES, SITES)
    request = partial(Request, study="s", plan=site.plan.hash, sites=tuple(SITES))
    joined = site.answer(request(task="join", round=0).message({}), lambda: None)
    acceptance.stated[SITES[0]] = acceptance.accept(SITES[0], joined, ("join", 0), ())
    groups = {own.name: dict(own.of(site.plan.build_networks())) for own in site.plan.course.phase_of(1).given}
    reply = site.answer(request(task="round", round=1).message(groups), lambda: None)
    acceptance.accept(SITES[0], reply, ("round", 1), ())
    reply.facts |= {"samples": 10_000_000, "cases": reply.facts["cases"] | {"train": 10_000_000}}
    with pytest.raises(Refused, match="differ from those at joining"):
        acceptance.accept(SITES[0], reply, ("round", 1), ())
