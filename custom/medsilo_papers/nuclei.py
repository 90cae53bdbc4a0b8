"""Segment nuclei in H&E images of MoNuSAC 2020, MoNuSeg 2018 and TNBC, in their published layout or as tiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal
from xml.etree import ElementTree

import numpy as np
from pydantic import Field
from torch import Tensor

from medsilo.extend import DataError, Segmentation, SiteData
from medsilo_papers.public_files import (
    PictureTask,
    Split,
    files_in,
    monai_loss,
    read_labels,
    read_picture,
    site_folder,
)

IGNORED = "Ambiguous"
# number of characters at the start of a TCGA file name that identify the patient, for example TCGA-G9-6356
BARCODE = 12
# Fractions of training, validation and test data, and the seed with which patients are split. With the seed
# TILES_SPLIT, each of the three data sets is divided nearly in the fractions SHARES.
SHARES, TILES_SPLIT = (0.55, 0.2, 0.25), 9
PUBLISHED_SPLIT = 179  # seed for splitting patients if the files have the published layouts of the data sets
PAPER_SHARES = (0.64, 0.16, 0.2)
ENDINGS = (".tif", ".png", ".svs")
LAYOUT = (
    "tiles (images/*.png with masks/*.png), MoNuSAC (<patient>/<image>.tif or .svs with <image>.xml), MoNuSeg (Tissue "
    "Images/*.tif with Annotations/*.xml) or TNBC (Slide_01/*.png with GT_01/*.png)"
)
# The hospitals in MoNuSAC 2020 (TCGA's tissue source sites); the key is the organ whose images these hospitals
# contributed.
ORGANS = {
    "breast": "A2 B6 BH D8 E2 E9 EW S3",
    "kidney": "2Z 5P B9 DW EV F9 G7 IZ MH P4 SX UZ",
    "lung": "49 50 55 69 73 78 86 L4 MP",
    "prostate": "EJ G9 J4 KK V1 VP X4 YL",
}


class Nuclei(PictureTask):
    """RGB images [3, size, size] with values from 0 to 1, and masks of the pixels that belong to nuclei.

    A site reads the folder that has the site's name; if no folder has this name, the site reads the only folder. A site
    with the name <set>-breast, -kidney, -lung or -prostate reads only images of this organ, from the hospitals in
    MoNuSAC that contributed it. All outlines or instances of an image become one mask, and regions that MoNuSAC calls
    ambiguous become background. Tiles are stored as `<set>/images/<name>.png`, and their masks (0 and 255) as
    `<set>/masks/<name>.png`.

    All images of a patient are used for the same purpose: training, validation or test. If the patient is unknown, all
    images of a slide, and all tiles of a source image, are used for the same purpose. All sites with the same layout of
    files use a patient's images for the same purpose, whatever the plan's seed is.
    """

    title: ClassVar[str] = "Nuclei in H&E tiles of three public sets"

    name: Literal["nuclei"] = "nuclei"
    size: int = Field(default=256, ge=16, le=2048, multiple_of=16, description="height and width of a case in pixels")
    split: Split = Field(
        default="patient",
        description="`paper` uses the published test folders, and a fifth of the other images for validation; without "
        "test folders, images are split at random. MoNuSAC's published training and test sets have two "
        "patients in common",
    )

    def default_network(self) -> str:
        return "unet"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        chosen, organ = _set_and_organ(site)
        sets = [_set_and_organ(one)[0] for one in sites]
        place = site_folder(self.name, chosen, sets, folder, lambda path: bool(images_in(path)), LAYOUT)
        images = images_in(place)
        if organ:
            images = [image for image in images if image.name[5:7] in ORGANS[organ].split()]
        if self.split == "patient":
            parts = [part_of(image) for image in images]
        else:
            parts = _parts_in_paper(images, place, self.seed_for(seed, site, "split"))
        if set(parts) != {0, 1, 2}:
            raise DataError(f"the site's {len(images)} images leave a part empty; expected whole sets: {LAYOUT}")
        return self.read_once(images, list(map(patient_of, images)), np.array(parts))

    def case_of(self, image: Path) -> tuple[Tensor, Tensor]:
        colours = read_picture(image)
        mask = nuclei_in(image, colours.shape[1:])
        return self.inputs_of(colours)[0], self.labels_of(mask)

    @property
    def goal(self) -> Segmentation:
        return Segmentation(2, soft_dice)


def _is_tile(image: Path) -> bool:
    return image.parent.name == "images"


def patient_of(image: Path) -> str:
    """Return the name of the group of images that are all used for the same purpose: a patient, a slide or a source
    image.
    """
    if image.name.startswith("TCGA-"):
        return image.name[:BARCODE]
    return image.stem.rsplit("_", 1)[0] if _is_tile(image) else image.parent.name


def part_of(image: Path) -> int:
    """Return the purpose of a patient's images: 0 for training, 1 for validation, 2 for test. The purpose depends only
    on the patient's name, so that all sites agree without communication.
    """
    number = TILES_SPLIT if _is_tile(image) else PUBLISHED_SPLIT
    place = PictureTask.seed_for(number, "nuclei", patient_of(image)) / 2**63
    return int(place >= SHARES[0]) + int(place >= SHARES[0] + SHARES[1])


def _set_and_organ(site: str) -> tuple[str, str | None]:
    """Split a site's name into the names of the data set and of the organ: "monusac2020-lung" gives "monusac2020" and
    "lung".
    """
    chosen, _, organ = site.rpartition("-")
    return (chosen, organ) if organ in ORGANS else (site, None)


def images_in(place: Path) -> list[Path]:
    """Return all tiles; if there are no tiles, return all images that have outlines or a mask. Outlines are in an XML
    file in the folder of the image or in ../Annotations, and masks are in a GT folder.
    """
    if (place / "masks").is_dir() and (tiles := files_in(place, "images/*.png")):
        return tiles
    outlined = []
    for truth in files_in(place, "**/*.xml"):
        folders = [truth.parent, truth.parent.parent / "Tissue Images"]
        paths = [folder / f"{truth.stem}{ending}" for folder in folders for ending in ENDINGS]
        outlined += [path for path in paths if path.is_file()][:1]
    slides = [path for path in files_in(place, "**/Slide_*/*.png") if _mask_of(path)]
    return outlined + slides


def nuclei_in(image: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask [H, W] of the nuclei in an image [3, *shape]: 1 inside nuclei, 0 elsewhere."""
    masked = _mask_of(image)
    if masked is not None:
        mask = (read_labels(masked) > 0).astype(np.uint8)
        if mask.shape != shape:
            raise DataError(
                f"an image and its mask have {list(shape)} and {list(mask.shape)} pixels", private=str(image)
            )
        return mask
    beside = image.with_suffix(".xml")
    return draw_outlines(beside if beside.is_file() else image.parents[1] / "Annotations" / beside.name, shape)


