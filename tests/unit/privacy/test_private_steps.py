"""Private training steps equal separate loops: the gradient of each case, clipping, noise and sampling."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.compute import Compute
from medsilo.learning.private import (
    ClippedSum,
    PoissonSample,
    PrivateSteps,
    gradients_of_cases,
)
from medsilo.models.architectures import ActivityCnn, Halving, SmallCnn, UNet, Vgg11
from medsilo.privacy.noise import NoiseSource
from medsilo_pretrained.paper_networks import AlexNet, BasicUNet, LeNet5
from tests.conftest import slow_but

COMPUTE = Compute()


class KnownNumbers:
    def __init__(self, seed: int = 0, silent: bool = False) -> None:
        self.generator, self.silent = torch.Generator().manual_seed(seed), silent
        self.deviations: list[float] = []

    def poisson_sample(self, count: int, rate: float) -> list[int]:
        return torch.nonzero(torch.rand(count, generator=self.generator) < rate).flatten().tolist()

    def with_normal(self, exact: Tensor, deviation: float) -> Tensor:
        self.deviations.append(deviation)
        noise = torch.randn(exact.shape, generator=self.generator, dtype=torch.float64)
        return exact if self.silent else (exact.double() + deviation * noise).to(exact.dtype)


def narrow_vgg() -> nn.Module:
    """Return VGG-11 with fewer channels, because the full network has 129 million weights."""
    real = Vgg11().build(1, 2)
    kinds = {type(layer) for layer in real.modules()}
    small = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        Halving(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(4 * 49, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0),
        nn.Linear(8, 2),
    )
    assert {type(layer) for layer in small.modules()} == kinds
    return small


BIG = ("alexnet", "basic-unet of volumes")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small-cnn": (lambda: SmallCnn(norm="group", width=4).build(3, 2), (3, 16, 16)),
    "small-cnn without norm": (lambda: SmallCnn(norm="none", width=4).build(1, 2), (1, 16, 16)),
    "small-cnn of volumes": (lambda: SmallCnn(norm="group", width=4, dimensions=3).build(1, 2), (1, 8, 8, 8)),
    "activity-cnn": (lambda: ActivityCnn(norm="group").build(3, 2), (3, 16)),
    "lenet5": (lambda: LeNet5(norm="group").build(1, 2), (1, 28, 28)),
    "alexnet": (lambda: AlexNet(norm="group", size=63, width=16).build(1, 2), (1, 63, 63)),
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


@pytest.fixture(params=slow_but([name for name in NETWORKS if name not in BIG], NETWORKS))
def network(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    build, shape = NETWORKS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, inputs = build(), torch.rand(5, *shape)
        outputs = model(inputs)
        targets = torch.randint(0, 2, (5, *outputs.shape[2:]))
    yield model.train(), inputs, targets


def one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Compute each case's gradient by a separate backward pass."""
    found = []
    for case in range(len(inputs)):
        loss = functional.cross_entropy(model(inputs[case : case + 1]), targets[case : case + 1])
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return found


def steps_for(model: nn.Module, secret: KnownNumbers, bound: float = 1.0, noise: float = 1.0) -> PrivateSteps:
    sample = PoissonSample(None, 5, 5, secret)
    return PrivateSteps(sample, bound, noise, secret)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def test_gradients_of_cases_are_those_of_a_loop(network: tuple[nn.Module, Tensor, Tensor]) -> None:
    single, inputs, targets = network
    model, inputs = copy.deepcopy(single).double(), inputs.double()  # double precision prevents rounding differences
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_hand = one_by_one(model, inputs, targets)
    losses, found = gradients_of_cases(model, functional.cross_entropy, inputs, targets)
    assert float(losses.mean()) == pytest.approx(float(functional.cross_entropy(model(inputs), targets)))
    for case, expected in enumerate(by_hand):
        own = torch.cat([gradient[case].flatten() for gradient in found])
        assert torch.allclose(own, expected, rtol=1e-7, atol=1e-9 * float(expected.norm()))
    assert before.keys() == model.state_dict().keys()
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.slow
def test_no_case_moves_the_sum_by_more_than_the_bound(network: tuple[nn.Module, Tensor, Tensor]) -> None:
    """The test uses clipping bounds that clip all cases, and bounds that clip only some cases."""
    model, inputs, targets = network
    lengths = torch.stack([gradient.norm() for gradient in one_by_one(model, inputs, targets)])
    for bound in (0.1 * float(lengths.min()), float(lengths.median()), 1e-3):
        sums = []
        for left_out in (None, *range(5)):
            here = [case for case in range(5) if case != left_out]
            steps = steps_for(model, KnownNumbers(silent=True), bound)
            steps.sample.owners = torch.arange(len(here))
            steps.gradient(model, functional.cross_entropy, inputs[here], targets[here])
            sums.append(flat_gradient(model) * 5)
        moved = torch.stack([(without - sums[0]).norm() for without in sums[1:]])
        assert (moved <= bound * (1 + 1e-4)).all()
        assert moved.max() > 0.99 * min(bound, float(lengths.max()))
        expected = torch.stack([min(1.0, bound / float(g.norm())) * g for g in one_by_one(model, inputs, targets)])
        assert torch.allclose(sums[0], expected.sum(0), rtol=1e-3, atol=1e-4 * bound)


