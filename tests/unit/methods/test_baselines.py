"""FedNova, SCAFFOLD, MOON and FedProx with stragglers equal separate loops in torch and numpy."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.federation.site_stack import TrainingSite
from medsilo.learning.layers import head_layers
from medsilo.learning.seeds import generator_for
from medsilo.learning.steps import with_features
from medsilo.methods.moon import contrast
from medsilo.plan import Plan
from medsilo.registry import NETWORKS
from medsilo.runs.messages import StudyMessage
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.sites import sites_of
from tests.unit.methods.test_algorithms import (
    SMALL,
    State,
    assert_close,
    batches_by_hand,
    initial,
    listen,
    load_data,
    merge_by_hand,
    with_state,
)
from tests.unit.methods.test_harmofl import HALVES

PLAIN_SGD = ["training.momentum=0", "training.learning_rate=0.05"]
UNIFORM = "algorithm.weighting=uniform"


# -------------------------------------------------------------------------------------------------------------- by hand
@dataclass
class Site:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    cases: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


Local = Callable[[Site, State], object]
Server = Callable[[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]], dict[str, float], dict], dict]


def study(plan: Plan, local: Local, server: Server, uniform: bool = False) -> list[State]:
    data = load_data(plan)
    sites = {}
    for name in SITES:
        model = with_state(plan, initial(plan))
        options = {"lr": plan.training.learning_rate, "momentum": plan.training.momentum, "weight_decay": 0.01}
        sites[name] = Site(model, torch.optim.SGD(model.parameters(), **options), cases=len(data[name].train))
    weights = {name: 1.0 if uniform else float(site.cases) for name, site in sites.items()}
    curve = [given := initial(plan)]
    trained = [name for name, _ in next(iter(sites.values())).model.named_parameters()]
    for number in range(1, plan.training.rounds + 1):
        sent, said = {}, {}
        for name, site in sites.items():
            site.model.load_state_dict(given)
            site.model.train()
            epochs, cases = range(plan.training.local_epochs), data[name].train.tensors
            site.batches = [one for epoch in epochs for one in batches_by_hand(plan, name, cases, number, epoch)]
            said[name] = local(site, given)
            sent[name] = {key: tensor.clone() for key, tensor in site.model.state_dict().items()}
        arrays = {name: {key: sent[name][key].double().numpy() for key in trained} for name in SITES}
        stepped = server({key: given[key].double().numpy() for key in trained}, arrays, weights, said)
        given = merge_by_hand(sent, weights) | {key: torch.from_numpy(value).float() for key, value in stepped.items()}
        curve.append(given)
    return curve


def plain(site: Site, given: State) -> int:
    for inputs, targets in site.batches:
        site.optimizer.zero_grad()
        functional.cross_entropy(site.model(inputs), targets).backward()
        site.optimizer.step()
    return len(site.batches)


def fresh(site: Site, given: State) -> int:
    site.optimizer.state.clear()
    return plain(site, given)


def nova(rho: float) -> Server:
    def step(w: dict, sent: dict, weights: dict, steps: dict) -> dict:
        total = sum(weights.values())
        # For each site, count how often momentum applies the gradients of a round in total.
        norms = {
            name: sum((1 - rho**left) / (1 - rho) for left in range(1, count + 1)) for name, count in steps.items()
        }
        effective = sum(weights[name] / total * norms[name] for name in sent)
        return {
            key: value
            - effective * sum(weights[name] / total * (value - sent[name][key]) / norms[name] for name in sent)
            for key, value in w.items()
        }

    return step


def test_an_impossible_reach_is_refused_before_anything_of_the_site_counts(tmp_path: Path) -> None:
    """A rejected answer does not change the running statistics, which the site sends in a separate group."""
    changes = ["participation.minimum=2", "participation.when_missing=continue", "training.rounds=1"]
    plan = make_plan("fednova", *SMALL, *changes)
    runs = []
    for name, spoil in (("lies", True), ("away", False)):
        participants = sites_of(plan, tmp_path / name)
        if spoil:
            lie(participants["hospital-a"])
        else:
            away(participants["hospital-a"], 1)
        runs.append(listen(plan, tmp_path / name, participants)[1])
    assert "reach is 1000000000000.0" in runs[0].rounds[0].refused["hospital-a"]
    for group in ("model", "buffers"):
        one, other = (run.state.aggregators[group].current("hospital-b") for run in runs)
        assert all(torch.equal(one[name], other[name]) for name in one)


def lie(participant: TrainingSite) -> None:
    answer = participant.answer

    def too_far(message: StudyMessage, *more: Any) -> StudyMessage:
        reply = answer(message, *more)
        if reply.groups:
            groups = {group: reply.groups[group] for group in ("buffers", "model")}
            groups["model"]["reach"] = torch.tensor(1e12, dtype=torch.float64)
            reply.groups = groups
        return reply

    participant.answer = too_far  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------------- SCAFFOLD
def scaffold(lr: float) -> tuple[Local, Server]:
    """Compute SCAFFOLD's step y ← y - η (g - c_i + c), and c_i⁺ by the formulas of the paper."""
    c: list[Tensor] = []

    def local(site: Site, given: State) -> list[Tensor]:
        parameters = list(site.model.parameters())
        x = [parameter.detach().clone() for parameter in parameters]
        if not c:
            c.extend(torch.zeros_like(parameter) for parameter in parameters)
        own = site.memory.setdefault("control", [torch.zeros_like(parameter) for parameter in parameters])
        for inputs, targets in site.batches:
            gradients = torch.autograd.grad(functional.cross_entropy(site.model(inputs), targets), parameters)
            with torch.no_grad():
                for parameter, gradient, mine, theirs in zip(parameters, gradients, own, c, strict=True):
                    parameter -= lr * (gradient + 0.01 * parameter - mine + theirs)
        scale = len(site.batches) * lr
        new = [mine - s + (a - p.detach()) / scale for mine, s, a, p in zip(own, c, x, parameters, strict=True)]
        site.memory["control"] = new
        return [n - mine for n, mine in zip(new, own, strict=True)]

    def server(w: dict, sent: dict, weights: dict, differences: dict) -> dict:
        for place, control in enumerate(c):
            c[place] = control + sum(differences[name][place] for name in sent) / len(sent)
        return {key: value + np.mean([sent[name][key] - value for name in sent], axis=0) for key, value in w.items()}

    return local, server


