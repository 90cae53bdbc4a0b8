"""Change the appearance of each image before training; hospitals exchange nothing for this change.

If federated training scores higher on the changed images, the gain does not come from a method that shares the images'
appearance.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from medsilo.tasks.own.image_folder import ImageFolder
from medsilo.tasks.synthetic import histology
from medsilo_papers.public_files import PictureTask

PLAIN, OWN, DEVELOPED = PictureTask.inputs_of, ImageFolder.inputs_of, histology.develop
GLASS = 240  # intensity of light through an empty slide on a scale of 0 to 255, after Macenko et al.


def centred(picture: Tensor) -> Tensor:
    """Return an image [1, C, H, W] after subtracting the mean of each channel."""
    return picture - picture.mean((2, 3), keepdim=True)


def standardised(picture: Tensor) -> Tensor:
    """Return an image whose channels have mean 0 and deviation 1, as `task.intensity.kind: z-score` does."""
    return centred(picture) / picture.std((2, 3), correction=0, keepdim=True).clamp(min=1e-6)


def matched(picture: Tensor) -> Tensor:
    """Return an image whose channels all have a flat histogram; equal values stay equal."""
    flat = picture.reshape(picture.shape[1], -1)
    ranks = [torch.searchsorted(channel.sort().values, channel.contiguous(), right=True) for channel in flat]
    return (torch.stack(ranks) / flat.shape[1]).reshape(picture.shape).float()


def stained(picture: Tensor) -> Tensor:
    """Return an image with the reference stains of Macenko et al., computed by MONAI; an image without tissue stays
    unchanged.
    """
    from monai.apps.pathology.transforms.stain.array import NormalizeHEStains

    pixels = (picture[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    try:
        normal = NormalizeHEStains(tli=GLASS)(np.ascontiguousarray(pixels))
    except (ValueError, np.linalg.LinAlgError):
        return picture
    return torch.from_numpy(np.ascontiguousarray(normal)).permute(2, 0, 1)[None].float() / 255


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": centred,
    "standardised": standardised,
    "histograms matched": matched,
    "stains normalised": stained,
}


def look_of(title: str) -> str:
    """Return the appearance that a row's title names at its end, for example "centred" for "FedAvg, centred", or an
    empty text.
    """
    last = title.rpartition(", ")[2]
    return last if last in LOOKS else ""


@contextmanager
def looking(title: str) -> Iterator[None]:
    look = LOOKS.get(look_of(title))
    if look is None:
        yield
        return
    generated = patch.object(histology, "develop", lambda *drawn: look(torch.from_numpy(DEVELOPED(*drawn))).numpy())
    read = patch.object(PictureTask, "inputs_of", lambda task, values: look(PLAIN(task, values)))
    own = patch.object(ImageFolder, "inputs_of", lambda task, scan: look(OWN(task, scan)))
    with generated, read, own:
        yield
