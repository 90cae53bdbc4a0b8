"""Compare each step of FedRep, FedBABU, FedRoD, FedALA and FedDyn with an implementation in numpy."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.core.errors import PlanError
from medsilo.core.files import load_tensors
from medsilo.learning.class_weights import balanced_softmax
from medsilo.learning.layers import head_names
from medsilo.learning.steps import learning_only
from medsilo.registry import METHODS
from medsilo.schedule.structures import names_of_last_layers
from medsilo.site.settings import make_settings
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.unit.methods.test_algorithms import listen
from tests.unit.methods.test_personal import (
    EPOCHS,
    ROUNDS,
    SIZES,
    SMALL,
    Array,
    Batches,
    Sgd,
    Site,
    curve_of,
    data_of,
    in_epoch,
)
from tests.unit.tasks import test_table as table

Theta = list[Array]  # W1, b1, W2 and b2 of the network tanh(x W1 + b1) W2 + b2, whose head consists of W2 and b2


# --------------------------------------------------------------------------------------- the methods in numpy
def gradients(theta: Theta, batch: tuple[Array, Array], shift: Array | float = 0.0) -> tuple[Theta, float]:
    (w1, b1, w2, b2), (x, y) = theta, batch
    h = np.tanh(x @ w1.T + b1)
    z = h @ w2.T + b2 + shift
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    dz = (p - np.eye(3)[y]) / len(x)
    dh = dz @ w2 * (1 - h**2)
    return [dh.T @ x, dh.sum(0), dz.T @ h, dz.sum(0)], float(-np.log(p[np.arange(len(y)), y]).mean())


@dataclass
class ByHand:
    data: Batches
    model: Theta
    given: Theta
    sgd: list[Sgd] = field(default_factory=lambda: [Sgd() for _ in range(4)])
    memory: dict[str, Any] = field(default_factory=dict)

    def passes(self) -> Batches:
        return [batch for number in range(EPOCHS) for batch in in_epoch(self.data, number)]

    def step(self, theta: Theta, slopes: Theta, places: tuple[int, ...] = (0, 1, 2, 3)) -> Theta:
        return [
            self.sgd[place].step(own, slope) if place in places else own
            for place, (own, slope) in enumerate(zip(theta, slopes, strict=True))
        ]


BODY, HEAD = (0, 1), (2, 3)


class FedRep:
    def __init__(self, head_epochs: int) -> None:
        self.epochs = head_epochs

    def receive(self, site: ByHand) -> Theta:
        site.model = [*site.given[:2], *site.model[2:]]
        return site.model

    def learn(self, site: ByHand) -> Theta:
        for number in range(self.epochs):
            for batch in in_epoch(site.data, -1 - number):
                site.model = site.step(site.model, gradients(site.model, batch)[0], HEAD)
        for batch in site.passes():
            site.model = site.step(site.model, gradients(site.model, batch)[0], BODY)
        return site.model


class FedBABU:
    def __init__(self, epochs: int, places: tuple[int, ...]) -> None:
        self.epochs, self.places = epochs, places

    def receive(self, site: ByHand) -> Theta:
        site.model = [*site.given[:2], *site.model[2:]]
        tuned, tuning = site.model, ByHand(site.data, [], [])
        for number in range(self.epochs):
            for batch in in_epoch(site.data, number):
                tuned = tuning.step(tuned, gradients(tuned, batch)[0], self.places)
        return tuned

    def learn(self, site: ByHand) -> Theta:
        for batch in site.passes():
            site.model = site.step(site.model, gradients(site.model, batch)[0], BODY)
        return site.model


class FedRoD:
    def receive(self, site: ByHand) -> Theta:
        site.model = site.given
        own = site.memory.setdefault("own", [np.zeros((3, 5)), np.zeros(3)])
        return [*site.given[:2], *(g + h for g, h in zip(site.given[2:], own, strict=True))]

    def learn(self, site: ByHand) -> Theta:
        counts = np.bincount(np.concatenate([y for _, y in site.data]), minlength=3)
        sgd = site.memory.setdefault("sgd", [Sgd(), Sgd()])
        for batch in site.passes():
            own = site.memory["own"]
            slopes, _ = gradients([*site.model[:2], *(g + h for g, h in zip(site.model[2:], own, strict=True))], batch)
            site.memory["own"] = [sgd[place].step(own[place], slopes[2 + place]) for place in range(2)]
            site.model = site.step(site.model, gradients(site.model, batch, np.log(counts))[0])
        return site.model


class FedALA:
    def __init__(self, layers: int, share: float, step: float, settled: float, passes: int) -> None:
        self.places = range(4 - 2 * layers, 4)
        self.share, self.step, self.settled, self.passes = share, step, settled, passes

    def receive(self, site: ByHand) -> Theta:
        if all(np.array_equal(one, other) for one, other in zip(site.model, site.given, strict=True)):
            return site.model
        way = {place: site.given[place] - site.model[place] for place in self.places}
        first = "w" not in site.memory
        w = site.memory.setdefault("w", {place: np.ones_like(site.model[place]) for place in self.places})
        sample = in_epoch(site.data, -1)[: math.ceil(self.share * len(site.data))]

        def mixture() -> Theta:
            return [
                site.model[place] + way[place] * w[place] if place in w else given
                for place, given in enumerate(site.given)
            ]

        losses: list[float] = []
        while len(losses) < (self.passes if first else 1):
            total = 0.0
            for batch in sample:
                slopes, loss = gradients(mixture(), batch)
                total += loss * len(batch[1])
                for place in w:
                    w[place] = np.clip(w[place] - self.step * slopes[place] * way[place], 0, 1)
            losses.append(total / sum(len(y) for _, y in sample))
            if len(losses) > 10 and np.std(losses[-10:]) < self.settled:
                break
        site.memory["passes"] = max(len(losses), site.memory.get("passes", 0))
        site.model = mixture()
        return site.model

    def learn(self, site: ByHand) -> Theta:
        for batch in site.passes():
            site.model = site.step(site.model, gradients(site.model, batch)[0])
        return site.model


class FedDyn:
    def __init__(self, alpha: float) -> None:
        self.alpha, self.h = alpha, [0.0] * 4

    def receive(self, site: ByHand) -> Theta:
        site.model = site.given
        return site.model

    def learn(self, site: ByHand) -> Theta:
        g = site.memory.setdefault("g", [np.zeros_like(own) for own in site.model])
        for batch in site.passes():
            slopes, _ = gradients(site.model, batch)
            pulled = [
                slope - own + self.alpha * (now - before)
                for slope, own, now, before in zip(slopes, g, site.model, site.given, strict=True)
            ]
            site.model = site.step(site.model, pulled)
        moved = [now - before for now, before in zip(site.model, site.given, strict=True)]
        site.memory["g"] = [own - self.alpha * way for own, way in zip(g, moved, strict=True)]
        return site.model

    def mixed(self, mean: Theta, sent: list[Theta], before: Theta) -> Theta:
        steps = [sum(one[place] - before[place] for one in sent) for place in range(4)]
        self.h = [h - self.alpha / len(sent) * step for h, step in zip(self.h, steps, strict=True)]
        return [own - h / self.alpha for own, h in zip(mean, self.h, strict=True)]


@dataclass(frozen=True)
class Case:
    name: str
    numbers: dict[str, Any]
    by_hand: Callable[[], Any]

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.numbers.items())])


ALA: list[dict[str, Any]] = [
    {"layers": 1, "share": 0.6, "step": 9.0, "settled": 0.02, "passes": 30},
    {"layers": 2, "share": 0.4, "step": 5.0, "settled": 0.0, "passes": 3},
]
CASES = [
    Case("fedrep", {"head_epochs": 3}, lambda: FedRep(3)),
    Case("fedrep", {"head_epochs": 1, "weighting": "uniform"}, lambda: FedRep(1)),
    Case("fedbabu", {"epochs": 2}, lambda: FedBABU(2, BODY + HEAD)),
    Case("fedbabu", {"epochs": 1}, lambda: FedBABU(1, BODY + HEAD)),
    Case("fedrod", {}, FedRoD),
    *(Case("fedala", numbers, lambda numbers=numbers: FedALA(**numbers)) for numbers in ALA),
    Case("feddyn", {"alpha": 0.3}, lambda: FedDyn(0.3)),
]


def study_by_hand(case: Case, start: Theta) -> tuple[list[dict[str, Theta]], dict[str, ByHand]]:
    method = case.by_hand()
    sites = {site: ByHand(data_of(site), start, start) for site in SIZES}
    shared, curve = start, []
    uniform = case.numbers.get("weighting") == "uniform" or case.name == "feddyn"
    weights = np.array([1.0 if uniform else float(size) for size in SIZES.values()])
    for number in range(ROUNDS + 1):
        for site in sites.values():
            site.given = shared
        curve.append({name: method.receive(site) for name, site in sites.items()} | {"shared": shared})
        if number == ROUNDS:
            break
        sent = [method.learn(site) for site in sites.values()]
        mean = [np.tensordot(weights / weights.sum(), np.stack(own), 1) for own in zip(*sent, strict=True)]
        mixed = getattr(method, "mixed", None)
        shared = mixed(mean, sent, shared) if mixed else mean
    return curve, sites


# ---------------------------------------------------------------------------------- the methods in medsilo
def two_layers(start: Theta, *between: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        first, head = nn.Linear(4, 5), nn.Linear(5, 3)
        model = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), first, *between, nn.Tanh(), head).double()
        with torch.no_grad():
            for weight, value in zip([*first.parameters(), *head.parameters()], start, strict=True):
                weight.copy_(torch.tensor(value))
        return model

    return build


def study(case: Case, start: Theta) -> list[dict[str, Theta]]:
    return curve_of(METHODS[case.name](**case.numbers), two_layers(start), arrays)


def arrays(tensors: dict[str, Tensor]) -> Theta:
    return [tensor.numpy().copy() for tensor in tensors.values()]


@pytest.fixture(scope="module")
def start() -> Theta:
    random = np.random.default_rng(6)
    return [random.normal(size=shape) for shape in ((5, 4), (5,), (3, 5), (3,))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_rounds_at_three_sites_are_those_of_the_equations(case: Case, start: Theta) -> None:
    mine, (expected, by_hand) = study(case, start), study_by_hand(case, start)
    for own, right in zip(mine, expected, strict=True):
        for name in right:
            assert len(own[name]) == (2 if name == "shared" and case.name in ("fedrep", "fedbabu") else 4)
            for one, other in zip(own[name], right[name], strict=False):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    ends = [np.concatenate([part.ravel() for part in expected[-1][site]]) for site in SIZES]
    # equal models would hide a mix-up of sites
    different = case.name != "feddyn"
    assert all((np.abs(one - other).max() > 1e-3) == different for i, one in enumerate(ends) for other in ends[:i])
    if case.name == "fedala":
        moved = np.concatenate([w.ravel() for site in by_hand.values() for w in site.memory["w"].values()])
        assert ((moved > 0) & (moved < 1)).any() and (moved == 1).any()
        settled = case.numbers["settled"] > 0
        assert all((10 < site.memory["passes"] < 30) == settled for site in by_hand.values())


# -------------------------------------------------------------------------------------- parts of the methods
def test_the_body_of_fedrep_keeps_its_statistics_while_the_head_learns(start: Theta) -> None:
    site = Site("a", METHODS["fedrep"](head_epochs=4), two_layers(start, nn.BatchNorm1d(5)))
    site.phase.train_round(site.context)
    assert int(site.modules["model"][3].num_batches_tracked) == EPOCHS * len(site.data)
    assert all(weight.requires_grad for weight in site.modules["model"].parameters())


def test_only_what_is_named_learns_and_what_was_held_before_stays_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].weight.requires_grad_(False)
    before = [weight.requires_grad for weight in model.parameters()]
    with learning_only(model, {"0.weight", "1.weight"}):
        assert [name for name, weight in model.named_parameters() if weight.requires_grad] == ["0.weight"]
    assert [weight.requires_grad for weight in model.parameters()] == before


def test_last_layers_are_those_that_have_parameters() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.Dropout())
    assert names_of_last_layers(model, 1) == ["3.weight"]
    assert names_of_last_layers(model, 2) == ["1.weight", "1.bias", "3.weight"]
    assert len(names_of_last_layers(model, 9)) == 5
    assert names_of_last_layers(nn.Linear(1, 1), 1) == ["weight", "bias"]


def test_balanced_softmax_knows_classes_that_a_site_lacks_and_a_single_score_of_two() -> None:
    z, y = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 1, 0, 1, 1])
    loss = balanced_softmax(nn.functional.cross_entropy, [2, 4, 0])(z, y)
    e = z.detach().exp() * torch.tensor([2.0, 4.0, 0.0])
    expected = -(e[torch.arange(6), y] / e.sum(1)).log().mean()
    torch.testing.assert_close(loss.detach(), expected)
    (slope,) = torch.autograd.grad(loss, z)
    assert slope.isfinite().all() and not slope[:, 2].any()

    def two(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.cat([torch.zeros_like(output), output], 1), target)

    one = z.detach()[:, 1:2] - z.detach()[:, :1]
    for counts in ([2, 4], [0, 6]):
        both = balanced_softmax(nn.functional.cross_entropy, counts)(z.detach()[:, :2], y)
        torch.testing.assert_close(balanced_softmax(two, counts)(one, y), both)


# ---------------------------------------------------------------------------------------------------- in the engine
def test_fedala_takes_over_each_mean_once_whether_it_is_validated_or_not() -> None:
    """FedALA equals FedAvg if FedALA's weights W stay at 1, even if only some rounds are validated."""
    changes = [*SMALL, "training.rounds=3", "model_selection.validate_every=2"]
    mine = inprocess.run(make_plan("fedala", *changes, "algorithm.step=1e-30")).models
    average = inprocess.run(make_plan("fedavg", *changes)).models
    for site in SITES:
        theirs = average[site].state_dict()
        for name, tensor in mine[site].state_dict().items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)


