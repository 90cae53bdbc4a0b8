"""Pictures of what an input layer does: images before and after it, and the amplitude that all sites share."""

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import binary_erosion
from torch import Tensor, nn

from medsilo.core.files import write_bytes
from medsilo.learning.amplitude import AmplitudeNorm

SMALLEST = 192  # pixels of an overlay's shorter side, so that its lines stay thin beside the image
THERE, FOUND = (0, 114, 178), (230, 159, 0)  # Okabe and Ito's blue and orange
DASH = 5


@torch.no_grad()
def draw_images(layer: nn.Module, images: Tensor, folder: Path) -> None:
    """before-1.png, after-1.png, ... of images [B, C, (D,) H, W]; both in the same window of grey values."""
    if images.ndim not in (4, 5):
        return  # signals have no picture
    after = layer.eval()(images)
    low, high = float(images.min()), float(images.max())
    for number, pair in enumerate(zip(images, after, strict=True), start=1):
        for kind, image in zip(("before", "after"), pair, strict=True):
            _write_png(folder / f"{kind}-{number}.png", _pixels(image, low, high))


def draw_found(image: Tensor, found: Tensor, right: Tensor, path: Path) -> None:
    """An image [C, (D,) H, W] with the outlines of masks [structures, (D,) H, W]: what is there, and, broken, what was
    found. Of a volume, the slice with the most of it."""
    if image.ndim == 4:
        depth = int((right.sum((0, 2, 3)) + found.sum((0, 2, 3)) * 1e-3).argmax())
        image, found, right = image[:, depth], found[:, depth], right[:, depth]
    scale = max(1, -(-SMALLEST // min(image.shape[1:])))
    pixels = _pixels(image, float(image.min()), float(image.max()))
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    pixels = pixels.repeat(scale, 0).repeat(scale, 1)
    across = np.add.outer(np.arange(len(pixels)), np.arange(pixels.shape[1])) // DASH % 2 == 0
    for masks, colour, where in ((right, THERE, True), (found, FOUND, across)):
        for mask in masks.cpu().numpy().astype(bool):
            pixels[_outline(mask.repeat(scale, 0).repeat(scale, 1)) & where] = colour
    _write_png(path, pixels)


def _outline(mask: np.ndarray) -> np.ndarray:
    """Return the mask's pixels at most two steps from what is outside of it."""
    return mask & ~binary_erosion(mask, iterations=2, border_value=1)


def draw_amplitude(layer: nn.Module | None, path: Path) -> None:
    """The amplitude's mean over channels on a logarithmic scale, the frequency zero in the middle."""
    if not isinstance(layer, AmplitudeNorm) or layer.amplitude.ndim < 3:
        return
    amplitude = layer.amplitude.detach().cpu().mean(0)
    if amplitude.ndim == 3:
        amplitude = amplitude[0]  # the plane of the frequency zero along the depth
    width = layer.size[-1]
    turned = amplitude.roll(-1, 0).flip(0)  # |F(-f)| = |F(f)|
    whole = torch.cat([amplitude, turned[:, 1 : (width + 1) // 2].flip(1)], 1)
    scale = torch.fft.fftshift(whole.log1p())
    _write_png(path, _pixels(scale[None], 0.0, float(scale.max())))


def _pixels(image: Tensor, low: float, high: float) -> np.ndarray:
    """[C, (D,) H, W] as uint8: RGB of three channels, else the first in grey; the middle slice of a volume."""
    if image.ndim == 4:
        image = image[:, image.shape[1] // 2]
    values = ((image.float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte().numpy()
    return values.transpose(1, 2, 0) if len(values) == 3 else values[0]


def _write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 pixels, [H, W] grey or [H, W, 3] RGB; the same pixels give the same bytes."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=9)
    write_bytes(path, content.getvalue())
