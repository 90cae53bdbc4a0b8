"""`medsilo init` reads a folder, explains its choices, and writes a study's files or prints an error."""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch

from medsilo.cli import main
from medsilo.core.errors import DataError
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import load_plan
from medsilo.registry import TASKS
from medsilo.site.data_set import DataSet
from medsilo.site.settings import SiteSettings
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.sources import DataSource
from medsilo_lab.start import trial
from medsilo_lab.start.choices import Draft
from medsilo_lab.start.dataset_facts import DatasetFacts, look_at, patient_in
from medsilo_lab.start.dataset_layout import OF_PLAN, OF_SETTINGS, DatasetLayout, first_sight, in_yaml, look, text_of
from medsilo_lab.start.folder_layout import layout_of, layout_of_folder
from medsilo_lab.study.verdict_file import read_verdict
from tests.conftest import make_plan
from tests.hospital import ball, photograph, write_balls, write_pixels, write_table
from tests.layouts import nested
from tests.unit.project.test_docs import commands

PATIENTS = [f"p{number:02}" for number in range(18)]


def names(*patterns: str, count: int = 4) -> list[str]:
    return [pattern.format(number) for pattern in patterns for number in range(count)]


# ---------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("items", "images", "labels"),
    [
        (names("images/{}.nii.gz", "labels/{}.nii.gz"), ("images/*.nii.gz",), "labels/*.nii.gz"),
        (names("Images/p/{}.jpg", "masks/p/{}.png"), ("Images/**/*.jpg",), "masks/**/*.png"),
        (names("images/a{}.png", "images/b{}.tif", "seg/a{}.png"), ("images/*",), "seg/*.png"),
        (names("images/{}/", "labels/{}.nrrd"), ("images/*/",), "labels/*.nrrd"),
        (
            names("imagesTr/c{}_0000.nii.gz", "imagesTr/c{}_0001.nii.gz", "labelsTr/c{}.nii.gz"),
            ("imagesTr/*_0000.nii.gz", "imagesTr/*_0001.nii.gz"),
            "labelsTr/*.nii.gz",
        ),
        (names("images/p{}.nii.gz", "masks/p{}_mask.nii.gz"), ("images/*.nii.gz",), "masks/*_mask.nii.gz"),
        (names("imgs/p{}_image.png", "masks/p{}-seg.png"), ("imgs/*_image.png",), "masks/*-seg.png"),
        (names("images/p{}_image.png", "labels/p{}_image.png"), ("images/*.png",), "labels/*.png"),
        (
            names("images/p{}_0000.nii", "images/p{}_0001.nii", "gt/p{}_gt.nii"),
            ("images/*_0000.nii", "images/*_0001.nii"),
            "gt/*_gt.nii",
        ),
        (names("images/c_000{}.png", "labels/c_000{}.png"), ("images/*.png",), "labels/*.png"),
        (names("p{}/t1.nii.gz", "p{}/t2.nii.gz", "p{}/seg.nii.gz"), ("*/t1.nii.gz", "*/t2.nii.gz"), "*/seg.nii.gz"),
        (
            [f"p{n}/p{n}_{kind}.nii" for n in range(4) for kind in ("flair", "seg")],
            ("*/*_flair.nii",),
            "*/*_seg.nii",
        ),
        (names("benign/{}.png", "malignant/{}.png"), ("*/*.png",), None),
        (names("benign/{}/", "malignant/x{}/"), ("*/*/",), None),
    ],
)
def test_a_layout_is_told_from_names(items: list[str], images: tuple[str, ...], labels: str | None) -> None:
    found = layout_of(items)
    assert (found.images, found.labels, found.hospitals) == (images, labels, ())
    below = layout_of([f"{site}/{item}" for site in ("st-anna", "west") for item in items])
    assert (below.images, below.labels, below.hospitals) == (images, labels, ("st-anna", "west"))
    assert below.classes == found.classes and len(found.classes) == (0 if labels else 2)
    assert len(found.channels) == len(images)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (names("images/{}.png"), "there are 4 images (images) and no labels; put images into images/"),
        (names("masks/{}.png"), "labels (masks) and no folder of images"),
        (names("only/{}.png"), "all images lie in one folder, only"),
        (names("{}.png"), "4 images lie there in no order"),
        (names("train/a/{}.png", "test/a/{}.png"), "folders test, train look like training and test sets"),
        (names("train/{}.png", "test/{}.png"), "folders test, train look like training and test sets"),
        (names("hospital-a/{}.png", "hospital-b/{}.png"), "their images have no labels"),
        (
            names("a/images/{}.png", "a/masks/{}.png", "b/images/{}.png"),
            "folders a look like hospitals and b",
        ),
        (
            names("a/images/{}.png", "a/masks/{}.png", "b/img/{}.png", "b/masks/{}.png"),
            "different layouts: a has images/*.png, masks/*.png; b has img/*.png",
        ),
        (
            names("st anna/images/{}.png", "st anna/masks/{}.png", "st-anna/images/{}.png", "st-anna/masks/{}.png"),
            "'st-anna' can't be a hospital's name",
        ),
        (names("images/{}.png", "scans/{}.png", "masks/{}.png"), "not distinguishable; keep one of each"),
    ],
)
def test_odd_names_are_refused_in_one_line(items: list[str], words: str) -> None:
    with pytest.raises(DataError) as caught:
        layout_of(sorted(items))
    assert words in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize(
    ("own", "patients"),
    [
        (names("{}_0", "{}_1", count=8), 8),
        # medsilo chooses the pattern that joins the most files to a patient and still leaves enough patients
        (names("s{}_3_0", "s{}_4_1", count=8), 8),
        (names("case_{}", count=30), None),  # the number in these file names identifies a case, not a patient
        (names("p{}/a", "p{}/b", count=8), 8),
        (names("p{}", count=8), None),
        (names("Nr. {}_Übersicht", "Nr. {}_links", count=8), 8),
        (names("{}_0", "{}_1", count=4), None),
    ],
)
def test_patients_are_guessed_from_names(own: list[str], patients: int | None) -> None:
    expression = patient_in({"": own})
    found = {re.search(expression, name)[1] for name in own} if expression else None  # type: ignore[index]
    assert (found and len(found)) == patients


