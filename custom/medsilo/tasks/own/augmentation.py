"""Augment training images at random. Each operation changes a whole batch on the batch's device.

The ranges and probabilities of random changes follow MONAI's transforms.

Every case has a seed for its random numbers, so that an augmented case does not depend on other cases in the batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.learning.compute import Case
from medsilo.tasks.own.folder import Augmentation

Random = Sequence[np.random.Generator]  # one random generator for each case

# Largest rotation within a slice in radians (0.26 radians are 15 degrees), and largest relative change of length.
TURN, SCALE = 0.26, 0.1
# by a batch's number of axes, the memory format with which convolutions are fastest
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Largest relative change of intensities, largest shift as a fraction of the image's standard deviation, and largest
# standard deviation of noise.
STRENGTH, SHIFT, NOISE = 0.1, 0.1, 0.05


def augmented(batch: Case, kinds: Sequence[Augmentation], masks: bool, seeds: Sequence[int]) -> Case:
    """Augment a batch in place, and return the batch; the batch's images have the memory format channels last.

    Args:
        batch: The images [B, C, (D,) H, W] and the targets.
        masks: True if targets are masks, which are flipped, rotated and warped like the images.
        seeds: The seed of each case.
    """
    images, targets = batch
    moved = [images, targets] if masks else [images]
    random = [np.random.default_rng(seed) for seed in seeds]
    for kind in kinds:
        if kind == "affine":
            _warp(images, targets if masks else None, random)
        elif kind == "intensity":
            _scale_and_shift(images, random)
        elif kind == "noise":
            _add_noise(images, random)
        elif kind == "rotate90":
            _rotate(moved, random)
        else:
            _flip(moved, -1 - "xyz".index(kind[-1]), random)
    return images.to(memory_format=LAYOUTS[images.ndim]), targets


def _flip(tensors: Sequence[Tensor], axis: int, random: Random) -> None:
    """Flip each case along an axis with probability one half."""
    if chosen := [case for case, own in enumerate(random) if own.random() < 0.5]:
        cases = _there(torch.tensor(chosen), tensors[0].device)
        for tensor in tensors:
            tensor[cases] = tensor[cases].flip(axis)


def _rotate(tensors: Sequence[Tensor], random: Random) -> None:
    """Rotate each case by a random multiple of 90 degrees within the plane of the slices."""
    turns = [own.integers(4) for own in random]
    for number in (1, 2, 3):
        if chosen := [case for case, turn in enumerate(turns) if turn == number]:
            cases = _there(torch.tensor(chosen), tensors[0].device)
            for tensor in tensors:
                tensor[cases] = torch.rot90(tensor[cases], number, (-2, -1))


def _warp(images: Tensor, labels: Tensor | None, random: Random) -> None:
    """With probability one half, rotate each slice of a case around its centre, and scale the case along each axis.

    Image values are interpolated linearly; outside the image, the values at the edges are repeated. Labels are
    interpolated by nearest neighbour.

    A volume is resampled in two steps: first within its slices, then across them.
    """
    axes = images.ndim - 2
    drawn = [(own.random(), own.uniform(-TURN, TURN), own.uniform(1 - SCALE, 1 + SCALE, axes)) for own in random]
    if not (chosen := [case for case, (chance, *_) in enumerate(drawn) if chance < 0.5]):
        return
    turns = torch.tensor([drawn[case][1] for case in chosen])
    scales = torch.tensor(np.array([drawn[case][2] for case in chosen], np.float32))
    height, width = images.shape[-2:]
    y, x = (_centred(places, images.device) for places in (height, width))
    numbers = _there(torch.stack([turns.cos(), turns.sin(), *scales.T]), images.device)[..., None, None]
    cosine, sine, *along, down, across = numbers
    # for each output pixel, its row in the input
    rows = cosine * down * y[:, None] - sine * across * x
    columns = sine * down * y[:, None] + cosine * across * x
    depths = _places(along[0][..., 0] * _centred(images.shape[2], images.device), images.shape[2]) if along else None
    grid = torch.stack([columns * (2 / width), rows * (2 / height)], -1)
    cases = _there(torch.tensor(chosen), images.device)
    images[cases] = _resampled(images[cases], grid, depths)
    if labels is not None:
        nearest = _places(rows, height).round().long() * width + _places(columns, width).round().long()
        labels[cases] = _picked(labels[cases], nearest.flatten(1), depths)


def _there(drawn: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device; a GPU need not wait for the copy."""
    return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn


def _centred(digits: int, device: torch.device) -> Tensor:
    return torch.arange(digits, device=device) - (digits - 1) / 2


def _places(centred: Tensor, digits: int) -> Tensor:
    """Convert distances from the centre of an axis to positions on the axis, clipped to its ends."""
    return (centred + (digits - 1) / 2).clamp(0, digits - 1)


def _resampled(images: Tensor, grid: Tensor, depths: Tensor | None) -> Tensor:
    """Interpolate images [B, C, (D,) H, W] at given positions.

    Args:
        grid: The positions within slices, [B, H, W, 2].
        depths: The positions along the axis across slices, [B, D], or None for flat images.
    """
    slices = images if depths is None else images.flatten(1, 2)
    flat = functional.grid_sample(slices, grid, padding_mode="border", align_corners=False)
    if depths is None:
        return flat
    volumes, cases = flat.view_as(images).transpose(1, 2), torch.arange(len(images), device=images.device)[:, None]
    below = depths.floor().long()
    above = (below + 1).clamp(max=images.shape[2] - 1)
    share = (depths - below)[..., None, None, None]
    return torch.lerp(volumes[cases, below], volumes[cases, above], share).transpose(1, 2)


def _picked(labels: Tensor, nearest: Tensor, depths: Tensor | None) -> Tensor:
    """Return the labels [B, (D,) H, W] that are nearest to given positions.

    Args:
        nearest: The flat indices of positions within slices, [B, H * W].
        depths: The positions along the axis across slices, [B, D], or None for flat images.
    """
    if depths is None:
        return labels.flatten(1).gather(1, nearest).view_as(labels)
    cases = torch.arange(len(labels), device=labels.device)[:, None]
    slices = labels[cases, depths.round().long()].flatten(2)
    return slices.gather(2, nearest[:, None].expand_as(slices)).view_as(labels)


def _scale_and_shift(images: Tensor, random: Random) -> None:
    """Scale the values of each image by a random factor, then shift the values by a random fraction of their standard
    deviation.
    """
    scales = [1 + own.uniform(-STRENGTH, STRENGTH) for own in random]
    shifts = [own.uniform(-SHIFT, SHIFT) for own in random]
    factors, parts = _there(torch.tensor([scales, shifts], dtype=images.dtype), images.device)
    each = (-1, *[1] * (images.ndim - 1))
    # one image at a time, because summing a whole batch could round differently
    deviations = torch.stack([image.std(correction=0) for image in images])
    images.mul_(factors.view(each)).add_((factors * parts * deviations).view(each))


def _add_noise(images: Tensor, random: Random) -> None:
    for image, own in zip(images, random, strict=True):
        chance, deviation, seed = own.random(), own.uniform(0, NOISE), int(own.integers(2**63))
        if chance < 0.5:
            generator = torch.Generator(image.device).manual_seed(seed)
            image.add_(torch.randn(image.shape, generator=generator, device=image.device), alpha=deviation)