def test_controls_stay_whole_when_a_site_is_away(tmp_path: Path) -> None:
    """The server's c is the mean of the control variates of all sites, including a site that missed the round."""
    changes = ["training.rounds=4", "participation.minimum=2", "participation.when_missing=continue"]
    plan = make_plan("scaffold", *SMALL, *PLAIN_SGD, "model_selection.keep=last", *changes)
    participants = sites_of(plan, tmp_path / "run")
    away(participants["hospital-b"], 2)
    _, coordinator = listen(plan, tmp_path / "run", participants)
    assert [len(line.sites) for line in coordinator.rounds] == [3, 2, 3, 3]
    control = coordinator.state.aggregators["control"].current(SITES[0])
    own = [participant.participant.state.modules["own-control"].state_dict() for participant in participants.values()]
    for name, tensor in control.items():
        torch.testing.assert_close(tensor, sum(one[name] for one in own) / 3, rtol=0, atol=1e-6)


def away(participant: TrainingSite, number: int) -> None:
    answer = participant.answer

    def sometimes(message: StudyMessage, *more: Any) -> StudyMessage:
        if message.facts["task"] == "round" and message.facts["round"] == number:
            raise MedsiloError("away")
        return answer(message, *more)

    participant.answer = sometimes  # type: ignore[method-assign]


