"""medsilo finds and reads DICOM series, rejects faulty files, and writes masks voxel for voxel."""

import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest
import SimpleITK
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from medsilo.check.data import data_findings, data_tables
from medsilo.cli import main
from medsilo.core.errors import DataError
from medsilo.core.yaml_text import dump_yaml
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import TASKS
from medsilo.runs.score import Score
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import Survey
from medsilo_dicom.dicom_masks import mask_of_contours, mask_of_segmentation
from medsilo_dicom.header import PRIVATE, library
from medsilo_dicom.series import ImageSeries, mask_as_scanned, read_again, scan_of_series, values_of
from medsilo_lab.deploy.dicom_objects import MadeBy, class_report, code_of, report, segmentation, sources_of
from medsilo_lab.deploy.dicom_predictor import DicomSeries
from medsilo_lab.deploy.model_card import CARD, CARD_DATA, interval_of
from medsilo_lab.start.dataset_layout import DatasetLayout, first_sight
from tests import dicoms
from tests.dicoms import DAMAGE, NAME, change, write_contours, write_segmentation, write_series, write_study
from tests.hospital import affine_of, ball
from tests.layouts import nested

STRUCTURES = {"kidney": code_of("kidney"), "tumour": code_of("tumour"), "thing": code_of("thing")}
MAKER = MadeBy("medsilo tests", "1", "ab" * 32)
BALL = {"name": "dicom-folder", "labels": ["ball"], "size": [16, 16, 8], "target_spacing": [2, 2, 3]}


def labels_of(names: list[str]):
    return lambda name: names.index(name) + 1


def turned_affine(
    angles: tuple[float, float, float], spacing: tuple[float, float, float], flips: list[int]
) -> np.ndarray:
    """Return an affine matrix [4, 4] in LPS coordinates with rotations about three axes and pairs of reversed axes."""
    turn = np.eye(3)
    for axis, angle in enumerate(angles):
        one, other = (axis + 1) % 3, (axis + 2) % 3
        about = np.eye(3)
        about[[one, one, other, other], [one, other, one, other]] = (
            *(np.cos(angle), -np.sin(angle)),
            *(
                np.sin(angle),
                np.cos(angle),
            ),
        )
        turn = turn @ about
    affine = np.eye(4)
    affine[:3, :3] = turn * np.array(flips) * np.array(spacing)
    affine[:3, 3] = (-13.7, 41.2, -250.5)
    return affine


# ---------------------------------------------------------------------------------------------------- round trip
@settings(max_examples=8, deadline=None)
@given(
    values=arrays(np.int16, (3, 5, 4), elements=st.integers(-1000, 3000)),
    labels=arrays(np.uint8, (3, 5, 4), elements=st.integers(0, 3)),
    angles=st.tuples(*[st.floats(-3, 3, allow_nan=False)] * 3),
    spacing=st.tuples(*[st.floats(0.3, 6)] * 3),
    flips=st.sampled_from([[1, 1, 1], [-1, -1, 1], [-1, 1, -1], [1, -1, -1]]),
)
def test_a_volume_and_its_masks_come_back_voxel_for_voxel(
    tmp_path_factory: pytest.TempPathFactory, values, labels, angles, spacing, flips
) -> None:
    folder, affine = tmp_path_factory.mktemp("trip"), turned_affine(angles, spacing, flips)
    files = write_series(folder, values, affine, shuffled=int(values[0, 0, 0]) + 1000)
    series = read_again(sorted(files))
    assert [header.path for header in series.slices] == files
    assert (values_of(series) == values).all()
    np.testing.assert_allclose(series.affine, affine, atol=1e-5)
    scan = scan_of_series(series)
    made = segmentation(sources_of(series), labels, STRUCTURES, MAKER)
    made.save_as(folder / "mask")
    assert (mask_of_segmentation(folder / "mask", series, labels_of(list(STRUCTURES))) == labels).all()
    own = SimpleITK.GetArrayFromImage(scan.on_own_grid(mask_as_scanned(labels, series)))
    assert (own == labels).all()
    read = highdicom.seg.segread(folder / "mask")
    instances = [header.instance for header in series.slices]
    back = read.get_pixels_by_source_instance(instances, combine_segments=True, ignore_spatial_locations=True)
    assert (back == labels).all()


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> ImageSeries:
    values, _ = ball((6, 32, 24), (1.0, 1.5, 2.0), 0)
    folder = tmp_path_factory.mktemp("series")
    return read_again(write_series(folder, np.rint(values * 100), affine_of((1.0, 1.5, 2.0), 20)))


