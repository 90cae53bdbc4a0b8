"""PerturbedOptimizer against Eqs. 6 and 7 in float64 numpy: least squares, whose gradient is known by hand."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.learning.perturbation import PerturbedOptimizer

ALPHA, RATE, DECAY = 0.05, 0.1, 0.01
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((20, 4)), RANDOM.standard_normal((20, 3))
START = {"weight": RANDOM.standard_normal((3, 4)), "bias": RANDOM.standard_normal(3)}
Weights = dict[str, np.ndarray]


def gradient(theta: Weights) -> Weights:
    """Of mean((X Wᵀ + b - Y)²)."""
    rest = 2 * (X @ theta["weight"].T + theta["bias"] - Y) / Y.size
    return {"weight": rest.T @ X, "bias": rest.sum(0)}


def perturbed_gradient(theta: Weights) -> Weights:
    """Eq. 6 and 7; one norm over weight and bias together, no weight decay inside."""
    g = gradient(theta)
    norm = np.sqrt(sum((part**2).sum() for part in g.values()))
    return gradient({name: theta[name] + ALPHA * g[name] / (norm + 1e-12) for name in theta})


def sgd_by_hand(theta: Weights, steps: int) -> Weights:
    speed = {name: np.zeros_like(value) for name, value in theta.items()}
    for _ in range(steps):
        g = perturbed_gradient(theta)
        for name in theta:
            speed[name] = 0.9 * speed[name] + g[name] + DECAY * theta[name]
        theta = {name: theta[name] - RATE * speed[name] for name in theta}
    return theta


def adam_by_hand(theta: Weights, steps: int) -> Weights:
    m, v = ({name: np.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    for step in range(1, steps + 1):
        g = perturbed_gradient(theta)
        for name in theta:
            one = g[name] + DECAY * theta[name]
            m[name] = 0.9 * m[name] + 0.1 * one
            v[name] = 0.99 * v[name] + 0.01 * one**2
        theta = {
            name: theta[name] - RATE * (m[name] / (1 - 0.9**step)) / (np.sqrt(v[name] / (1 - 0.99**step)) + 1e-8)
            for name in theta
        }
    return theta


BASES: dict[str, tuple[Callable, Callable]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=DECAY), sgd_by_hand),
    "adam": (lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.9, 0.99), weight_decay=DECAY), adam_by_hand),
}


def linear() -> nn.Linear:
    model = nn.Linear(4, 3).double()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in START.items()})
    return model


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    inputs, targets = torch.from_numpy(X), torch.from_numpy(Y)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        return loss.detach()

    return closure


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", BASES)
def test_equations_6_and_7(name: str, groups: int) -> None:
    make, by_hand = BASES[name]
    model = linear()
    parameters = list(model.parameters()) if groups == 1 else [{"params": [p]} for p in model.parameters()]
    optimizer = PerturbedOptimizer(make(parameters), ALPHA)
    for _ in range(4):
        loss = optimizer.step(closure_of(model, optimizer))
    expected = by_hand(START, 4)
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected[key], rtol=0, atol=1e-6)
    before = by_hand(START, 3)
    np.testing.assert_allclose(loss, ((X @ before["weight"].T + before["bias"] - Y) ** 2).mean(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BASES)
def test_state_goes_there_and_back(name: str) -> None:
    make, _ = BASES[name]
    model, other = linear(), linear()
    optimizer, twin = (PerturbedOptimizer(make(one.parameters()), ALPHA) for one in (model, other))
    optimizer.step(closure_of(model, optimizer))
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for one, own in ((model, optimizer), (other, twin)):
        own.step(closure_of(one, own))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    plain = make(linear().parameters())
    plain.load_state_dict(optimizer.state_dict())  # the state is the base's
    assert twin.param_groups is twin.base.param_groups and twin.state is twin.base.state


def test_a_zero_gradient_moves_nothing() -> None:
    model = nn.Linear(2, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = PerturbedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ALPHA)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) * 0).sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_without_gradient_stay_out_and_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)).double()
    unused = model[1].weight.clone()
    optimizer = PerturbedOptimizer(BASES["sgd"][0](model.parameters()), ALPHA)
    optimizer.step(closure_of(model[0], optimizer))
    assert torch.equal(model[1].weight, unused)


def test_running_statistics_see_the_first_pass_only() -> None:
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    inputs = torch.from_numpy(X)
    other(inputs)  # one pass at the unperturbed weights
    optimizer = PerturbedOptimizer(BASES["sgd"][0](model.parameters()), ALPHA, module=model)
    passes = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        passes.append(model[1].running_mean.clone())
        return loss.detach()

    optimizer.step(closure)
    assert len(passes) == 2 and torch.equal(*passes)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[1], name), getattr(other[1], name))
    assert model[1].track_running_stats


def test_the_weights_come_back_when_the_second_pass_fails() -> None:
    model = linear()
    optimizer = PerturbedOptimizer(BASES["sgd"][0](model.parameters()), ALPHA)
    whole, calls = closure_of(model, optimizer), []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return whole()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert np.array_equal(model.weight.detach().numpy(), START["weight"])


def test_schedulers_and_new_groups_reach_the_base() -> None:
    model, more = linear(), linear()
    optimizer = PerturbedOptimizer(BASES["sgd"][0](model.parameters()), ALPHA)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure_of(model, optimizer))
    scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == RATE / 2
    optimizer.add_param_group({"params": list(more.parameters())})
    assert len(optimizer.base.param_groups) == len(optimizer.param_groups) == 2


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        PerturbedOptimizer(BASES["sgd"][0](linear().parameters()), -0.1)
