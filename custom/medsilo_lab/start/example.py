"""Write the data of three synthetic hospitals as folders of NIfTI files, for a first try of 'medsilo init'."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medsilo.core.errors import MedsiloError
from medsilo.core.files import make_folder, write_text
from medsilo.tasks.synthetic.hospitals import numbers_for
from medsilo.tasks.synthetic.prostate import SITES, SyntheticProstate

PATIENTS = {"hospital-a": 16, "hospital-b": 20, "hospital-c": 18}
GREYS, MIDDLE = 200.0, 600.0  # the synthetic values 0 and 1 become the grey values MIDDLE and MIDDLE + GREYS
ABOUT = """Drawn volumes of three hospitals that do not exist, written by 'medsilo example': no patients.
images/: a bright and a dark ellipsoid before stripes, under noise; labels/: 1 in the bright one, which is to be found.
"""


def write_example(folder: Path) -> int:
    """Write the images and masks of the hospitals as NIfTI files, and return the number of all patients."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MedsiloError(f"{folder} exists and is not empty; choose another folder for the example")
    task = SyntheticProstate(similarity="high")
    for position, (site, count) in enumerate(PATIENTS.items()):
        scanner, random = SITES[position], numbers_for(0, "example", position)
        images, masks = task.draw(count, scanner, True, random)
        for kind in ("images", "labels"):
            make_folder(folder / site / kind)
        for patient, (image, mask) in enumerate(zip(images, masks, strict=True), 1):
            values = np.rint(GREYS * image + MIDDLE).astype(np.int16)
            for kind, own in (("images", values), ("labels", mask.astype(np.uint8))):
                write_volume(folder / site / kind / f"patient-{patient:02}.nii.gz", own, scanner.spacing)
    write_text(folder / "README.txt", ABOUT)
    return sum(PATIENTS.values())


def write_volume(path: Path, values: np.ndarray, spacing: Sequence[float]) -> None:
    """Write a volume [D, H, W] as NIfTI in LPS orientation, with the spacing in the order x, y, z."""
    import nibabel

    x, y, z = spacing
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0), np.diag([-x, -y, z, 1.0])), path)
