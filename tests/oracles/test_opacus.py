"""Compare private training steps with Opacus: the clipped sum, the noise of the sum, the trained weights, and the
privacy cost.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.models.architectures import ActivityCnn, SmallCnn, UNet
from medsilo.privacy.accounting import epsilon, noise_for
from medsilo.privacy.mechanisms import Charge, SampledGaussian

WHY = "needs opacus, from pyproject.toml's group dev"
opacus = pytest.importorskip("opacus", reason=WHY)
accountants = pytest.importorskip("opacus.accountants", reason=WHY)
calibration = pytest.importorskip("opacus.accountants.utils", reason=WHY)
optimizers = pytest.importorskip("opacus.optimizers", reason=WHY)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Full backward hook", "ignore:Optimal order"
)
CASES = 6
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small-cnn": (lambda: SmallCnn(norm="group", width=4).build(3, 2), (3, 16, 16)),
    "activity-cnn": (lambda: ActivityCnn(norm="group").build(3, 2), (3, 16)),
    "unet": (lambda: UNet(norm="instance", features=(4, 8)).build(1, 2), (1, 16, 16)),
}


class SharedNoise:
    """Sample noise as Opacus does: with torch's normal random numbers from a seed, for each weight in turn."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.sizes = [weight.numel() for weight in model.parameters()]
        self.generator = torch.Generator().manual_seed(seed)

    def with_normal(self, exact: Tensor, deviation: float) -> Tensor:
        if not deviation:
            return exact.clone()
        drawn = [torch.normal(0.0, deviation, (size,), generator=self.generator) for size in self.sizes]
        return exact + torch.cat(drawn).double()


def network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, inputs = build().train(), torch.rand(CASES, *shape)
        targets = torch.randint(0, 2, (CASES, *model(inputs).shape[2:]))
    return model, inputs, targets


def not_in_place(model: nn.Module) -> nn.Module:
    """Replace in-place activations, since Opacus' hooks do not allow in-place changes."""
    for layer in model.modules():
        if getattr(layer, "inplace", False):
            layer.inplace = False
    return model


def trained(
    name: str, bound: float, noise: float, steps: int = 1, expected: float = CASES
) -> tuple[list[Tensor], list[Tensor]]:
    """Train a network with medsilo's and with Opacus' steps, on the same batches with the same noise; return the
    weights of both.
    """
    ours, inputs, targets = network(name)
    theirs = opacus.GradSampleModule(not_in_place(copy.deepcopy(ours)))
    secret = SharedNoise(ours, 7)
    private = PrivateSteps(PoissonSample(None, CASES, expected, secret), bound, noise, secret)
    descent = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    train_step = private.train_step(ours, functional.cross_entropy, descent)
    noisy = optimizers.DPOptimizer(
        torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9),
        noise_multiplier=noise,
        max_grad_norm=bound,
        expected_batch_size=expected,
        generator=torch.Generator().manual_seed(7),
    )
    for step in range(steps):
        here = [(step + case) % CASES for case in range(CASES - step % 2)]
        private.sample.owners = torch.arange(len(here))
        train_step(inputs[here], targets[here])
        noisy.zero_grad()
        functional.cross_entropy(theirs(inputs[here]), targets[here]).backward()
        noisy.step()
    return list(ours.parameters()), list(theirs.parameters())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("bound", [1e-2, 0.3, 1e3], ids=["cuts all", "cuts some", "cuts none"])
def test_the_clipped_sum_is_opacus(name: str, bound: float) -> None:
    for ours, theirs in zip(*trained(name, bound, noise=0.0), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6 * bound)
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_noise_has_opacus_scale_and_comes_at_the_same_place(name: str) -> None:
    """The test uses Opacus' random numbers, and a batch with more cases than the expected number."""
    for ours, theirs in zip(*trained(name, bound=0.3, noise=1.3, expected=4), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_training_goes_to_opacus_weights() -> None:
    before = [weight.clone() for weight in network("small-cnn")[0].parameters()]
    for start, ours, theirs in zip(before, *trained("small-cnn", 0.3, 0.8, steps=5), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert not torch.allclose(start, ours, atol=1e-2)


# Each row has noise, sampling rate, steps and δ; noise is little or much, and the sampling rate is small or large.
STEPS = [(0.7, 0.01, 500, 1e-3), (1.0, 0.3, 40, 1e-5), (3.0, 0.05, 1000, 1e-5)]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), STEPS)
def test_steps_cost_what_opacus_two_accountants_say(noise: float, rate: float, steps: int, delta: float) -> None:
    """The ε of the PRV accountant is exact to 0.01; the ε of the Rényi accountant is an upper bound."""
    ours = epsilon([Charge(what="x", of=SampledGaussian(noise=noise, rate=rate, steps=steps))], delta)
    prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
    prv.history = rdp.history = [(noise, rate, steps)]
    assert ours == pytest.approx(prv.get_epsilon(delta, eps_error=0.01), abs=0.02)
    assert ours <= rdp.get_epsilon(delta) <= 1.5 * ours


@pytest.mark.slow
def test_noise_for_a_target_is_opacus() -> None:
    theirs = calibration.get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, steps=100, accountant="prv", epsilon_tolerance=0.05
    )
    assert noise_for(2.0, 1e-5, 0.1, 100) == pytest.approx(theirs, rel=0.02)
