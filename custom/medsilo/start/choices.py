"""Choose what a plan and a hospital's settings say, from what lies in the folder; every choice has its reason."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medsilo.core.errors import DataError
from medsilo.plan import Plan, parse_plan
from medsilo.start.fitting import Fit, Machine, Step, largest_that_fits, steps_for
from medsilo.start.looks import Looks, ranges

LEAST_TESTED = 5  # patients of a part, so that their score is told (smallest_metric)
LEAST_TRAINED = 9  # patients of a hospital that trains, so that 0.6 of them are LEAST_TESTED (limits.least_cases)
THIN = 16  # slices: in fewer a network in three dimensions sees little
AIR = -500  # Hounsfield units: what lies below says that an image is a CT
WIDER = 0.25  # of the structures' range, on each side of a window
BYTE, TWELVE_BITS = 255, 4095
STEPS = 12  # of the optimizer that a round should have at least
LONGEST_ROUND = 8  # epochs
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,62}")  # of a structure or a class


@dataclass(frozen=True)
class Choice:
    """A key of a plan or of medsilo.yaml, what it is set to, and why."""

    key: str  # with a dot where it is in a section
    value: Any
    why: str


@dataclass(frozen=True)
class Draft:
    """All choices for one folder."""

    plan: tuple[Choice, ...]
    settings: tuple[Choice, ...]
    sites: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)  # hospital -> what it says in their place

    def settings_of(self, site: str) -> tuple[Choice, ...]:
        """Return all settings of a hospital, its own in the place of those that hold for all."""
        own = {choice.key: choice for choice in self.sites[site]}
        shared = [own.pop(choice.key, choice) for choice in self.settings]
        return tuple(sorted([*shared, *own.values()], key=lambda choice: "." not in choice.key))  # a section is whole


METHOD = Choice("algorithm.name", "fedavg", "the plainest; 'medsilo compare' compares others with it")


def nested(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return choices as mappings within each other."""
    values: dict[str, Any] = {}
    for choice in choices:
        section, _, key = choice.key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = choice.value
    return values


def choose(looks: Looks, sites: Sequence[str], machine: Machine, device: str | None = None) -> Draft:
    """Return the choices for a folder of these hospitals, on this machine. device: one that was asked for."""
    labels, label_map = labels_of(looks)
    shares, dimensions = shares_of(looks.patients), dimensions_of(looks)
    training = trained_of(looks.patients)
    axes = dimensions.value if dimensions else 2
    spacing = spacing_of(looks, axes)
    task = [
        Choice("task.name", "image-folder" if looks.flat else "nifti-folder", looks.found[0]),
        Choice("task.kind", "segmentation" if looks.segments else "classification", looks.layout.kind),
        labels,
        _channels(looks),
        *([dimensions] if dimensions else []),
        *([spacing] if spacing else []),
        intensity_of(looks),
        augmentation_of(looks),
        shares,
    ]
    course = course_of(sites, looks.patients if looks.layout.hospitals else {})

    def drafted(step: Step) -> Plan:
        own = [*size_of(looks, step, spacing), *network_of(Fit(step), looks)]
        rest = Choice("training.batch_size", step.batch, "")
        return parse_plan(nested([Choice("algorithm.name", "fedavg", ""), *task, *own, rest, course[0]]))

    fit = largest_that_fits(steps_for(looks.segments, axes, machine), drafted, machine)
    learning = [*network_of(fit, looks), *training_of(fit, looks, training, shares.value, machine)]
    plan = (METHOD, *task, *size_of(looks, fit.step, spacing, fit.limit(machine)), *learning, *course)
    settings = (*settings_of(looks, label_map, shares), *asked_for(device))
    return Draft(plan, settings, shares_of_small(looks.patients, shares))


def trained_of(patients: Mapping[str, int]) -> list[str]:
    """Return the hospitals that can train: those with patients enough, or all where these are too few."""
    enough = [site for site, count in patients.items() if count >= LEAST_TRAINED]
    return enough if len(enough) > 1 else list(patients)


