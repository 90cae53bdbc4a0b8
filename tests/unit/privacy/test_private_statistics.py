"""With differential privacy, AdaFed's statistics and HarmoFL's amplitude are clipped, and sent once with noise before
training.
"""

import math
from pathlib import Path

import pytest
import torch

from medsilo.core.files import load_tensors
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.private import PoissonSample, PrivateSteps
from medsilo.learning.statistics import batch_norm_input_statistics, moments_of_cases, statistics_from
from medsilo.models.architectures import SmallCnn
from medsilo.plan import Plan
from medsilo.privacy.accounting import epsilon, noise_for
from medsilo.privacy.mechanisms import Charge, Gaussian
from medsilo.privacy.noise import NoiseSource
from medsilo.site.settings import SiteSettings
from tests import inprocess
from tests.conftest import make_plan
from tests.unit.privacy.test_private_training import at, promised

PROMISE = 'privacy={"epsilon": 2.0, "delta": 0.001, "statistics": {"epsilon": 0.5}}'
HISTOLOGY = ["task.name=synthetic-histology", "network.name=small-cnn", "network.norm=group", "training.batch_size=8"]


def releasing(units: list[str], noise: float, clip: float = 1.0, size: int | None = None) -> PrivateSteps:
    secret = NoiseSource()
    sample = PoissonSample(units, len(units), 4, secret, size)
    return PrivateSteps(sample, 1.0, 1.0, secret, releasing=noise, clip=clip)


# ---------------------------------------------------------------------------------------------------- one release
def test_one_unit_moves_the_sum_by_the_bound_at_most() -> None:
    vectors = torch.tensor([[100.0, 0.0], [0.0, 300.0], [0.1, 0.2], [float("inf"), float("nan")]])
    units = ["a", "a", "b", "c"]
    with_a = releasing(units, 1e-9).noisy_mean([vectors[:1], vectors[1:]]) * 3
    without = releasing(units[2:], 1e-9).noisy_mean([vectors[2:]]) * 2
    assert float((with_a - without).norm()) == pytest.approx(1.0, abs=1e-5)
    # Infinite values and NaN count as zero.
    assert torch.allclose(without, torch.tensor([0.1, 0.2], dtype=torch.float64), atol=1e-6)


@pytest.mark.usefixtures("known_noise")
def test_noise_on_a_release_has_the_scale_of_its_account() -> None:
    found = torch.stack([releasing(["a", "b"], 3.0, 0.5, size=10).noisy_mean([torch.zeros(2, 40)]) for _ in range(200)])
    assert float(found.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.05)
    assert float(releasing(["a"], 0.0).noisy_mean([torch.zeros(1, 40)]).abs().max()) == 0


def test_without_noise_and_cuts_they_are_the_exact_statistics() -> None:
    torch.manual_seed(0)
    model = SmallCnn(norm="batch").build(3, 2)
    images = torch.rand(6, 3, 16, 16)
    exact = batch_norm_input_statistics(model, [images])
    found = statistics_from(torch.cat(list(moments_of_cases(model, [images[:4], images[4:]]))).mean(0), _widths(exact))
    for (mean, variance), (own_mean, own_variance) in zip(exact, found, strict=True):
        assert torch.allclose(mean, own_mean, atol=1e-5) and torch.allclose(variance, own_variance, atol=1e-5)


def _widths(statistics: list[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [len(mean) for mean, _ in statistics]


@pytest.mark.parametrize("band", [None, 0.0, 0.2])
def test_a_mean_of_amplitudes_is_that_of_the_images(band: float | None) -> None:
    images, norm = torch.rand(5, 2, 8, 8), AmplitudeNorm((2, 8, 8), band=band)
    norm.take(norm.amplitudes(images).mean(0))
    exact = torch.fft.rfftn(images, dim=(2, 3)).abs().mean(0)
    assert torch.allclose(norm.used, exact[:, :1, :1] if band == 0 else exact, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- whole studies
def harmofl(*changes: str) -> Plan:
    amplitude = ["algorithm.amplitude.measured=before", "algorithm.amplitude.band=0.0"]
    return make_plan("harmofl", *HISTOLOGY, PROMISE, *amplitude, *changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        harmofl(),
        *(pytest.param(promised(name), marks=pytest.mark.long) for name in ("adafed", "d-adafed", "fedrdn")),
    ],
)
def test_each_release_is_charged_and_all_together_keep_the_promise(plan: Plan) -> None:
    site = at(plan)
    each = [site.charges(number, plan.course.phase_of(number)) for number in range(1, plan.rounds + 1)]
    charges = [charge for own in each for charge in own]
    released = [charge for charge in charges if isinstance(charge.of, Gaussian)]
    assert each[0] == released[:1] and len(released) == sum(
        phase.name.startswith(("measure", "harm")) for phase in plan.course.phases
    )
    assert 0.45 < epsilon(released, 0.001) <= 0.5
    assert 1.9 < epsilon(charges, 0.001) <= 2.0


def test_the_noise_of_a_release_is_no_more_than_needed() -> None:
    noise = noise_for(0.5, 1e-5, 1.0, 2)
    assert 0.499 < epsilon([Charge(what="x", of=Gaussian(noise=noise, count=2))], 1e-5) <= 0.5


@pytest.mark.slow
def test_an_amplitude_leaves_once_with_noise_in_a_round_of_its_own(tmp_path: Path) -> None:
    plan = harmofl("training.rounds=1")
    assert [phase.name for phase in plan.course.phases][:2] == ["harmonise", "train"] and plan.rounds == 2
    assert [group.name for group in plan.course.phases[0].sent] == ["amplitude"]
    run = inprocess.run(plan, folder=tmp_path / "run", settings=SiteSettings(device="cpu"))
    assert run.summary.finished
    told = load_tensors(tmp_path / "run/global/last.safetensors")[0]
    shared = next(tensor for name, tensor in told.items() if name.endswith("amplitude"))
    data = plan.task.read("a", ["a", "b", "c"], plan.seed, None).train
    exact = torch.stack([data[n][0] for n in range(len(data))]).sum((2, 3)).mean(0)
    size = math.prod(plan.task.shape[1:])  # type: ignore[index]
    assert not torch.allclose(shared[:, 0, 0], exact, rtol=1e-3) and float(shared[:, 0, 0].max()) < 3 * size
