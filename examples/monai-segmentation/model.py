"""MONAI's U-Net, and images of round structures, whose brightness differs from site to site."""

import numpy as np
import torch
from monai.data import create_test_image_2d
from monai.networks.nets import UNet

SIZE = 64


def unet() -> UNet:
    return UNet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2), norm="BATCH")


def images_of(site: str, cases: int = 40) -> list[dict[str, torch.Tensor]]:
    """Return a site's cases as MONAI expects them: for each case, an image [1, H, W] and a mask [1, H, W]."""
    number = int(site.rpartition("-")[2])
    random = np.random.RandomState(number)
    made = []
    for _ in range(cases):
        image, mask = create_test_image_2d(SIZE, SIZE, num_objs=3, rad_max=12, noise_max=0.3, random_state=random)
        image = (image + 0.3 * number * random.rand()) * (0.5 + 0.4 * number)
        made.append({"image": torch.tensor(image[None]).float(), "label": torch.tensor(mask[None] > 0).long()})
    return made