def test_no_head_of_fedbabu_travels_and_the_lead_gets_the_one_that_was_drawn(tmp_path: Path) -> None:
    plan = make_plan("fedbabu", *SMALL, "algorithm.epochs=1")
    transport, _ = listen(plan, tmp_path)
    first, (lead, _) = plan.build_networks()["model"], load_tensors(tmp_path / "global" / "last.safetensors")
    head = set(head_names(first))
    parcels = [message.groups.get("global", {}).keys() for _, message in [*transport.sent, *transport.received]]
    assert any(parcels) and not any(names & head for names in parcels)
    assert {name for name, tensor in first.state_dict().items() if torch.equal(lead[name], tensor)} == head


REFUSED = [
    ("fedrod", ["task.name=synthetic-prostate"], "balances the classes of cases, which task synthetic-prostate"),
    (
        "fedrod",
        ["training.class_weights=balanced"],
        "training.class_weights: fedrod balances classes by balanced softmax",
    ),
    *((name, ["network.name=linear"], "this network has no layer before") for name in ("fedrep", "fedbabu", "fedrod")),
]


@pytest.mark.parametrize(("method", "changes", "says"), REFUSED)
def test_plans_that_make_no_sense_are_refused(method: str, changes: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_plan(method, *changes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedrep", "feddyn", "fedala", "fedbabu", "fedrod"])
def test_they_learn_from_a_table(method: str, tmp_path: Path) -> None:
    """Each of five methods reaches an AUROC above 0.75 on a table.

    FedALA and FedDyn are also tested with a network of a single layer.
    """
    for number, site in enumerate(table.SITES):
        table.write(tmp_path / site, table.lines(seed=number))
    settings = make_settings(
        {"data": table.described(tmp_path), "min_patients_per_metric": 1, "public_data": True}, "a test"
    )
    for network in ("mlp", "linear") if method in ("fedala", "feddyn") else ("mlp",):
        plan = table.plan_of(method, network, kind="classification")
        assert inprocess.run(plan, settings=settings).summary.pooled["auroc"] > 0.75
