"""Properties of amplitude normalisation and perturbed steps that hold for any images and weights."""

import pytest
import torch
from torch import nn

from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.perturbation import PerturbedOptimizer
from tests.conftest import over_all

every_seed = over_all("seed", range(8))


def drawn(seed: int) -> tuple[AmplitudeNorm, torch.Tensor]:
    """A frozen layer and other images, both in double precision, of a shape that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    size = [int(torch.randint(3, 14, (), generator=generator)) for _ in range(1 + seed % 3)]
    shape = (int(torch.randint(1, 4, (), generator=generator)), *size)
    band = [None, 0.0, 0.2, 0.5][seed % 4]
    norm = AmplitudeNorm(shape, band=band).double()
    norm(torch.rand(4, *shape, generator=generator, dtype=torch.float64) + 1)
    norm.freeze()
    return norm, torch.rand(5, *shape, generator=generator, dtype=torch.float64)


@every_seed
def test_every_image_takes_the_amplitude_and_keeps_its_phase(seed: int) -> None:
    norm, images = drawn(seed)
    out = norm(images)
    before, after = (torch.fft.rfftn(one, dim=norm.axes) for one in (images, out))
    for block in norm.blocks:
        shared = norm.amplitude[block].expand_as(after[block])
        torch.testing.assert_close(after[block].abs(), shared, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after.sgn(), before.sgn(), rtol=0, atol=1e-6)


@every_seed
def test_normalising_twice_is_normalising_once(seed: int) -> None:
    norm, images = drawn(seed)
    once = norm(images)
    torch.testing.assert_close(norm(once), once, rtol=0, atol=1e-9)


@every_seed
def test_images_do_not_know_of_each_other_once_frozen(seed: int) -> None:
    norm, images = drawn(seed)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(norm(images)[order], norm(images[order]), rtol=0, atol=1e-12)
    torch.testing.assert_close(norm(images)[:1], norm(images[:1]), rtol=0, atol=1e-12)


@every_seed
def test_brightness_of_all_frequencies_leaves_no_trace(seed: int) -> None:
    norm, images = drawn(seed)
    if norm.reach is None:
        torch.testing.assert_close(norm(images * 7.5), norm(images), rtol=0, atol=1e-9)


@every_seed
def test_a_running_average_stays_between_the_least_and_the_greatest_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm, means = AmplitudeNorm((2, 6, 5), decay=0.3), []
    for _ in range(4):
        images = torch.rand(3, 2, 6, 5, generator=generator)
        means.append(torch.fft.rfftn(images, dim=(-2, -1)).abs().mean(0))
        norm(images)
    assert (norm.amplitude <= torch.stack(means).amax(0) + 1e-5).all()
    assert (norm.amplitude >= torch.stack(means).amin(0) - 1e-5).all()


@every_seed
def test_the_perturbation_has_length_alpha_whatever_the_scale_of_the_loss(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs, alpha = torch.randn(6, 3), 0.01 + 0.1 * seed
    for scale in (1e-3, 1.0, 1e3):
        optimizer = PerturbedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), alpha)
        seen: list[torch.Tensor] = []

        def closure(scale: float = scale, optimizer: PerturbedOptimizer = optimizer, seen: list = seen) -> torch.Tensor:
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            optimizer.zero_grad()
            loss = scale * model(inputs).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        assert float((seen[1] - seen[0]).norm()) == pytest.approx(alpha, rel=1e-3)
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), seen[0])