def test_files_of_windows_and_blanks_hide_no_patient(tmp_path: Path) -> None:
    """In earlier versions, Thumbs.db counted as an image without a patient, so each image became a separate patient."""
    for number, kind in enumerate(("melanoma ", "naevus")):
        for image in range(12):
            write_pixels(tmp_path / kind / f"P{20 * number + image // 2}_{image}.png", photograph(image)[0])
        for name in ("Thumbs.db", "desktop.ini"):
            (tmp_path / kind / name).write_bytes(b"x")
    draft = first_sight(DatasetLayout(tmp_path, "hospital-a")).choices
    assert draft.plan["task.labels"][0] == ["melanoma", "naevus"], "a name without the blank that a folder ends in"
    assert draft.plan["task.score"][0] == "auroc"
    assert draft.settings["data.label_map"][0] == {"melanoma ": "melanoma"}
    expression = draft.settings["data.patient"][0]
    assert re.search(expression, "naevus/P25_11")[1] == "P25"  # type: ignore[index]


def test_a_class_is_no_patient() -> None:
    of_classes = [f"{letter}/{name}" for letter in "abcdefgh" for name in names("p{}", count=8)]
    assert patient_in({"": of_classes}, classes=True) is None
    expression = patient_in({"": [f"{name}_{image}" for name in of_classes for image in (0, 1)]}, classes=True)
    assert expression and re.search(expression, "a/p1_0")[1] == re.search(expression, "b/p1_1")[1] == "p1"  # type: ignore[index]


# ---------------------------------------------------------------------------------------------------- folders
def write_seg(
    folder: Path, count: int = 18, change: Callable[[int, np.ndarray, np.ndarray], tuple] | None = None
) -> Path:
    for number in range(count):
        pixels, mask = photograph(number)
        pixels, mask = change(number, pixels, mask) if change else (pixels, mask)
        write_pixels(folder / f"images/{number}.png", pixels)
        write_pixels(folder / f"masks/{number}.png", mask)
    return folder


def write_classes(folder: Path) -> Path:
    for number in range(18):
        for place, name in enumerate(("naevus", "skin cancer!")):
            for image in range(2):
                pixels = photograph(1000 * place + 10 * number + image)[0] // 2 + np.uint8(90 * place)
                write_pixels(folder / name / f"p{number:02}_{image}.png", pixels)
    return folder


