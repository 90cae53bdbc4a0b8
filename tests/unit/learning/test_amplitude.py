"""The output of AmplitudeNorm equals the paper's equations, which numpy computes in double precision for each image."""

from itertools import product

import numpy as np
import pytest
import torch

from medsilo.core.errors import DataError, MedsiloError
from medsilo.learning.amplitude import AmplitudeNorm, images_averaged
from tests.conftest import over_all

SHAPES = [(3, 12, 16), (1, 9, 7), (2, 8, 11), (2, 4, 6, 5), (1, 5, 8, 8), (4, 10)]
TOLERANCE = {"rtol": 0, "atol": 1e-6}


def amplitude_by_hand(batch: np.ndarray) -> np.ndarray:
    """Return the amplitudes |F(x)| of the whole spectrum, averaged over the batch, with the shape [C, ...]."""
    return np.mean([[np.abs(np.fft.fftn(channel)) for channel in image] for image in batch], axis=0)


def low(size: tuple[int, ...], band: float | None) -> np.ndarray:
    """Return a mask of the frequencies whose amplitude the layer replaces by the shared amplitude."""
    reach = max(size) if band is None else np.floor(min(size) * band)
    frequencies = np.meshgrid(*(np.fft.fftfreq(length) * length for length in size), indexing="ij")
    return np.all([np.abs(frequency) <= reach for frequency in frequencies], axis=0)


def normalise_by_hand(batch: np.ndarray, amplitude: np.ndarray, band: float | None) -> np.ndarray:
    """Compute Eq. 4 of the paper, Re F⁻¹(A exp(j P))."""
    mask = low(batch.shape[2:], band)
    out = np.empty_like(batch)
    for number, image in enumerate(batch):
        for channel, values in enumerate(image):
            spectrum = np.fft.fftn(values)
            taken = np.where(mask, amplitude[channel], np.abs(spectrum))
            out[number, channel] = np.fft.ifftn(taken * np.exp(1j * np.angle(spectrum))).real
    return out


