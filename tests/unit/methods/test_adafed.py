"""Test all rounds of AdaFed, d-AdaFed and f-AdaFed, resuming, absent sites, and invalid plans."""

import copy
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from medsilo.check.disclosure import told_besides
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.tensors import Modules
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.site_stack import TrainingSite
from medsilo.learning.layers import batch_norm_names
from medsilo.methods.adafed import AdaFed
from medsilo.plan import Plan
from medsilo.registry import METHODS
from medsilo.runs.messages import StudyMessage
from medsilo.schedule.phase import ServerSide
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, make_plan, slow_but
from tests.sites import CPU, site_of
from tests.unit.methods.test_algorithms import initial, load_data, plan_sgd, train_by_hand, with_state

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16", "training.weight_decay=0.01"]
QUICK = [*SMALL, "algorithm.pretraining.epochs=2"]
VARIANTS = ["adafed", "d-adafed", "f-adafed"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=1"]
State = dict[str, Tensor]


def quick(method: str, *changes: str, sites: list[str] | None = None) -> Plan:
    own = SMALL if method == "f-adafed" else QUICK
    return make_plan(method, *own, *changes, sites=sites)


def same_models(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(tensor, other[site].state_dict()[name])
        for site, model in one.items()
        for name, tensor in model.state_dict().items()
    )


# ----------------------------------------------------------------------------------- all rounds, computed independently
def pretrained_by_hand(plan: Plan, data: dict[str, SiteData]) -> torch.nn.Module:
    """Compute f-AdaFed's first model by two epochs over a fifth of each site's training cases, which are pooled."""
    from medsilo.learning.seeds import generator_for

    inputs, targets = [], []
    for site in SITES:
        cases = data[site].train
        order = torch.randperm(len(cases), generator=generator_for(plan.seed, site, "public share"))
        chosen = sorted(order[: -(-len(cases) // 5)].tolist())
        inputs.append(cases.inputs[chosen])
        targets.append(cases.targets[chosen])
    together, labels = torch.cat(inputs), torch.cat(targets)
    model = with_state(plan, initial(plan))
    optimizer = plan_sgd(plan, model)
    for epoch in range(2):
        order = torch.randperm(len(together), generator=generator_for(plan.seed, "pre-training", epoch))
        for batch in order.split(plan.training.batch_size):
            if len(batch) == 1:
                continue
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(together[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def weights_by_hand(statistics: list[list[tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
    count = len(statistics)
    weights = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            if i != j:
                pairs = zip(statistics[i], statistics[j], strict=True)
                terms = [np.sum((a - c) ** 2) + np.sum((np.sqrt(b) - np.sqrt(d)) ** 2) for (a, b), (c, d) in pairs]
                weights[i, j] = 1 / np.sum(np.sqrt(terms))
    weights *= 0.5 / weights.sum(1, keepdims=True)
    np.fill_diagonal(weights, 0.5)
    return weights


def inputs_by_hand(model: torch.nn.Module, layers: list[torch.nn.Module], inputs: Tensor) -> list:
    seen: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers]
    with torch.no_grad():
        copy.deepcopy(model).eval()
        model.eval()(inputs)
    for hook in hooks:
        hook.remove()
    rows = [np.moveaxis(tensor.double().numpy(), 1, -1).reshape(-1, tensor.shape[1]) for tensor in seen]
    return [(row.mean(0), row.var(0)) for row in rows]


def mix_by_hand(states: dict[str, State], weights: np.ndarray) -> dict[str, State]:
    mixed = {}
    for i, site in enumerate(SITES):
        mixed[site] = {
            name: sum(weights[i, j] * states[other][name].double() for j, other in enumerate(SITES)).float()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in states[site].items()
        }
    return mixed


def course_by_hand(method: str, plan: Plan) -> tuple[dict[str, State], np.ndarray]:
    data = load_data(plan)
    norms = set(batch_norm_names(with_state(plan, initial(plan))))
    models = {site: with_state(plan, initial(plan)) for site in SITES}
    optimizers = {site: plan_sgd(plan, model) for site, model in models.items()}
    weights, first = np.full((3, 3), 1 / 3), 1
    if method != "f-adafed":
        f = pretrained_by_hand(plan, data)
        layers = [f[0][1], f[1][1]] if method == "adafed" else [f[6]]
        weights = weights_by_hand([inputs_by_hand(f, layers, data[site].train.inputs) for site in SITES])
        first = 2  # in round 1, sites measure statistics and do not train
    for number in range(first, first + plan.training.rounds):
        for site, model in models.items():
            train_by_hand(plan, model, optimizers[site], data[site], site, number)
        if method == "f-adafed" and number == plan.training.rounds // 2:
            running = [
                [(b.running_mean.double().numpy(), b.running_var.double().numpy()) for b in (m[0][1], m[1][1])]
                for m in models.values()
            ]
            later = weights_by_hand(running)
        sent = {
            site: {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in norms}
            for site, model in models.items()
        }
        for site, state in mix_by_hand(sent, weights).items():
            models[site].load_state_dict(state, strict=False)
        if method == "f-adafed" and number == plan.training.rounds // 2:
            weights = later
    return {site: model.state_dict() for site, model in models.items()}, weights


@pytest.mark.parametrize("method", VARIANTS)
def test_the_whole_course_equals_one_written_by_hand(method: str) -> None:
    plan = quick(method, "training.rounds=4")
    run = inprocess.run(plan)
    models, weights = course_by_hand(method, plan)
    np.testing.assert_allclose(run.summary.details.similarity.weights, weights, rtol=1e-5, atol=1e-6)
    for site in SITES:
        for name, tensor in run.models[site].state_dict().items():
            torch.testing.assert_close(tensor, models[site][name], rtol=0, atol=2e-6, msg=lambda t, n=name: f"{n}: {t}")


# ------------------------------------------------------------------------------------------------ phases and messages
class Carrier(inprocess.Loop):
    def __init__(self, participants: dict[str, TrainingSite]) -> None:
        super().__init__(participants)
        self.carried: list[tuple[str, int, str, StudyMessage, StudyMessage]] = []
        self.lost: Callable[[str, int], bool] = lambda site, number: False
        self.change: Callable[[str, StudyMessage], None] = lambda site, reply: None

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing = {}
        for site in sites:
            message = outgoing(site)
            task, number = message.facts["task"], message.facts["round"]
            if task == "round" and self.lost(site, number):
                missing[site] = Missing("lost", "no answer")
                continue
            try:
                reply = self.participants[site].answer(message)
                self.carried.append((task, number, site, message, copy.copy(reply)))
                self.change(site, reply)
                receive(site, reply)
            except MedsiloError as error:
                missing[site] = Missing("refused", str(error))
        return missing


class Study:
    def __init__(self, plan: Plan, folder: Path, data: dict[str, SiteData] | None = None) -> None:
        self.plan, self.folder, self.data = plan, folder, data or {}
        self.transport = Carrier(self.participants())
        self.coordinator = self.new_coordinator()

    def participants(self) -> dict[str, TrainingSite]:
        names = self.plan.participation.sites
        return {s: site_of(self.plan, s, names, CPU, self.folder / "sites" / s, self.data.get(s)) for s in names}

    def new_coordinator(self) -> Coordinator:
        names = self.plan.participation.sites
        return Coordinator(self.plan, names, self.transport, Record(self.folder), "in-process", settings=CPU)

    def groups(self, number: int) -> list[tuple[set[str], set[str]]]:
        return [
            (set(p.groups), set(r.groups)) for t, n, _, p, r in self.transport.carried if (t, n) == ("round", number)
        ]


def test_statistics_go_up_once_and_never_down(tmp_path: Path) -> None:
    study = Study(quick("adafed", "training.rounds=3"), tmp_path / "run")
    study.coordinator.run()
    assert study.groups(1) == [({"pretrained"}, {"statistics"})] * 3
    for number in (2, 3, 4):
        assert study.groups(number) == [({"model"}, {"model"})] * 3
    assert all("statistics" not in message.groups for *_, message, _ in study.transport.carried)
    assert set(study.coordinator.state.aggregators) == {"model", "statistics"}


def test_f_adafed_shares_no_data_and_sends_running_statistics_in_the_middle(tmp_path: Path) -> None:
    study = Study(quick("f-adafed", "training.rounds=5"), tmp_path / "run")
    summary = study.coordinator.run()
    assert [study.groups(number)[0] for number in range(1, 6)] == [
        ({"model"}, {"model"}),
        ({"model"}, {"model", "statistics"}),
        *[({"model"}, {"model"})] * 3,
    ]
    assert summary.details.pretraining is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes", "phases"),
    [
        ("adafed", ["training.rounds=3"], "mttt"),
        ("adafed", ["training.rounds=2", "algorithm.weights=uniform"], "tt"),
        ("adafed", ["training.rounds=2", "algorithm.weights=uniform", "algorithm.init_from_pretrained=true"], "mtt"),
        ("f-adafed", ["training.rounds=7"], "vvmtttt"),
        ("f-adafed", ["training.rounds=2"], "mt"),
    ],
)
def test_phases(method: str, changes: list[str], phases: str, tmp_path: Path) -> None:
    names = {"m": "measure", "t": "train", "v": "average"}
    plan = quick(method, *changes)
    assert [plan.course.phase_of(n).name for n in range(1, plan.rounds + 1)] == [names[letter] for letter in phases]
    run = inprocess.run(plan)
    assert [line.phase for line in run.history] == [names[letter] for letter in phases]


@pytest.mark.parametrize("share", ["local", "weighted", "mean"])
def test_batch_norm_stays_or_is_mixed_or_is_averaged(share: str, tmp_path: Path) -> None:
    study = Study(quick("adafed", f"algorithm.bn_share={share}", "model_selection.keep=last"), tmp_path / "run")
    study.coordinator.run()
    norms = set(batch_norm_names(study.transport.participants[SITES[0]].participant.state.model))
    reply = next(r for t, n, *_, r in study.transport.carried if (t, n) == ("round", 2))
    assert bool(norms & set(reply.groups["model"])) == (share == "weighted")
    assert set(reply.groups) == ({"model", "norms"} if share == "mean" else {"model"})
    ends = [participant.participant.state.model.state_dict() for participant in study.transport.participants.values()]
    alike = all(torch.equal(ends[0][name], ends[1][name]) for name in norms)
    assert alike == (share == "mean")
    assert not torch.equal(ends[0]["6.weight"], ends[1]["6.weight"])


# ------------------------------------------------------------------------------------------------ resuming
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stop_in"),
    slow_but([("adafed", 1), ("f-adafed", 2)], product(VARIANTS, [1, 2, 3, 4]), [("adafed", 3), ("d-adafed", 4)]),
)
def test_a_study_that_stops_anywhere_goes_on_with_the_same_numbers(method: str, stop_in: int, tmp_path: Path) -> None:
    """The study stops while sites measure statistics, in the first round of weighted means, or in a later round."""
    plan = quick(method, "training.rounds=4")
    whole = inprocess.run(plan, folder=tmp_path / "whole" / "run")
    study = Study(plan, tmp_path / "part" / "run")
    study.transport.lost = lambda site, number: number == stop_in and site == SITES[1]
    with pytest.raises(MedsiloError, match="no answer"):
        study.coordinator.run()
    (study.folder / "summary.json").unlink()
    with pytest.MonkeyPatch.context() as patch:  # the resumed study must not compute the first model again
        patch.setattr(AdaFed, "make_f", _no_pretraining)
        resumed = inprocess.run(plan, folder=study.folder, resume=True)
    assert same_models(whole.models, resumed.models)
    assert whole.summary.details == resumed.summary.details
    assert whole.summary.mean_test == resumed.summary.mean_test


def _no_pretraining(algorithm: AdaFed, server: ServerSide, modules: Modules) -> dict[str, Any]:
    raise AssertionError("the first model is computed again")


# ------------------------------------------------------------------------------------------------ absent sites
def test_a_site_lost_after_measuring_keeps_its_model(tmp_path: Path) -> None:
    plan = quick("adafed", "training.rounds=3", *GO_ON)
    study = Study(plan, tmp_path / "run")
    study.transport.lost = lambda site, number: site == SITES[2] and number == 3
    summary = study.coordinator.run()
    assert summary.sites[SITES[2]].missed == {3: "lost: no answer"}
    carried = {(n, site): (p, r) for t, n, site, p, r in study.transport.carried if t == "round"}
    weights = np.array(summary.details.similarity.weights)
    sent = [carried[3, site][1].groups["model"] for site in SITES[:2]]
    name = "6.weight"
    rows, models = weights[:2, :2] / weights[:2, :2].sum(1, keepdims=True), sent
    for site, row in zip(SITES[:2], rows, strict=True):
        expected = sum(share * model[name].double().numpy() for share, model in zip(row, models, strict=True))
        np.testing.assert_allclose(carried[4, site][0].groups["model"][name], expected, atol=1e-6)
    mixed = sum(
        w * carried[2, s][1].groups["model"][name].double().numpy() for w, s in zip(weights[2], SITES, strict=True)
    )
    np.testing.assert_allclose(carried[4, SITES[2]][0].groups["model"][name], mixed, atol=1e-6)


def test_a_site_lost_while_measuring_learns_from_itself_alone(tmp_path: Path) -> None:
    study = Study(quick("adafed", *GO_ON), tmp_path / "run")
    study.transport.lost = lambda site, number: site == SITES[0] and number == 1
    weights = study.coordinator.run().details.similarity.weights
    assert weights == [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]


# ------------------------------------------------------------------------------------------------ f, noise, leaks
def test_f_from_a_file(tmp_path: Path) -> None:
    plan = quick("adafed", "algorithm.pretraining.source=file")
    model = plan.build_networks()["pretrained"]
    safetensors.torch.save_file(model.state_dict(), tmp_path / "pretrained.safetensors")
    run = inprocess.run(plan, settings=SiteSettings(device="cpu", data=tmp_path))
    facts = run.summary.details.pretraining
    assert facts["source"] == "file" and len(facts["sha256"]) == 64
    for change, message in [
        (lambda state: state.pop("6.weight"), "Missing key.*6.weight"),
        (lambda state: state.update({"6.weight": torch.zeros(2, 2)}), "size mismatch for 6.weight"),
        (lambda state: state.update({"other": torch.zeros(2)}), "Unexpected key.*other"),
    ]:
        state = dict(model.state_dict())
        change(state)
        safetensors.torch.save_file(state, tmp_path / "pretrained.safetensors")
        with pytest.raises(MedsiloError, match=message):
            inprocess.run(plan, settings=SiteSettings(device="cpu", data=tmp_path))
    (tmp_path / "pretrained.safetensors").write_text("nothing")
    with pytest.raises(MedsiloError, match="cannot be read"):
        inprocess.run(plan, settings=SiteSettings(device="cpu", data=tmp_path))
    with pytest.raises(MedsiloError, match=r"server's data folder.*f-adafed"):
        inprocess.run(plan)


@pytest.mark.slow
def test_models_can_start_from_f() -> None:
    scores = []
    for start in ("false", "true"):
        run = inprocess.run(
            quick("adafed", f"algorithm.init_from_pretrained={start}", "algorithm.pretraining.epochs=9")
        )
        scores.append([facts.validation for facts in run.summary.sites.values()])
    before, after = (np.mean([curve[1] for curve in curves]) for curves in scores)
    assert np.mean([curve[0] for curve in scores[1]]) == np.mean([curve[0] for curve in scores[0]])
    assert after > before + 0.2


def test_the_public_share_must_be_at_the_server_for_real_tasks() -> None:
    plan = make_plan("adafed", "task.name=activity-windows", sites=SITES)
    networks = plan.build_networks()
    server = ServerSide(SITES, {}, {}, set, plan.task, plan.training, 0, CPU.compute, None, lambda: None)
    with pytest.raises(MedsiloError, match="public share of.*the server.*choose f-adafed"):
        plan.algorithm.make_f(server, networks)


@pytest.mark.parametrize(("method", "numbers"), [("adafed", 96), ("d-adafed", 128), ("f-adafed", 96)])
def test_the_leaks_are_listed(method: str, numbers: int) -> None:
    plan = quick(method)
    lines = "\n".join(told_besides(plan))
    assert f"{numbers} numbers, once; the method adds no noise" in lines
    assert ("declared public" in lines) == (method != "f-adafed")


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(("method", "norm", "kept"), [("adafed", "none", "norms"), ("f-adafed", "group", "batch norm")])
def test_a_network_without_the_norms_is_refused(method: str, norm: str, kept: str) -> None:
    with pytest.raises(PlanError, match=f"{method} keeps {kept} .* network has none"):
        make_plan(method, "network.name=activity-cnn", f"network.norm={norm}")


def test_d_adafed_needs_features_only() -> None:
    run = inprocess.run(quick("d-adafed", "network.name=activity-cnn", "network.norm=group"))
    assert run.summary.status == "finished"
    with pytest.raises(PlanError, match="d-adafed keeps features.*network has none"):
        METHODS["d-adafed"]().check({"model": torch.nn.ReLU()})


def test_f_adafed_needs_two_rounds_and_running_statistics() -> None:
    with pytest.raises(PlanError, match="set 2 or more"):
        make_plan("f-adafed", "training.rounds=1")
    with pytest.raises(PlanError, match="needs batch norm's running statistics"):
        METHODS["f-adafed"]().check({"model": torch.nn.BatchNorm1d(3, track_running_stats=False)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(layer1_mean=torch.zeros(3, dtype=torch.float64)), r"layer1_mean has shape \[3\]"),
        (lambda s: s.pop("layer1_mean"), "lacks layer1_mean"),
        (lambda s: s["layer0_variance"].neg_(), "only 0 to 1e+12 is possible there"),
        (lambda s: s["layer0_mean"].fill_(1e200), "layer0_mean holds 1e+200; only -1e+06 to 1e+06"),
        (lambda s: s["layer0_mean"].fill_(torch.nan), "layer0_mean holds NaN"),
        (lambda s: s["samples"].fill_(0), "samples is below 1"),
    ],
)
def test_sites_with_impossible_statistics_are_refused(change: Callable, message: str, tmp_path: Path) -> None:
    study = Study(quick("adafed", *GO_ON), tmp_path / "run")

    def spoil(site: str, reply: StudyMessage) -> None:
        if site == SITES[1] and "statistics" in reply.groups:
            change(reply.groups["statistics"])

    study.transport.change = spoil
    summary = study.coordinator.run()
    assert message.replace("\\", "") in summary.sites[SITES[1]].missed[1]
    assert np.isfinite(summary.details.similarity.weights).all()


def test_one_sample_and_constant_inputs_give_weights_that_are_numbers(tmp_path: Path) -> None:
    plan = quick("adafed", "training.batch_size=4")
    data = load_data(plan)

    def cut(part: Cases, count: int, value: float | None = None) -> Cases:
        inputs = part.inputs[:count] if value is None else torch.full_like(part.inputs[:count], value)
        return Cases(inputs, part.targets[:count], part.patients[:count])

    own = data[SITES[0]]
    data[SITES[0]] = SiteData(cut(own.train, 1), cut(own.validation, 1), cut(own.test, 1))
    other = data[SITES[1]]
    data[SITES[1]] = SiteData(cut(other.train, 9, 0.0), other.validation, other.test)
    study = Study(plan, tmp_path / "run", data)
    weights = np.array(study.coordinator.run().details.similarity.weights)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(1), 1)


@pytest.mark.parametrize(
    "change", ["self_weight=1.5", "self_weight=-1", "noise=-1", "pretraining.share=0", "bn_share=no"]
)
def test_wrong_numbers_are_one_line_errors(change: str) -> None:
    with pytest.raises(PlanError, match=r"algorithm\."):
        make_plan("adafed", f"algorithm.{change}")
