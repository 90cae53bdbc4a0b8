"""A hospital's own volumes in image files."""

from typing import ClassVar, Literal

from medsilo.tasks.own.volume_folder import VolumeFolder


class NiftiFolder(VolumeFolder):
    """Volumes of NIfTI, MHA, NRRD, or a folder for each DICOM series; masks are files on the same grid."""

    title: ClassVar[str] = "A hospital's own volumes: segmentation or classification, 3-D or slices"

    name: Literal["nifti-folder"] = "nifti-folder"

    def across_patients(self) -> str:
        return super().across_patients()  # an image is scaled by its own intensities alone