def half(amplitude: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(amplitude[..., : amplitude.shape[-1] // 2 + 1].copy())


def draw(shape: tuple[int, ...], count: int = 3, seed: int = 0, batches: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.random((count, *shape)) * random.uniform(0.5, 2) + random.uniform(-1, 1) for _ in range(batches)]


@over_all("band, start, shape", product([None, 0.0, 0.1, 0.25, 0.5], ["batch", "zero"], SHAPES))
def test_equations_2_to_4(shape: tuple[int, ...], start: str, band: float | None) -> None:
    norm = AmplitudeNorm(shape, decay=0.3, band=band, start=start).double()
    running = np.zeros(shape)
    for number, batch in enumerate(draw(shape)):
        share = 1.0 if start == "batch" and number == 0 else 0.3
        running = (1 - share) * running + share * amplitude_by_hand(batch)
        images = torch.from_numpy(batch)
        expected = normalise_by_hand(batch, running, band)
        np.testing.assert_allclose(norm(images).numpy(), expected, **TOLERANCE)
        torch.testing.assert_close(norm.amplitude, half(running), **TOLERANCE)
        assert torch.equal(images, torch.from_numpy(batch))
    norm.freeze()
    for module in (norm.train(), norm.eval()):
        np.testing.assert_allclose(module(images).numpy(), expected, **TOLERANCE)
    torch.testing.assert_close(norm.amplitude, half(running), **TOLERANCE)


@pytest.mark.parametrize("band", [None, 0.0, 0.2])
def test_single_precision_is_as_near_as_it_can_be(band: float | None) -> None:
    norm = AmplitudeNorm((3, 48, 48), band=band)
    batch = np.random.default_rng(1).random((4, 3, 48, 48))
    out = norm(torch.from_numpy(batch).float()).numpy()
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, normalise_by_hand(batch, amplitude_by_hand(batch), band), **TOLERANCE)


def test_evaluation_never_updates_and_passes_images_unchanged_before_the_first_batch() -> None:
    norm = AmplitudeNorm((1, 4, 4)).eval()
    images = torch.rand(2, 1, 4, 4)
    assert torch.equal(norm(images), images)
    assert not norm.amplitude.any() and not norm.batches
    norm.train()(images)
    before = norm.amplitude.clone()
    other = norm.eval()(images + 1)
    assert torch.equal(norm.amplitude, before)
    assert not torch.equal(other, images + 1)  # in evaluation mode, the layer uses the running average of amplitudes


def test_frozen_survives_saving_and_freezes_what_is_given() -> None:
    images = torch.rand(2, 3, 8, 8)
    norm = AmplitudeNorm((3, 8, 8))
    with pytest.raises(MedsiloError, match="no amplitude to freeze"):
        norm.freeze()
    given = torch.rand(3, 8, 5)
    norm.freeze(given)
    given += 1
    copy = AmplitudeNorm((3, 8, 8))
    copy.load_state_dict(norm.state_dict())
    assert torch.equal(copy.train()(images), norm.eval()(images))
    torch.testing.assert_close(copy.amplitude, given - 1)
    with pytest.raises(DataError, match=r"\[3, 8, 8\].*\[3, 8, 5\]"):
        norm.freeze(torch.rand(3, 8, 8))


@pytest.mark.parametrize("band", [None, 0.0, 0.3])
@pytest.mark.parametrize("value", [0.0, 0.5, -2.0, 1e-20])
def test_constant_and_empty_images_give_finite_output(value: float, band: float | None) -> None:
    norm = AmplitudeNorm((1, 6, 8), band=band)
    norm(torch.rand(4, 1, 6, 8))
    out = norm(torch.full((2, 1, 6, 8), value))
    assert out.isfinite().all()
    norm.freeze()
    assert norm(torch.full((2, 1, 6, 8), value)).isfinite().all()


def test_a_frequency_without_amplitude_has_phase_zero() -> None:
    """A zero has the phase 0, as in numpy, so the output for an image of zeros is the inverse transform of A."""
    norm = AmplitudeNorm((1, 6, 6)).double()
    batch = draw((1, 6, 6))[0]
    norm(torch.from_numpy(batch))
    norm.freeze()
    expected = np.fft.ifftn(amplitude_by_hand(batch), axes=(1, 2)).real
    np.testing.assert_allclose(norm(torch.zeros(1, 1, 6, 6).double())[0].numpy(), expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_transforms_in_single_precision(dtype: torch.dtype) -> None:
    images = (torch.rand(2, 1, 64, 64) + 30).to(dtype)  # the sum of the image's values is too large for float16
    norm, wide = AmplitudeNorm((1, 64, 64)), AmplitudeNorm((1, 64, 64))
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(images)
    assert out.dtype == dtype and norm.amplitude.dtype == torch.float32
    assert torch.equal(out, wide(images.float()).to(dtype))
    assert torch.equal(norm.amplitude, wide.amplitude)


def test_the_mean_alone_needs_no_transform_once_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = AmplitudeNorm((3, 8, 8), band=0.0)
    norm(torch.rand(2, 3, 8, 8))
    norm.freeze()
    monkeypatch.setattr(torch.fft, "rfftn", lambda *_, **__: pytest.fail("the code computed a transform"))
    norm(torch.rand(2, 3, 8, 8))


def test_only_what_is_used_needs_to_travel() -> None:
    norm = AmplitudeNorm((3, 8, 8), band=0.0)
    norm(torch.rand(2, 3, 8, 8))
    before = norm.amplitude.clone()
    assert norm.used.shape == (3, 1, 1)
    norm.forget_unused()
    assert torch.equal(norm.amplitude[:, :1, :1], before[:, :1, :1])
    assert norm.amplitude.count_nonzero() == 3
    full = AmplitudeNorm((3, 8, 8), band=0.2)
    full(torch.rand(2, 3, 8, 8))
    assert full.used is full.amplitude


def test_wrong_shapes_name_both_and_the_setting() -> None:
    norm = AmplitudeNorm((3, 48, 48))
    for images in (torch.rand(2, 3, 40, 48), torch.rand(2, 1, 48, 48), torch.rand(3, 48, 48)):
        with pytest.raises(DataError) as caught:
            norm(images)
        text = str(caught.value)
        assert str(list(images.shape[1:])) in text and "[3, 48, 48]" in text and "task.size" in text
    assert not norm.batches


def test_nan_is_refused_with_its_count_and_leaves_the_average_alone() -> None:
    norm = AmplitudeNorm((1, 6, 6))
    norm(torch.rand(4, 1, 6, 6))
    before = norm.amplitude.clone()
    images = torch.rand(4, 1, 6, 6)
    images[1, 0, 2, 3] = images[1, 0, 2, 4] = images[3, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="3 pixels in 2 of 4 images"):
        norm(images)
    assert torch.equal(norm.amplitude, before)


@pytest.mark.parametrize(
    "wrong", [{"decay": -0.1}, {"decay": 1.1}, {"band": 0.6}, {"band": -0.1}, {"start": "one"}, {"shape": (3,)}]
)
def test_wrong_numbers_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError):
        AmplitudeNorm(**{"shape": (3, 8, 8), **wrong})


@over_all("images, batch, epochs", [(40, 8, 1), (41, 8, 2), (5, 16, 1), (37, 16, 3), (1, 4, 1)])
@pytest.mark.parametrize("start", ["batch", "zero"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 1.0])
def test_how_many_images_an_average_covers(images: int, batch: int, epochs: int, decay: float, start: str) -> None:
    """The expected number of images is 1 / Σ w², where w is the weight of an image in the running average."""
    whole = [list(range(place, min(place + batch, images))) for place in range(0, images, batch)]
    whole = [one for one in whole if len(one) > 1 or images <= batch] * epochs
    shares: list[float] = []
    for number, one in enumerate(whole):
        step = 1.0 if start == "batch" and number == 0 else decay
        shares = [share * (1 - step) for share in shares] + [step / len(one)] * len(one)
    total = sum(shares)
    expected = min(images, total**2 / sum(share**2 for share in shares)) if total else 0
    assert images_averaged(images, batch, epochs, decay, start) == int(expected + 1e-6)
