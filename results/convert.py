"""Convert the papers' public data sets into the form that medsilo's readers take. Each conversion writes into the
folder of the data set.

    python -m results.convert camelyon17 DATA/camelyon17_v1.0      # for image-folder
    python -m results.convert covid-xray "DATA/Curated X-Ray Dataset"
    python -m results.convert organmnist DATA                      # organsmnist.npz and others become folders
    python -m results.convert pamap2 DATA/PAMAP2_Dataset/Protocol  # for activity-windows
    python -m results.convert fundus DATA                          # Drishti-GS1, REFUGE and RIGA+, for fundus

As in the papers, the program divides cases at random. With --by-patient, the tables name each image's patient.
"""

import csv
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from medsilo.tasks.splits import dirichlet

X_RAYS = ("COVID-19", "Normal", "Pneumonia-Viral", "Pneumonia-Bacterial")
ORGANS = ("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left")
ORGANS = (*ORGANS, "lung-right", "pancreas", "spleen")
# Columns of PAMAP2: for each of three sensors, the axes of the acceleration (16 g), of the gyroscope and of the
# magnetometer
CHANNELS = [start + axis for start in (3, 20, 37) for axis in (1, 2, 3, 7, 8, 9, 10, 11, 12)]
# lying, sitting, standing, walking, cycling, Nordic walking, descending stairs, vacuuming, ironing and rope jumping
ACTIVITIES = (1, 2, 3, 4, 6, 7, 13, 16, 17, 24)
# length of a window, and distance between the starts of two windows; both follow from the released network and the
# paper's number of test windows
STEPS, STRIDE = 200, 100
CLIENTS, ALPHA, FEWEST = 20, 0.1, 40
REFUGE, RIGA = (255, 128, 0), (0, 255, 128)  # grey levels of the background, the disc's rim and the cup
# the data source, the path of an image, and the image's mask with 1 in the disc's rim and 2 in the cup
Pair = tuple[str, Path, np.ndarray]


def write_cases(folder: Path, rows: Iterable[dict[str, str]], by_patient: bool) -> None:
    """Write cases.csv.

    Args:
        by_patient: True writes the patient as the group whose images must stay in one part; False makes each image a
            group.
    """
    alone = [{**row, "patient": row["image"]} for row in rows] if not by_patient else []
    found = [{name: row[name] for name in row if name != "part"} for row in alone] or [*rows]
    with (folder / "cases.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def camelyon17(folder: Path, by_patient: bool = False) -> None:
    """Read WILDS' metadata.csv, which lists all hospitals in one table."""

    def rows() -> Iterator[dict[str, str]]:
        with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                slide = f"patient_{row['patient']}_node_{row['node']}"
                image = f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
                label = "tumour" if row["tumor"] == "1" else "normal"
                yield {"image": image, "label": label, "patient": row["patient"], "site": f"center-{row['center']}"}

    write_cases(folder, rows(), by_patient)


def covid_xray(folder: Path, by_patient: bool = False) -> None:
    """Read folders of classes, and write grey copies of the images into grey/. Images with the same person<number> in
    their names belong to one patient.
    """
    rows = []
    for label in X_RAYS:
        for path in sorted((folder / label).iterdir()):
            copy = folder / "grey" / label / f"{path.stem}.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("L").save(copy)
            person = re.search(r"person\d+", path.stem, re.IGNORECASE)
            patient = person.group().lower() if person else f"{label}-{path.stem}"
            rows.append({"image": copy.relative_to(folder).as_posix(), "label": label, "patient": patient})
    write_cases(folder, rows, by_patient)


def organmnist(folder: Path, by_patient: bool = False) -> None:
    """Write MedMNIST's files into a folder for each set. MedMNIST's three parts share no CT volume, so they serve as
    the split by patient.
    """
    for source in sorted(folder.glob("organ?mnist*.npz")):
        place, rows = folder / source.stem, []
        (place / "images").mkdir(parents=True, exist_ok=True)
        with np.load(source, allow_pickle=False) as file:
            for own, part in (("train", "train"), ("val", "validation"), ("test", "test")):
                for number, image in enumerate(file[f"{own}_images"]):
                    name, label = f"images/{own}-{number:05}.png", ORGANS[int(file[f"{own}_labels"][number, 0])]
                    Image.fromarray(image).save(place / name)
                    rows.append({"image": name, "label": label, "patient": name, "part": part})
        write_cases(place, rows, by_patient)


def pamap2(folder: Path, by_patient: bool = False) -> None:
    """Cut the recordings subject101.dat to subject109.dat into windows of one activity each, and divide the windows
    among 20 clients.
    """
    windows, labels = [], []
    for path in sorted(folder.glob("subject1??.dat")):
        table = np.loadtxt(path, usecols=[1, *CHANNELS], ndmin=2)
        for run in np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1):
            if run[0, 0] in ACTIVITIES:
                values = filled(run[:, 1:])
                starts = range(0, len(run) - STEPS + 1, STRIDE)
                windows += [values[start : start + STEPS].T for start in starts]
                labels += [ACTIVITIES.index(int(run[0, 0]))] * len(starts)
    every, known, random = np.array(windows, np.float32), np.array(labels), np.random.default_rng(0)
    for client, own in enumerate(dirichlet(known, CLIENTS, ALPHA, 0, FEWEST), 1):
        train, test = np.array_split(random.permutation(own), 2)
        parts = {"x_train": every[train], "y_train": known[train], "x_test": every[test], "y_test": known[test]}
        np.savez(folder / f"client-{client:02}.npz", **parts)


