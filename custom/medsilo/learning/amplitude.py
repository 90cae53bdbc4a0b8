"""HarmoFL's amplitude normalisation: an image keeps its phase spectrum, and gets an average amplitude spectrum."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from medsilo.core.errors import DataError, MedsiloError

# The layer adds this constant to every Fourier coefficient, so that a coefficient of 0 gets the phase 0. The added
# constant is smaller than the rounding error of any coefficient that is not 0.
NO_PHASE = 1e-15
CACHED = 1 << 20  # number of pixels whose spectra fit into a CPU's cache


class AmplitudeNorm(nn.Module):
    """HarmoFL's Ψ (Equations 2 to 4): x ↦ Re F⁻¹(A · exp(j P(x))), where P is the phase of x and A the average
    amplitude.

    In training, each batch updates the average amplitude A and is then normalised with A. In evaluation, and in
    training after A is frozen, the layer does not update A. In evaluation before the first training batch, the layer
    returns images unchanged. The layer passes no gradient to its input, and does not change its input in place.

    Args:
        shape: (C, H, W) or (C, D, H, W). All images must have this shape.
        decay: v of Equation 3: A ← (1 - v) A + v · mean over the batch of |F(x)|. With v = 0, A stays the amplitude of
            the first batch.
        band: The frequencies at which A replaces the image's amplitude. None: all frequencies, as in the paper. 0.0:
            only frequency 0, the mean, as in the released code. 0 < band ≤ 0.5: the low frequencies |f| ≤ floor(min(H,
            W) · band).
        start: "batch": the first batch sets A. "zero": A starts at zero, as in the paper's text.

    >>> import torch
    >>> norm = AmplitudeNorm((3, 16, 16))
    >>> norm(torch.rand(8, 3, 16, 16)).shape
    torch.Size([8, 3, 16, 16])
    >>> norm.amplitude.shape
    torch.Size([3, 16, 9])
    """

    # the average amplitude A, not normalised, in the layout of torch.fft.rfftn, of the shape [C, ..., W // 2 + 1]
    amplitude: Tensor
    batches: Tensor  # number of batches over which the amplitude A is averaged
    frozen: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        decay: float = 0.1,
        band: float | None = None,
        start: Literal["batch", "zero"] = "batch",
    ) -> None:
        super().__init__()
        if len(shape) < 2 or min(shape) < 1:
            raise ValueError(f"shape is {tuple(shape)}: give a shape (C, H, W) or (C, D, H, W)")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}: the decay must be in [0, 1]")
        if band is not None and not 0 <= band <= 0.5:
            raise ValueError(f"band is {band}: give None or a share of the image's size from 0 to 0.5")
        if start not in ("batch", "zero"):
            raise ValueError(f"start is {start!r}: choose 'batch' or 'zero'")
        self.shape, self.decay, self.band, self.start = tuple(shape), decay, band, start
        self.size = self.shape[1:]
        self.axes = tuple(range(-len(self.size), 0))
        self.reach = None if band is None else math.floor(min(self.size) * band)
        self.blocks = _low_frequencies(self.size, self.reach)
        self.register_buffer("amplitude", torch.zeros(*self.shape[:-1], self.size[-1] // 2 + 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        self._wrong: Tensor | None = None  # on a GPU: counts of NaN and of infinite pixels in one epoch

    def _apply(self, *args: Any, **named: Any) -> "AmplitudeNorm":
        """The number of batches and the frozen state stay in the CPU's memory, because reading a GPU's memory means
        waiting for the GPU.
        """
        super()._apply(*args, **named)
        if self.amplitude.device.type == "cuda":
            self.batches, self.frozen = self.batches.cpu(), self.frozen.cpu()
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        learns = self.training and not self.frozen
        if not learns and not self.frozen and not self.batches:
            return images
        # the layer computes at least in single precision: half precision could overflow in the sum over an image's
        # pixels and in the spectrum
        wide = images.to(torch.promote_types(images.dtype, self.amplitude.dtype))
        parts = wide.split(self._together(wide))
        spectra: Iterator[Tensor] = (torch.fft.rfftn(part, dim=self.axes) for part in parts)
        if learns:
            spectra = self._learn(list(spectra), wide)
        if self.reach == 0:
            return self._with_mean(wide).to(images.dtype)
        out = torch.empty_like(wide)
        for part, spectrum in zip(out.split(self._together(wide)), spectra, strict=True):
            part.copy_(self._with_amplitude(spectrum))
        return out.to(images.dtype)

    @torch.no_grad()
    def amplitudes(self, images: Tensor) -> Tensor:
        self._check(images)
        spectra = torch.fft.rfftn(images.to(self.amplitude.dtype), dim=self.axes).abs() / math.prod(self.size)
        return self._used_of(spectra).flatten(1)

    @torch.no_grad()
    def take(self, mean: Tensor) -> None:
        """Set the average amplitude A to a mean over images. Negative amplitudes, which privacy noise may cause, become
        0.
        """
        self.amplitude.zero_()
        self.used.copy_((mean.clamp(min=0) * math.prod(self.size)).view(self.used.shape))
        self.batches.fill_(1)

    @torch.no_grad()
    def freeze(self, amplitude: Tensor | None = None) -> None:
        """Stop all updates of the average amplitude A.

        Args:
            amplitude: The final value of A. None: A keeps its present value.
        """
        if amplitude is not None:
            if amplitude.shape != self.amplitude.shape:
                given, own = list(amplitude.shape), list(self.amplitude.shape)
                raise DataError(f"the amplitude has the shape {given}, but the images need {own}")
            self.amplitude.copy_(amplitude)
        elif not self.batches:
            raise MedsiloError("there is no amplitude to freeze: the layer has processed no batch, and none was set")
        self.frozen.fill_(True)

    @property
    def used(self) -> Tensor:
        """For each channel, the average amplitude A at the frequencies that normalisation uses."""
        return self._used_of(self.amplitude)

    def _used_of(self, amplitudes: Tensor) -> Tensor:
        means: Any = (..., *[slice(1)] * len(self.size))
        return amplitudes[means] if self.reach == 0 else amplitudes

    @torch.no_grad()
    def forget_unused(self) -> None:
        """Set the average amplitude A to zero at all frequencies that normalisation does not use."""
        kept = self.used.clone()
        self.amplitude.zero_()
        self.used.copy_(kept)

    def _together(self, images: Tensor) -> int:
        """Return the number of images to transform at once, such that the images' spectra fit into a CPU's cache."""
        return max(1, len(images) if images.device.type != "cpu" else CACHED // math.prod(self.shape))

    def _with_amplitude(self, spectrum: Tensor) -> Tensor:
        """Apply HarmoFL's Equation 4 to a spectrum F in place; F / |F| replaces exp(j P), because computing angles
        takes more time.
        """
        for block in self.blocks:
            spectrum[block].add_(NO_PHASE).sgn_().mul_(self.amplitude[block])
        return torch.fft.irfftn(spectrum, s=self.size, dim=self.axes)

    def _learn(self, spectra: list[Tensor], images: Tensor) -> Iterator[Tensor]:
        """Update the average amplitude A by HarmoFL's Equation 3, unless the batch contains NaN."""
        batch = sum((spectrum.abs().sum(0) for spectrum in spectra[1:]), spectra[0].abs().sum(0)) / len(images)
        finite = batch.isfinite().all()
        if images.device.type != "cpu":
            self._wrong = _not_numbers(images) + (0 if self._wrong is None else self._wrong)
            batch = torch.where(finite, batch, self.amplitude)
        elif not finite:
            _refuse(_not_numbers(images))
        share = 1.0 if self.start == "batch" and not self.batches else self.decay
        self.amplitude.lerp_(batch.to(self.amplitude.dtype), share)
        self.batches += 1
        return iter(spectra)

    def end_pass(self) -> None:
        """Raise DataError if a batch on the GPU had NaN or infinite pixels since the last call of this method."""
        found, self._wrong = self._wrong, None
        if found is not None and bool(found[0]):
            _refuse(found)

    def _with_mean(self, images: Tensor) -> Tensor:
        """Apply HarmoFL's Equation 4 to frequency 0 only: the mean of each image gets the absolute value A and keeps
        its sign.
        """
        mean = images.mean(self.axes, keepdim=True)
        shared = self.used / math.prod(self.size)
        return images + (torch.where(mean < 0, -shared, shared) - mean)

    def _check(self, images: Tensor) -> None:
        if images.ndim != len(self.shape) + 1 or images.shape[1:] != self.shape:
            raise DataError(
                f"images have the shape {list(images.shape[1:])}, but the amplitude has {list(self.shape)}: "
                f"all sites need the same size and number of channels; set task.size"
            )