def course_of(sites: Sequence[str], patients: Mapping[str, int]) -> list[Choice]:
    """Return who takes part, and how numbers are chosen. patients: of each hospital where the folder has all of
    them."""
    training = trained_of(patients) if patients else list(sites)
    few = {site: patients[site] for site in patients if site not in training}
    told = ", ".join(f"{site} has {count}" for site, count in few.items())
    why = f"tested and not trained on, as fewer than {LEAST_TRAINED} patients are too few for three parts: {told}"
    alone = "this hospital alone; the consortium's lead adds the others"
    return [
        Choice("participation.sites", training, "the folder's hospitals" if patients else alone),
        *([Choice("participation.unseen", list(few), why)] if few else []),
        Choice("seed", 0, "the same seed gives the same numbers"),
        Choice("protocol", "clinical", "choices on validation data; test data are used once"),
    ]


def asked_for(device: str | None) -> list[Choice]:
    """Return the device, where one was asked for."""
    return [Choice("device", device, "as --device asked for")] if device else []


# ---------------------------------------------------------------------------------------------------- the task
def labels_of(looks: Looks) -> tuple[Choice, Mapping[Any, str]]:
    """Return the plan's labels, and what the hospital's own are called there."""
    if looks.segments:
        values = sorted({value for look in looks.looked for value in look.values} - {0})
        names = ["structure"] if len(values) == 1 else [f"structure-{place}" for place in range(1, len(values) + 1)]
        told = ", ".join(map(str, values))
        why = f"masks have the value{'s' if len(values) > 1 else ''} {told}, besides 0: call them what they are"
        return Choice("task.labels", names, why), dict(zip(values, names, strict=True))
    own = list(looks.classes)
    names = [name if NAME.fullmatch(name) else re.sub(r"[^A-Za-z0-9._+ -]", "-", name).strip("-._+ ") for name in own]
    if len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
        raise DataError("classes have names that a plan can't tell apart; use letters and digits", ", ".join(own))
    counts = ", ".join(f"{name} {count}" for name, count in looks.classes.items())
    where = "the table's" if looks.layout.by_table else "the folders' names"
    changed = {old: new for old, new in zip(own, names, strict=True) if old != new}
    return Choice("task.labels", names, f"{where}, with their images: {counts}"), dict(changed)


def _channels(looks: Looks) -> Choice:
    channels = looks.channels
    if looks.flat:
        told = "all images have three channels" if channels == 3 else "all images have 1 channel"
        if channels == 3 and looks.grey:
            told = f"{looks.grey} of {len(looks.looked)} images are grey, and are read as three equal channels"
        if channels not in (1, 3):
            raise DataError(f"flat images have {channels} channels; save them in grey, or in RGB without transparency")
        return Choice("task.colours", "rgb" if channels == 3 else "grey", told)
    names = looks.layout.channels
    names = names if len(names) == channels else tuple(f"channel-{number}" for number in range(channels))
    several = "one file each, in this order" if len(names) > 1 else "call it what it is, for example t2 or ct"
    return Choice("task.modalities", list(names), several)


def dimensions_of(looks: Looks) -> Choice | None:
    """Return whether volumes are learned whole or slice by slice; None of flat images."""
    if looks.flat:
        return None
    slices = looks.middle(2)
    if slices < THIN:
        return Choice("task.dimensions", 2, f"slice by slice: {slices:.0f} slices are few for a network in 3-D")
    return Choice("task.dimensions", 3, f"whole volumes: {slices:.0f} slices in the median")


def spacing_of(looks: Looks, dimensions: int) -> Choice | None:
    """Return the spacing for all hospitals; None of flat images, and of what is resized to one size."""
    if looks.flat or not looks.segments:
        return None
    middle = [float(f"{looks.spaced(axis):.2g}") for axis in range(dimensions)]
    told = ranges([look.spacing[:dimensions] for look in looks.looked])
    return Choice("task.target_spacing", middle, f"mm, the median; these images have {told}")


def intensity_of(looks: Looks) -> Choice:
    """Return how intensities are scaled."""
    low, high = min(look.low for look in looks.looked), max(look.high for look in looks.looked)
    kinds = {look.kind for look in looks.looked}
    key = "task.intensity"
    if looks.flat and kinds == {"uint8"}:
        return Choice(key, {"kind": "bytes"}, "images of 8 bits: 0 to 255 becomes 0 to 1")
    if looks.flat:
        return Choice(key, {"kind": "percentiles"}, f"values from {low:g} to {high:g}: each image by its own range")
    if low < AIR and np.median([look.low for look in looks.looked]) < AIR:
        window = "window of the structures and a quarter more" if looks.segments else "usual window of soft tissue"
        return Choice(key, _window(looks), f"a CT, as values begin at {low:g}: the {window}")
    return Choice(
        key, {"kind": "z-score"}, f"values from {low:g} to {high:g}, no CT: they mean nothing across scanners"
    )


