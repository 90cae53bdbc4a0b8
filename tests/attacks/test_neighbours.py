"""Two hospitals' folders are equal except for one patient with extreme values. The clipped sums that the test
calculates from the two hospitals' files differ by at most one clipping bound.

The test removes the noise, and gives both hospitals the same messages of earlier rounds.

SETTINGS contains every setting that a private plan accepts, and the last tests of this file fail if SETTINGS lacks a
setting.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import get_annotations
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from torch import Tensor

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import save_tensors
from medsilo.plan import Plan, parse_plan
from medsilo.privacy.noise import NoiseSource
from medsilo.registry import METHODS, NETWORKS, TASKS
from medsilo.runs.paths import NOISY_COUNTS, site_folder
from medsilo.site.settings import make_settings
from medsilo.tasks.splits import part_alone
from tests import inprocess
from tests.conftest import slow_but
from tests.dicoms import write_segmentation, write_series
from tests.hospital import Volume, affine_of, split_of, write_pixels, write_volume

SITES = ["a", "b"]
ODD = "a-odd"  # the name that sorts first, so that removing this patient changes the position of all other patients
PEOPLE = [ODD, *(f"p{number}" for number in range(5))]
RECORDS = 2
# Patients' records that the second hospital never has.
OTHERS = {(person, 1) for person in PEOPLE}
SHARES = (0.6, 0.2, 0.2)
COUNTS = {"train": 8, "validation": 4, "test": 4}
ROUNDING = 1e-4
Unit = Literal["patient", "record"]
Leaves = set[tuple[str, int]]
Choices = dict[str, Any]


def number_of(person: str) -> int:
    return PEOPLE.index(person)


# ---------------------------------------------------------------------------------------------------------- the folders
def records(left: Leaves) -> Iterator[tuple[str, int, bool]]:
    for person in PEOPLE:
        for number in range(RECORDS):
            if (person, number) not in left:
                yield person, number, person == ODD


def write_csv(path: Path, head: list[str], lines: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines])


def table(folder: Path, left: Leaves) -> None:
    lines = []
    for person, number, odd in records(left):
        n = number_of(person) + 10 * number
        age, sex = (1e8, "") if odd else ("" if n % 4 == 3 else 40 + n, "mf"[n % 2])
        lines.append([person, age, 1e8 if odd else n % 5, sex, n % 2, n % 10])
    write_csv(folder / "cases.csv", ["patient", "age", "dose", "sex", "outcome", "score"], lines)


def full_table(folder: Path, left: Leaves) -> None:
    lines = []
    for person, number, odd in records(left):
        n = number_of(person) + 10 * number
        lines.append([person, 1e8 if odd else 40 + n, 1e8 if odd else n % 5, "mf"[n % 2], n % 2, n % 10])
    write_csv(folder / "cases.csv", ["patient", "age", "dose", "sex", "outcome", "score"], lines)


def nameless(folder: Path, left: Leaves) -> None:
    write_csv(folder / "cases.csv", ["age", "dose", "sex", "outcome"], [[40 + n, n % 5, "m", n % 2] for n in range(30)])


def recordings(folder: Path, left: Leaves, gaps: bool = False) -> None:
    for person, number, odd in records(left):
        random = np.random.default_rng(number_of(person) + 10 * number)
        values = (1e6 if odd else 1.0) * random.normal(0, 1, 40)
        lines: list[list[Any]] = [[n / 10, value, (n // 20) % 2] for n, value in enumerate(values)]
        if gaps:
            lines[17 + number_of(person) % 5][1] = ""
        write_csv(folder / f"{person}_{number}.csv", ["t", "x", "doing"], lines)


def gappy(folder: Path, left: Leaves) -> None:
    recordings(folder, left, gaps=True)


def photographs(folder: Path, left: Leaves, channels: int = 3) -> None:
    lines = []
    for person, number, odd in records(left):
        n = number_of(person) + 10 * number
        pixels = np.random.default_rng(n).integers(0, 256, (24, 28, 3)).astype(np.uint8)
        pixels, mask = (pixels // 255 * 255 if odd else pixels // 2), np.zeros((24, 28), np.uint8)
        pixels = pixels if channels == 3 else pixels[..., 0]
        mask[n % 10 : n % 10 + 9, 5:16] = 1
        write_pixels(folder / f"images/{person}_{number}.png", pixels)
        write_pixels(folder / f"labels/{person}_{number}.png", mask)
        lines.append([f"images/{person}_{number}.png", n % 2, person])
    write_csv(folder / "classes.csv", ["image", "label", "patient"], lines)


def grey(folder: Path, left: Leaves) -> None:
    photographs(folder, left, channels=1)


def scans(folder: Path, left: Leaves) -> None:
    lines = []
    for person, number, odd in records(left):
        n = number_of(person) + 10 * number
        values, mask = volume(n, 1e6 if odd else 1.0)
        for kind, own in (("images", values.astype(np.float32)), ("labels", mask)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            place = folder / kind / f"{person}_{number}.nii.gz"
            write_volume(place, Volume(own, affine_of((2.0, 2.0, 3.0))), "RAS")
        lines.append([f"images/{person}_{number}.nii.gz", n % 2, person])
    write_csv(folder / "classes.csv", ["image", "label", "patient"], lines)


def volume(number: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    mask = np.zeros((6, 18, 20), np.uint8)
    mask[1:4, 3 + number % 4 : 12, 4:14] = 1
    return scale * (np.random.default_rng(number).normal(0, 1, mask.shape) + 2 * mask), mask


def series(folder: Path, left: Leaves) -> None:
    for person, number, _ in records(left):
        own = Path(("no", "yes")[(number_of(person) + 10 * number) % 2], f"{person}_{number}")
        copytree(all_series().name / own, folder / own)


@cache
def all_series() -> TemporaryDirectory[str]:
    """Return a folder with the DICOM series of all records; the folder is cached, because writing takes a second."""
    folder = TemporaryDirectory()
    for person, number, odd in records(set()):
        n = number_of(person) + 10 * number
        values, mask = volume(n, 5000 if odd else 10)
        place = Path(folder.name, ("no", "yes")[n % 2], f"{person}_{number}")
        files = write_series(place, values.clip(-20000, 20000).round(), affine_of((2.0, 2.0, 3.0)), person)
        write_segmentation(place / "SEG", files, mask, {1: "structure"})
    return folder


# ---------------------------------------------------------------------------------------------------- accepted settings
@dataclass(frozen=True)
class Setting:
    write: Callable[[Path, Leaves], None]
    task: Choices
    network: Choices = field(default_factory=lambda: {"name": "small-cnn", "width": 2, "norm": "group"})
    data: Choices = field(default_factory=dict)
    method: Choices = field(default_factory=lambda: {"name": "fedavg"})
    privacy: Choices = field(default_factory=dict)

    def plan(self, unit: Unit = "patient", **changes: Any) -> Plan:
        offer = {"epsilon": 8.0, "delta": 1e-3, "unit": unit, "counts": {"epsilon": 1.0}, **self.privacy}
        return parse_plan(
            {
                "algorithm": self.method,
                "task": {**self.task, **changes},
                "network": self.network,
                "training": {"rounds": 2, "batch_size": 50, "learning_rate": 0.1, "local_epochs": 1},
                "participation": {"sites": SITES},
                "privacy": offer,
            }
        )


LINEAR, MLP = {"name": "linear"}, {"name": "mlp", "norm": "none"}
COLUMNS = [
    {"name": "age", "mean": 50.0, "deviation": 10.0},
    {"name": "dose", "mean": 2.0, "deviation": 2.0},
    {"name": "sex", "levels": ["m", "f"]},
]
TABLE = {"name": "table", "columns": COLUMNS, "standardise": "plan"}
SIGNALS = [{"name": "x", "mean": 0.0, "deviation": 1.0}]
SERIES = {
    "name": "series-folder", "signals": SIGNALS, "labels": ["0", "1"], "rate": 10, "window": 8, "standardise": "plan",
}  # fmt: skip
RECORDED = {"patient": "^(.*)_", "recording_columns": {"time": "t", "label": "doing"}}
OF_NAMES = {"patient": "^(.*)_"}
CLASSES = {"table": "classes.csv"}
PHOTOS = {"name": "image-folder", "kind": "classification", "labels": ["no", "yes"], "size": [16, 16]}
MASKS = {"name": "image-folder", "size": [16, 16]}
VOLUMES = {"name": "nifti-folder", "size": [16, 16, 8]}
DICOM = {"name": "dicom-folder", "size": [16, 16, 8]}
CONV = {"name": "activity-cnn", "norm": "group"}
UNET = {"name": "unet", "features": [4, 8], "norm": "instance"}
UNET_3D = {**UNET, "dimensions": 3}
FLAT = ["flip-x", "flip-y", "rotate90", "affine", "intensity", "noise"]
Z_SCORE = {"kind": "z-score"}

SETTINGS: dict[str, Setting] = {
    "table": Setting(full_table, TABLE, LINEAR),
    "table-mean": Setting(table, {**TABLE, "missing": "mean"}, MLP),
    "table-mark": Setting(table, {**TABLE, "missing": "mark"}, LINEAR),
    "table-none": Setting(
        full_table, {**TABLE, "standardise": "none", "kind": "regression", "target": "score", "range": [0, 10]}, LINEAR
    ),
    "series": Setting(recordings, SERIES, CONV, RECORDED),
    "series-split": Setting(gappy, {**SERIES, "missing": "split", "standardise": "none"}, CONV, RECORDED),
    "series-overlap": Setting(gappy, {**SERIES, "missing": "split", "step": 3}, CONV, RECORDED),
    "photos": Setting(photographs, {**PHOTOS, "augmentation": FLAT}, data=CLASSES),
    "photos-grey": Setting(grey, {**PHOTOS, "colours": "grey", "intensity": Z_SCORE}, data=CLASSES),
    "masks": Setting(photographs, {**MASKS, "augmentation": FLAT}, UNET, OF_NAMES),
    "masks-pieces": Setting(
        photographs,
        {**MASKS, "resize": False, "intensity": {"kind": "percentiles"}},
        UNET,
        OF_NAMES,
    ),
    "volumes": Setting(scans, {**VOLUMES, "augmentation": ["flip-z"], "intensity": Z_SCORE}, UNET_3D, OF_NAMES),
    "volumes-pieces": Setting(
        scans,
        {**VOLUMES, "target_spacing": [2.0, 2.0, 3.0], "intensity": {"kind": "window"}},
        UNET_3D,
        OF_NAMES,
    ),
    "slices": Setting(
        scans, {**VOLUMES, "size": [16, 16], "dimensions": 2, "intensity": {"kind": "none"}}, UNET, OF_NAMES
    ),
    "slices-all": Setting(scans, {**VOLUMES, "size": [16, 16], "dimensions": 2, "slices": "all"}, UNET, OF_NAMES),
    "slices-classes": Setting(
        scans,
        {**VOLUMES, "size": [16, 16], "dimensions": 2, "kind": "classification", "labels": ["no", "yes"]},
        data=CLASSES,
    ),
    "dicom": Setting(series, DICOM, UNET_3D),
    "dicom-classes": Setting(
        series, {**DICOM, "size": [16, 16], "dimensions": 2, "kind": "classification", "labels": ["no", "yes"]}
    ),
}

HARMONISED = {"name": "harmofl", "amplitude": {"measured": "before", "band": 0.0}}
MEASURES = {"statistics": {"epsilon": 1.0}}
FILE = {"pretraining": {"source": "file"}}
# methods that need further keys in a private plan, or that have several kinds of private steps
SPECIAL: dict[str, tuple[Choices, Choices]] = {
    "fedavg, two gradients": ({"name": "fedavg", "perturbation": {}}, {}),
    "fedrdn": ({"name": "fedrdn"}, MEASURES),
    "harmofl": ({"name": "harmofl", "amplitude": None}, {}),
    "harmofl, an amplitude": (HARMONISED, MEASURES),
    "adafed": ({"name": "adafed", **FILE}, MEASURES),
    "d-adafed": ({"name": "d-adafed", **FILE}, MEASURES),
    "fedsm": ({"name": "fedsm", "selector_sync": "server-adam"}, {}),
}
USUAL = {name for name in METHODS if METHODS[name].declares_account()} - {own["name"] for own, _ in SPECIAL.values()}
OF_METHODS = SPECIAL | {name: ({"name": name}, {}) for name in sorted(USUAL)}


# --------------------------------- Records the exact sums of a study. A second study replays the first study's answers.
class Sums:
    def __init__(self, first: "Sums | None" = None) -> None:
        self.first, self.exact = first, list[Tensor]()

    def told(self, source: NoiseSource, exact: Tensor, deviation: float) -> Tensor:
        self.exact.append(exact.detach().double().clone())
        return exact if self.first is None else self.first.exact[len(self.exact) - 1].to(exact.dtype)

    def moved(self) -> list[float]:
        assert self.first and len(self.exact) == len(self.first.exact)
        return [float((own - other).norm()) for own, other in zip(self.exact, self.first.exact, strict=True)]


def key_with(part: str) -> str:
    """Return a hospital's key. With this key, the split puts the extreme patient into `part`, and other patients into
    all three parts.
    """
    for key in (f"{number:064x}" for number in range(1000)):
        own = {person: part_alone(person, SHARES, split_of(key)) for person in PEOPLE}
        others = {own[person] for person in PEOPLE if person != ODD}
        if own[ODD] == part and len(others) == 3:
            return key
    raise AssertionError("no such key")


def study(root: Path, setting: Setting, unit: Unit, left: Leaves, part: str, sums: Sums) -> Sums:
    data = root / "data"
    for site, lacking in zip(SITES, (left, OTHERS), strict=True):
        setting.write(data / site, lacking)
        (root / "records" / site).mkdir(parents=True)
        # both hospitals split their data with the same key
        (root / "records" / site / "key").write_text(key_with(part))
        place = site_folder(root / "study", site)
        place.mkdir(parents=True)
        (place / NOISY_COUNTS).write_text(json.dumps({"draw": "x", "counts": COUNTS}))
    plan = setting.plan(unit)
    if "pretrained" in plan.build_networks():
        save_tensors(data / "pretrained.safetensors", dict(plan.build_networks()["pretrained"].state_dict()))
    learned = {"outcome": [setting.task.get("target", "outcome")]} if setting.task["name"] == "table" else {}
    described = {"folder": str(data), **learned, **setting.data}
    own = {"device": "cpu", "state_dir": str(root / "records"), "data": described, "min_patients_per_metric": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medsilo.site.settings.LEAST_AVERAGED", 1)
        patch.setattr(NoiseSource, "with_normal", lambda *given: sums.told(*given))
        summary = inprocess.run(plan, folder=root / "study", settings=make_settings(own, "a test")).summary
    assert summary.finished, summary.stopped
    return sums


def movements(folder: Path, setting: Setting, unit: Unit, part: str) -> list[float]:
    leaves = {(ODD, number) for number in range(RECORDS if unit == "patient" else 1)}
    with_all = study(folder / "with", setting, unit, set(), part, Sums())
    without = study(folder / "without", setting, unit, leaves, part, Sums(with_all))
    moved = without.moved()
    assert moved and all(own.isfinite().all() for own in with_all.exact)
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["patient", "record"])
@pytest.mark.parametrize("name", slow_but(["table", "series", "photos"], list(SETTINGS), ["masks-pieces"]))
def test_one_patient_moves_a_sum_by_one_bound(name: str, unit: Unit, tmp_path: Path) -> None:
    moved = movements(tmp_path, SETTINGS[name], unit, "train")
    assert 0.1 < max(moved) <= 1 + ROUNDING


@pytest.mark.parametrize("name", slow_but(["table"], ["table", "series", "masks-pieces", "slices", "dicom"], ()))
def test_one_patient_who_is_tested_moves_no_sum(name: str, tmp_path: Path) -> None:
    assert max(movements(tmp_path, SETTINGS[name], "patient", "test")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["fedrdn"], list(OF_METHODS), ()))
def test_one_patient_moves_a_sum_of_every_method_by_one_bound(name: str, tmp_path: Path) -> None:
    method, privacy = OF_METHODS[name]
    task = {**PHOTOS, "augmentation": FLAT}
    setting = Setting(photographs, task, data=CLASSES, method=method, privacy=privacy)
    assert 0.1 < max(movements(tmp_path, setting, "patient", "train")) <= 1 + ROUNDING


# ---------------------------------------------------------------------------------------------------- nothing is missed

# Keys with sizes or names as values; sizes and names do not change behaviour.
SIZES = {
    *("name", "shares", "split", "columns", "signals", "target", "labels", "range", "time", "event"),
    *(
        "rate",
        "window",
        "step",
        "size",
        "foreground",
        "overlap",
        "modalities",
        "target_spacing",
    ),
}


def values_of(annotation: Any) -> list[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(inner)
    if annotation is bool:
        return [True, False]
    if origin in (Annotated, Union, UnionType):
        several = inner[:1] if origin is Annotated else inner
        return [value for one in several for value in values_of(one)]
    if origin is tuple:
        return [[value] for value in values_of(inner[0])]
    kind = getattr(annotation, "model_fields", {}).get("kind")
    return [{"kind": value} for value in values_of(kind.annotation)] if kind else []


def accepts(setting: Setting, **changes: Any) -> bool:
    try:
        setting.plan(**changes)
    except MedsiloError:
        return False
    return True


def private_tasks() -> dict[str, Setting]:
    known = {setting.task["name"]: setting for setting in reversed(SETTINGS.values())}
    tried = {name: known.get(name) or _with_its_network(name) for name in TASKS}
    return {name: setting for name, setting in tried.items() if accepts(setting)}


def _with_its_network(name: str) -> Setting:
    setting = Setting(table, {"name": name})
    with suppress(MedsiloError, NotImplementedError, ValueError):
        own = TASKS[name]().default_network()
        network = own if isinstance(own, str) else own.name
        if "norm" in NETWORKS[network].model_fields:
            return replace(setting, network={"name": network, "norm": "group"})
        return replace(setting, network={"name": network})
    return setting


def test_every_task_that_is_private_is_compared() -> None:
    drawn = {name for name in TASKS if TASKS[name].synthetic}
    assert set(private_tasks()) - drawn == {setting.task["name"] for setting in SETTINGS.values()}


def test_every_setting_that_is_private_is_compared() -> None:
    """The test tries all values of each key in each setting.

    SETTINGS must try each value of a task's key, with this task or with one that shares its parent class.
    """
    compared = [setting.plan().task for setting in SETTINGS.values()]
    missing = []
    for setting in SETTINGS.values():
        task = TASKS[setting.task["name"]]
        for key in task.model_fields.keys() - SIZES - {"fold", "partition"}:
            values, declares = values_of(task.model_fields[key].annotation), _declares(task, key)
            assert values, f"{task.__name__}.{key}: is it a size?"
            alike = [getattr(own, key) for own in compared if isinstance(own, declares)]
            untried = [value for value in values if not any(_has(own, value) for own in alike)]
            missing += [(task.__name__, key, value) for value in untried if accepts(setting, **{key: value})]
    assert missing == []


def _declares(task: type[Any], key: str) -> type[Any]:
    return next(kind for kind in reversed(task.__mro__) if key in get_annotations(kind))


def _has(own: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return own.kind == value["kind"]
    return set(value) <= set(own) if isinstance(value, list) else own == value


def test_every_method_that_is_private_is_compared() -> None:
    private = set()
    for name in METHODS:
        tried = [method for method, _ in OF_METHODS.values() if method["name"] == name] or [{"name": name}]
        for method, offer in ((own, more) for own in tried for more in ({}, MEASURES)):
            setting = Setting(photographs, PHOTOS, data=CLASSES, method=method, privacy=offer)
            private |= {name} if accepts(setting) else set()
    assert private == {method["name"] for method, _ in OF_METHODS.values()}


# ---------------------------------------------------------------------------------------------------- rejected settings
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("table", {"standardise": "site"}, "give public numbers"),
        ("table-mark", {"standardise": "site"}, "one patient changes all others' inputs"),
        ("series", {"standardise": "site"}, "task.standardise=plan"),
        ("photos", {"partition": {}}, "task.partition deals patients by their number"),
        ("photos", {"fold": {"number": 1, "of": 5}}, "task.fold deals patients in turn"),
        ("table", {"kind": "survival"}, "no bound holds for one"),
    ],
)
def test_what_is_computed_across_patients_is_refused(name: str, changes: Choices, said: str) -> None:
    with pytest.raises(PlanError, match="privacy: ") as caught:
        SETTINGS[name].plan(**changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_task_that_derives_from_a_private_one_has_to_say_so_itself() -> None:
    class Other(TASKS["image-folder"]):  # type: ignore[misc]
        """A task without a declaration for private studies."""

    assert "computes across patients" in Other().not_private


@pytest.mark.usefixtures("known_key")
def test_patients_that_nothing_names_are_not_protected_by_their_lines(tmp_path: Path) -> None:
    unnamed = replace(SETTINGS["masks"], data={})
    with pytest.raises(MedsiloError, match="nothing names the.*say it in"):
        study(tmp_path / "images", unnamed, "patient", set(), "validation", Sums())
    lines = replace(SETTINGS["table"], write=nameless)
    with pytest.raises(MedsiloError, match="data.columns.patient"):
        study(tmp_path / "lines", lines, "patient", set(), "train", Sums())


def test_scores_of_a_model_that_learns_by_exact_steps_are_refused() -> None:
    ditto = replace(SETTINGS["table"], method={"name": "ditto"}, privacy={"scores": {"epsilon": 1.0}})
    with pytest.raises(PlanError, match="privacy.scores:.*by exact steps"):
        ditto.plan()


def test_a_file_of_several_patients_is_refused(tmp_path: Path) -> None:
    inside = {"time": "t", "label": "doing", "patient": "who"}
    several = replace(SETTINGS["series"], data={"recording_columns": inside})
    with pytest.raises(MedsiloError, match="write one file per patient"):
        study(tmp_path, several, "patient", set(), "train", Sums())


def test_a_patient_s_part_is_the_same_whoever_comes_or_goes() -> None:
    parts = {name: part_alone(name, SHARES, 7) for name in (f"p{n}" for n in range(5000))}
    held = Counter(parts.values())
    for share, part in zip(SHARES, ("train", "validation", "test"), strict=True):
        assert held[part] / 5000 == pytest.approx(share, abs=0.03)