def text_of(elements: pydicom.Dataset) -> str:
    return "\n".join(str(element.value) for element in elements.iterall() if element.VR != "SQ")


@pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="needs Debian's dicom3tools")
@pytest.mark.parametrize("kind", ["found", "nothing found", "the least header"])
def test_results_conform_to_the_standard(kind: str, series: ImageSeries, tmp_path: Path) -> None:
    labels = np.zeros(series.shape, np.uint8)
    if kind != "nothing found":
        labels[2:4, 3:9, 5:11], labels[4, 1, 1] = 1, 3
    if kind == "the least header":
        files = [Path(shutil.copy(header.path, tmp_path)) for header in series.slices]
        for path in files:
            bare = ("AccessionNumber", "StudyID", "StudyTime", "PatientSex", "ReferringPhysicianName", "PatientName")
            change(path, **dict.fromkeys(bare))
        series = read_again(files)
    sources = sources_of(series)
    made = segmentation(sources, labels, STRUCTURES, MAKER)
    millilitres = {name: float((labels == n).sum()) * 3e-3 for n, name in enumerate(STRUCTURES, 1)}
    told = report(sources, made, STRUCTURES, millilitres, MAKER)
    of_class = class_report(sources, "malignant", 0.75, MAKER)
    for name, one in (("mask", made), ("report", told), ("class", of_class)):
        one.save_as(tmp_path / name)
        found = subprocess.run(["dciodvfy", "-new", tmp_path / name], capture_output=True, text=True, check=False)
        lines = (found.stdout + found.stderr).splitlines()
        assert not [line for line in lines if line.startswith("Error")]
        warnings = [line for line in lines if line.startswith("Warning")]
        known = ("99MEDSILO", "DICOMDIR")
        assert all(any(word in line for word in known) for line in warnings), warnings


def test_a_report_has_volumes_and_the_model_and_is_no_diagnosis(series: ImageSeries) -> None:
    labels = np.zeros(series.shape, np.uint8)
    labels[2:4, 3:9, 5:11] = 1
    sources = sources_of(series)
    made = segmentation(sources, labels, STRUCTURES, MAKER)
    told = report(sources, made, STRUCTURES, {"kidney": 0.216, "tumour": 0.0, "thing": 0.0}, MAKER)
    assert (told.VerificationFlag, told.CompletionFlag, told.PreliminaryFlag) == (
        "UNVERIFIED",
        "PARTIAL",
        "PRELIMINARY",
    )
    text = text_of(told)
    for word in ("not a diagnosis", MAKER.name, MAKER.plan, made.SOPInstanceUID, "Kidney", "milliliter", "0.216"):
        assert word in text
    referred_to = [one.value for one in told.iterall() if one.keyword == "ReferencedSegmentNumber"]
    assert referred_to == [1], "a structure without voxels has no frames to refer to"
    segments = made.SegmentSequence
    assert [one.SegmentedPropertyTypeCodeSequence[0].CodeMeaning for one in segments] == ["Kidney", "Tumor", "Tissue"]
    for one in segments:
        algorithm = one.SegmentationAlgorithmIdentificationSequence[0]
        assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == (MAKER.name, MAKER.version)
        assert MAKER.plan in algorithm.AlgorithmParameters
    assert "not a diagnosis" in made.SeriesDescription
    referred = made.ReferencedSeriesSequence[0]
    assert referred.SeriesInstanceUID == series.uid


# ---------------------------------------------------------------------------------------------------- contours
def circle(series: ImageSeries, z: float, radius: float, points: int = 400) -> np.ndarray:
    """Return a circle around the centre of a slice, as points in the patient's coordinates in millimetres."""
    spacing = np.linalg.norm(series.affine[:3, :3], axis=0)
    angles = np.linspace(0, 2 * np.pi, points, endpoint=False)
    voxels = np.stack([11.5 + radius * np.cos(angles) / spacing[0], 15.5 + radius * np.sin(angles) / spacing[1]])
    return (series.affine @ np.vstack([voxels, np.full(points, z), np.ones(points)]))[:3].T


def test_contours_become_masks_with_holes(series: ImageSeries, tmp_path: Path) -> None:
    files = [header.path for header in series.slices]
    rings = [circle(series, z, radius) for z in (1, 2) for radius in (10.0, 4.0)]
    write_contours(tmp_path / "drawn", files, {"ring": rings, "core": [circle(series, 2, 3.0)]})
    mask = mask_of_contours(tmp_path / "drawn", series, labels_of(["ring", "core"]))
    y, x = np.mgrid[:32, :24]
    distance = np.hypot((x - 11.5) * 1.0, (y - 15.5) * 1.5)
    ring = (distance < 10) & (distance > 4)
    assert ((mask[1] == 1) == ring).all() and ((mask[2] == 1) == ring).all()
    assert ((mask[2] == 2) == (distance < 3)).all() and not mask[[0, 3, 4, 5]].any()
    analytic = np.pi * (10**2 - 4**2) / (1.0 * 1.5)
    assert abs((mask[1] == 1).sum() / analytic - 1) < 0.05