def test_feddyns_h_counts_those_that_answered_among_all_sites(tmp_path: Path) -> None:
    """FedDyn's h is the mean of the sites' gradients g_k over all sites, including sites that did not answer.

    The mean of the models that sites sent is w + h/α, where w is the next global model.
    """
    changes = ["training.rounds=3", "participation.minimum=2", "participation.when_missing=continue"]
    plan = make_plan("feddyn", *SMALL, *PLAIN_SGD, "model_selection.keep=last", "algorithm.alpha=0.1", *changes)
    participants = sites_of(plan, tmp_path / "run")
    away(participants["hospital-b"], 2)
    transport, coordinator = listen(plan, tmp_path / "run", participants)
    assert [len(line.sites) for line in coordinator.rounds] == [3, 2, 3]
    own = [list(one.participant.state.modules["gradient"].parameters()) for one in participants.values()]
    last = [p.groups["model"] for _, p in transport.received if p.facts["round"] == 3 and "model" in p.groups]
    final = coordinator.state.aggregators["model"].current(SITES[0])
    for place, (name, tensor) in enumerate(final.items()):
        h = sum(gradients[place] for gradients in own) / 3
        torch.testing.assert_close(tensor, sum(one[name] for one in last) / 3 - h / 0.1, rtol=0, atol=1e-5)


def test_scaffold_is_refused_with_adam_unless_the_plan_says_so() -> None:
    adam = ["training.optimizer=adam", "training.momentum=0", "training.learning_rate=0.001"]
    with pytest.raises(PlanError, match=r"training\.optimizer:.*sgd, not adam.*optimizer=any"):
        make_plan("scaffold", *SMALL, *adam)
    run = inprocess.run(make_plan("scaffold", *SMALL, *adam, "algorithm.optimizer=any"))
    assert run.summary.status == "finished"


