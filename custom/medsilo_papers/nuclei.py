"""Nuclei in H&E images: MoNuSAC 2020, MoNuSeg 2018 and TNBC, as they are published or cut into tiles beforehand."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal
from xml.etree import ElementTree

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import Cases, DataError, Network, Segmentation, SiteData, network, scans, seeds, splits, volumes
from medsilo_papers.public_files import (
    PictureTask,
    files_in,
    in_parts,
    monai_loss,
    read_labels,
    read_picture,
    rows_of,
    site_folder,
)

INDEX = "index.csv"
IGNORED = "Ambiguous"  # a class of MoNuSAC's test set
BARCODE = 12  # letters of a TCGA name that are the patient's: TCGA-G9-6356
# Shares of train, validation and test. The number was chosen because all three sets then come near to these shares.
SHARES, SPLIT = (0.55, 0.2, 0.25), 9
PUBLISHED_SPLIT = 179  # the same for the six sites of the published sets
PAPER_SHARES = (0.64, 0.16, 0.2)
ENDINGS = (".tif", ".png", ".svs")
LAYOUT = (
    f"{INDEX} with tiles, or MoNuSAC (<patient>/<image>.tif or .svs with <image>.xml), MoNuSeg (Tissue Images/*.tif "
    "with Annotations/*.xml) or TNBC (Slide_01/*.png with GT_01/*.png)"
)
# The hospitals of MoNuSAC 2020 (TCGA's tissue source sites) by organ; no hospital has two.
ORGANS = {
    "breast": "A2 B6 BH D8 E2 E9 EW S3",
    "kidney": "2Z 5P B9 DW EV F9 G7 IZ MH P4 SX UZ",
    "lung": "49 50 55 69 73 78 86 L4 MP",
    "prostate": "EJ G9 J4 KK V1 VP X4 YL",
}


class Nuclei(PictureTask):
    """RGB images in 0 to 1, [3, size, size], and which pixels are nuclei.

    Published sets: a site takes the folder of its name, or the only one; a site named <set>-breast, -kidney, -lung or
    -prostate that organ's hospitals of MoNuSAC. Outlines and instances become one mask; what MoNuSAC calls ambiguous is
    background. Tiles: `index.csv` (columns set and name) with `<set>/images/<name>.png` and `<set>/masks/<name>.png`
    (0 and 255); a folder with one set belongs to whatever site has it, of several a site takes the set of its name.

    Patients, where the name tells them (TCGA, TNBC's slides), else source images, go whole into one part, the same
    patient into the same part at every site that reads the same layout; that split does not depend on the seed.
    """

    title: ClassVar[str] = "Nuclei in H&E tiles of three public sets"

    name: Literal["nuclei"] = "nuclei"
    size: int = Field(default=256, ge=16, le=2048, multiple_of=16, description="height and width of a case in pixels")
    fit: Literal["resize", "cut"] = Field(
        default="resize", description="how published images come to that size: squeezed as in HarmoFL's paper, or cut"
    )
    split: splits.Split = Field(
        default="patient",
        description="paper: the published test folders, and a fifth of the other images for validation; MoNuSAC's "
        "published test set has two patients of its training set. Where there is no test folder: images at random",
    )

    def default_network(self) -> Network:
        return network("unet")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        if folder is None or not (folder / INDEX).is_file():
            return self._load_published(site, sites, seed, folder)
        if self.split == "paper":
            raise DataError(f"task.split: paper needs the published sets; a folder with {INDEX} is split by patient")
        chosen, names = tiles_of(site, folder)
        parts = np.array([part_of(name) for name in names])
        return in_parts(parts, lambda own: self._read(folder / chosen, names[own]))

    def _load_published(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        chosen, organ = _set_and_organ(site)
        sets = [_set_and_organ(one)[0] for one in sites]
        place = site_folder(self.name, chosen, sets, folder, lambda path: bool(published_in(path)), LAYOUT)
        images = published_in(place)
        if organ:
            images = [image for image in images if image.name[5:7] in ORGANS[organ].split()]
        if self.split == "patient":
            parts = [_part(PUBLISHED_SPLIT, _published_patient(image)) for image in images]
        else:
            parts = _parts_in_paper(images, place, splits.split_seed(seed, site))
        if set(parts) != {0, 1, 2}:
            raise DataError(f"the site's {len(images)} images leave a part empty; expected whole sets: {LAYOUT}")
        return in_parts(np.array(parts), lambda own: self._published([images[place] for place in own]))

    def _published(self, images: list[Path]) -> Cases:
        inputs, targets, patients = [], [], []
        for image in images:
            colours = read_picture(image)
            for tile, mask in self._tiles(colours, nuclei_in(image, colours.shape[1:])):
                inputs.append(self.inputs_of(tile)[0])
                targets.append(volumes.resized_to_majority(mask, (self.size, self.size)))
                patients.append(_published_patient(image))
        return Cases(torch.stack(inputs), torch.stack(targets), patients)

    def _tiles(self, image: np.ndarray, mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """The image as a whole, or in tiles that cover it and overlap where they must; borders are repeated."""
        if self.fit == "resize":
            return [(image, mask)]
        beyond = [(0, max(0, self.size - length)) for length in mask.shape]
        image, mask = np.pad(image, [(0, 0), *beyond], mode="edge"), np.pad(mask, beyond)
        starts = [
            np.linspace(0, length - self.size, -(-length // self.size)).astype(int).tolist() for length in mask.shape
        ]
        windows = [(slice(y, y + self.size), slice(x, x + self.size)) for y in starts[0] for x in starts[1]]
        return [(image[:, *window], mask[window]) for window in windows]

    @property
    def goal(self) -> Segmentation:
        return Segmentation(2, soft_dice)

    def _read(self, folder: Path, names: np.ndarray) -> Cases:
        size = (self.size, self.size)
        images = torch.empty(len(names), 3, *size)
        masks = torch.empty(len(names), *size, dtype=torch.int64)
        for place, name in enumerate(names):
            image, mask = read_tile(folder, str(name))
            try:
                images[place], masks[place] = self.inputs_of(image)[0], volumes.resized_to_majority(mask, size)
            except DataError as error:
                raise DataError(str(error), private=str(name)) from error
        return Cases(images, masks, [patient_of(str(name)) for name in names])


def tiles_of(site: str, folder: Path) -> tuple[str, np.ndarray]:
    """The site's set and the names of its tiles, sorted."""
    rows = [(row["set"], row["name"]) for row in rows_of(folder / INDEX, ("set", "name"))]
    if wrong := [text for row in rows for text in row if Path(text).name != text]:
        raise DataError(f"{INDEX} names a set or tile that is no plain name; write names without folders", wrong[0])
    sets = sorted({chosen for chosen, _ in rows})
    chosen = sets[0] if len(sets) == 1 else site
    if chosen not in sets:
        listed = ", ".join(sets) or "none"
        raise DataError(f"no set of the site's data has its name; name the site after one of them: {listed}")
    return chosen, np.array(sorted(name for one, name in rows if one == chosen))


def read_tile(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """One tile [channels, H, W] as stored, and its mask [H, W], 0 or 1."""
    paths = [folder / kind / f"{name}.png" for kind in ("images", "masks")]
    try:
        image, mask = (scans.read_scan(path).values for path in paths)
    except DataError as error:
        raise DataError(
            "a tile or its mask is no readable PNG; see this site's log for its name", error.private
        ) from error
    if image.shape[1:] != mask.shape[1:]:
        shapes = f"{list(image.shape[1:])} and {list(mask.shape[1:])} pixels"
        raise DataError(f"a tile and its mask have {shapes}; export both from one image", str(paths[0]))
    return image, (mask[0] > 0).astype(np.uint8)


def patient_of(name: str) -> str:
    """Return who or what must not be in two parts: the patient of a TCGA name, else the source image of a tile."""
    return name[:BARCODE] if name.startswith("TCGA-") else name.rsplit("_", 1)[0]


def part_of(name: str) -> int:
    """0 train, 1 validation, 2 test: the patient's name decides, so that all sites agree without asking."""
    return _part(SPLIT, patient_of(name))


def _part(number: int, patient: str) -> int:
    place = seeds.seed_for(number, "nuclei", patient) / 2**63
    return int(place >= SHARES[0]) + int(place >= SHARES[0] + SHARES[1])


# ---------------------------------------------------------------------- the published sets
def _set_and_organ(site: str) -> tuple[str, str | None]:
    """A site's set, and the organ where it takes but one: "monusac2020-lung" is lung of monusac2020."""
    chosen, _, organ = site.rpartition("-")
    return (chosen, organ) if organ in ORGANS else (site, None)


def published_in(place: Path) -> list[Path]:
    """All images with outlines (XML) beside them or in ../Annotations, or with a mask in their slide's GT folder."""
    outlined = []
    for truth in files_in(place, "**/*.xml"):
        folders = [truth.parent, truth.parent.parent / "Tissue Images"]
        paths = [folder / f"{truth.stem}{ending}" for folder in folders for ending in ENDINGS]
        outlined += [path for path in paths if path.is_file()][:1]
    slides = [path for path in files_in(place, "**/Slide_*/*.png") if _instances(path)]
    return outlined + slides


def nuclei_in(image: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return which pixels of a published image [3, *shape] are nuclei: 0 or 1, [H, W]."""
    masked = _instances(image)
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
    """Refuses document types, so that no entity can be declared, let alone expanded."""

    def doctype(self, *_: object) -> None:
        raise ValueError("a document type, which annotations have no use for")


def read_outlines(path: Path) -> list[list[tuple[float, float]]]:
    """Return the outlines (x, y) of all nuclei of a file as Aperio's ImageScope writes it (XML)."""
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_WithoutDoctype()))
        annotations = list(root.iter("Annotation"))
        if not annotations or any(one.find("Vertex") is not None for one in annotations):
            raise ValueError("no Annotation, or a Vertex of no Region")
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
    """The mask of a file's nuclei: 1 inside an outline and on it, [H, W]."""
    from PIL import Image, ImageDraw

    mask = Image.new("L", (shape[1], shape[0]))
    pen = ImageDraw.Draw(mask)
    for outline in read_outlines(path):
        if len(outline) > 2:
            pen.polygon(outline, fill=1, outline=1)
    return np.array(mask)


def _parts_in_paper(images: list[Path], place: Path, seed: int) -> list[int]:
    """Test where a folder says so, a fifth of the rest validation; without such a folder, images at random."""
    tests = np.array([any("test" in name.lower() for name in image.relative_to(place).parts) for image in images])
    if not tests.any():
        return splits.parts_by_draw([str(image) for image in images], PAPER_SHARES, seed).tolist()
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~tests))
    parts = np.where(tests, 2, 0)
    parts[rest[: round(0.2 * len(rest))]] = 1
    return parts.tolist()


def _instances(image: Path) -> Path | None:
    """TNBC's mask of an image; None of another set's."""
    slide = image.parent.name
    mask = image.parents[1] / slide.replace("Slide_", "GT_") / image.name
    return mask if slide.startswith("Slide_") and mask.is_file() else None


def _published_patient(image: Path) -> str:
    return image.name[:BARCODE] if image.name.startswith("TCGA-") else image.parent.name


def soft_dice(output: Tensor, target: Tensor) -> Tensor:
    """Return MONAI's Dice loss over both classes and the whole batch, as HarmoFL's released code has it."""
    return monai_loss("DiceLoss", to_onehot_y=True, softmax=True, batch=True)(output, target[:, None])
