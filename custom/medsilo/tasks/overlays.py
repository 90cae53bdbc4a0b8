"""Images as pixels, with the outlines of structures, as PNG files."""

from io import BytesIO
from pathlib import Path

import numpy as np
import scipy  # which loads its parts when they are used
import torch
from PIL import Image
from torch import Tensor, nn

from medsilo.core.files import write_bytes

SMALLEST = 192  # pixels of an overlay's shorter side, so that its lines stay thin beside the image
THERE, FOUND = (0, 114, 178), (230, 159, 0)  # Okabe and Ito's blue and orange
DASH = 5


def pixels_of(image: Tensor, low: float, high: float) -> np.ndarray:
    """Return [C, (D,) H, W] as uint8: RGB of three channels, else the first in grey; the middle slice of a volume."""
    if image.ndim == 4:
        image = image[:, image.shape[1] // 2]
    values = ((image.float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte().numpy()
    return values.transpose(1, 2, 0) if len(values) == 3 else values[0]


def colours_of(pixels: np.ndarray) -> np.ndarray:
    """Return grey pixels [H, W] as RGB, [H, W, 3]."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)


def outline(mask: np.ndarray) -> np.ndarray:
    """Return the mask's pixels at most two steps from what is outside of it."""
    return mask & ~scipy.ndimage.binary_erosion(mask, iterations=2, border_value=1)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 pixels, [H, W] grey or [H, W, 3] RGB; the same pixels give the same bytes."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=9)
    write_bytes(path, content.getvalue())


@torch.no_grad()
def draw_images(layer: nn.Module, images: Tensor, folder: Path) -> None:
    """before-1.png, after-1.png, ... of images [B, C, (D,) H, W]; both in the same window of grey values."""
    if images.ndim not in (4, 5):
        return  # signals have no picture
    after = layer.eval()(images)
    low, high = float(images.min()), float(images.max())
    for number, pair in enumerate(zip(images, after, strict=True), start=1):
        for kind, image in zip(("before", "after"), pair, strict=True):
            write_png(folder / f"{kind}-{number}.png", pixels_of(image, low, high))


def draw_found(image: Tensor, found: Tensor, right: Tensor, path: Path) -> None:
    """An image [C, (D,) H, W] with the outlines of masks [structures, (D,) H, W]: what is there, and, broken, what was
    found. Of a volume, the slice with the most of it."""
    if image.ndim == 4:
        depth = int((right.float() + found * 1e-3).sum((0, 2, 3)).argmax())
        image, found, right = image[:, depth], found[:, depth], right[:, depth]
    pixels = pixels_of(image, float(image.min()), float(image.max()))
    scale = max(1, -(-SMALLEST // min(image.shape[1:])))
    pixels = colours_of(pixels).repeat(scale, 0).repeat(scale, 1)
    across = np.add.outer(np.arange(len(pixels)), np.arange(pixels.shape[1])) // DASH % 2 == 0
    for masks, colour, where in ((right, THERE, True), (found, FOUND, across)):
        for mask in masks.cpu().numpy().astype(bool):
            pixels[outline(mask.repeat(scale, 0).repeat(scale, 1)) & where] = colour
    write_png(path, pixels)
