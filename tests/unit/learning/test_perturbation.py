"""Test the state and the hooks of PerturbedOptimizer.

The tests of HarmoFL compare the optimizer with Eq. 6 and 7 of the HarmoFL paper.
"""

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
BASES: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=DECAY),
    "adam": lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.9, 0.99), weight_decay=DECAY),
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


@pytest.mark.parametrize("name", BASES)
def test_state_goes_there_and_back(name: str) -> None:
    make = BASES[name]
    model, other = linear(), linear()
    optimizer, twin = (PerturbedOptimizer(make(one.parameters()), ALPHA) for one in (model, other))
    optimizer.step(closure_of(model, optimizer))
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for one, own in ((model, optimizer), (other, twin)):
        own.step(closure_of(one, own))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    plain = make(linear().parameters())
    plain.load_state_dict(optimizer.state_dict())  # the base optimizer can load the state of PerturbedOptimizer
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
    optimizer = PerturbedOptimizer(BASES["sgd"](model.parameters()), ALPHA)
    optimizer.step(closure_of(model[0], optimizer))
    assert torch.equal(model[1].weight, unused)


class WithoutTruth(nn.Sequential):
    """A network whose truth value raises an error, as the truth value of a compiled network does."""

    def __bool__(self) -> bool:
        raise TypeError


@pytest.mark.parametrize("kind", [nn.Sequential, WithoutTruth])
def test_running_statistics_see_the_first_pass_only(kind: type[nn.Sequential]) -> None:
    torch.manual_seed(0)
    model, other = (kind(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    inputs = torch.from_numpy(X)
    other(inputs)
    optimizer = PerturbedOptimizer(BASES["sgd"](model.parameters()), ALPHA, module=model)
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
    optimizer = PerturbedOptimizer(BASES["sgd"](model.parameters()), ALPHA)
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
    optimizer = PerturbedOptimizer(BASES["sgd"](model.parameters()), ALPHA)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure_of(model, optimizer))
    scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == RATE / 2
    optimizer.add_param_group({"params": list(more.parameters())})
    assert len(optimizer.base.param_groups) == len(optimizer.param_groups) == 2


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        PerturbedOptimizer(BASES["sgd"](linear().parameters()), -0.1)