def write_series(folder: Path, values: np.ndarray, number: int) -> Path:
    folder.mkdir(parents=True)
    writer, uid = SimpleITK.ImageFileWriter(), f"1.2.826.0.1.3680043.2.1125.{number}"
    writer.KeepOriginalImageUIDOn()
    writer.SetImageIO("GDCMImageIO")
    for place, pixels in enumerate(values.astype(np.int16)):
        image = SimpleITK.GetImageFromArray(pixels)
        image.SetSpacing((1.5, 1.5))
        facts = {
            "0008|0060": "CT",
            "0008|0018": f"{uid}.2.{place}",
            "0020|000d": f"{uid}.1",
            "0020|000e": uid,
            "0020|0013": str(place),
            "0020|0032": f"0\\0\\{2.5 * place}",
            "0020|0037": "1\\0\\0\\0\\1\\0",
        }
        for key, value in facts.items():
            image.SetMetaData(key, value)
        writer.SetFileName(str(folder / f"{place:02}.dcm"))
        writer.Execute(image)
    return folder


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photographs of two classes as files, which tests must not change."""
    return write_classes(tmp_path_factory.mktemp("it's #1") / "data")


def dataset_facts_of(folder: Path) -> DatasetFacts:
    return look_at(folder, layout_of_folder(folder))


def drafted(folder: Path, gpu: bool = False) -> Draft:
    return look(DatasetLayout(folder, "hospital-a", gpu=gpu)).choices


def small_masks(number: int, pixels: np.ndarray, mask: np.ndarray) -> tuple:
    return pixels, mask if number else mask[:10, :10].copy()


REFUSED: dict[str, tuple[Callable[[int, np.ndarray, np.ndarray], tuple], str]] = {
    "transparent among colours": (
        lambda n, p, m: (p if n else np.concatenate([p, p[..., :1]], 2), m),
        "images have 3 channels (17) and 4 channels (1)",
    ),
    "empty masks": (lambda n, p, m: (p, 0 * m), "the masks of all 18 cases that were opened are empty"),
    "coloured masks": (lambda n, p, m: (p, p), "no case can be used: masks have several channels"),
    "other sizes": (lambda n, p, m: (p, m[:5, :5].copy()), "an image and its mask have different sizes"),
    "instances": (
        lambda n, p, m: (p, np.arange(1200, dtype=np.uint16).reshape(30, 40)),
        "masks have 1200 different values",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_odd_images_are_refused(kind: str, tmp_path: Path) -> None:
    change, words = REFUSED[kind]
    with pytest.raises(DataError) as caught:
        dataset_facts_of(write_seg(tmp_path, change=change))
    assert words in str(caught.value)


def test_a_folder_without_images_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for folder, words in ((tmp_path, "no image, but 1 .txt; medsilo reads NIfTI"), (tmp_path / "no", "does not exist")):
        with pytest.raises(DataError, match=words):
            layout_of_folder(folder)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(b"no image")
    write_pixels(tmp_path / "masks/a.png", photograph(1)[1])
    with pytest.raises(DataError, match="no case can be used"):
        dataset_facts_of(tmp_path)
    write_pixels(tmp_path / "images/b.png", photograph(1)[0])
    (tmp_path / "masks/a.png").rename(tmp_path / "masks/c.png")
    with pytest.raises(DataError, match="no image has.*give each image"):
        dataset_facts_of(tmp_path)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    facts = dataset_facts_of(write_seg(tmp_path, change=small_masks))
    assert list(facts.left_out.values()) == [1] and "different sizes" in next(iter(facts.left_out))
    assert len(facts.looked) == 17 and facts.cases == {"": 18}


# ---------------------------------------------------------------------------------------------------- choices
def test_grey_pictures_among_colours_are_read_and_said(tmp_path: Path) -> None:
    draft = drafted(write_seg(tmp_path, change=lambda n, p, m: (p if n > 2 else p[..., 0].copy(), m)))
    value, why = draft.plan["task.colours"]
    assert value == "rgb" and "in grey" in why


def test_a_draft_of_photographs(tmp_path: Path) -> None:
    draft = drafted(write_seg(tmp_path))
    task = nested(draft.plan)["task"]
    assert (task["name"], task["kind"], task["labels"], task["colours"]) == (
        "image-folder",
        "segmentation",
        ["structure"],
        "rgb",
    )
    assert task["size"] == [40, 28] and task["intensity"] == {"kind": "bytes"}
    assert task["shares"] == [0.44, 0.28, 0.28]
    assert nested(draft.settings)["data"]["label_map"] == {255: "structure"}
    assert all(why for _, why in (*draft.plan.values(), *draft.settings.values()))


def test_a_draft_of_classes(classes: Path) -> None:
    draft = drafted(classes)
    assert nested(draft.plan)["task"]["labels"] == ["naevus", "skin cancer"]
    data = nested(draft.settings)["data"]
    assert data["label_map"] == {"skin cancer!": "skin cancer"} and data["images"] == "*/*.png"
    assert DataSource.model_validate(data).patient == r"^[^/]+/(.*?[^_/])(?:_\d+)+$"
    large = nested(drafted(classes, gpu=True).plan)
    assert large["network"]["name"] == "densenet121" and nested(draft.plan)["network"]["name"] == "small-cnn"


def test_a_table_is_read_as_it_is(tmp_path: Path) -> None:
    write_seg(tmp_path / "files", 18)
    rows = [{"image": f"files/images/{n}.png", "label": f"files/masks/{n}.png", "patient": n // 2} for n in range(18)]
    write_table(tmp_path / "cases.csv", rows)
    facts = dataset_facts_of(tmp_path)
    assert facts.segments and facts.patients == {"": 9} and facts.layout.by_table
    write_table(tmp_path / "cases.csv", [{**row, "label": f"c{n % 2}"} for n, row in enumerate(rows)])
    draft = drafted(tmp_path)
    assert nested(draft.plan)["task"]["labels"] == ["c0", "c1"] and "images" not in nested(draft.settings)["data"]


@pytest.mark.slow
def test_volumes_get_a_spacing_and_pieces_of_their_shape(tmp_path: Path) -> None:
    thick = write_balls(tmp_path / "thick", PATIENTS[:9], shape=(20, 48, 40))
    plan = nested(drafted(thick).plan)
    task = plan["task"]
    assert (task["dimensions"], task["target_spacing"], task["intensity"]) == (3, [1.5, 1.5, 2.5], {"kind": "z-score"})
    assert task["size"] == [40, 48, 20] and plan["training"]["batch_size"] == 2
    large = nested(drafted(write_balls(tmp_path / "large", PATIENTS[:9], shape=(40, 120, 100))).plan)
    assert large["task"]["size"] == [64, 80, 24] and len(large["network"]["features"]) == 4
    thin = nested(drafted(write_balls(tmp_path / "thin", PATIENTS[:9], shape=(6, 48, 40))).plan)
    assert thin["task"]["dimensions"] == 2


# ---------------------------------------------------------------------------------------------------- DICOM
@pytest.fixture(scope="module")
def scanner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ct")
    for number, patient in enumerate(PATIENTS[:9]):
        values, mask = ball((8, 24, 20), (1.5, 1.5, 2.5), number)
        write_series(folder / "images" / patient, 40 * values - 1000 * (values < -0.3), number + 1)
        image = SimpleITK.GetImageFromArray(mask)
        image.SetSpacing((1.5, 1.5, 2.5))
        (folder / "labels").mkdir(exist_ok=True)
        SimpleITK.WriteImage(image, str(folder / f"labels/{patient}.nii.gz"))
    return folder


def test_series_are_images_and_are_seen_as_a_ct(scanner: Path, tmp_path: Path) -> None:
    draft = drafted(scanner)
    assert nested(draft.settings)["data"]["images"] == "images/*/"
    window = nested(draft.plan)["task"]["intensity"]
    assert window["kind"] == "window" and -200 < window["low"] < window["high"] < 200
    source = DataSource.model_validate({**nested(draft.settings)["data"], "cache_folder": tmp_path})
    task = TASKS["nifti-folder"].model_validate(nested(draft.plan)["task"])
    data = task.read("hospital-a", ["hospital-a"], 0, source)
    places = sorted({*data.train.patients, *data.validation.patients, *data.test.patients})  # type: ignore[attr-defined]
    assert places == PATIENTS[:9]
    kept = len(list(tmp_path.iterdir()))
    touched = scanner / "images/p00/03.dcm"
    os.utime(touched, ns=(0, 0))
    task.read("hospital-a", ["hospital-a"], 0, source)
    assert len(list(tmp_path.iterdir())) == kept + 1  # one changed slice makes the cached volume invalid
    inputs, target = data.train[0]
    assert inputs.shape[1:] == target.shape and torch.isfinite(inputs).all() and target.any()


def test_a_series_with_a_link_in_it_is_left_out(scanner: Path, tmp_path: Path) -> None:
    own = tmp_path / "data/images/p"
    own.mkdir(parents=True)
    for path in (scanner / "images/p00").iterdir():
        (own / path.name).symlink_to(path)
    (tmp_path / "data/labels").mkdir()
    (tmp_path / "data/labels/p.nii.gz").write_bytes((scanner / "labels/p00.nii.gz").read_bytes())
    listing = CaseIndex.of_cases(
        DataSource(folder=tmp_path / "data", images="images/*/"), tmp_path / "data", masks=True
    )
    assert not listing.entries and any("lead out of it" in problem.what for problem in listing.problems)


def test_two_series_in_a_folder_are_refused(scanner: Path, tmp_path: Path) -> None:
    for number, patient in enumerate(PATIENTS[:2]):
        for path in (scanner / "images" / patient).iterdir():
            (tmp_path / "images/p").mkdir(parents=True, exist_ok=True)
            (tmp_path / "images/p" / f"{number}{path.name}").write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="16 DICOM files of 2 series"):
        layout_of_folder(tmp_path)


# ---------------------------------------------------------------------------------------------------- files
def test_what_is_written_says_what_was_chosen(classes: Path) -> None:
    draft = drafted(classes)
    for text, values, choices in (
        (text_of(OF_PLAN, draft.plan), nested(draft.plan), draft.plan),
        (text_of(OF_SETTINGS, draft.settings), nested(draft.settings), draft.settings),
    ):
        assert load_yaml(text) == json.loads(json.dumps(values)) | (
            {} if "data" not in values else {"data": values["data"]}
        )
        assert all(len(line) <= 120 for line in text.splitlines() if "folder:" not in line)
        joined = " ".join(text.replace("#", " ").split())
        assert all(" ".join(why.replace("#", " ").split()) in joined for _, why in choices.values())


@pytest.mark.parametrize(
    "value", ["1e-4", "yes", "a: b", "it's", " x", "#1", "null", "2026-11-21", "*/*.png", "C:\\x", "ä"]
)
def test_texts_are_read_back_as_they_are(value: str) -> None:
    assert load_yaml(f"key: {in_yaml(value)}  # why") == {"key": value}
    assert load_yaml(f"key: {in_yaml([value, {value: 1.5}])}") == {"key": [value, {value: 1.5}]}


def test_init_writes_checks_and_overwrites_nothing(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "study"
    command = ["init", str(classes), "-o", str(out), "--no-train", "--device", "cpu", "--json"]
    before = sorted(classes.rglob("*"))
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["check"]["hospital-a"]["go"] and told["trial"] is None and all(row["why"] for row in told["choices"])
    plan = load_plan(out / "job/app/config/plan.yaml")
    assert plan.task.goal.label_names == ("naevus", "skin cancer") and plan.participation.sites == ("hospital-a",)
    # one hospital made the plan, which the lead receives by mail
    mailed = " ".join((out / "job/app/config/plan.yaml").read_text().split())
    assert not re.search(r"(?<!fewer than )\b\d+ (of them|patients|cases|flat|images)", mailed), mailed
    settings = SiteSettings.read(out)
    assert settings.data and settings.data.folder == classes.resolve() and settings.data.data_set == out / "data-set"
    patients = told["data_sets"]["hospital-a"]["patients"]
    assert told["report"] is None and patients == DataSet.read(out / "data-set").patients.model_dump()
    assert (patients["known"], patients["count"]) == (True, 18)
    written = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(command) == 1
    assert "medsilo does not overwrite it" in json.loads(capsys.readouterr().out)["error"]
    assert written == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["init", str(classes), "-o", str(classes / "study")]) == 1
    assert "is inside the data folder" in capsys.readouterr().err
    assert sorted(classes.rglob("*")) == before


def test_init_needs_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["init"]) == 2 and "medsilo example" in capsys.readouterr().err
    (tmp_path / "x").write_text("")
    assert main(["example", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["init", str(tmp_path), "-o", str(tmp_path / "study")]) == 1
    assert not (tmp_path / "study").exists()


def test_the_trial_has_as_many_rounds_on_every_machine_and_for_every_plan() -> None:
    tried = [trial.alone(make_plan("fedavg", f"training.rounds={rounds}")) for rounds in (2, 50)]
    assert [(one.algorithm.name, one.rounds) for one in tried] == [("local", trial.ROUNDS)] * 2


@pytest.mark.slow
def test_a_classification_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("medsilo_lab.start.trial.ROUNDS", 3)
    command = ["init", str(write_classes(tmp_path / "data")), "-o", str(tmp_path / "study"), "--device", "cpu"]
    assert main(command) == 0
    assert (tmp_path / "study/trial/report.html").is_file()
    assert "does federated training help" not in capsys.readouterr().out


def in_general(text: str) -> list[str]:
    """Return output without numbers, column widths and verdicts, which depend on the processor."""
    told = re.sub(r"[+−-]?\d+(\.\d+)?", "0", text)
    told = re.sub(r"0 (bytes|[kMG]B)", "0 bytes", re.sub(" +", " ", told))
    told = re.sub(r"better|worse|inconclusive", "VERDICT", told)
    told = re.sub(r"; (about|more than) 0.*|; a VERDICT needs.*", "", told)
    began = r"(?m)^(Inconclusive: with fedavg,|Federated training with fedavg is VERDICT:)|higher|lower"
    return re.sub(began, "ANSWER", told).splitlines()


def missing(sample: str, told: str) -> list[str]:
    left, said = [line.removesuffix("...").strip() for line in in_general(sample)], iter(in_general(told))
    while left and any(left[0] in line for line in said):
        left.pop(0)
    return left


def test_a_sample_is_held_to_its_order_and_its_words() -> None:
    assert missing("a 1.5 b\n...\nc 2\n", "a -30 b\nx\nc 7\n") == []
    assert missing("a\nb\n", "b\na\n") == ["b"] and missing("a 1 B\n", "a 1 b\n") == ["a 0 B"]


@pytest.mark.first
@pytest.mark.long
def test_the_tutorial_runs_as_it_stands(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In an empty folder, the commands of docs/start/tutorial.md print the text on the page; the test trains for fewer
    rounds.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("medsilo_lab.start.trial.ROUNDS", 3)
    names = ("start/tutorial.md", "start/your-data.md", "study/join.md")
    pages = "\n".join((root / "docs" / name).read_text("utf-8") for name in names)
    pages = re.sub(r" \\\n +", " ", pages)
    shown = re.findall(r"```\nmedsilo (.*)\n```\n\n```text\n([^`]*)```", pages)
    assert [words.split()[0] for words, _ in shown] == [
        "example",
        "init",
        "compare",
        "compare",
        "predict",
        "release",
        "init",
        "check",
    ]
    lines = [*commands(root / "docs/start/tutorial.md")]
    acts = [line.split()[0] for line in lines]
    assert acts == ["example", "init", "compare", "compare", "predict", "release"]
    for line in (*lines, shown[-1][0]):
        assert main(shlex.split(line)) == 0, line
        told = capsys.readouterr().out
        assert [missing(sample, told) for words, sample in shown if words == line] != [], line
        assert not any(missing(sample, told) for words, sample in shown if words == line), line
    page = (tmp_path / "study/trial/report.html").read_text("utf-8")
    assert page.count('class="overlay"') == 9 and "reaches a mean test dice of 0." in page
    verdict = read_verdict(tmp_path / "runs/first")
    [fedavg] = [row.score for row in verdict.rows if row.title == "fedavg"]
    assert fedavg and fedavg.mean > 0.5 and "single-site training" in verdict.headline
    assert (tmp_path / "runs/first/report.html").is_file() and (tmp_path / "bundle/configs/metadata.json").is_file()
    assert (tmp_path / "predictions/overview.png").is_file()
    masks = [SimpleITK.ReadImage(str(path)) for path in (tmp_path / "predictions").glob("*.nii.gz")]
    assert len(masks) == len(list((tmp_path / "data/hospital-a/images").iterdir()))