def _not_numbers(images: Tensor) -> Tensor:
    wrong = ~images.isfinite().flatten(1)
    return torch.stack([wrong.sum(), wrong.any(1).sum(), torch.full_like(wrong.sum(), len(images))])


def _refuse(values: Tensor) -> NoReturn:
    pixels, images, of = values.tolist()
    raise DataError(
        f"{pixels} pixels in {images} of {of} images of training batches are NaN or infinite; correct the images"
    )


def _low_frequencies(size: Sequence[int], reach: int | None) -> list[tuple]:
    """Return disjoint slices that together cover the frequencies |f| ≤ reach in the layout of torch.fft.rfftn."""
    if reach is None:
        return [(...,)]

    def both_ends(length: int) -> list[slice]:
        return [slice(None)] if 2 * reach + 1 >= length else [slice(reach + 1), slice(length - reach, None)]

    return [(..., *ends, slice(reach + 1)) for ends in product(*map(both_ends, size[:-1]))]


def images_averaged(images: int, batch_size: int, epochs: int, decay: float, start: str) -> int:
    """Return the effective number of images in a site's average amplitude: 1 / Σ w², where w is an image's weight.

    In a running average, late batches weigh more than early batches, so the effective number is smaller than the number
    of images.
    """
    batch_size = min(batch_size, images)
    sizes = [batch_size] * (images // batch_size)
    if images % batch_size > 1:  # training skips the last batch if it has only one image
        sizes.append(images % batch_size)
    seen = sizes * epochs
    shares = [decay * (1 - decay) ** (len(seen) - 1 - place) for place in range(len(seen))]
    if start == "batch":
        shares[0] = (1 - decay) ** (len(seen) - 1)
    total = sum(shares)
    if not total:
        return 0
    squares = sum(share**2 / size for share, size in zip(shares, seen, strict=True))
    return min(images, math.floor(total**2 / squares + 1e-9))
