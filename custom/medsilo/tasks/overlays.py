"""Write PNG files of images with outlines of structures."""

from io import BytesIO
from pathlib import Path

import numpy as np
import scipy  # scipy imports its submodules on first use
import torch
from PIL import Image
from torch import Tensor, nn

from medsilo.core.files import write_bytes

SMALLEST = 192  # smaller pictures are enlarged to this many pixels along the shorter edge, so that outlines look thin
# Colour of true outlines (blue) and of predicted outlines (orange), from Okabe and Ito's palette.
THERE, FOUND = (0, 114, 178), (230, 159, 0)
DASH = 5


def pixels_of(image: Tensor, low: float, high: float) -> np.ndarray:
    """Convert an image [C, (D,) H, W] to uint8 pixels: three channels become RGB; otherwise, the first channel becomes
    grey.

    Of a volume, only the middle slice is converted. The value `low` becomes 0, the darkest grey, and `high` becomes
    255.
    """
    if image.ndim == 4:
        image = image[:, image.shape[1] // 2]
    values = ((image.float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte().numpy()
    return values.transpose(1, 2, 0) if len(values) == 3 else values[0]


def colours_of(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)


def outline(mask: np.ndarray) -> np.ndarray:
    """Return the pixels of a mask within two pixels of its boundary."""
    return mask & ~scipy.ndimage.binary_erosion(mask, iterations=2, border_value=1)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write grey pixels [H, W] or RGB pixels [H, W, 3] as a PNG file; equal pixels give identical files."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=9)
    write_bytes(path, content.getvalue())


@torch.no_grad()
def draw_images(layer: nn.Module, images: Tensor, folder: Path) -> None:
    """Write the inputs and outputs of a layer as PNG files, before-1.png, after-1.png, before-2.png and so on.

    All these files share one grey scale, so that they can be compared.

    Args:
        images: The inputs, [B, C, (D,) H, W].
    """
    if images.ndim not in (4, 5):
        return  # signals can't be drawn
    after = layer.eval()(images)
    low, high = float(images.min()), float(images.max())
    for number, pair in enumerate(zip(images, after, strict=True), start=1):
        for kind, image in zip(("before", "after"), pair, strict=True):
            write_png(folder / f"{kind}-{number}.png", pixels_of(image, low, high))


def draw_found(image: Tensor, predicted: Tensor, right: Tensor, path: Path) -> None:
    """Draw the outlines of true and predicted masks on an image, and write the image as a PNG file.

    Outlines of true masks are solid, and outlines of predicted masks are dashed. Of a volume, only the slice with the
    largest structures is drawn.

    Args:
        image: The image, [C, (D,) H, W].
        predicted: The predicted masks, [structures, (D,) H, W].
        right: The true masks, [structures, (D,) H, W].
    """
    if image.ndim == 4:
        depth = int((right.float() + predicted * 1e-3).sum((0, 2, 3)).argmax())
        image, predicted, right = image[:, depth], predicted[:, depth], right[:, depth]
    pixels = pixels_of(image, float(image.min()), float(image.max()))
    scale = max(1, -(-SMALLEST // min(image.shape[1:])))
    pixels = colours_of(pixels).repeat(scale, 0).repeat(scale, 1)
    across = np.add.outer(np.arange(len(pixels)), np.arange(pixels.shape[1])) // DASH % 2 == 0
    for masks, colour, where in ((right, THERE, True), (predicted, FOUND, across)):
        for mask in masks.cpu().numpy().astype(bool):
            pixels[outline(mask.repeat(scale, 0).repeat(scale, 1)) & where] = colour
    write_png(path, pixels)
