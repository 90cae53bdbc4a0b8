"""Write small generated data sets in exactly the layouts of the public data sets."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK
from PIL import Image

from medsilo_lab.start.choices import Choices
from results.convert import ACTIVITIES, CHANNELS

RANDOM = np.random.default_rng


def nested(choices: Choices) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, (value, _) in choices.items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return values


def picture(path: Path, values: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, **options)


def noise(number: int, *shape: int) -> np.ndarray:
    return RANDOM(number).integers(0, 100, shape, dtype=np.uint8)


def camelyon17(folder: Path) -> Path:
    rows = []
    for center in range(5):
        for patient in range(4):
            row: dict[str, Any] = {"patient": f"{20 * center + patient:03}", "node": patient, "center": center}
            for patch in range(3):
                at = {
                    "x_coord": 32 * patch,
                    "y_coord": 96,
                    "tumor": patch % 2,
                    "slide": 4 * center,
                    "split": patient % 2,
                }
                rows.append({"": len(rows), **row, **at})
                slide = f"patient_{row['patient']}_node_{row['node']}"
                pixels = noise(len(rows), 40, 40, 4) + np.uint8(150 * at["tumor"])
                pixels[..., 3] = 255
                picture(folder / f"patches/{slide}/patch_{slide}_x_{at['x_coord']}_y_96.png", pixels)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


SQUARE = ((8, 6), (19, 6), (19, 17), (8, 17))  # corners (x, y) of a nucleus of 12 x 12 pixels


def xml(path: Path, classes: dict[str, tuple] = {"Epithelial": SQUARE}, head: str = "") -> None:  # noqa: B006
    annotations = ""
    for number, (name, corners) in enumerate(classes.items()):
        vertices = "".join(f'<Vertex X="{x}.0" Y="{y}.0" Z="0"/>' for x, y in corners)
        annotations += (
            f'<Annotation Id="{number}"><Attributes><Attribute Name="{name}" Id="0" Value=""/></Attributes><Regions>'
            f'<RegionAttributeHeaders><AttributeHeader Id="1" Name="Region"/></RegionAttributeHeaders>'
            f'<Region Id="1"><Attributes/><Vertices>{vertices}</Vertices></Region></Regions></Annotation>'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<?xml version="1.0"?>{head}<Annotations MicronsPerPixel="0.25">{annotations}</Annotations>')


LUNGS = ["55-1594", "69-7760", "69-A59K", "73-4668", "78-7220", "86-7713", "49-6743", "50-6591", "55-7570", "55-7573"]
BREASTS = ["A2-A0CV", "A2-A0ES", "B6-A0WZ", "BH-A18T", "D8-A3Z6", "E2-A154"]
TESTED = ["49-6743", "50-6591", "55-7570", "55-7573", "A2-A0ES"]


def monusac(folder: Path) -> Path:
    for number, code in enumerate([*LUNGS, *BREASTS]):
        stem = f"TCGA-{code}-01Z-00-DX1"
        part = "MoNuSAC Testing Data and Annotations" if code in TESTED else "MoNuSAC_images_and_annotations"
        for image in (1, 2):
            place = folder / part / stem / f"{stem}_{image}"
            ending = ".svs" if code in TESTED and image == 2 else ".tif"
            picture(place.with_suffix(ending), noise(number, 30, 44, 4), format="TIFF")
            classes = {"Epithelial": SQUARE, "Ambiguous": ((30, 20), (40, 20), (40, 28))} if code in TESTED else {}
            xml(place.with_suffix(".xml"), classes or {"Epithelial": SQUARE})
    return folder


MONUSEG = ["18-5592", "21-5784", "21-5786", "2Z-A9J9", "38-6178", "44-2665", "49-4488", "50-5931", "69-7764"]
MONUSEG += ["A6-6782", "A7-A13E", "A7-A13F"]


def monuseg(folder: Path) -> Path:
    for number, code in enumerate(MONUSEG):
        stem = f"TCGA-{code}-01Z-00-DX1"
        if number < 9:
            training = folder / "MoNuSeg 2018 Training Data"
            picture(training / "Tissue Images" / f"{stem}.tif", noise(number, 40, 40, 3))
            xml(training / "Annotations" / f"{stem}.xml")
        else:
            picture(folder / "MoNuSegTestData" / f"{stem}.tif", noise(number, 40, 40, 3))
            xml(folder / "MoNuSegTestData" / f"{stem}.xml")
    return folder


def tnbc(folder: Path) -> Path:
    for slide in range(1, 12):
        for image in (1, 2):
            name = f"{slide:02}_{image}.png"
            mask = np.zeros((32, 32), np.uint8)
            mask[6:18, 8:20] = 255
            picture(folder / f"TNBC_NucleiSegmentation/Slide_{slide:02}/{name}", noise(slide, 32, 32, 4))
            picture(folder / f"TNBC_NucleiSegmentation/GT_{slide:02}/{name}", mask)
            for kind in ("Slide", "GT"):  # macOS adds files with these names to archives
                hidden = folder / f"__MACOSX/TNBC_NucleiSegmentation/{kind}_{slide:02}/._{name}"
                hidden.parent.mkdir(parents=True, exist_ok=True)
                hidden.write_bytes(b"Mac OS X")
    return folder


def volume(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(values)
    image.SetSpacing((0.6, 0.6, 3.0))
    SimpleITK.WriteImage(image, str(path))


def prostate(folder: Path, patients: int = 5, site: str = "ISBI_1.5", ending: str = ".nii.gz") -> Path:
    for patient in range(patients):
        values = RANDOM(patient).integers(0, 900, (7, 24, 20), dtype=np.int16)
        mask = np.zeros(values.shape, np.uint8)
        mask[:6, 8:16, 6:14] = 1 + patient % 2
        if site == "I2CVB":
            for kind, array in (("Image", values), ("Mask", mask)):
                volume(folder / site / kind / f"p{patient}{ending}", array)
        else:
            volume(folder / site / f"Case{patient:02}{ending}", values)
            word = "Segmentation" if patient % 2 else "segmentation"
            volume(folder / site / f"Case{patient:02}_{word}{ending}", mask)
    return folder


def eye(greys: tuple[int, int, int]) -> np.ndarray:
    labels = np.zeros((32, 28), int)
    labels[8:24, 6:22], labels[12:20, 10:18] = 1, 2
    return np.array(greys, np.uint8)[labels]


def drishti(folder: Path) -> Path:
    for number in range(8):
        part, truth = ("Training", "GT") if number < 4 else ("Test", "Test_GT")
        name = f"drishtiGS_{number:03}"
        place = folder / "drishti-gs1" / part
        picture(place / "Images" / f"{name}.png", noise(number, 32, 28, 3))
        for kind, greys in (("OD", (0, 255, 255)), ("cup", (0, 0, 191))):
            picture(place / truth / name / "SoftMap" / f"{name}_{kind}segSoftmap.png", eye(greys))
    return folder


def refuge(folder: Path) -> Path:
    for number in range(8):
        name, group = (f"g{number:04}", "Glaucoma") if number < 4 else (f"n{number:04}", "Non-Glaucoma")
        picture(folder / "REFUGE/Training400" / group / f"{name}.jpg", noise(number, 32, 28, 3))
        masks = folder / "REFUGE/Annotation-Training400/Disc_Cup_Masks"
        picture(masks / group / f"{name}.bmp", eye((255, 128, 0)))
    return folder


def riga(folder: Path) -> Path:
    for source in ("BinRushed", "Magrabia"):
        for kind in ("train", "test"):
            lines = ["image,mask"]
            for number in range(4):
                name = f"image{number}{kind}"
                paths = [f"DiscRegion/{source}/{name}.tif", f"DiscRegion/{source}/{name}-1.tif"]
                picture(folder / paths[0], noise(number, 32, 28, 3))
                picture(folder / paths[1], eye((0, 255, 128)))
                lines.append(",".join(paths))
            (folder / f"{source}_{kind}.csv").write_text("\n".join(lines) + "\n")
    return folder


def plain_fundus(folder: Path) -> Path:
    for number in range(8):
        picture(folder / "rim-one/images" / f"r{number}.jpg", noise(number, 32, 28, 3))
        picture(folder / "rim-one/masks" / f"r{number}.png", eye((0, 1, 2)))
    return folder


def pamap2(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for subject in range(101, 107):
        activity = np.repeat([0, *ACTIVITIES, 5, 12], 24)
        table = np.full((len(activity), 54), np.nan)
        table[:, 0], table[:, 1] = 0.01 * np.arange(len(activity)), activity
        table[:, 3:] = RANDOM(subject).normal(0, 1, (len(activity), 51))
        table[:, CHANNELS] += activity[:, None]
        table[5::7, 4:7] = np.nan  # missing values, as if the wrist sensor had lost some packets
        np.savetxt(folder / f"subject{subject}.dat", table, fmt="%.5g")
    return folder


def covid_xray(folder: Path) -> Path:
    for label, name in enumerate(("COVID-19", "Normal", "Pneumonia-Viral", "Pneumonia-Bacterial")):
        for number in range(24):
            stem = f"person{label}{number // 2}_virus_{number}" if label > 1 else f"{name}-{number}"
            values = noise(number, 70, 80, 3) if number % 3 == 0 else noise(number, 70, 80)
            picture(folder / name / f"{stem}.jpg", values + np.uint8(30 * label))
    return folder


def organ_mnist(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    arrays = {}
    for part, cases in (("train", 66), ("val", 22), ("test", 44)):
        labels = np.arange(cases) % 11
        arrays[f"{part}_images"] = noise(cases, cases, 28, 28) + (10 * labels[:, None, None]).astype(np.uint8)
        arrays[f"{part}_labels"] = labels[:, None].astype(np.uint8)
    np.savez(folder / "organcmnist.npz", **arrays)
    return folder


@dataclass(frozen=True)
class Layout:
    make: Callable[[Path], Path]
    task: dict[str, Any]
    sites: list[str]
    network: dict[str, Any] = field(default_factory=lambda: {"name": "unet", "features": [4, 8]})


LAYOUTS = {
    "monusac": Layout(monusac, {"name": "nuclei", "size": 32}, ["monusac2020-lung", "monusac2020-breast"]),
    "monuseg": Layout(monuseg, {"name": "nuclei", "size": 32}, ["monuseg2018"]),
    "tnbc": Layout(tnbc, {"name": "nuclei", "size": 32}, ["tnbc"]),
    "prostate-3": Layout(prostate, {"name": "prostate", "size": 32}, ["isbi-15"]),
    "prostate-1": Layout(
        lambda folder: prostate(prostate(folder, site="I2CVB"), site="promise12", ending=".mhd"),
        {"name": "prostate", "size": 32, "slices": 1, "intensity": "fixed", "objective": "dice", "augment": False},
        ["i2cvb", "promise12"],
    ),
    "fundus": Layout(plain_fundus, {"name": "fundus", "size": 32}, ["rim-one"]),
}
EYES = [(drishti, "drishti-gs1"), (refuge, "refuge"), (riga, "binrushed"), (riga, "magrabia")]