def linear(inputs: int = 4) -> nn.Module:
    """Return a linear layer with zero weights, whose gradient is x · (p − y)."""
    model = nn.Linear(inputs, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_the_noise_has_the_scale_that_is_charged_and_is_new_in_every_step() -> None:
    """A step without cases consists of noise, whose standard deviation is noise × bound / expected number of cases."""
    model, secret = nn.Linear(200, 50), KnownNumbers(3)
    steps = steps_for(model, secret, bound=0.5, noise=3.0)
    steps.sample.owners = torch.zeros(0, dtype=torch.int64)
    seen = []
    for _ in range(2):
        steps.gradient(model, functional.cross_entropy, torch.zeros(0, 200), torch.zeros(0, dtype=torch.int64))
        seen.append(flat_gradient(model))
    assert secret.deviations == [1.5, 1.5]
    for noise in seen:
        assert float(noise.std()) == pytest.approx(1.5 / 5, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack(seen))[0, 1])) < 0.05


@pytest.mark.usefixtures("known_noise")
def test_the_package_s_own_noise_has_that_scale_and_no_two_attempts_share_it() -> None:
    model = nn.Linear(300, 100)
    seen = []
    for source in (NoiseSource(), NoiseSource(), NoiseSource.from_seed(1, "a", 1), NoiseSource.from_seed(1, "a", 2)):
        sample = PoissonSample(None, 5, 5, source)
        steps = PrivateSteps(sample, 2.0, 1.1, source)
        steps.gradient(model, functional.cross_entropy, torch.zeros(0, 300), torch.zeros(0, dtype=torch.int64))
        seen.append(flat_gradient(model))
        assert float(seen[-1].std()) == pytest.approx(1.1 * 2.0 / 5, rel=0.02)
    assert float((torch.corrcoef(torch.stack(seen)) - torch.eye(4)).abs().max()) < 0.03


def test_an_exact_step_is_the_mean_of_the_cases_where_nothing_is_cut() -> None:
    model, inputs, targets = nn.Linear(4, 2), torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    steps = steps_for(model, KnownNumbers(silent=True), bound=1e3)
    steps.sample.owners = torch.arange(5)
    loss = steps.gradient(model, functional.cross_entropy, inputs, targets)
    mine = flat_gradient(model)
    plain = functional.cross_entropy(model(inputs), targets)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(plain, list(model.parameters()))])
    assert torch.allclose(mine, expected, atol=1e-6)
    assert float(loss) == pytest.approx(float(plain))


def test_a_case_whose_gradient_is_not_finite_changes_nothing_of_the_others() -> None:
    model, inputs, targets = linear(), torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    sums = []
    for broken in (torch.zeros(4), torch.full((4,), float("nan")), torch.tensor([float("inf"), 0, 0, 0])):
        inputs[2] = broken
        steps = steps_for(model, KnownNumbers(silent=True))
        steps.sample.owners = torch.arange(5)
        steps.gradient(model, functional.cross_entropy, inputs, targets)
        sums.append(model.weight.grad.clone())
    assert torch.equal(sums[1], sums[2])
    assert sums[1].isfinite().all()
    assert torch.allclose(sums[0], sums[1])  # the gradient of a case of zeros is zero


