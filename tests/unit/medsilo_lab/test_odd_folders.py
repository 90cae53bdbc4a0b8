"""`medsilo init` reads folders with unusual layouts from real hospitals."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from medsilo.cli import main
from medsilo.plan import Plan, load_plan
from medsilo.site.data_set import DataSet
from medsilo.site.settings import SiteSettings
from medsilo_lab.start.dataset_layout import DatasetLayout, place_of, write_start
from medsilo_lab.start.file_table import table_of_files
from medsilo_lab.start.folder_layout import layout_of
from medsilo_lab.start.making import make_each, stop_at_questions
from tests.hospital import ball, photograph, write_balls, write_pixels


def write_csv(path: Path, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines])


EACH = {"patients": "each image is a patient"}


def read_by(study: Path) -> dict[str, Any]:
    return DataSet.read(study / "data-set").reading


def written(folder: Path, said: Mapping[str, str] = EACH, **asked: Any) -> tuple[Plan, dict[str, Any]]:
    made = make_each(DatasetLayout(folder, "hospital-a", "cpu", **asked), stop_at_questions, said=said)
    plan = write_start(folder.parent / "study", made.sight.choices, made.sets)
    return plan, next(iter(made.sets.values())).data_set.reading


def drafted(folder: Path, *more: str, said: Mapping[str, str] = EACH) -> tuple[Plan, dict[str, Any]]:
    study, each = folder.parent / "study", [f"--set={key}={answer}" for key, answer in said.items()]
    assert main(["init", str(folder), "-o", str(study), "--no-train", "--device", "cpu", *each, *more]) == 0
    return load_plan(study / "job/app/config/plan.yaml"), read_by(study)


def refused(folder: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    assert main(["init", str(folder), "-o", str(folder.parent / "study"), "--no-train", *more]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        {"labels": {"background": 0, "left lung": 1}, "channel_names": {"0": "CT"}},
        {"labels": {"0": "background", "1": "left lung"}, "modality": {"0": "CT"}, "numTraining": 12},
    ],
    ids=["nnU-Net", "Decathlon"],
)
def test_dataset_json_names_structures_and_channels(told: dict[str, Any], tmp_path: Path) -> None:
    write_balls(tmp_path / "data", [f"p{number:02}" for number in range(16)])
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(told))
    plan, data = written(tmp_path / "data")
    assert (plan.task.labels, plan.task.modalities) == (("left lung",), ("ct",))  # type: ignore[attr-defined]
    assert data["label_map"] == {"1": "left lung"}


@pytest.mark.parametrize("text", ["{", '{"labels": 3}', "[]"])
def test_a_dataset_json_that_lies_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number in range(6):
        image, mask = photograph(number)
        write_pixels(tmp_path / f"data/images/{number}.png", image)
        write_pixels(tmp_path / f"data/masks/{number}.png", mask)
    (tmp_path / "data" / "dataset.json").write_text(text)
    assert "dataset.json can't be read" in refused(tmp_path / "data", capsys)


def photographs(folder: Path, count: int = 24) -> list[str]:
    names = [f"ISIC_{number:04}" for number in range(count)]
    for number, name in enumerate(names):
        write_pixels(folder / f"{name}.png", photograph(number)[0])
    return names


def test_a_table_beside_images_has_their_labels(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """ISIC and Kaggle publish tables with many columns, and list images without the suffix of the file name."""
    names = photographs(tmp_path / "data" / "images")
    lines = [[name, 40 + place % 30, ["nevus", "melanoma"][place % 2]] for place, name in enumerate(names)]
    write_csv(tmp_path / "data" / "metadata.csv", ["isic_id", "age_approx", "kind"], lines)
    assert "which column of metadata.csv is to be learned? kind: nevus (12)" in refused(tmp_path / "data", capsys)
    plan, data = drafted(tmp_path / "data", "--target", "kind")
    assert (plan.task.name, plan.task.kind) == ("image-folder", "classification")  # type: ignore[attr-defined]
    assert plan.task.labels == ("melanoma", "nevus")  # type: ignore[attr-defined]
    cases = (tmp_path / "study/data-set/private/cases.csv").read_text().splitlines()
    assert cases[1] == "images/ISIC_0000.png,nevus,images/ISIC_0000.png" and len(cases) == 25
    assert "table" not in data  # the list of cases comes from the image files, and not from a table


def test_classes_and_folders_may_be_spelt_otherwise(tmp_path: Path) -> None:
    """The hospitals write class names with different capitals, and folder names with spaces and umlauts."""
    for site, classes in (("Süd Klinik", ("benign", "Malignant")), ("nord", ("Benign", "malignant"))):
        for label, name in enumerate(classes):
            for number in range(12):
                image = photograph(100 * len(site) + 20 * label + number)[0]
                write_pixels(tmp_path / "data" / site / name / f"{label}{number}.png", image)
    plan, data = written(tmp_path / "data", {"folders": "hospitals", **EACH})
    assert plan.participation.sites == ("Sued-Klinik", "nord")
    assert [name.lower() for name in plan.task.labels] == ["benign", "malignant"]  # type: ignore[attr-defined]
    assert {own.lower(): plans.lower() for own, plans in data["label_map"].items()}.items() <= {
        ("benign", "benign"),
        ("malignant", "malignant"),
    }
    assert data["folder"] == str(tmp_path / "data" / "Süd Klinik")
    for site in plan.participation.sites:
        source = SiteSettings.read(place_of(tmp_path / "study", site)).data
        survey = plan.task.survey(site, plan.participation.sites, 0, source)
        assert survey.usable and sum(part.cases for part in survey.parts.values()) == 24


def test_a_class_in_other_letters_is_spelt_as_a_hospital_is(tmp_path: Path) -> None:
    """In earlier versions, a class that hospitals spelt in two ways became two classes."""
    for label, name in enumerate(("Gutartig", "bösartig")):
        for number in range(12):
            write_pixels(tmp_path / "data" / name / f"{label}{number}.png", photograph(number)[0])
    plan, data = written(tmp_path / "data")
    assert plan.task.labels == ("Gutartig", "boesartig")  # type: ignore[attr-defined]
    assert data["label_map"]["bösartig"] == "boesartig"


def test_the_channels_of_one_file_are_not_called_files(tmp_path: Path) -> None:
    write_balls(tmp_path / "data", [f"p{number}" for number in range(12)])
    for path in (tmp_path / "data/images").iterdir():
        image = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.stack([image.get_fdata()] * 2, -1), image.affine), path)
    plan, _ = written(tmp_path / "data")
    assert plan.task.modalities == ("channel-0", "channel-1")  # type: ignore[attr-defined]
    (line,) = [
        line for line in (tmp_path / "study/job/app/config/plan.yaml").read_text().splitlines() if "modalities" in line
    ]
    assert "one file each" not in line


def recordings(folder: Path, names: Iterable[str]) -> None:
    random = np.random.default_rng(0)
    for name in names:
        write_csv(folder / f"{name}.csv", ["x", "y"], random.normal(0, 1, (64, 2)).round(3).tolist())


def test_two_recordings_of_a_patient_are_one_patient_s(tmp_path: Path) -> None:
    names = [f"P{number:02}" for number in range(24)]
    recordings(tmp_path / "data" / "rest", [f"{name}_rest" for name in names])
    recordings(tmp_path / "data" / "walk", [f"{name}_walk" for name in names])
    plan, _ = drafted(tmp_path / "data", said={})
    assert plan.task.labels == ("rest", "walk")  # type: ignore[attr-defined]
    source = SiteSettings.read(tmp_path / "study").data
    survey = plan.task.survey("hospital-a", ["hospital-a"], 0, source)
    assert sum(part.patients for part in survey.parts.values()) == 24
    assert sum(part.cases for part in survey.parts.values()) > 24


def test_recordings_beside_a_table_are_recordings(tmp_path: Path) -> None:
    """The table's rows do not become patients' values, and the plan contains no file name."""
    edf = pytest.importorskip("pyedflib", reason="needs medsilo[edf]")
    (tmp_path / "data").mkdir()
    random, lines = np.random.default_rng(0), []
    heads = edf.highlevel.make_signal_headers(["I", "II"], sample_frequency=100, physical_min=-10, physical_max=10)
    for number in range(20):
        name = f"Mueller_{chr(97 + number)}.edf"
        edf.highlevel.write_edf(str(tmp_path / "data" / name), random.normal(0, 1, (2, 400)), heads, {})
        lines.append([name, ["sinus", "flutter"][number % 2]])
    write_csv(tmp_path / "data" / "labels.csv", ["file", "rhythm"], lines)
    plan, data = drafted(tmp_path / "data", said={"patients": "each case is a patient"})
    assert (plan.task.name, plan.task.labels) == ("series-folder", ("flutter", "sinus"))  # type: ignore[attr-defined]
    assert data["table"] == "labels.csv" and data["columns"]["image"] == "file"
    assert "Mueller" not in (tmp_path / "study/job/app/config/plan.yaml").read_text()


def test_a_hospital_without_a_channel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for site, kinds in (("north", ("t1", "t2")), ("south", ("t2",))):
        for number in range(4):
            image, mask = ball((16, 16, 8), (1.0, 1.0, 2.0), number)
            for kind, values in (*((kind, image) for kind in kinds), ("seg", mask)):
                write_pixels(tmp_path / "data" / site / f"p{number}" / f"{kind}.nii.gz", values)
    told = refused(tmp_path / "data", capsys)
    assert all(word in told for word in ("north has */t1.nii.gz, */t2.nii.gz", "south has */t2.nii.gz, */seg.nii.gz"))


def test_half_of_the_masks_may_be_empty(tmp_path: Path) -> None:
    for number in range(24):
        image, mask = photograph(number)
        write_pixels(tmp_path / f"data/images/{number:02}.png", image)
        write_pixels(tmp_path / f"data/masks/{number:02}.png", mask * (number % 2))
    plan, _ = drafted(tmp_path / "data")
    assert plan.task.kind == "segmentation"  # type: ignore[attr-defined]


def test_a_table_names_files_as_windows_does(tmp_path: Path) -> None:
    write_csv(tmp_path / "list.csv", ["file", "label"], [[f"photos\\{n} a.png", "ab"[n % 2]] for n in range(8)])
    files = {"list.csv": tmp_path / "list.csv"} | {f"photos/{n} a.png": tmp_path / f"{n}" for n in range(8)}
    table = table_of_files(files, [name for name in files if name.endswith(".png")], None)
    assert table and (table.name, table.file, table.label) == ("list.csv", "file", "label")


def test_only_a_column_that_names_files_makes_a_table_of_files(tmp_path: Path) -> None:
    write_csv(tmp_path / "north.csv", ["id", "sent_to", "age"], [[n, "south", n] for n in range(9)])
    write_csv(tmp_path / "south.csv", ["id", "sent_to", "age"], [[n, "north", n] for n in range(9)])
    files = {path.name: path for path in tmp_path.iterdir()}
    assert table_of_files(files, list(files), None) is None
    assert layout_of([f"{site}/{name}/{n}.png" for site in "ab" for name in ("x", "y") for n in range(4)]).classes


def test_slices_of_volumes_are_one_option(tmp_path: Path) -> None:
    """The option by_slices changes all keys of a plan that depend on the number of dimensions."""
    write_balls(tmp_path / "data", [f"p{number:02}" for number in range(12)], shape=(20, 24, 20))
    assert written(tmp_path / "data")[0].task.axes == 3  # type: ignore[attr-defined]
    (tmp_path / "again").mkdir()
    plan, _ = written((tmp_path / "data").rename(tmp_path / "again" / "data"), by_slices=True)
    task = plan.task
    assert (task.dimensions, len(task.size), len(task.target_spacing)) == (2, 2, 2)  # type: ignore[attr-defined]
    assert plan.network.dimensions == 2  # type: ignore[attr-defined]


def test_a_table_beside_images_and_masks_that_is_not_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a public data set of white cells, the table names the image 001.png by the number 1."""
    for site, first in (("north", 0), ("south", 100)):
        for number in range(24):
            image, mask = photograph(number + first)
            write_pixels(tmp_path / f"data/{site}/images/{number:03}.png", image)
            write_pixels(tmp_path / f"data/{site}/masks/{number:03}.png", mask)
        write_csv(tmp_path / f"data/{site}/classes.csv", ["image ID", "class"], [[n, n % 3] for n in range(24)])
    one = str(tmp_path / "data/north")
    assert main(["data", one, "-o", str(tmp_path / "set"), "--yes"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "000.png" in line and "classes.csv" not in line
    for folder, tables, more in (
        (one, "classes.csv", []),
        (str(tmp_path / "data"), "north/classes.csv, south/classes.csv", ["--set=folders=hospitals"]),
    ):
        out = str(tmp_path / f"set-{len(more)}")
        each = ["--set=patients=each image is a patient"]
        code = main(["data", folder, "-o", out, "--yes", *each, *more])
        told = capsys.readouterr()
        assert code == 0, told.err
        assert f"not looked at: {tables}" in told.out.splitlines()