@pytest.mark.parametrize(
    ("structures", "words"),
    [
        (lambda s: {"a": [circle(s, 1, 5.0)], "b": [circle(s, 1, 3.0)]}, "overlap"),
        (lambda s: {"a": [circle(s, 1.4, 5.0)]}, "don't lie on the slices"),
        (lambda s: {"a": [circle(s, 9, 5.0)]}, "don't lie on the slices"),
    ],
    ids=["overlap", "between slices", "beyond"],
)
def test_contours_that_do_not_fit_are_refused(structures, words: str, series: ImageSeries, tmp_path: Path) -> None:
    write_contours(tmp_path / "drawn", [header.path for header in series.slices], structures(series))
    with pytest.raises(DataError, match=words):
        mask_of_contours(tmp_path / "drawn", series, labels_of(["a", "b"]))


# ---------------------------------------------------------------------------------------------------- a tree
def survey_of(folder: Path, **data) -> Survey:
    task = TASKS["dicom-folder"].model_validate(BALL)
    return task.survey("a", ["a"], 0, DataSource.model_validate({"folder": folder, **data}))


DOZEN = ("missing", "end missing", "twice", "phases", "two in one", "tilt", "localiser", "multi-frame", "colour", "cut")


@pytest.mark.long
@pytest.mark.parametrize("kinds", [(*DOZEN, "claims", "nobody"), pytest.param(tuple(DAMAGE), marks=pytest.mark.slow)])
def test_no_damaged_study_trains_and_none_stops_the_others(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for number in range(4):
        write_study(tmp_path / f"good-{number}", f"p{number}", number)
    for number, name in enumerate(kinds):
        DAMAGE[name][0](write_study(tmp_path / f"bad {name}", f"q{number}", 10 + number))
    survey = survey_of(tmp_path)
    assert survey.usable and sum(part.cases for part in survey.parts.values()) == 4
    left_out = [problem for problem in survey.problems if problem.severity == "left out"]
    for name in kinds:
        words = DAMAGE[name][1]
        told = [one.what for one in left_out if any(f"bad {name}/" in private for private in one.private)]
        assert any(re.search(words, what) for what in told), (name, told)
    for problem in survey.problems:
        assert not re.search(r"good-|bad |1\.2\.8|IM0|q\d|DOE", problem.what)


def test_where_nothing_matches_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("no DICOM")
    assert "no DICOM series" in survey_of(tmp_path).problems[0].what
    values, _ = ball((4, 8, 8), (1.5, 1.5, 2.5), 0)
    write_series(tmp_path / "a", np.rint(values), affine_of((1.5, 1.5, 2.5)))
    told = survey_of(tmp_path)
    assert not told.usable and any("no label" in one.what and one.count == 1 for one in told.problems)
    other = survey_of(tmp_path, images="b/**/*")
    assert "fits data.images" in other.problems[0].what and not other.usable


@pytest.mark.slow
def test_structures_have_the_plans_names_or_the_hospitals(tmp_path: Path) -> None:
    files = write_study(tmp_path / "s0", "p0", 0, label="BALL ")
    for number in (1, 2, 3):
        write_study(tmp_path / f"s{number}", f"p{number}", number, label="Kugel")
    assert sum(part.cases for part in survey_of(tmp_path).parts.values()) == 1
    (unknown,) = [one for one in survey_of(tmp_path).problems if "not in the plan" in one.what]
    assert unknown.count == 3 and "Kugel" not in unknown.what
    assert sum(part.cases for part in survey_of(tmp_path, label_map={"kugel": "ball"}).parts.values()) == 4
    rest = survey_of(tmp_path, label_map={"*": "background"})
    assert [one.count for one in rest.problems if one.what.startswith("masks are empty")] == [3]
    write_segmentation(tmp_path / "again", files, np.ones((7, 12, 12), np.uint8), {1: "ball"})
    assert any("several segmentations" in one.what for one in survey_of(tmp_path).problems)
    assert not any("several segm" in one.what for one in survey_of(tmp_path, labels="*/B/*").problems)


def test_volumes_are_classified_by_their_first_folder(tmp_path: Path) -> None:
    for number in range(6):
        values, _ = ball((4, 12, 12), (1.5, 1.5, 2.5), number)
        place = tmp_path / ("benign" if number % 2 else "malignant") / f"s{number}" / "series"
        write_series(place, np.rint(values), affine_of((1.5, 1.5, 2.5)), f"p{number}")
    kind = {"kind": "classification", "labels": ["benign", "malignant"]}
    task = TASKS["dicom-folder"].model_validate({**BALL, **kind})
    survey = task.survey("a", ["a"], 0, DataSource(folder=tmp_path))
    assert sum(part.classes["benign"] for part in survey.parts.values()) == 3
    assert sum(part.cases for part in survey.parts.values()) == 6


def test_identifiers_are_told_by_their_elements_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        write_study(tmp_path / f"s{number}", f"p{number}", number)
    library()  # pydicom would also warn when the next line writes an invalid date
    change(tmp_path / "s0/A/series/IM0000", PatientBirthDate="born to Jane Doe")
    # NVFlare may call logging.config.dictConfig, which also disables pydicom's logger, at any time
    logging.getLogger("pydicom").disabled = False
    logging.getLogger("pydicom").warning("Jane")
    survey = survey_of(tmp_path)
    assert "Jane" not in caplog.text + "".join(capfd.readouterr())
    assert survey.identifiers["PatientName"] == 4 and "InstitutionName" not in survey.identifiers
    plan = plan_of()
    (table,) = [one for one in data_tables(survey, plan, 1) if one.title.startswith("Identifiers")]
    assert ["PatientName", 4] in [list(row) for row in table.rows]
    (hidden,) = [one for one in data_tables(survey, plan, 5) if one.title.startswith("Identifiers")]
    assert ["PatientName", "fewer than 5"] in [list(row) for row in hidden.rows]
    assert any("none leaves" in finding.remedy for finding in data_findings(survey, plan, 5))
    assert NAME not in str([finding.as_json() for finding in data_findings(survey, plan, 5)])


@pytest.mark.parametrize("compressor", ["JPEG", "JPEG2000", "RLE"])
def test_compressed_slices_are_read_as_they_were(compressor: str, tmp_path: Path) -> None:
    values = np.rint(ball((4, 16, 12), (1.0, 1.5, 2.0), 0)[0] * 100)
    twelve = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 0}
    for path in write_series(tmp_path / "plain", values, affine_of((1.0, 1.5, 2.0), 20), **twelve):
        if compressor == "RLE":
            elements = pydicom.dcmread(path)
            elements.compress(pydicom.uid.RLELossless)
            elements.save_as(tmp_path / f"{path.name}.dcm")
            continue
        writer = SimpleITK.ImageFileWriter()
        writer.SetImageIO("GDCMImageIO")
        writer.SetFileName(str(tmp_path / f"{path.name}.dcm"))
        writer.UseCompressionOn()
        writer.SetCompressor(compressor)
        writer.KeepOriginalImageUIDOn()
        writer.Execute(SimpleITK.ReadImage(path))
    files = sorted(tmp_path.glob("*.dcm"))
    assert pydicom.dcmread(files[0], stop_before_pixels=True).file_meta.TransferSyntaxUID.is_compressed
    assert (values_of(read_again(files)) == values).all()


