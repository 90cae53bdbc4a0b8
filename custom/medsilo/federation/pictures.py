"""Pictures of what an input layer does: images before and after it, and the amplitude that all sites share."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.files import write_bytes
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.png import png

FOLDER = "pictures"


@torch.no_grad()
def draw_images(layer: nn.Module, images: Tensor, folder: Path) -> None:
    """before-1.png, after-1.png, ... of images [B, C, (D,) H, W]; both in the same window of grey values."""
    if images.ndim not in (4, 5):
        return  # signals have no picture
    after = layer.eval()(images)
    low, high = float(images.min()), float(images.max())
    for number, pair in enumerate(zip(images, after, strict=True), start=1):
        for kind, image in zip(("before", "after"), pair, strict=True):
            write_bytes(folder / f"{kind}-{number}.png", png(_pixels(image, low, high)))


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
    write_bytes(path, png(_pixels(scale[None], 0.0, float(scale.max()))))


def _pixels(image: Tensor, low: float, high: float) -> np.ndarray:
    """[C, (D,) H, W] as uint8: RGB of three channels, else the first in grey; the middle slice of a volume."""
    if image.ndim == 4:
        image = image[:, image.shape[1] // 2]
    values = ((image.float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte().numpy()
    return values.transpose(1, 2, 0) if len(values) == 3 else values[0]