def _window(looks: Looks) -> dict[str, Any]:
    if not looks.segments:
        return {"kind": "window", "low": -160, "high": 240}
    low, high = (float(np.median([look.tail[end] for look in looks.looked])) for end in (0, 1))
    more = WIDER * (high - low)
    return {"kind": "window", "low": math.floor((low - more) / 10) * 10, "high": math.ceil((high + more) / 10) * 10}


def augmentation_of(looks: Looks) -> Choice:
    """Return the changes by chance in training."""
    key = "task.augmentation"
    if looks.flat and looks.channels == 3:
        return Choice(key, ["flip-x", "flip-y", "intensity"], "colours: no flips where left or up means something")
    return Choice(
        key, ["affine", "intensity"], "small turns, other brightness; no flips, as bodies have a left and a right"
    )


def shares_of(patients: Mapping[str, int]) -> Choice:
    """Return the shares of patients in training, validation and test, as they suit the largest hospital; small ones
    have shares of their own (`shares_of_small`)."""
    most = max(patients.values())
    told = f"of patients in training, validation, test; {most} patients, {_tested(most)} of them tested"
    small = sum(_shares(count) != _shares(most) for count in patients.values())
    return Choice("task.shares", _shares(most), f"{told}{f'; small hospitals have their own ({small})' * bool(small)}")


def shares_of_small(patients: Mapping[str, int], usual: Choice) -> dict[str, tuple[Choice, ...]]:
    """Return the shares of hospitals that need others, so that enough of their patients are tested."""
    found: dict[str, tuple[Choice, ...]] = {}
    for site in trained_of(patients):
        if (own := _shares(patients[site])) != usual.value:
            told = f"of {patients[site]} patients {_tested(patients[site])} are tested, so that their score is told"
            found[site] = (Choice("data.shares", own, told),)
    return found


def _shares(patients: int) -> list[float]:
    part = max(0.2, math.ceil(100 * LEAST_TESTED / patients) / 100)
    return [0.6, 0.2, 0.2] if part == 0.2 or part > 1 / 3 else [round(1 - 2 * part, 2), part, part]


def _tested(patients: int) -> str:
    least = math.floor(_shares(patients)[2] * patients + 1e-9)
    few = f" (too few, as scores of fewer than {LEAST_TESTED} are not told)" if least < LEAST_TESTED else ""
    return f"{least}{few}"


