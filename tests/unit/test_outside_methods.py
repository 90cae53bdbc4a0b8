"""Three methods of another installed package, which know the package's rooms and which no room knows, against the same
methods written out by hand."""

import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from medsilo.core import distribution
from medsilo.core.errors import Refused
from medsilo.federation import inprocess
from medsilo.federation.participant import Participant
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan
from tests.conftest import SITES, make_plan
from tests.unit.test_algorithms import (
    CPU,
    SMALL,
    State,
    assert_close,
    initial,
    listen,
    load_data,
    merge_by_hand,
    train_by_hand,
    with_state,
)
from tests.unit.test_baselines import PLAIN_SGD, Local, Server, Site, away, plain, study
from tests.unit.test_harmofl import assert_resumes

FILES = Path(__file__).parents[1] / "outside_methods"
NAMES = {"feddyn": "FedDyn", "fedala": "FedALA", "elastic": "Elastic"}
every_method = pytest.mark.parametrize("method", NAMES)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The three files as an installed package whose entry points name them."""
    place = tmp_path_factory.mktemp("installed")
    info = place / "outside_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 1.0\n")
    entries = [f"{name} = {name}:{kind}" for name, kind in NAMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[medsilo.methods]", *entries]))
    monkeypatch.syspath_prepend(FILES)
    monkeypatch.syspath_prepend(place)
    distribution.facts_of.cache_clear()
    yield
    distribution.facts_of.cache_clear()
    for name in NAMES:
        sys.modules.pop(name, None)


def planned(method: str, *changes: str) -> Plan:
    return make_plan(method, *SMALL, *PLAIN_SGD, "training.local_epochs=2", *changes)


def assert_not_fedavg(state: State) -> None:
    average = inprocess.run(make_plan("fedavg", *SMALL, *PLAIN_SGD, "training.local_epochs=2"))
    assert not torch.allclose(average.models[SITES[0]].state_dict()["4.weight"], state["4.weight"], atol=1e-4)


# ---------------------------------------------------------------------------------------------------- FedDyn
def dynamic(alpha: float, sites: int = 3) -> tuple[Local, Server]:
    h: dict[str, np.ndarray] = {}

    def local(site: Site, given: State) -> None:
        parameters = list(site.model.parameters())
        start = [p.detach().clone() for p in parameters]
        g = site.memory.setdefault("g", [torch.zeros_like(p) for p in parameters])
        for inputs, targets in site.batches:
            loss = functional.cross_entropy(site.model(inputs), targets)
            for p, own, before in zip(parameters, g, start, strict=True):
                loss = loss - (own * p).sum() + alpha / 2 * ((p - before) ** 2).sum()
            site.optimizer.zero_grad()
            loss.backward()
            site.optimizer.step()
        site.memory["g"] = [
            own - alpha * (p.detach() - before) for own, p, before in zip(g, parameters, start, strict=True)
        ]

    def server(w: dict, sent: dict, weights: dict, said: dict) -> dict:
        for key, value in w.items():
            h[key] = h.get(key, 0.0) - alpha / sites * sum(one[key] - value for one in sent.values())
        return {key: sum(one[key] for one in sent.values()) / len(sent) - h[key] / alpha for key in w}

    return local, server


def test_feddyn_is_its_algorithm() -> None:
    plan = planned("feddyn", "algorithm.alpha=0.3", "training.rounds=3")
    expected = study(plan, *dynamic(0.3), uniform=True)
    run = inprocess.run(plan)
    for site in SITES:
        assert_close(run.models[site].state_dict(), expected)
    assert_not_fedavg(expected)


def test_feddyns_h_counts_those_that_answered_among_all_sites(tmp_path: Path) -> None:
    """h = mean of all sites' g_k, whoever was away: then w + h/α is the mean of those that answered."""
    plan = planned(
        "feddyn", "training.rounds=3", "participation.minimum=2", "participation.when_missing=continue"
    ).with_changes(["tracking.select=last"])
    participants = {site: Participant(plan, site, SITES, CPU, tmp_path / "run" / "sites" / site) for site in SITES}
    away(participants["hospital-b"], 2)
    transport, coordinator = listen(plan, tmp_path / "run", participants)
    assert [len(line.sites) for line in coordinator.rounds] == [3, 2, 3]
    own = [list(one.state.modules["gradient"].parameters()) for one in participants.values()]
    last = [p.groups["model"] for _, p in transport.received if p.facts["round"] == 3 and "model" in p.groups]
    final = coordinator.state.mixers["model"].current(SITES[0])
    for place, (name, tensor) in enumerate(final.items()):
        h = sum(gradients[place] for gradients in own) / 3
        torch.testing.assert_close(tensor, sum(one[name] for one in last) / 3 - h / 0.1, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- Elastic
def elastic(tau: float, decay: float) -> tuple[Local, Server]:
    data = iter(load_data(planned("elastic")).values())

    def local(site: Site, given: State) -> dict[str, np.ndarray]:
        inputs, targets = site.memory.setdefault("data", next(data).train.tensors if "data" not in site.memory else ())
        model = copy.deepcopy(site.model).train()
        omega = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            gradients = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
            for name, gradient in zip(omega, gradients, strict=True):
                omega[name] = decay * omega[name] + (1 - decay) * gradient.abs().double().numpy()
        plain(site, given)
        return omega

    def server(w: dict, sent: dict, weights: dict, said: dict) -> dict:
        def mean(values: dict) -> np.ndarray:
            return sum(weights[name] * values[name] for name in sent) / sum(weights.values())

        omega = {key: mean({name: said[name][key] for name in sent}) for key in w}
        largest = max(value.max() for value in omega.values())
        return {
            key: value + (1 + tau - omega[key] / largest) * mean({name: sent[name][key] - value for name in sent})
            for key, value in w.items()
        }

    return local, server


@pytest.mark.parametrize("uniform", [False, True])
def test_elastic_aggregation_is_its_algorithm(uniform: bool) -> None:
    weighting = ["algorithm.weighting=uniform"] if uniform else []
    plan = planned("elastic", "algorithm.tau=0.4", "algorithm.decay=0.8", *weighting)
    expected = study(plan, *elastic(0.4, 0.8), uniform=uniform)
    run = inprocess.run(plan)
    for site in SITES:
        assert_close(run.models[site].state_dict(), expected)
    assert_not_fedavg(expected)


def test_elastic_aggregation_refuses_a_sensitivity_below_0(tmp_path: Path) -> None:
    plan = planned("elastic", "training.rounds=1")
    network = plan.build_networks()
    sensitivity = plan.course.last.groups[0]
    values = {name: tensor.clone() for name, tensor in sensitivity.of(network).items()}
    sensitivity.check(values)
    values["4.weight"][0, 0] = -1
    with pytest.raises(Refused, match=r"sensitivity/4\.weight is below 0"):
        sensitivity.check(values)


# ---------------------------------------------------------------------------------------------------- FedALA
LAST, SHARE, STEP, PASSES = 3, 0.6, 20.0, 2


def aggregated(
    plan: Plan, site: str, rounds: int, data: tuple[Tensor, Tensor], own: nn.Module, shared: nn.Module, memory: dict
) -> None:
    """own ← θ + (w - θ) W over the last tensors, W by gradient steps on a share of the batches."""
    (inputs, targets), size = data, plan.training.batch_size
    local = {name: p.detach().clone() for name, p in list(own.named_parameters())[-LAST:]}
    way = {name: dict(shared.named_parameters())[name].detach() - p for name, p in local.items()}
    w = memory.setdefault("w", {name: torch.ones_like(p) for name, p in local.items()})
    batches = max(1, len(inputs) // size + (len(inputs) % size > 1))
    for number in range(1 if memory.get("learnt") else PASSES):
        order = torch.randperm(len(inputs), generator=generator_for(plan.seed, site, "personalise", rounds, number))
        for chosen in order.split(size)[: math.ceil(SHARE * batches)]:
            w_now = {name: w[name].clone().requires_grad_() for name in w}
            layers = {name: local[name] + way[name] * w_now[name] for name in w}
            model = copy.deepcopy(shared).train()
            loss = functional.cross_entropy(functional_call(model, layers, (inputs[chosen],)), targets[chosen])
            gradients = torch.autograd.grad(loss, list(w_now.values()))
            for name, gradient in zip(w, gradients, strict=True):
                w[name] = (w[name] - STEP * gradient).clamp(0, 1)
    memory["learnt"] = True
    own.load_state_dict({**shared.state_dict(), **{name: local[name] + way[name] * w[name] for name in w}})


def fedala_by_hand(plan: Plan) -> tuple[dict[str, State], State, dict[str, dict]]:
    """Every site's model as it is evaluated last, the shared one, and what each site remembers."""
    data = load_data(plan)
    models = {site: with_state(plan, initial(plan)) for site in SITES}
    optimizers = {
        site: torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01) for site, model in models.items()
    }
    memory: dict[str, dict] = {site: {} for site in SITES}
    shared = with_state(plan, initial(plan))
    for number in range(1, plan.training.rounds + 2):
        if number > 1:
            for site, model in models.items():
                aggregated(plan, site, number - 1, data[site].train.tensors, model, shared, memory[site])
        if number > plan.training.rounds:
            break
        for site, model in models.items():
            train_by_hand(plan, model, optimizers[site], data[site], site, number, 0.0)
        sent = {site: {k: v.clone() for k, v in model.state_dict().items()} for site, model in models.items()}
        shared.load_state_dict(merge_by_hand(sent, {site: float(len(data[site].train)) for site in SITES}))
    return {site: model.state_dict() for site, model in models.items()}, shared.state_dict(), memory


def test_fedala_is_its_algorithm(tmp_path: Path) -> None:
    numbers = [
        f"algorithm.{key}={value}"
        for key, value in {"last": LAST, "share": SHARE, "step": STEP, "passes": PASSES}.items()
    ]
    plan = planned("fedala", *numbers)
    models, shared, memory = fedala_by_hand(plan)
    _, coordinator = listen(plan, tmp_path / "run")
    run = inprocess.run(plan)
    for site in SITES:
        assert_close(run.models[site].state_dict(), models[site])
        assert any(((w > 0) & (w < 1)).any() for w in memory[site]["w"].values())  # else nothing was learnt
    assert_close(coordinator.state.mixers["global"].current(SITES[0]), shared)
    assert not torch.equal(models[SITES[0]]["6.weight"], models[SITES[1]]["6.weight"])
    assert torch.equal(models[SITES[0]]["0.0.weight"], models[SITES[1]]["0.0.weight"])  # a lower layer


def test_fedala_whose_weights_stay_1_is_fedavg() -> None:
    runs = [inprocess.run(planned(*one)) for one in (("fedala", "algorithm.step=1e-30"), ("fedavg",))]
    for site in SITES:
        assert_close(*(run.models[site].state_dict() for run in runs))


# ---------------------------------------------------------------------------------------------------- as any method
@every_method
def test_they_come_through_the_registry_and_resume(method: str, tmp_path: Path) -> None:
    plan = planned(method, "training.rounds=3")
    assert list(plan.packages) == ["outside-methods"]
    assert_resumes(plan, 2, tmp_path)
