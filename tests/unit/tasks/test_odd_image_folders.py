"""After at most three answers of a user, `medsilo data` reads image folders as hospitals export them, or gives a
reason.

Even with --yes, the command asks for facts that only a person knows.
"""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.plan import parse_plan
from medsilo.site.data_set import DataSet
from medsilo.site.settings import read_settings_of_all
from medsilo.tasks.case_index import CaseIndex
from tests.sites import site_of

EACH = {"patients": "each image is a patient"}
CLASSES = ("benign", "malignant")


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8)


class Writer:
    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0

    def image(self, name: str, number: int | None = None) -> None:
        self.count += 1
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = pixels(self.count if number is None else number)
        if name.endswith(".nii.gz"):
            volume = np.repeat(values[..., None], 4, 2).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path)
        else:
            Image.fromarray(values).save(path)

    def mask(self, name: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.zeros((16, 16), np.uint8)
        values[4:9, 5:11] = 1
        if name.endswith(".nii.gz"):
            nibabel.save(nibabel.Nifti1Image(np.repeat(values[..., None], 4, 2), np.eye(4)), path)
        else:
            Image.fromarray(values).save(path)

    def table(self, name: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",").writerows([head, *rows])


@dataclass(frozen=True)
class Export:
    write: Callable[[Writer], None]
    answers: dict[str, str] = field(default_factory=dict)  # answers to questions that --yes does not answer
    also: dict[str, str] = field(default_factory=dict)  # answers to questions for which --yes uses a safe default
    # the number of patients: in the whole export, or at each hospital if the export has several hospitals
    patients: int | dict[str, int] = 0
    cases: int | dict[str, int] = 0
    known: bool = True
    left_out: int = 0
    learns: str = "classification"
    refused: str = ""
    says: str = ""
    classes: int = 2


EXPORTS: dict[str, Export] = {}


def export(**truth: Any) -> Callable[[Callable[[Writer], None]], Callable[[Writer], None]]:
    def noted(write: Callable[[Writer], None]) -> Callable[[Writer], None]:
        EXPORTS[write.__name__] = Export(write, **truth)
        return write

    return noted


# ---------------------------------------------------------------------------------------------------- patients in paths
def chexpert_lines(to: Writer, numbers: Iterable[int], top: str = "") -> list[list[Any]]:
    lines = []
    for number in numbers:
        for view in ("view1_frontal", "view2_lateral"):
            name = f"patient{number:05}/study1/{view}.jpg"
            to.image(f"{top}{name}")
            lines.append([f"CheXpert-v1.0-small/train/{name}", "FM"[number % 2], 40 + number, number // 2 % 2])
    return lines


CHEXPERT = ["Path", "Sex", "Age", "Pleural Effusion"]


@export(answers={"target": "Pleural Effusion"}, patients=30, cases=60, says="Sex: ")
def chexpert(to: Writer) -> None:
    to.table("train.csv", CHEXPERT, chexpert_lines(to, range(30)))


@export(answers={"target": "Pleural Effusion"}, patients=30, cases=60)
def chexpert_in_two_tables(to: Writer) -> None:
    to.table("train.csv", CHEXPERT, chexpert_lines(to, range(20), "train/"))
    to.table("valid.csv", CHEXPERT, chexpert_lines(to, range(20, 30), "valid/"))


@export(answers={"folders": "patients"}, patients=20, cases=80, says="20 folders of 4 images")
def tiles_in_folders_of_patients(to: Writer) -> None:
    for patient in range(8860, 8880):
        for label in "01":
            for tile in range(2):
                to.image(f"{patient}/{label}/{patient}_x{tile}.png")


@export(answers={"folders": "patients"}, patients=12, cases=36)
def folders_called_as_people(to: Writer) -> None:
    for number in range(12):
        for label in CLASSES:
            for tile in range(1 + (label == "benign")):
                to.image(f"Muster{chr(65 + number)}_Anna/{label}/{tile}.png")


@export(patients=20, cases=40)
def patients_below_classes(to: Writer) -> None:
    for number in range(20):
        for tile in range(2):
            to.image(f"{CLASSES[number % 2]}/P{number:02}/{tile}.png")


@export(answers={"classes": "benign, malignant"}, patients=15, cases=60)
def numbers_of_patients_begin_again_in_each_class(to: Writer) -> None:
    """Nobody knows whether patient 3 of one class is also patient 3 of the other class.

    If equal numbers in two classes mean one patient, no patient can be in both training and test data.
    """
    for label in CLASSES:
        for number in range(15):
            for tile in range(2):
                to.image(f"{label}/{number}/{tile}.png")


@export(patients=20, cases=40)
def visits_in_folders_of_patients(to: Writer) -> None:
    for number in range(20):
        for day in ("2021-03-04", "2022-05-06"):
            to.image(f"P{number:02}/{day}/scan.png")
    to.table("labels.csv", ["patient", "label"], [[f"P{n:02}", CLASSES[n % 2]] for n in range(20)])


@export(patients={"hospital-1": 10, "hospital-2": 10}, cases={"hospital-1": 40, "hospital-2": 40})
def hospitals_with_folders_of_patients(to: Writer) -> None:
    for site in (1, 2):
        for number in range(10):
            for tile in range(4):
                to.image(f"hospital-{site}/{CLASSES[tile % 2]}/P{site}{number:02}/{tile}.png")


# -------------------------------------------------------------------------------------------------------- in file names
@export(patients=33, cases=132)
def patients_in_names_of_files(to: Writer) -> None:
    for number in range(33):
        for tile in range(4):
            to.image(f"{CLASSES[number % 2]}/P{number:02}_{tile}.png")


@export(patients=24, cases=72)
def names_begin_with_a_patient_whom_a_table_labels(to: Writer) -> None:
    for number in range(24):
        for tile in "abc":
            to.image(f"P{number:02}_{tile}.png")
    to.table("labels.csv", ["pid", "diagnosis"], [[f"P{n:02}", CLASSES[n % 2]] for n in range(24)])


@export(patients=20, cases=40, learns="segmentation")
def masks_beside_images(to: Writer) -> None:
    for number in range(20):
        for tile in range(2):
            to.image(f"P{number:02}_{tile}.png")
            to.mask(f"P{number:02}_{tile}_mask.png")


@export(answers=EACH, patients=24, cases=24, known=False, says="nothing names the patient of 24 images")
def photographs_without_patients(to: Writer) -> None:
    for number in range(24):
        to.image(f"{CLASSES[number % 2]}/{number * 37:08x}.png")


@export(answers={"patients": "/([a-z]+)"}, patients=12, cases=24)
def patients_by_an_expression_that_is_said(to: Writer) -> None:
    for number in range(24):
        to.image(f"{CLASSES[number // 2 % 2]}/{chr(97 + number // 2) * 3}{number * 37:05}.png")


# --------------------------------------------------------------------------------------------------------------- tables
@export(patients=20, cases=40)
def a_column_with_a_blank(to: Writer) -> None:
    for number in range(40):
        to.image(f"images/{number}.png")
    lines = [[f"{n}.png", f"MUSTER-{n // 2}", CLASSES[n // 2 % 2]] for n in range(40)]
    to.table("labels.csv", ["file", "Patient ID", "label"], lines)


@export(patients=20, cases=40)
def a_column_with_punctuation(to: Writer) -> None:
    for number in range(40):
        to.image(f"bilder/{number}.png")
    lines = [[f"bilder\\{n}.png", f"{n // 2}", CLASSES[n // 2 % 2]] for n in range(40)]
    to.table("tabelle.csv", ["Datei", "Pat.-Nr.", "Diagnosis"], lines)


@export(patients=20, cases=40)
def an_excel_table(to: Writer) -> None:
    import pandas

    for number in range(40):
        to.image(f"img/{number}.png")
    lines = {"image": [f"{n}.png" for n in range(40)], "MRN": [f"m{n // 2}" for n in range(40)]}
    pandas.DataFrame({**lines, "class": [CLASSES[n // 2 % 2] for n in range(40)]}).to_excel(
        to.root / "labels.xlsx", index=False
    )


@export(answers={"patients": "column 'folder'"}, patients=20, cases=60)
def a_table_by_folder(to: Writer) -> None:
    for number in range(20):
        for tile in range(3):
            to.image(f"case{number:03}/{tile}.png")
    to.table("labels.csv", ["folder", "label"], [[f"case{n:03}", CLASSES[n % 2]] for n in range(20)])


@export(answers=EACH, patients=30, cases=30, left_out=30, known=False)
def images_for_half_of_the_lines(to: Writer) -> None:
    for number in range(30):
        to.image(f"images/{number * 7919:07}.png")
    lines = [[f"{n * 7919:07}", CLASSES[n % 2], 30 + n] for n in range(60)]
    to.table("metadata.csv", ["isic_id", "label", "age"], lines)


@export(patients=20, cases=20, left_out=20)
def lines_for_half_of_the_images(to: Writer) -> None:
    for number in range(40):
        to.image(f"images/{number}.png")
    lines = [[f"{n}.png", f"p{n}", CLASSES[n % 2]] for n in range(20)]
    to.table("labels.csv", ["image", "patient_id", "label"], lines)


@export(
    answers={"target": "tumor"},
    also={"hospitals": "hospitals"},
    patients={"0": 10, "1": 10, "2": 10},
    cases={"0": 20, "1": 20, "2": 20},
)
def a_column_of_centres(to: Writer) -> None:
    for number in range(60):
        to.image(f"patches/{number}.png")
    lines = [[f"{n}.png", f"p{n // 2}", n // 20, CLASSES[n // 2 % 2]] for n in range(60)]
    to.table("metadata.csv", ["image", "patient", "center", "tumor"], lines)


@export(refused="40 patients have lines with different label")
def a_patient_with_two_labels(to: Writer) -> None:
    for number in range(40):
        for tile in range(2):
            to.image(f"P{number:02}/{tile}.png")
    lines = [[f"P{n:02}", label] for n in range(40) for label in CLASSES]
    to.table("labels.csv", ["patient", "label"], lines)


@export(answers={"target": "sex"}, patients=20, cases=20)
def a_table_without_a_label(to: Writer) -> None:
    for number in range(20):
        to.image(f"images/{number}.png")
    lines = [[f"{n}.png", f"p{n}", "fm"[n % 2], f"note {n}"] for n in range(20)]
    to.table("list.csv", ["image", "patient", "sex", "comment"], lines)


@export(refused="no column of list.csv has 2 to 20 classes")
def a_table_of_notes(to: Writer) -> None:
    for number in range(20):
        to.image(f"images/{number}.png")
    to.table("list.csv", ["image", "patient", "comment"], [[f"{n}.png", f"p{n}", f"note {n}"] for n in range(20)])


# -------------------------------------------------------------------------------------------------------------- folders
@export(
    answers={"folders": "hospitals", **EACH},
    patients={"north": 12, "south": 12},
    cases={"north": 12, "south": 12},
    known=False,
)
def hospitals_with_classes(to: Writer) -> None:
    for site in ("north", "south"):
        for number in range(12):
            to.image(f"{site}/{CLASSES[number % 2]}/{number * 7919:06x}.png")


@export(
    answers={"folders": "hospitals", **EACH},
    patients={"north": 16, "south": 12},
    cases={"north": 16, "south": 12},
    known=False,
)
def a_hospital_with_one_class(to: Writer) -> None:
    for number in range(16):
        to.image(f"north/{CLASSES[number % 2]}/{number * 7919:06x}.png")
    for number in range(12):
        to.image(f"south/benign/{number * 6007:06x}.png")


@export(
    answers={"folders": "patients"},
    refused="folders are patients, so that no name has the class",
    says="30 folders of 4 images",
)
def folders_of_patients_without_labels(to: Writer) -> None:
    for number in range(30):
        for tile in range(4):
            to.image(f"P{number:03}/{tile}.png")


@export(answers={"folders": "hospitals"}, refused="folders are hospitals, so that no name has the class")
def five_folders_that_are_hospitals(to: Writer) -> None:
    for number in range(5):
        for tile in range(10):
            to.image(f"quast{number}/{tile}.png")


@export(answers={"folders": "classes", **EACH}, patients=120, cases=120, known=False, classes=24)
def many_folders_that_are_classes(to: Writer) -> None:
    for number in range(24):
        for tile in range(5):
            to.image(f"finding{number}/{number * 53 + tile * 7919:06x}.png")


@export(answers=EACH, patients=40, cases=40, known=False)
def classes_called_by_numbers(to: Writer) -> None:
    for number in range(40):
        to.image(f"{number % 2}/{number * 7919:06x}.png")


@export(refused="all images lie in one folder, benign")
def one_class(to: Writer) -> None:
    for number in range(20):
        to.image(f"benign/{number}.png")


@export(answers=EACH, patients=24, cases=24, known=False)
def parts_above_classes(to: Writer) -> None:
    for number in range(24):
        part = "test" if number < 6 else "train"
        to.image(f"{part}/{CLASSES[number % 2]}/{number * 7919:06x}.png")


@export(patients=20, cases=40)
def a_patient_in_two_parts(to: Writer) -> None:
    for number in range(20):
        to.image(f"train/{CLASSES[number % 2]}/P{number:02}_1.png")
        to.image(f"test/{CLASSES[number % 2]}/P{number:02}_2.png")


@export(answers=EACH, patients=24, cases=24, known=False)
def one_folder_too_deep(to: Writer) -> None:
    for number in range(24):
        to.image(f"export/2024/{CLASSES[number % 2]}/{number * 7919:06x}.png")


@export(refused="no order that medsilo knows")
def images_and_nothing_else(to: Writer) -> None:
    for number in range(24):
        to.image(f"{number}.png")


# ---------------------------------------------------------------------------------------------------------------- masks
@export(answers={"folders": "patients"}, patients=12, cases=36, learns="segmentation", says="12 folders of 3 images")
def folders_of_patients_with_images_and_masks(to: Writer) -> None:
    for number in range(12):
        for tile in range(3):
            to.image(f"P{number:02}/images/{tile}.png")
            to.mask(f"P{number:02}/masks/{tile}.png")


@export(
    answers={"folders": "hospitals", **EACH},
    patients={"north": 12, "south": 12},
    cases={"north": 12, "south": 12},
    learns="segmentation",
    known=False,
)
def hospitals_with_images_and_masks(to: Writer) -> None:
    for site in ("north", "south"):
        for number in range(12):
            to.image(f"{site}/images/{number * 7919:06x}.png")
            to.mask(f"{site}/masks/{number * 7919:06x}.png")


@export(answers=EACH, patients=20, cases=20, learns="segmentation", known=False)
def images_and_masks_beside_coco(to: Writer) -> None:
    for number in range(20):
        to.image(f"images/{number * 7919:06x}.png")
        to.mask(f"masks/{number * 7919:06x}.png")
    (to.root / "instances.json").write_text(json.dumps({"images": [], "annotations": [], "categories": []}))


@export(refused="COCO")
def coco(to: Writer) -> None:
    for number in range(20):
        to.image(f"images/{number}.png")
    rows = {"images": [{"id": 1, "file_name": "0.png"}], "annotations": [{"segmentation": [[1, 1, 5, 5, 1, 5]]}]}
    (to.root / "instances.json").write_text(json.dumps({**rows, "categories": []}))


@export(refused="masks as run lengths (column 'EncodedPixels')")
def run_lengths(to: Writer) -> None:
    for number in range(20):
        to.image(f"train/{number}.png")
    to.table("train.csv", ["ImageId", "EncodedPixels"], [[f"{n}.png", f"{n + 3} 4 {n + 30} 5"] for n in range(20)])


@export(refused="no folder of images")
def masks_without_images(to: Writer) -> None:
    for number in range(20):
        to.mask(f"masks/{number}.png")


@export(patients=12, cases=24, learns="segmentation")
def a_table_says_whose_masks_are(to: Writer) -> None:
    for number in range(24):
        to.image(f"images/{number}.png")
        to.mask(f"labels/{number}.png")
    to.table("list.csv", ["image", "Patient No"], [[f"{n}.png", f"p{n // 2}"] for n in range(24)])


# ----------------------------------------------------------------------------------------------------------------- BIDS
def bids(to: Writer, kind: str = "T1w", subjects: int = 14) -> None:
    for number in range(subjects):
        for session in (1, 2):
            stem = f"sub-{number:02}/ses-{session}/anat/sub-{number:02}_ses-{session}"
            to.image(f"{stem}_{kind}.nii.gz")
    lines = [[f"sub-{n:02}", 60 + n, ("control", "patient")[n % 2]] for n in range(subjects)]
    to.table("participants.tsv", ["participant_id", "age", "group"], lines)


@export(patients=14, cases=28)
def bids_with_groups(to: Writer) -> None:
    bids(to)


@export(patients=14, cases=28, learns="segmentation")
def bids_with_derivatives(to: Writer) -> None:
    bids(to)
    for number in range(14):
        for session in (1, 2):
            stem = f"sub-{number:02}/ses-{session}/anat/sub-{number:02}_ses-{session}"
            to.mask(f"derivatives/manual/{stem}_desc-lesion_dseg.nii.gz")


@export(answers={"image": "T2w"}, patients=14, cases=28, says="T1w (28), T2w (28)")
def bids_with_two_contrasts(to: Writer) -> None:
    bids(to)
    bids(to, "T2w")


@export(refused="a BIDS folder needs masks in derivatives, or labels in participants.tsv")
def bids_without_anything_to_learn(to: Writer) -> None:
    bids(to)
    (to.root / "participants.tsv").unlink()


# ----------------------------------------------------------------------------------------------------- links and copies
@export(refused="links that lead out of the data folder")
def links_out_of_the_folder(to: Writer) -> None:
    outside = Writer(to.root.parent / "elsewhere")
    for number in range(20):
        outside.image(f"{number}.png")
        path = to.root / CLASSES[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(outside.root / f"{number}.png")


@export(patients=20, cases=40, left_out=1)
def one_link_out_of_the_folder(to: Writer) -> None:
    patients_below_classes(to)
    outside = Writer(to.root.parent / "elsewhere")
    outside.image("x.png", 999)
    (to.root / "benign/P00/x.png").symlink_to(outside.root / "x.png")


@export(
    answers=EACH,
    patients={"hospital-a": 24, "hospital-b": 12},
    cases={"hospital-a": 24, "hospital-b": 12},
    left_out=12,
    known=False,
    says="12 images found again at 2 hospitals",
)
def the_same_images_at_two_hospitals(to: Writer) -> None:
    for site in "ab":
        for number in range(24):
            same = number if number < 12 else None
            to.image(f"hospital-{site}/{CLASSES[number % 2]}/{number * 7919:06x}.png", (same and same + 5000) or same)


@export(patients=19, cases=38, left_out=1, says="1 image found again of two patients")
def the_same_image_of_two_patients(to: Writer) -> None:
    for number in range(20):
        for tile in range(2):
            to.image(
                f"{CLASSES[number % 2]}/P{number:02}/{tile}.png", 7000 if (number, tile) in ((3, 0), (8, 1)) else None
            )


# -------------------------------------------------------------------------------------------------------------- further
@export(answers={"folders": "hospitals"}, patients={"nord": 10, "west": 10}, cases={"nord": 20, "west": 20})
def hospitals_with_a_table_each(to: Writer) -> None:
    for site in ("nord", "west"):
        for number in range(20):
            to.image(f"{site}/img/{number}.png")
        lines = [[f"{n}.png", f"{site}{n // 2}", CLASSES[n // 2 % 2]] for n in range(20)]
        to.table(f"{site}/labels.csv", ["file", "patient", "label"], lines)


@export(answers={"folders": "hospitals"}, refused="folders are hospitals")
def folders_called_as_places(to: Writer) -> None:
    for site in ("north", "south"):
        for number in range(12):
            to.image(f"{site}/{number}.png")


@export(patients=20, cases=40)
def visits_in_names_of_files(to: Writer) -> None:
    for number in range(20):
        for visit in "ab":
            to.image(f"{CLASSES[number % 2]}/P{number:02}_{visit}_1.png")


@export(answers={"patients": r"^(.*?\d+)[-_. ].+$"}, patients=20, cases=80, says="40 patients, or 20")
def visits_in_names_of_folders(to: Writer) -> None:
    for number in range(20):
        for visit in (1, 2):
            for tile in range(2):
                to.image(f"{CLASSES[number % 2]}/P{number:02}_visit{visit}/{tile}.png")


@export(answers={"folders": "neither"}, patients=12, cases=24, learns="segmentation")
def masks_in_folders_of_findings(to: Writer) -> None:
    for number in range(24):
        to.image(f"{CLASSES[number % 2]}/P{number // 2:02}_{number}.png")
        to.mask(f"{CLASSES[number % 2]}/P{number // 2:02}_{number}_mask.png")


@export(answers={"folders": "patients"}, refused="patients have several visits")
def visits_with_several_channels(to: Writer) -> None:
    for number in range(6):
        for visit in (1, 2, 3):
            for kind in ("t1", "t2"):
                to.image(f"P{number}/v{visit}/{kind}.nii.gz")
            to.mask(f"P{number}/v{visit}/seg.nii.gz")


@export(refused="several masks of one image")
def bids_with_two_raters(to: Writer) -> None:
    bids(to)
    for rater in "ab":
        for number in range(14):
            to.mask(f"derivatives/{rater}/sub-{number:02}/ses-1/anat/sub-{number:02}_ses-1_dseg.nii.gz")


@export(patients=20, cases=40)
def classes_in_folders_and_patients_in_a_table(to: Writer) -> None:
    for number in range(40):
        to.image(f"{CLASSES[number // 2 % 2]}/{number * 7919:06x}.png")
    to.table("meta.csv", ["file", "Patient-ID"], [[f"{n * 7919:06x}.png", f"p{n // 2}"] for n in range(40)])


@export(answers={"patients": r"^(.*\d.*)[-_. ][^-_. ]+$"}, patients=20, cases=40)
def barcodes_in_names_of_files(to: Writer) -> None:
    for number in range(20):
        for tile in range(2):
            to.image(f"{CLASSES[number % 2]}/TCGA-0{number % 2}-{number:04}-{tile}.png")


@export(answers={"folders": "patients"}, refused="folders are patients", says="20 folders of 2 images")
def visits_without_labels(to: Writer) -> None:
    for number in range(20):
        for day in ("01", "02"):
            to.image(f"P{number:02}/20{number:02}-03-{day}/scan.png")


@export(answers={"classes": "no"}, refused="has the class", says="left, right")
def sides_in_folders_of_patients(to: Writer) -> None:
    for number in range(20):
        for side in ("left", "right"):
            to.image(f"P{number:02}/{side}/scan.png")


@export(also={"hospitals": "hospitals"}, patients={"a": 20, "b": 10}, says="10 patients are at several hospitals")
def patients_at_two_hospitals(to: Writer) -> None:
    for number in range(40):
        to.image(f"images/{number}.png")
    lines = [[f"{n}.png", f"p{n % 30}", "ab"[n // 20], CLASSES[n % 2]] for n in range(40)]
    to.table("list.csv", ["image", "patient", "hospital", "label"], lines)


def videos(to: Writer, patients: bool) -> None:
    for number in range(20):
        for frame in range(3):
            to.image(f"video{number:02}/frame_{frame}.png")
    head = ["video", *(["patient_id"] if patients else []), "label"]
    lines = [[f"video{n:02}", *([f"p{n // 2}"] if patients else []), CLASSES[n // 2 % 2]] for n in range(20)]
    to.table("labels.csv", head, lines)


@export(answers={"patients": "column 'video'"}, patients=20, cases=60, says="are they of 20 patients")
def frames_of_videos(to: Writer) -> None:
    """In earlier versions, each folder name silently became a patient, although a patient may have several folders."""
    videos(to, patients=False)


@export(patients=10, cases=60)
def frames_of_videos_of_named_patients(to: Writer) -> None:
    """In earlier versions, medsilo ignored the patient column, so a patient had one video in training and another in
    test data.
    """
    videos(to, patients=True)


@export(answers={"patients": "lesion_id"}, patients=30, cases=60, says="are they of 30 patients, by column 'lesion_id'")
def lesions_in_a_table(to: Writer) -> None:
    """In earlier versions, the command proposed each image as a patient, although a column named the lesions."""
    for number in range(60):
        to.image(f"ISIC_{number:07}.png")
    lines = [[f"HAM_{n // 2:04}", f"ISIC_{n:07}", CLASSES[n // 2 % 2], 30 + n % 50] for n in range(60)]
    to.table("HAM10000_metadata.csv", ["lesion_id", "image_id", "dx", "age"], lines)


# ------------------------------------------------------------------------------------------------------------- messages
def given(answers: dict[str, str]) -> list[str]:
    return [text for key, value in answers.items() for text in ("--set", f"{key}={value}")]


def counted(found: dict[str, int]) -> int | dict[str, int]:
    return found[""] if found.keys() == {""} else found


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_right_after_three_answers_or_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, folder, out = EXPORTS[name], tmp_path / "export", tmp_path / "set"
    own.write(Writer(folder))
    command = ["data", str(folder), "-o", str(out), "--yes"]
    assert len(own.answers) + len(own.also) <= 3
    keys, said = list(own.answers), ""
    for place, key in enumerate(keys):
        assert main([*command, *given({known: own.answers[known] for known in keys[:place]})]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{key}: " in line, line
        said += line
    code = main([*command, *given(own.answers | own.also)])
    told = capsys.readouterr()
    if own.refused:
        assert code == 1 and own.refused in told.err.splitlines()[-1], told.err
        assert own.says in said and not list(out.rglob(DataSet.FILE))
        return
    assert code == 0, told.err
    places = {"": out} if (out / DataSet.FILE).exists() else {path.parent.name: path.parent for path in sites_in(out)}
    sets = {site: DataSet.read(place) for site, place in places.items()}
    assert counted({site: one.patients.count for site, one in sets.items()}) == own.patients
    cases = {site: sum(1 for _ in cases_of(one, places[site])) for site, one in sets.items()}
    assert counted(cases) == (own.cases or own.patients)
    assert {one.patients.known for one in sets.values()} == {own.known}
    assert sum(sum(one.left_out.values()) for one in sets.values()) == own.left_out
    for one in sets.values():
        assert one.learns["kind"] == own.learns
        if own.learns == "classification":
            assert len(one.learns["labels"]) == own.classes
        assert own.says in said + told.out


def sites_in(out: Path) -> list[Path]:
    return sorted(out.glob(f"*/{DataSet.FILE}"))


def cases_of(one: DataSet, place: Path) -> list[Any]:
    source = one.source(place)
    return CaseIndex.of_cases(source, source.folder, one.learns["kind"] == "segmentation").usable


def test_hospitals_in_one_folder_take_part_each_with_its_own(tmp_path: Path) -> None:
    """After one acceptance, `run --settings` reads a data set for each of two hospitals; each data set contains only
    this hospital's own images.
    """
    folder, out = tmp_path / "export", tmp_path / "set"
    hospitals_with_folders_of_patients(Writer(folder))
    assert main(["data", str(folder), "-o", str(out), "--yes"]) == 0
    settings, sites = read_settings_of_all(out), ["hospital-1", "hospital-2"]
    plan = parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "image-folder", "kind": "classification", "labels": [*CLASSES], "size": [16, 16]},
            "network": {"name": "small-cnn", "width": 2},
            "training": {"rounds": 1, "batch_size": 8},
            "participation": {"sites": sites},
        }
    )
    state = {"device": "cpu", "state_dir": str(tmp_path / "state")}
    for again, site in enumerate(sites):
        with pytest.raises(MedsiloError, match="nobody has accepted"):
            site_of(plan, site, sites, settings.of(site).changed(state, "a test"), tmp_path / f"{again}/sites" / site)
    assert main(["data", "accept", str(out), "--by", "A. Person"]) == 0
    for site in sites:
        own = settings.of(site).changed(state, "a test")
        assert own.data and own.data.folder == folder / site
        member = site_of(plan, site, sites, own, tmp_path / "runs/sites" / site)
        parts = member.participant.disclosure.patients
        assert len({name for part in parts.values() for name in part}) == 10
    (out / "hospital-1/private/cases.csv").write_text("image,label,patient\n")
    with pytest.raises(MedsiloError, match="does not match its digest in data.yaml"):
        read_settings_of_all(out)