def size_of(looks: Looks, step: Step, spacing: Choice | None, limit: str = "") -> list[Choice]:
    """Return the size that the network reads; and that large flat images keep their own. limit: why it is not more."""
    axes = len(step.caps)
    sizes = [looks.middle(axis) for axis in range(axes)]
    if spacing:
        sizes = [size * looks.spaced(axis) / spacing.value[axis] for axis, size in enumerate(sizes)]
    least = step.multiple(sizes)
    median = " x ".join(f"{size:.0f}" for size in sizes)
    key = "task.size"
    pieces = looks.flat and looks.segments and max(sizes) > 2 * max(step.caps)
    if pieces or not spacing:
        wanted = [max(least, int(min(size, cap) // least * least)) for size, cap in zip(sizes, step.caps, strict=True)]
    else:
        wanted = _shaped_as(sizes, math.prod(step.caps), least)
    if pieces:
        keep = Choice("task.resize", False, "images keep their size: made smaller, structures would vanish")
        return [Choice(key, wanted, f"pieces of {median} pixels (median); {limit}"), keep]
    if all(own >= size - least for own, size in zip(wanted, sizes, strict=True)):
        return [Choice(key, wanted, f"the median is {median}; a multiple of {least}, which the network halves")]
    how = "pieces of it, in its shape" if spacing else "made smaller"
    return [Choice(key, wanted, f"the median is {median}: {how}; {limit}")]


def _shaped_as(sizes: Sequence[float], most: int, least: int) -> list[int]:
    """Return the size of pieces, multiples of a number: all of an image, or what is left of it where the axis that is
    nearest to whole gives way, until it has no more than so many voxels."""
    wanted = [max(least, math.ceil(size / least - 0.5) * least) for size in sizes]
    while math.prod(wanted) > most and max(wanted) > least:
        axis = max(
            (own / size, own, place) for place, (own, size) in enumerate(zip(wanted, sizes, strict=True)) if own > least
        )[2]
        wanted[axis] -= least
    return wanted


# ---------------------------------------------------------------------------------------------------- learning
def network_of(fit: Fit, looks: Looks) -> list[Choice]:
    """Return the network that fits."""
    step, dimensions = fit.step, len(fit.step.caps)
    if not looks.segments:
        norm = "batch" if step.network == "densenet121" else "group"
        why = "running statistics; with fewer cases than 500 try batch-statistics" if norm == "batch" else _OWN_NORM
        found = [
            Choice("network.name", step.network, fit.why),
            Choice("network.dimensions", dimensions, "those of the images"),
        ]
        return [*found, Choice("network.norm", norm, why)]
    sizes = [looks.middle(axis) for axis in range(dimensions)]
    features = list(step.levels(sizes))
    return [
        Choice("network.name", "unet", fit.why),
        Choice("network.dimensions", dimensions, "those of the images" if looks.flat else "those of task.dimensions"),
        Choice("network.features", features, f"{len(features)} levels: the image is halved {len(features) - 1} times"),
        Choice("network.residual_units", 2, "residual convolutions in each level"),
        Choice("network.norm", "instance", _OWN_NORM),
    ]


_OWN_NORM = "no running statistics, which hospitals with other scanners would spoil for each other; FedBN needs batch"


def training_of(
    fit: Fit, looks: Looks, training: Sequence[str], shares: Sequence[float], machine: Machine
) -> list[Choice]:
    """Return how long and with what steps is trained. training: the hospitals that do."""
    slices = 1 if looks.flat or len(fit.step.caps) == 3 else looks.middle(2)
    cases = int(np.median([looks.cases[site] for site in training]) * slices * shares[0])
    batch = Choice("training.batch_size", fit.step.batch, fit.limit(machine))
    return steps_of(cases, batch, 0.0005 if looks.segments else 0.001)


def steps_of(cases: int, batch: Choice, rate: float) -> list[Choice]:
    """Return how long and with what steps is trained. cases: of training, in the median hospital."""
    steps = max(1, cases // batch.value)
    epochs = min(LONGEST_ROUND, max(1, math.ceil(STEPS / steps)))
    return [
        Choice("training.rounds", 40, "a start: look at the curves, and take more where they still rise"),
        Choice("training.local_epochs", epochs, f"about {epochs * steps} steps a round in the median hospital"),
        batch,
        Choice("training.optimizer", "adam", "needs little tuning"),
        Choice("training.learning_rate", rate, "usual for adam; less where the loss jumps"),
    ]


# ---------------------------------------------------------------------------------------------------- the settings
def settings_of(looks: Looks, label_map: Mapping[Any, str], shares: Choice) -> list[Choice]:
    """Return what medsilo.yaml says of the data."""
    source, several = looks.source, bool(looks.layout.hospitals)
    where = "with a folder for each hospital" if several else "nothing is written there"
    found = [Choice("data.folder", str(source.folder), where)]
    if looks.layout.images:
        images = looks.layout.images[0] if len(looks.layout.images) == 1 else list(looks.layout.images)
        series = ", a DICOM series in each folder" if looks.layout.images[0].endswith("/") else ""
        found.append(Choice("data.images", images, f"the text that * matches is a case's name{series}"))
    if looks.layout.labels:
        found.append(Choice("data.labels", looks.layout.labels, "a mask finds its image by that name"))
    if source.patient:
        count = f"{sum(looks.cases.values())} cases of {sum(looks.patients.values())} patients"
        found.append(Choice("data.patient", source.patient, f"a guess from the names: {count}; correct it"))
    if label_map:
        what = "values in the masks" if looks.segments else "names of folders"
        found.append(Choice("data.label_map", label_map, f"{what}: names in the plan"))
    return [*found, own_shares(shares)]


def own_shares(shares: Choice) -> Choice:
    """Return the same shares for a hospital's own settings."""
    return Choice("data.shares", shares.value, "training, validation, test: at a hospital this decides")
