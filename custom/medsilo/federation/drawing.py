"""Pictures of what an input layer does to images, and of what was found in them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.tasks.overlays import colours_of, fullest, outline, pixels_of, write_png

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
            write_png(folder / f"{kind}-{number}.png", pixels_of(image, low, high))


def draw_found(image: Tensor, found: Tensor, right: Tensor, path: Path) -> None:
    """An image [C, (D,) H, W] with the outlines of masks [structures, (D,) H, W]: what is there, and, broken, what was
    found. Of a volume, the slice with the most of it."""
    if image.ndim == 4:
        depth = fullest(right.float() + found * 1e-3)
        image, found, right = image[:, depth], found[:, depth], right[:, depth]
    pixels = pixels_of(image, float(image.min()), float(image.max()))
    scale = max(1, -(-SMALLEST // min(image.shape[1:])))
    pixels = colours_of(pixels).repeat(scale, 0).repeat(scale, 1)
    across = np.add.outer(np.arange(len(pixels)), np.arange(pixels.shape[1])) // DASH % 2 == 0
    for masks, colour, where in ((right, THERE, True), (found, FOUND, across)):
        for mask in masks.cpu().numpy().astype(bool):
            pixels[outline(mask.repeat(scale, 0).repeat(scale, 1)) & where] = colour
    write_png(path, pixels)