def test_a_patient_s_gradients_are_cut_together_however_they_are_portioned(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.randn(7, 4), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    owners, bound = torch.tensor([0, 0, 0, 1, 2, 2, 2]), 0.4
    model = linear()
    each = one_by_one(model, inputs, targets)
    together = [sum(each[case] for case in range(7) if owners[case] == patient) for patient in range(3)]
    expected = sum(min(1.0, bound / float(g.norm())) * g for g in together) / 5
    for at_once in (1, 2, 3, 7):
        monkeypatch.setattr("medsilo.learning.private.AT_ONCE", at_once * 10)
        steps = steps_for(model, KnownNumbers(silent=True), bound)
        steps.sample.owners = owners
        steps.gradient(model, functional.cross_entropy, inputs, targets)
        assert torch.allclose(flat_gradient(model), expected, atol=1e-5)


def test_losses_that_mix_a_batch_are_taken_case_by_case() -> None:
    """Each case has a separate Dice loss, because a Dice loss over the batch would mix the cases' gradients."""

    def of_batch(output: Tensor, targets: Tensor) -> Tensor:
        chance = output.softmax(1)[:, 1]
        return 1 - 2 * (chance * targets).sum() / (chance + targets).sum()

    model, inputs, targets = linear(), torch.randn(5, 4), torch.tensor([1, 1, 1, 0, 1])
    sums = []
    for here in ([0, 1, 2, 3, 4], [0, 1, 2, 3]):
        steps = steps_for(model, KnownNumbers(silent=True), bound=1e-3)
        steps.sample.owners = torch.arange(len(here))
        steps.gradient(model, of_batch, inputs[here], targets[here])
        sums.append(flat_gradient(model) * 5)
    assert float((sums[0] - sums[1]).norm()) <= 1e-3 * (1 + 1e-4)


# --------------------------------------------------------------------------------------------- the random sample
def test_each_unit_is_drawn_by_itself_with_its_cases_together() -> None:
    """In 4000 steps, each patient is sampled independently with the expected probability; a sampled patient brings all
    of the patient's cases.
    """
    patients = ["a", "b", "a", "c", "b", "a", "d", "e"]
    data = TensorDataset(torch.arange(8.0)[:, None], torch.arange(8))
    sample = PoissonSample(patients, 8, 2.0, NoiseSource.from_seed(1, "sample"))
    assert (sample.rate, sample.expected) == (0.25, 2.0)
    seen = torch.zeros(4000, 5)
    for step, (_, cases) in enumerate(sample.batches(data, 4000, COMPUTE)):
        names = [patients[case] for case in cases.tolist()]
        assert all(patients.count(name) == names.count(name) for name in names)
        assert len(set(names)) == len(sample.owners.unique()) and len(sample.owners) == len(cases)
        assert sample.owners.tolist() == sorted(sample.owners.tolist())
        for name in set(names):
            seen[step, "abcde".index(name)] = 1
    assert torch.allclose(seen.mean(0), torch.full((5,), 0.25), atol=4 * (0.25 * 0.75 / 4000) ** 0.5)
    together = torch.corrcoef(seen.T) - torch.eye(5)
    assert float(together.abs().max()) < 4 / 4000**0.5
    assert float((seen.sum(1) == 0).double().mean()) == pytest.approx(0.75**5, abs=0.03)


def test_where_a_batch_has_all_cases_every_unit_is_in_every_step() -> None:
    data = TensorDataset(torch.arange(3.0)[:, None], torch.arange(3))
    sample = PoissonSample(None, 3, 16, NoiseSource())
    assert sample.rate == 1.0 and sample.expected == 3
    assert [cases.tolist() for _, cases in sample.batches(data, 2, COMPUTE)] == [[0, 1, 2]] * 2


class Twice(nn.Module):
    """A network with an unused layer, and with a layer whose weights the network also uses without calling the
    layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.layer.weight.T


def test_weights_may_act_outside_their_layer_or_not_at_all() -> None:
    model, inputs, targets = Twice(), torch.randn(3, 4), torch.tensor([0, 1, 1])
    _, (weight, bias, *idle) = gradients_of_cases(model, functional.cross_entropy, inputs, targets)
    assert all(not own.any() for own in idle)
    for case in range(3):
        loss = functional.cross_entropy(model(inputs[case : case + 1]), targets[case : case + 1])
        expected = torch.autograd.grad(loss, list(model.layer.parameters()))
        assert torch.allclose(weight[case], expected[0]) and torch.allclose(bias[case], expected[1])


def test_a_network_that_counts_what_passes_through_it_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen += inputs.sum()
            return self.layer(inputs)

    steps = steps_for(Counting(), KnownNumbers())
    steps.sample.owners = torch.arange(3)
    with pytest.raises(MedsiloError, match="per-case gradients"):
        steps.gradient(Counting(), functional.cross_entropy, torch.randn(3, 4), torch.tensor([0, 1, 1]))


def test_each_case_has_a_dropout_of_its_own() -> None:
    model, inputs = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5), nn.Linear(50, 2)), torch.ones(2, 50)
    _, (weight, *_) = gradients_of_cases(model.train(), functional.cross_entropy, inputs, torch.tensor([0, 0]))
    assert ((weight[0] == 0).all(1) != (weight[1] == 0).all(1)).any()


def test_clipped_sums_begin_anew() -> None:
    clipped = ClippedSum([torch.zeros(2)], 1.0)
    clipped.finish()
    assert float(clipped.total[0].abs().sum()) == 0
