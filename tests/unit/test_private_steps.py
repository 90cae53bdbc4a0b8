"""Private steps: gradients of single cases, the bound, the noise and the sample, against loops by hand."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from medsilo.learning.loop import Compute
from medsilo.learning.private import AdaptiveClipping, Bounds, Clipped, PoissonSample, PrivateSteps, gradients_of_cases
from medsilo.models.activity_cnn import ActivityCnn
from medsilo.models.alexnet import AlexNet
from medsilo.models.basic_unet import BasicUNet
from medsilo.models.lenet5 import LeNet5
from medsilo.models.small_cnn import SmallCnn
from medsilo.models.unet import UNet
from medsilo.models.vgg11 import Vgg11

COMPUTE = Compute()


class KnownNumbers:
    """Draws and noise of a seed, with everything that was asked for."""

    def __init__(self, seed: int = 0, silent: bool = False) -> None:
        self.generator, self.silent = torch.Generator().manual_seed(seed), silent
        self.deviations: list[float] = []

    def drawn(self, count: int, rate: float) -> list[int]:
        return torch.nonzero(torch.rand(count, generator=self.generator) < rate).flatten().tolist()

    def with_normal(self, exact: Tensor, deviation: float) -> Tensor:
        self.deviations.append(deviation)
        noise = torch.randn(exact.shape, generator=self.generator, dtype=torch.float64)
        return exact if self.silent else (exact.double() + deviation * noise).to(exact.dtype)


def narrow_vgg() -> nn.Module:
    """VGG-11 with its kinds of layers, fewer features: the real one has 129 million weights."""
    real = Vgg11().build(1, 2)
    kinds = {type(layer) for layer in real.modules()}
    small = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(4 * 49, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0),
        nn.Linear(8, 2),
    )
    assert {type(layer) for layer in small.modules()} == kinds
    return small


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small-cnn": (lambda: SmallCnn(norm="group", width=4).build(3, 2), (3, 16, 16)),
    "small-cnn without norm": (lambda: SmallCnn(norm="none", width=4).build(1, 2), (1, 16, 16)),
    "small-cnn of volumes": (lambda: SmallCnn(norm="group", width=4, dimensions=3).build(1, 2), (1, 8, 8, 8)),
    "activity-cnn": (lambda: ActivityCnn(norm="group").build(3, 2), (3, 16)),
    "lenet5": (lambda: LeNet5(norm="group").build(1, 2), (1, 28, 28)),
    "alexnet": (lambda: AlexNet(norm="group", size=63, width=32).build(1, 2), (1, 63, 63)),
    "vgg11": (narrow_vgg, (1, 32, 32)),
    "unet": (lambda: UNet(norm="instance", features=(4, 8)).build(1, 2), (1, 16, 16)),
    "unet with residual units": (
        lambda: UNet(norm="instance", features=(4, 8), residual_units=2).build(1, 2),
        (1, 16, 16),
    ),
    "unet without norm": (lambda: UNet(norm="none", features=(4, 8)).build(1, 2), (1, 16, 16)),
    "unet of volumes": (lambda: UNet(norm="instance", features=(4, 8), dimensions=3).build(1, 2), (1, 8, 8, 8)),
    "basic-unet": (lambda: BasicUNet(norm="instance", features=(4, 4, 4, 4, 4)).build(1, 2), (1, 32, 32)),
    "basic-unet of volumes": (
        lambda: BasicUNet(norm="instance", features=(2, 2, 2, 2, 2), dimensions=3).build(1, 2),
        (1, 32, 32, 32),
    ),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """A network that we ship, with cases and their targets."""
    build, shape = NETWORKS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, inputs = build(), torch.rand(5, *shape)
        outputs = model(inputs)
        targets = torch.randint(0, 2, (5, *outputs.shape[2:]))
    yield model.train(), inputs, targets


def one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The gradient of every case, by autograd and a loop."""
    found = []
    for case in range(len(inputs)):
        loss = functional.cross_entropy(model(inputs[case : case + 1]), targets[case : case + 1])
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return found


def steps_for(model: nn.Module, secret: KnownNumbers, bound: float = 1.0, noise: float = 1.0) -> PrivateSteps:
    sample = PoissonSample(None, 5, 5, secret)
    return PrivateSteps(sample, Bounds(["model"], bound), noise, secret, COMPUTE)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def test_gradients_of_cases_are_those_of_a_loop(network: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, inputs, targets = network
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_hand = one_by_one(model, inputs, targets)
    with gradients_of_cases(model) as gradients:
        loss = functional.cross_entropy(model(inputs), targets, reduction="none").flatten(1).mean(1).sum() if targets.ndim > 1 else (
            functional.cross_entropy(model(inputs), targets, reduction="sum")
        )
        found = gradients(loss, list(model.parameters()))
    for case, expected in enumerate(by_hand):
        own = torch.cat([gradient[case].flatten() for gradient in found])
        assert torch.allclose(own, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))
    assert before.keys() == model.state_dict().keys()  # and nothing stays on the network
    assert all(not layer._forward_hooks and not layer._backward_hooks for layer in model.modules())
    assert not any(hasattr(weight, "grad_sample") for weight in model.parameters())


def test_no_case_moves_the_sum_by_more_than_the_bound(network: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Of every network: the sum with and without each case, with a bound that cuts all and one that cuts some."""
    model, inputs, targets = network
    lengths = torch.stack([gradient.norm() for gradient in one_by_one(model, inputs, targets)])
    for bound in (0.1 * float(lengths.min()), float(lengths.median()), 1e-3):
        sums = []
        for left_out in (None, *range(5)):
            here = [case for case in range(5) if case != left_out]
            steps = steps_for(model, KnownNumbers(silent=True), bound)
            steps.sample.owners = torch.arange(len(here))
            steps.gradient("model", model, functional.cross_entropy, inputs[here], targets[here])
            sums.append(flat_gradient(model) * 5)
        moved = torch.stack([(without - sums[0]).norm() for without in sums[1:]])
        assert (moved <= bound * (1 + 1e-4)).all()
        assert moved.max() > 0.99 * min(bound, float(lengths.max()))  # and the bound is used
        expected = torch.stack([min(1.0, bound / float(g.norm())) * g for g in one_by_one(model, inputs, targets)])
        assert torch.allclose(sums[0], expected.sum(0), rtol=1e-3, atol=1e-4 * bound)