# ---------------------------------------------------------------------------------------------------- end to end
def plan_of() -> Plan:
    return parse_plan({"algorithm": {"name": "fedavg"}, "task": BALL, "participation": {"sites": ["a"]}})


@pytest.mark.slow
def test_from_studies_to_a_model_to_segmentations(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "data"
    for number in range(4):
        write_study(data / f"s{number}", f"PAT-{number}-X", number)
    settings_ = {"data": {"folder": str(data), "cache_folder": str(tmp_path / "cache")}}
    site = tmp_path / "site"
    site.mkdir()
    (site / "medsilo.yaml").write_text(dump_yaml({**settings_, "device": "cpu", "min_patients_per_metric": 1}), "utf-8")
    plan = {
        "algorithm": {"name": "fedavg"},
        "task": BALL,
        "network": {"name": "unet", "dimensions": 3, "features": [4, 8]},
        "training": {"rounds": 1, "batch_size": 2},
        "participation": {"sites": ["a"]},
    }
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan), "utf-8")
    common = ["--plan", str(tmp_path / "plan.yaml"), "--settings", str(site)]
    private = str(tmp_path / "private.txt")
    assert main(["check", "jobs/fedavg", *common, "--site", "a", "--private", private]) == 0
    told = capsys.readouterr().out
    assert "Identifiers in DICOM headers" in told and NAME not in told
    (tmp_path / "empty").mkdir()
    assert main(["run", "jobs/fedavg", *common, "--engine", "inprocess", "--data", str(tmp_path / "empty")]) == 1
    assert "no DICOM series of images" in capsys.readouterr().err
    run = tmp_path / "run"
    assert main(["run", "jobs/fedavg", *common, "--engine", "inprocess", "-o", str(run)]) == 0
    (made,) = run.iterdir()
    out = tmp_path / "out"
    assert main(["predict", str(made), str(data / "s0"), "-o", str(out), "--device", "cpu"]) == 0
    _check_segmentation(out, data / "s0")
    assert main(["release", "export", str(made), "-o", str(tmp_path / "bundle")]) == 0
    _check_card(tmp_path / "bundle", made)
    # neither the training files nor the run contain a patient's name, identifier or UID
    uid = pydicom.dcmread(data / "s0/B/mask", stop_before_pixels=True).StudyInstanceUID
    for folder in (tmp_path / "cache", run, tmp_path / "bundle"):
        for path in (path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            assert not [word for word in (NAME, "PAT-", uid) if word.encode() in content], path


def _check_segmentation(out: Path, study: Path) -> None:
    (case,) = json.loads((out / "predictions.json").read_text("utf-8"))["cases"]
    made = highdicom.seg.segread(out / case["mask"])
    files = sorted((study / "A").rglob("IM*"))
    back = made.get_pixels_by_source_instance(
        [pydicom.dcmread(path).SOPInstanceUID for path in files], combine_segments=True, ignore_spatial_locations=True
    )
    assert back.sum() * 1.5 * 1.5 * 2.5 / 1000 == pytest.approx(case["volume_ml_ball"], abs=1e-5)
    told = text_of(pydicom.dcmread(out / case["report"]))
    assert "not a diagnosis" in told and made.SOPInstanceUID in told


def _check_card(bundle: Path, run: Path) -> None:
    card, summary = (json.loads(path.read_text("utf-8")) for path in (bundle / CARD_DATA, run / "summary.json"))
    released = summary["sites"]["a"]
    assert card["plan_hash"] == summary["plan_hash"] and card["data"] == {"a": released["cases"]}
    score, (low, high) = released["test"]["dice"], card["scores"]["a"]["interval"]
    assert card["scores"]["a"]["score"] == score and low <= score <= high and card["privacy"] is None
    page = (bundle / CARD).read_text("utf-8")
    for word in (
        summary["plan_hash"],
        "not a medical device",
        f"| {score:.2f} untrained |",
        "no differential privacy",
        "FedAvg",
    ):
        assert word in page


def test_intervals_follow_from_score_and_cases() -> None:
    assert interval_of("accuracy", Score.told(0.5, 10)) == (0.2366, 0.7634)  # Wilson 1927, computed separately
    assert interval_of("dice", Score.told(0.8, 50)) == (0.6079, 0.9921)  # ± sqrt(ln(40) / 100)
    assert interval_of("dice", Score.told(0.9, 2)) == (0.0, 1.0)
    # the confidence interval of a rounded score covers both ends of the rounding range
    assert interval_of("accuracy", Score.told(0.5, 10, 0.2))[0] < 0.2366
    assert interval_of("concordance", Score.told(0.7, 100)) is None and interval_of("dice", Score.told(0.5, 0)) is None


# ---------------------------------------------------------------------------------------------------- as they are met
ENHANCED_CT, ENHANCED_MR = "1.2.840.10008.5.1.4.1.1.2.1", "1.2.840.10008.5.1.4.1.1.4.1"


def item(**values) -> pydicom.Sequence:
    one = pydicom.Dataset()
    for name, value in values.items():
        setattr(one, name, value)
    return pydicom.Sequence([one])


def write_enhanced(path: Path, files: list[Path], kind: str, order: list[int], **frame_of: list) -> None:
    """Write slices as one Enhanced DICOM object, with frames in the order `order` and a different rescale slope for
    each frame.
    """
    slices = [pydicom.dcmread(files[number]) for number in order]
    made = pydicom.dcmread(files[0])
    groups = pydicom.Sequence()
    for number, one in enumerate(slices):
        group = pydicom.Dataset()
        group.PlanePositionSequence = item(ImagePositionPatient=one.ImagePositionPatient)
        scale = {"RescaleSlope": 1 + number % 2, "RescaleIntercept": -1024 * (1 + number % 2)}
        group.PixelValueTransformationSequence = item(**scale, RescaleType="HU")
        group.FrameContentSequence = item(StackID="1", InStackPositionNumber=number + 1)
        for name, values in frame_of.items():
            group.MREchoSequence = item(**{name: values[number]})
        groups.append(group)
    shared = {
        "PlaneOrientationSequence": item(ImageOrientationPatient=made.ImageOrientationPatient),
        "PixelMeasuresSequence": item(PixelSpacing=made.PixelSpacing, SliceThickness=made.SliceThickness),
    }
    names = ("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient", "RescaleSlope", "RescaleIntercept")
    for name in names:
        delattr(made, name)
    made.SOPClassUID, made.NumberOfFrames = kind, len(slices)
    made.SharedFunctionalGroupsSequence, made.PerFrameFunctionalGroupsSequence = item(**shared), groups
    made.PixelData = b"".join(one.PixelData for one in slices)
    dicoms.write(made, path)


@pytest.mark.parametrize("kind", [ENHANCED_CT, ENHANCED_MR])
def test_enhanced_objects_are_volumes_whose_results_come_back(kind: str, tmp_path: Path) -> None:
    values, _ = ball((5, 16, 12), (1.0, 1.5, 2.0), 0)
    values, order = np.rint(values * 100), [3, 0, 4, 1, 2]
    files = write_series(tmp_path / "plain", values, affine_of((1.0, 1.5, 2.0), 20))
    write_enhanced(tmp_path / "all", files, kind, order)
    series = read_again([tmp_path / "all"])
    doubled = np.isin(np.arange(5), [order[1], order[3]])[:, None, None]
    assert (values_of(series) == np.where(doubled, 2 * values, values)).all()
    np.testing.assert_allclose(series.affine, read_again(files).affine, atol=1e-6)
    labels = np.random.default_rng(0).integers(0, 4, values.shape)
    by_frame = labels[np.argsort([header.frame for header in series.slices])]
    segmentation(sources_of(series), by_frame, STRUCTURES, MAKER).save_as(tmp_path / "mask")
    assert (mask_of_segmentation(tmp_path / "mask", series, labels_of(list(STRUCTURES))) == labels).all()
    image = DicomSeries(series.uid, 1, series.slices, {"kidney": STRUCTURES["kidney"]}, MAKER)
    scan = image.read()
    bright = (scan.values[0] > np.median(scan.values)).astype(np.uint8)
    names = image.write(scan, {"volume_ml_kidney": 1.0}, bright, tmp_path)
    kept = mask_of_segmentation(tmp_path / names["mask"], series, lambda name: 1)
    assert (kept == mask_as_scanned(bright, series)).all()


def as_siemens_writes(path: Path) -> None:
    """Move all functional groups into the frames, and add private sequences; one private sequence lacks a value
    representation.
    """
    made = pydicom.dcmread(path)
    shared, end = made.SharedFunctionalGroupsSequence[0], b"\xfe\xff\xdd\xe0\0\0\0\0"
    made.Modality, made.Manufacturer, made.ImageType = "MR", "Siemens", ["ORIGINAL", "PRIMARY", "M", "NONE"]
    for number, frame in enumerate(made.PerFrameFunctionalGroupsSequence, 1):
        frame.update(shared)
        frame.MRImageFrameTypeSequence = item(FrameType=made.ImageType)
        frame.MREchoSequence = item(EffectiveEchoTime=2.98)
        frame.FrameContentSequence[0].DimensionIndexValues = [1, number, 1]
        block = frame.private_block(0x0021, "SIEMENS MR SDI 02", create=True)
        own = pydicom.Dataset()
        own.private_block(0x0021, "SIEMENS MR SDI 02", create=True).add_new(6, "LO", "text")
        block.add_new(0xFE, "SQ", pydicom.Sequence([own]))
    del made.SharedFunctionalGroupsSequence
    made.DimensionOrganizationSequence = item(DimensionOrganizationUID=pydicom.uid.generate_uid())
    made.save_as(path)
    data = path.read_bytes()
    begin, element = b"\xfe\xff\x00\xe0\xff\xff\xff\xff", b"\x21\0\x06\x10" + (1 << 17).to_bytes(4, "little")
    inner = begin + element + bytes(1 << 17) + b"\xfe\xff\x0d\xe0\0\0\0\0"
    nested = begin + b"\x21\0\x07\x10\xff\xff\xff\xff" + inner + end + b"\xfe\xff\x0d\xe0\0\0\0\0"
    creator, lost = b"\x21\0\x10\0LO\x04\0TEST", b"\x21\0\xfe\x10UN\0\0\xff\xff\xff\xff" + nested + end
    place = data.index(b"\x28\x00\x02\x00US")
    path.write_bytes(data[:place] + creator + lost + data[place:])


def test_frames_that_say_all_of_themselves_are_volumes(tmp_path: Path) -> None:
    values = np.rint(ball((5, 16, 12), (1.0, 1.5, 2.0), 0)[0] * 100)
    files = write_series(tmp_path / "plain", values, affine_of((1.0, 1.5, 2.0), 20))
    write_enhanced(tmp_path / "all", files, ENHANCED_MR, [0, 2, 4, 1, 3])
    before = read_again([tmp_path / "all"])
    known = values_of(before)
    as_siemens_writes(tmp_path / "all")
    series = read_again([tmp_path / "all"])
    assert (values_of(series) == known).all() and (series.affine == before.affine).all()
    assert PRIVATE in series.slices[0].identifiers


def test_objects_that_highdicom_and_gdcm_make_of_series_are_read_alike(tmp_path: Path) -> None:
    values = np.rint(ball((4, 16, 12), (1.0, 1.5, 2.0), 0)[0] * 100)
    common = {"SliceThickness": "2", "PatientPosition": "HFS", "AcquisitionNumber": 1, "Laterality": ""}
    files = write_series(tmp_path / "plain", values, affine_of((1.0, 1.5, 2.0), 20), **common)
    slices = [pydicom.dcmread(path) for path in files]
    made = highdicom.legacy.LegacyConvertedEnhancedCTImage(slices, highdicom.UID(), 2, highdicom.UID(), 1)
    made.save_as(tmp_path / "legacy")
    series = read_again([tmp_path / "legacy"])
    assert (values_of(series) == values).all()
    np.testing.assert_allclose(series.affine, read_again(files).affine, atol=1e-6)
    made.compress(pydicom.uid.RLELossless)
    made.save_as(tmp_path / "rle")
    assert (values_of(read_again([tmp_path / "rle"])) == values).all()
    if shutil.which("dcmcjpls"):
        subprocess.run(["dcmcjpls", tmp_path / "legacy", tmp_path / "jls"], check=True)
        assert (values_of(read_again([tmp_path / "jls"])) == values).all()


def test_frames_of_several_volumes_or_fewer_than_told_are_refused(tmp_path: Path) -> None:
    files = write_series(tmp_path / "plain", np.zeros((4, 8, 8)), affine_of((1.0, 1.5, 2.0), 20))
    path = tmp_path / "all"
    write_enhanced(path, files, ENHANCED_MR, [0, 1, 2, 3], EffectiveEchoTime=[10.0, 10.0, 80.0, 80.0])
    with pytest.raises(DataError, match="several phases, echoes"):
        read_again([path])
    write_enhanced(path, files, ENHANCED_MR, [0, 1, 2, 2])
    with pytest.raises(DataError, match="a slice twice"):
        read_again([path])
    for what in ({"NumberOfFrames": 3}, {"NumberOfFrames": 60_000}, {"PerFrameFunctionalGroupsSequence": None}):
        write_enhanced(path, files, ENHANCED_CT, [0, 1, 2, 3])
        change(path, **what)
        with pytest.raises(DataError, match="no slice has|claims more pixels"):
            read_again([path])


def test_big_endian_is_read_as_little_endian(tmp_path: Path) -> None:
    values = np.rint(ball((4, 16, 12), (1.0, 1.5, 2.0), 0)[0] * 100)
    files = write_series(tmp_path, values, affine_of((1.0, 1.5, 2.0), 20))
    for path in files:
        one = pydicom.dcmread(path)
        one.PixelData = np.frombuffer(one.PixelData, "<i2").astype(">i2").tobytes()
        one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRBigEndian
        pydicom.dcmwrite(path, one, implicit_vr=False, little_endian=False, force_encoding=True)
    assert (values_of(read_again(files)) == values).all()


def test_series_without_a_frame_of_reference_are_read_with_a_caution(tmp_path: Path) -> None:
    for number in range(4):
        files = write_study(tmp_path / f"s{number}", f"p{number}", number)
        if number < 2:
            for path in files:
                change(path, FrameOfReferenceUID="" if number else None)
    survey = survey_of(tmp_path)
    assert survey.usable and sum(part.cases for part in survey.parts.values()) == 4
    (told,) = [one for one in survey.problems if "frame of reference" in one.what]
    assert told.severity == "note" and told.count == 2
    series = read_again(sorted((tmp_path / "s0/A/series").iterdir()))
    frames = {source.FrameOfReferenceUID for _ in range(2) for source in sources_of(series)}
    assert len(frames) == 1 and frames.pop()


def square(mask: np.ndarray, spacing: tuple[float, float, float]) -> list[np.ndarray]:
    found, affine = [], affine_of(spacing)
    for z, slice_ in enumerate(mask):
        ys, xs = np.nonzero(slice_)
        if len(ys):
            (left, right), (low, high) = ((own.min() - 0.4, own.max() + 0.4) for own in (xs, ys))
            corners = (left, low), (right, low), (right, high), (left, high)
            found.append(np.array([(affine @ (x, y, z, 1))[:3] for x, y in corners]))
    return found


@pytest.mark.slow
def test_init_knows_studies_as_an_archive_exports_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One hospital has segmentations; the other hospital has contours, one of which surrounds all structures."""
    archive, spacing = tmp_path / "archive", (1.5, 1.5, 2.5)
    for patient in range(10):
        write_study(archive / "north" / f"{patient:03}", f"n{patient}", patient, "Tumour, left")
        values, mask = ball((7, 12, 12), spacing, patient)
        place = archive / "south" / f"{patient:03}"
        files = write_series(place / "series", np.rint(values * 100), affine_of(spacing), f"s{patient}")
        drawn = {"TUMOUR, LEFT": square(mask, spacing), "BODY": square(np.ones_like(mask), spacing)}
        write_contours(place / "contours", files, drawn | ({"<b>../x": square(mask, spacing)} if patient < 3 else {}))
    for patient in range(3):
        values, mask = ball((7, 12, 12), spacing, patient)
        place = archive / "tiny" / f"{patient:03}"
        files = write_series(place / "series", np.rint(values * 100), affine_of(spacing), f"t{patient}")
        drawn = {"tumour, left": square(mask, spacing), "Meier, Anna" if patient else "ball": []}
        write_contours(place / "contours", files, drawn)
    (archive / "north/000/B/mask").write_bytes((archive / "north/000/B/mask").read_bytes()[:400])
    out = tmp_path / "study"
    assert main(["init", str(archive), "-o", str(out), "--no-train", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(told["check"][site]["go"] for site in ("north", "south"))
    plan = load_plan(out / "job/app/config/plan.yaml")
    assert plan.task.name == "dicom-folder" and plan.task.goal.label_names == ("background", "Tumour-left")
    assert plan.participation.sites == ("north", "south") and plan.task.model_dump()["modalities"] == ("image",)
    written = SiteSettings.read(out / "north").data
    assert written and dict(written.label_map or {}) == {"Tumour, left": "Tumour-left", "*": "background"}
    shown = json.dumps([told["found"], told["choices"]])
    assert "22 volumes of 22 patients" in shown
    assert "Meier" not in shown and NAME not in shown and '"n1"' not in shown


@pytest.mark.slow
def test_folders_of_patients_are_no_hospitals_and_targets_no_second_label(tmp_path: Path) -> None:
    for patient in range(12):
        files = write_study(tmp_path / "archive" / f"{patient:03}", f"n{patient}", patient)
        (tmp_path / "archive" / f"{patient:03}/B/mask").unlink()
        tumour = ball((7, 12, 12), (1.5, 1.5, 2.5), patient)[1]
        drawn = {"GTV": tumour, "PTV": np.ones_like(tumour)}
        drawn = {name: square(mask, (1.5, 1.5, 2.5)) for name, mask in drawn.items()}
        write_contours(tmp_path / "archive" / f"{patient:03}/B/drawn", files, drawn)
    sight = first_sight(DatasetLayout(tmp_path / "archive", "st-anna", "cpu"))
    values = nested(sight.choices.plan)
    assert not sight.several and values["participation"]["sites"] == ["st-anna"]
    assert values["task"]["labels"] == ["GTV"]
    assert nested(sight.choices.settings)["data"]["label_map"] == {"GTV": "GTV", "*": "background"}


def test_what_init_can_not_use_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An error names a damaged file, or a segmentation without its series in the same folder; medsilo does not try to
    read a pipe.
    """
    write_study(tmp_path / "other", "n0", 0)
    write_study(tmp_path / "archive", "n1", 1)
    (tmp_path / "archive/B/mask").unlink()
    shutil.copy(tmp_path / "other/B/mask", tmp_path / "archive/B/mask")
    (tmp_path / "archive/B/noise").write_bytes(bytes(128) + b"DICM" + bytes(range(256)) * 9)
    os.mkfifo(tmp_path / "archive/B/pipe")
    assert main(["init", str(tmp_path / "archive"), "-o", str(tmp_path / "study"), "--no-train"]) == 1
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("medsilo: ")]
    assert "no study can be used" in told and "no label" in told and not (tmp_path / "study").exists()
