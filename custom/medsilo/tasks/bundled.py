"""A task's reading of images and use of networks, in the words of a MONAI Bundle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IN_MONAI = "scripts.in_monai"  # where a bundle holds what MONAI has not got
Words = dict[str, Any]  # a class under "_target_", and its arguments


@dataclass(frozen=True)
class InMonai:
    """A task in a bundle's words. `transforms` follow reading, can be inverted and have the image under "image".

    The inferer gets how many cases go through the network together from the bundle, under "batch" or "sw_batch_size".
    """

    transforms: list[Words]
    inferer: Words
    channels: Sequence[str] = field(default=("image",), kw_only=True)  # that lie in files of their own
    flat: bool = field(default=False, kw_only=True)  # whether images are flat, and no volumes
    classes: Sequence[str] = field(default=(), kw_only=True)  # names of the network's outputs, where they are known
    classifies: bool = field(default=False, kw_only=True)  # whether images get one class, and no mask
    converter: str = field(default="opaque", kw_only=True)  # what a flat picture passes first, in IN_MONAI
    files: Sequence[str] = field(default=(), kw_only=True)  # of tasks/own that the bundle needs, without suffix