def test_scaffolds_control_holds_a_decay_only_where_it_is_in_the_gradient(tmp_path: Path) -> None:
    """After one step, c_i equals the gradient of this step, which includes weight decay for adam but not for adamw."""

    def control(optimizer: str, decay: float) -> Tensor:
        numbers = ["training.momentum=0", "training.rounds=1", "training.local_steps=1", "algorithm.optimizer=any"]
        numbers += [f"training.optimizer={optimizer}", f"training.weight_decay={decay}"]
        participants = sites_of(plan := make_plan("scaffold", *SMALL, *numbers), tmp_path / f"{optimizer}-{decay}")
        listen(plan, tmp_path / f"{optimizer}-{decay}", participants)
        return next(participants[SITES[0]].participant.state.modules["own-control"].parameters())

    torch.testing.assert_close(control("adamw", 0.5), control("adamw", 0.0), rtol=0, atol=0)
    assert not torch.allclose(control("adam", 0.5), control("adam", 0.0), atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------- MOON


@pytest.mark.parametrize(("kind", "exact"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_the_contrast_is_taken_in_the_features_own_type(kind: torch.dtype, exact: float) -> None:
    """In half precision, the cosine of parallel features could be as large as 1.004."""
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(5, 7, generator=generator).double() for _ in range(3)]
    a, b, c = (one.numpy() / np.linalg.norm(one.numpy(), axis=1, keepdims=True) for one in wide)
    expected = np.mean(np.log1p(np.exp(((a * c).sum(1) - (a * b).sum(1)) / 0.5)))
    found = contrast(*(one.to(kind) for one in wide), 0.5)
    assert found.dtype == (kind if kind == torch.float64 else torch.float32)
    assert float(found) == pytest.approx(expected, abs=exact)


def moon(mu: float) -> Local:
    def last(model: nn.Module) -> nn.Module:
        return model[-1][-1] if isinstance(model[-1], nn.Sequential) else model[-1]

    def features(model: nn.Module, inputs: Tensor) -> Tensor:
        z = model[:-1](inputs)
        return model[-1][:-1](z) if isinstance(model[-1], nn.Sequential) else z

    def local(site: Site, given: State) -> None:
        arrived = copy.deepcopy(site.model).eval()
        previous = site.memory.setdefault("previous", copy.deepcopy(site.model)).eval()
        for inputs, targets in site.batches:
            z = features(site.model, inputs)
            with torch.no_grad():
                near, far = features(arrived, inputs), features(previous, inputs)
            pairs = [functional.cosine_similarity(z, other) / 0.5 for other in (near, far)]
            loss = functional.cross_entropy(last(site.model)(z), targets)
            loss = loss + mu * functional.cross_entropy(torch.stack(pairs, 1), torch.zeros(len(z), dtype=torch.long))
            site.optimizer.zero_grad()
            loss.backward()
            site.optimizer.step()
        site.memory["previous"] = copy.deepcopy(site.model)

    return local


@pytest.mark.parametrize(("network", "size"), [("small-cnn", 32), ("unet", 32), ("densenet121", 32), ("lenet5", 28)])
def test_features_are_what_the_last_layer_is_given(network: str, size: int) -> None:
    model = NETWORKS[network]().build(1, 3).eval()
    (head,) = head_layers(model)
    met: list[Tensor] = []
    head.register_forward_hook(lambda _, given, __: met.append(given[0]))
    inputs = torch.rand(2, 1, size, size)
    with torch.no_grad():
        output, z = with_features(model, inputs)
        assert torch.equal(output, model(inputs))
    assert torch.equal(z, met[0].flatten(1))
    assert len(head._forward_pre_hooks) == 0


def test_a_network_whose_last_layer_no_hook_sees_is_told() -> None:
    """In earlier versions, MOON with a compiled network raised an error without a remedy."""

    class Unseen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head.forward(inputs)

    with pytest.raises(MedsiloError, match="before compiling"):
        with_features(Unseen(), torch.ones(1, 2))


# ----------------------------------------------------------------------------------------------------------- stragglers
def test_stragglers_do_a_part_of_their_steps(tmp_path: Path) -> None:
    changes = ["training.rounds=4", "training.local_epochs=3", "algorithm.partial=0.5", *PLAIN_SGD]
    plan = make_plan("fedprox", *SMALL, *changes)
    steps: dict[str, list[int]] = {site: [] for site in SITES}
    participants = sites_of(plan, tmp_path / "run")
    for site, participant in participants.items():
        counted = steps[site]
        participant.participant.state.optimizers["model"].register_step_post_hook(
            lambda *_, counted=counted: counted.append(1)
        )
    listen(plan, tmp_path / "run", participants)
    sizes = {site: len(data.train) for site, data in load_data(plan).items()}
    every = {site: 3 * (size // 16 + (size % 16 > 1)) for site, size in sizes.items()}
    shares = []
    for number in range(1, 5):
        for site in SITES:
            straggles, drawn = torch.rand(2, generator=generator_for(plan.seed, site, "method", number)).tolist()
            shares.append((site, drawn if straggles < 0.5 else 1.0))
    assert 1 < sum(share < 1 for _, share in shares) < len(shares)
    for site in SITES:
        expected = [max(1, int(np.ceil(share * every[site]))) for who, share in shares if who == site]
        assert sum(steps[site]) == sum(expected)


def test_no_partial_work_where_amplitudes_are_averaged() -> None:
    with pytest.raises(PlanError, match=r"algorithm\.partial: .*partial=0 or amplitude=null"):
        make_plan("fedprox", *SMALL, "algorithm.partial=0.5", HALVES[0])


# ---------------------------------------------------------------------------------------------------------- composition
def test_both_halves_of_harmofl_under_a_server_step_that_is_the_mean() -> None:
    """If all sites have the same number of cases, FedNova and FedAvgM without momentum equal the uniform mean."""
    equal = ["training.truncate=true", "training.optimizer_state=reset", UNIFORM]
    reference = inprocess.run(make_plan("harmofl", *SMALL, *equal)).models["hospital-b"].state_dict()
    for method, changes in (("fednova", []), ("fedavgm", ["algorithm.server_momentum=0"])):
        composed = inprocess.run(make_plan(method, *SMALL, *equal, *HALVES, *changes))
        assert_close(composed.models["hospital-b"].state_dict(), reference)


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("fedadam", "algorithm.server_betas=[0.9, 1.0]", "less than 1"),
        ("fedyogi", "algorithm.variant=keras", "'reddi' or 'torch'"),
        ("scaffold", "algorithm.weighting=cases", "'uniform'"),
    ],
)
def test_wrong_numbers_are_refused_in_one_line(method: str, change: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(method, change)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