def filled(values: np.ndarray) -> np.ndarray:
    """Return values [steps, channels] in which gaps are interpolated linearly between their neighbours in time."""
    steps = np.arange(len(values))
    for channel in values.T:
        gap = np.isnan(channel)
        channel[gap] = np.interp(steps[gap], steps[~gap], channel[~gap])
    return values


def fundus(folder: Path, by_patient: bool = False) -> None:
    """Write the images of Drishti-GS1, REFUGE and RIGA+ into <site>/images, and their masks into <site>/masks. A pixel
    belongs to a structure if half of the experts marked the pixel.
    """
    for site, picture, labels in (*drishti(folder), *refuge(folder), *riga(folder)):
        for kind in ("images", "masks"):
            (folder / site / kind).mkdir(parents=True, exist_ok=True)
        Image.open(picture).convert("RGB").save(folder / site / "images" / f"{picture.stem}.png")
        Image.fromarray(labels).save(folder / site / "masks" / f"{picture.stem}.png")


def grey(path: Path) -> np.ndarray:
    """Return a mask's first channel, or the palette indices of a mask with a palette, as [H, W]."""
    values = np.asarray(Image.open(path))
    return values[..., 0] if values.ndim == 3 else values


def in_labels(mask: np.ndarray, greys: tuple[int, int, int]) -> np.ndarray:
    """Return a mask with 1 in the disc's rim and 2 in its cup, from a mask whose grey levels are `greys`."""
    assert set(np.unique(mask)) <= set(greys), "a mask has other greys; save it without smoothing or compression"
    return np.select([mask == greys[2], mask == greys[1]], [2, 1], 0).astype(np.uint8)


def drishti(folder: Path) -> Iterator[Pair]:
    """Yield the images of Drishti-GS1 with the disc and the cup that more than half of the experts marked."""
    for disc in sorted(folder.glob("**/SoftMap/*_ODsegSoftmap.png")):
        name = disc.name.removesuffix("_ODsegSoftmap.png")
        [picture] = disc.parents[3].glob(f"Images/**/{name}.png")
        cup = grey(disc.with_name(f"{name}_cupsegSoftmap.png")) > 127
        yield "drishti-gs1", picture, np.where(cup, 2, grey(disc) > 127).astype(np.uint8)


def refuge(folder: Path) -> Iterator[Pair]:
    pictures = {path.stem: path for path in folder.glob("**/*.jpg")}
    for mask in sorted(folder.glob("**/Disc_Cup_Masks/**/*.bmp")):
        yield "refuge", pictures[mask.stem], in_labels(grey(mask), REFUGE)


def riga(folder: Path) -> Iterator[Pair]:
    for table in sorted(folder.glob("**/*_t[re]*.csv")):
        with table.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                site = table.stem.partition("_")[0].lower()
                yield site, table.parent / row["image"], in_labels(grey(table.parent / row["mask"]), RIGA)


SETS = {"camelyon17": camelyon17, "covid-xray": covid_xray, "organmnist": organmnist, "pamap2": pamap2}
SETS["fundus"] = fundus

if __name__ == "__main__":
    name, place, *more = sys.argv[1:]
    SETS[name](Path(place), "--by-patient" in more)