class _WithoutDoctype(ElementTree.TreeBuilder):
    """Rejects XML with a document type, because a document type could declare entities that exhaust the memory."""

    def doctype(self, *_: object) -> None:
        raise ValueError("a document type (DTD), which medsilo does not read")


def read_outlines(path: Path) -> list[list[tuple[float, float]]]:
    """Return the outlines (x, y) of all nuclei in an XML file of Aperio's ImageScope."""
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_WithoutDoctype()))
        annotations = list(root.iter("Annotation"))
        if not annotations or any(one.find("Vertex") is not None for one in annotations):
            raise ValueError("an Annotation is missing, or a Vertex lies outside of a Region")
        return [
            [(float(vertex.attrib["X"]), float(vertex.attrib["Y"])) for vertex in region.iter("Vertex")]
            for annotation in annotations
            if all(own.get("Name") != IGNORED for own in annotation.iter("Attribute"))
            for region in annotation.iter("Region")
        ]
    except (OSError, ElementTree.ParseError, ValueError, KeyError) as error:
        message = "an annotation is no XML with Annotation, Region and Vertex (X, Y); see this site's log for its name"
        raise DataError(message, f"{path}: {error}") from error


def draw_outlines(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask [H, W] of the nuclei in an XML file: 1 inside and on each outline, 0 elsewhere."""
    from PIL import Image, ImageDraw

    mask = Image.new("L", (shape[1], shape[0]))
    pen = ImageDraw.Draw(mask)
    for outline in read_outlines(path):
        if len(outline) > 2:
            pen.polygon(outline, fill=1, outline=1)
    return np.array(mask)


def _parts_in_paper(images: list[Path], folder: Path, seed: int) -> list[int]:
    """Split images as in the HarmoFL paper. Images in folders with "test" in their name are test data, and a fifth of
    all other images are validation data. If no folder has "test" in its name, images are split at random.
    """
    tests = np.array([any("test" in name.lower() for name in image.relative_to(folder).parts) for image in images])
    if not tests.any():
        return SiteData.parts_by_draw([str(image) for image in images], PAPER_SHARES, seed).tolist()
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~tests))
    parts = np.where(tests, 2, 0)
    parts[rest[: round(0.2 * len(rest))]] = 1
    return parts.tolist()


def _mask_of(image: Path) -> Path | None:
    if _is_tile(image):
        return image.parents[1] / "masks" / image.name
    slide = image.parent.name
    mask = image.parents[1] / slide.replace("Slide_", "GT_") / image.name
    return mask if slide.startswith("Slide_") and mask.is_file() else None


def soft_dice(output: Tensor, target: Tensor) -> Tensor:
    return monai_loss("DiceLoss", to_onehot_y=True, softmax=True, batch=True)(output, target[:, None])
