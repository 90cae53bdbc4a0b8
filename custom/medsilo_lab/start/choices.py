"""Choose a plan and a hospital's settings for the files in a folder, and give a reason for every choice."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from medsilo.core.errors import DataError
from medsilo.core.text import latin
from medsilo.tasks.scored_together import usual_score
from medsilo_lab.start.dataset_facts import DatasetFacts, ranges
from medsilo_lab.start.fitting import Fit
from medsilo_lab.start.wording import LEAST_NAMED, names_a_person, plans_words, renamed, renamed_words, yes_last

# minimum number of test or validation patients for which scores are disclosed (min_patients_per_metric)
LEAST_TESTED = 5
LEAST_TRAINED = 9  # minimum number of patients of a hospital that trains
FEWEST = 2
THIN = 16  # minimum number of slices of a volume; thinner volumes do not suit a 3-D network
AIR = -500  # images that contain a value below this number count as CT images, because −1000 Hounsfield units are air
# an intensity window extends beyond the intensity range of the structures at both ends, by this fraction of the range
WIDER = 0.25
STEPS = 12
LONGEST_ROUND = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ -]{0,62}")  # matches the allowed names of structures and classes

Choices = Mapping[str, tuple[Any, str]]  # the value of each key, such as task.name, and the reason for this value


class Choice(NamedTuple):
    value: Any
    why: str


@dataclass(frozen=True)
class Draft:
    plan: Choices
    settings: Choices
    # choices for a single hospital, which have priority over the choices for all hospitals
    sites: Mapping[str, Choices] = field(default_factory=dict)


METHOD = Choice("fedavg", "the plainest; 'medsilo compare' compares others with it")
BATCH = Choice(32, "cases are small: any machine has room")
ADAMS_RATE = "usual for adam; less where the loss jumps"
# order of the sections in a plan; sections that are not listed follow at the end
SECTIONS = ("algorithm", "task", "network", "training", "participation")
BEHIND_SHARES = ("task.partition", "task.size", "task.resize")  # keys that follow task.shares in a plan


def in_order(choices: Choices) -> Choices:
    """Sort choices by section, in the order of SECTIONS. Choices in sections that SECTIONS lacks come last."""
    section = {key: key.rpartition(".")[0] for key in choices}
    places = {name: place for place, name in enumerate(SECTIONS)}
    keys = sorted(choices, key=lambda key: (not section[key], places.get(section[key], len(places)), section[key]))
    return {key: choices[key] for key in keys}


def trained_of(patients: Mapping[str, int]) -> list[str]:
    """Return the hospitals with enough patients for training. If fewer than two hospitals have enough patients, return
    all hospitals.
    """
    enough = [site for site, count in patients.items() if count >= LEAST_TRAINED]
    return enough if len(enough) > 1 else list(patients)


def named_hospitals(patients: Mapping[str, int]) -> dict[str, int]:
    """Return the hospitals for the plan. Folders with very few patients are left out, because a folder may belong to a
    patient. A hospital with very few patients may not disclose any number.
    """
    if len(patients) < 2:
        return dict(patients)
    named = {site: count for site, count in patients.items() if count >= LEAST_NAMED}
    if not named:
        raise DataError(
            f"none of {len(patients)} hospitals has {LEAST_NAMED} patients, so each folder or table may be of one "
            "patient; put all cases into one folder or table",
            ", ".join(patients),
        )
    return named


def course_of(patients: Mapping[str, int], site: str) -> Choices:
    """Choose the participating hospitals, the seed and the protocol. `patients` contains the number of patients of each
    hospital; if `site` is the only hospital, `patients` has the single key "".
    """
    alone = {"participation.sites": ([site], "this hospital alone; the consortium's lead adds the others")}
    training = trained_of(patients)
    few = {name: count for name, count in patients.items() if name not in training}
    why = f"tested and not trained on, as fewer than {LEAST_TRAINED} patients are too few for three parts"
    return {
        **(alone if "" in patients else {"participation.sites": (training, "the folder's hospitals")}),
        **({"participation.evaluation_sites": (list(few), why)} if few else {}),
        "participation.resume": (3, "times that a study goes on by itself after its job or the server died"),
        "seed": (0, "the same seed gives the same numbers"),
        "protocol": ("default", "choices on validation data; test data are used once"),
    }


# ---------------------------------------------------------------------------------------------------- the task
def labels_of(facts: DatasetFacts) -> tuple[Choice, Mapping[Any, str]]:
    """Return the labels for the plan, and a map from the hospital's labels to the labels for the plan."""
    if facts.segments:
        values = sorted({value for look in facts.looked for value in look.values} - {0})
        told, known = ", ".join(map(str, values)), dict(facts.layout.named.structures) if facts.layout.named else {}
        named = [known[value] for value in values if known.get(value) and not names_a_person(known[value])]
        if len(named) == len(values) == len(set(named)):
            return Choice(named, f"as dataset.json calls the masks' values {told}"), dict(
                zip(values, named, strict=True)
            )
        names = ["structure"] if len(values) == 1 else [f"structure-{place}" for place in range(1, len(values) + 1)]
        why = f"masks have the value{'s' if len(values) > 1 else ''} {told}, besides 0: call them what they are"
        return Choice(names, why), dict(zip(values, names, strict=True))
    words = plans_words(facts.patients_of, facts.patients_known)
    own = yes_last(sorted(set(words.values())))
    names = [name if NAME.fullmatch(name) and name == name.strip() else latin(name) for name in own]
    if len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
        raise DataError("classes have names that differ in punctuation only; use letters and digits", ", ".join(own))
    if len(own) < FEWEST:
        raise DataError(
            f"fewer than two classes have {LEAST_NAMED} patients, so the classes may be patients; add patients to "
            f"each class, or combine rare classes",
            ", ".join(words),
        )
    where = "the table's" if facts.layout.by_table else "the folders' names"
    spelt = dict(zip(own, names, strict=True))
    changed = renamed({here: spelt[plans] for here, plans in words.items()})
    return Choice(names, where + renamed_words(names)), dict(changed)


def with_score(plan: Choices) -> Choices:
    """Choose the score by which a classification selects the round and compares methods."""
    score = usual_score(plan["task.labels"][0]), "selects the round and decides; accuracy would hide a rare class"
    found = dict[str, tuple[Any, str]]()
    for key, choice in plan.items():
        found |= {key: choice, "task.score": score} if key == "task.labels" else {key: choice}
    return found


def channels_of(facts: DatasetFacts) -> Choices:
    channels = facts.channels
    if facts.flat:
        told = "all images have three channels" if channels == 3 else "all images have 1 channel"
        if channels == 3 and any(look.channels == 1 for look in facts.looked):
            told = "images in grey are read as three equal channels"
        if channels not in (1, 3):
            raise DataError(f"flat images have {channels} channels; save them in grey, or in RGB without transparency")
        return {"task.colours": ("rgb" if channels == 3 else "grey", told)}
    if facts.layout.named and len(own := facts.layout.named.channels) == channels == len(set(own)) and all(own):
        return {"task.modalities": (list(own), "as dataset.json calls them")}
    if len(files := facts.layout.channels) == channels:
        told = "one file each, in this order" if channels > 1 else "call it what it is, for example t2 or ct"
        return {"task.modalities": (list(files), told)}
    names = [f"channel-{number}" for number in range(channels)]
    return {"task.modalities": (names, "as each file has them, in this order: call them what they are")}


def dimensions_of(facts: DatasetFacts, by_slices: bool = False) -> Choice | None:
    """Choose between a 3-D network and a 2-D network on slices, or return None for 2-D images. `by_slices` is true if
    the user requests a 2-D network on slices.
    """
    if facts.flat:
        return None
    if by_slices:
        return Choice(2, "slice by slice, as --slices asked for")
    slices = facts.middle(2)
    if slices < THIN:
        return Choice(2, f"slice by slice: {slices:.0f} slices are few for a network in 3-D")
    return Choice(3, f"whole volumes: {slices:.0f} slices in the median")


def spacing_of(facts: DatasetFacts, dimensions: int) -> Choice | None:
    """Choose the voxel spacing for all hospitals, or return None for 2-D images and for images that are resized to one
    size.
    """
    if facts.flat or not facts.segments:
        return None
    middle = [float(f"{facts.spaced(axis):.2g}") for axis in range(dimensions)]
    told = ranges([look.spacing[:dimensions] for look in facts.looked])
    return Choice(middle, f"mm, the median; these images have {told}")


def intensity_of(facts: DatasetFacts) -> Choice:
    low, high = min(look.low for look in facts.looked), max(look.high for look in facts.looked)
    kinds = {look.kind for look in facts.looked}
    if facts.flat and kinds == {"uint8"}:
        return Choice({"kind": "bytes"}, "images of 8 bits: 0 to 255 becomes 0 to 1")
    if facts.flat:
        return Choice({"kind": "percentiles"}, f"values from {low:g} to {high:g}: each image by its own range")
    if low < AIR and np.median([look.low for look in facts.looked]) < AIR:
        window = "window of the structures and a quarter more" if facts.segments else "usual window of soft tissue"
        return Choice(_window(facts), f"a CT, as values begin at {low:g}: the {window}")
    return Choice({"kind": "z-score"}, f"values from {low:g} to {high:g}, no CT: they mean nothing across scanners")


def _window(facts: DatasetFacts) -> dict[str, Any]:
    if not facts.segments:
        return {"kind": "window", "low": -160, "high": 240}
    low, high = (float(np.median([look.tail[end] for look in facts.looked])) for end in (0, 1))
    more = WIDER * (high - low)
    return {"kind": "window", "low": math.floor((low - more) / 10) * 10, "high": math.ceil((high + more) / 10) * 10}


def augmentation_of(facts: DatasetFacts) -> Choice:
    if facts.flat and facts.channels == 3:
        return Choice(["flip-x", "flip-y", "intensity"], "colours: no flips where left or up means something")
    return Choice(["affine", "intensity"], "small turns, other brightness; no flips, as bodies have a left and a right")


def shares_of(patients: Mapping[str, int]) -> Choice:
    """Choose the fractions of the largest hospital's patients for training, validation and test. The function
    `shares_of_small` chooses the fractions for small hospitals.
    """
    most = max(patients.values())
    small = any(_shares(count) != _shares(most) for count in patients.values())
    few = f"; too few are tested, as scores of fewer than {LEAST_TESTED} are suppressed"
    more = few * (_tested(most) < LEAST_TESTED) + "; small hospitals have their own" * small
    return Choice(_shares(most), f"of patients in training, validation, test{more}")


def shares_of_small(patients: Mapping[str, int]) -> dict[str, Choices]:
    """For each small hospital, choose the fractions of patients for training, validation and test. The fraction for the
    test is large enough for a score that may be disclosed.
    """
    usual, found = shares_of(patients).value, dict[str, Choices]()
    for site in trained_of(patients):
        if (own := _shares(patients[site])) != usual:
            tested = _tested(patients[site])
            told = f"{tested} of {patients[site]} patients are tested, enough to disclose their score"
            found[site] = {"data.shares": (own, told)}
    return found


def _shares(patients: int) -> list[float]:
    part = max(0.2, math.ceil(100 * LEAST_TESTED / patients) / 100)
    return [0.6, 0.2, 0.2] if part == 0.2 or part > 1 / 3 else [round(1 - 2 * part, 2), part, part]


def _tested(patients: int) -> int:
    return math.floor(_shares(patients)[2] * patients + 1e-9)


def size_of(facts: DatasetFacts, fit: Fit, spacing: Choice | None, limit: str) -> Choices:
    """Choose the size of the network's input. Large 2-D images with masks are not resized. `limit` is the reason for
    the maximum input size, as a text for the plan's comments.
    """
    axes = len(fit.caps)
    sizes = [facts.middle(axis) for axis in range(axes)]
    if spacing:
        sizes = [size * facts.spaced(axis) / spacing.value[axis] for axis, size in enumerate(sizes)]
    least = fit.multiple(sizes)
    median = " x ".join(f"{size:.0f}" for size in sizes)
    pieces = facts.flat and facts.segments and max(sizes) > 2 * max(fit.caps)
    if pieces or not spacing:
        wanted = [max(least, int(min(size, cap) // least * least)) for size, cap in zip(sizes, fit.caps, strict=True)]
    else:
        wanted = _shaped_as(sizes, math.prod(fit.caps), least)
    if pieces:
        keep = False, "images keep their size: made smaller, structures would vanish"
        return {"task.size": (wanted, f"pieces of {median} pixels (median); {limit}"), "task.resize": keep}
    if all(own >= size - least for own, size in zip(wanted, sizes, strict=True)):
        return {"task.size": (wanted, f"the median is {median}; a multiple of {least}, which the network halves")}
    how = "pieces of it, in its shape" if spacing else "made smaller"
    return {"task.size": (wanted, f"the median is {median}: {how}; {limit}")}


def _shaped_as(sizes: Sequence[float], most: int, least: int) -> list[int]:
    """Return the size of a patch, which is a whole image or a part of an image. Every side of the patch is a multiple
    of `least`.

    The function starts with a patch of the image's size. While the patch has more than `most` voxels, the function
    shrinks the patch's side that is largest in proportion to the image's side.
    """
    wanted = [max(least, math.ceil(size / least - 0.5) * least) for size in sizes]
    while math.prod(wanted) > most and max(wanted) > least:
        axis = max(
            (own / size, own, place) for place, (own, size) in enumerate(zip(wanted, sizes, strict=True)) if own > least
        )[2]
        wanted[axis] -= least
    return wanted


# ---------------------------------------------------------------------------------------------------- learning
def network_of(fit: Fit, facts: DatasetFacts) -> Choices:
    dimensions = len(fit.caps)
    if not facts.segments:
        norm = "batch" if fit.network == "densenet121" else "group"
        why = "running statistics; with fewer cases than 500 try batch-statistics" if norm == "batch" else _OWN_NORM
        return {
            "network.name": (fit.network, MEASURED),
            "network.dimensions": (dimensions, "those of the images"),
            "network.norm": (norm, why),
        }
    sizes = [facts.middle(axis) for axis in range(dimensions)]
    features = list(fit.levels(sizes))
    return {
        "network.name": (fit.network, MEASURED),
        "network.dimensions": (dimensions, "those of the images" if facts.flat else "those of task.dimensions"),
        "network.features": (features, f"{len(features)} levels: the image is halved {len(features) - 1} times"),
        "network.residual_units": (2, "residual convolutions in each level"),
        "network.norm": ("instance", _OWN_NORM),
    }


MEASURED = "'medsilo check' measures whether it fits a hospital's machine"
_OWN_NORM = "no running statistics, which hospitals with other scanners would spoil for each other; FedBN needs batch"


def steps_of(cases: int, batch: tuple[Any, str]) -> Choices:
    """Choose rounds, epochs and learning rate. `cases` is the number of training cases in a hospital of median size."""
    steps = max(1, cases // batch[0])
    epochs = min(LONGEST_ROUND, max(1, math.ceil(STEPS / steps)))
    return {
        "training.rounds": (40, "a start: look at the curves, and take more where they still rise"),
        "training.local_epochs": (epochs, f"about {epochs * steps} steps a round in the median hospital"),
        "training.batch_size": batch,
        "training.optimizer": ("adam", "needs little tuning"),
        "training.learning_rate": (0.001, ADAMS_RATE),
    }


# ---------------------------------------------------------------------------------------------------- the settings
def settings_of(facts: DatasetFacts, label_map: Mapping[Any, str]) -> Choices:
    source, found = facts.source, dict[str, tuple[Any, str]]()
    if facts.layout.images:
        images = facts.layout.images[0] if len(facts.layout.images) == 1 else list(facts.layout.images)
        series = ", a DICOM series in each folder" if facts.layout.images[0].endswith("/") else ""
        each = "" if source.patient or facts.layout.table else "; each counts as one patient, without a line 'patient'"
        found["data.images"] = images, f"the text that * matches is a case's name{series}{each}"
    if facts.layout.labels:
        found["data.labels"] = facts.layout.labels, "a mask finds its image by that name"
    if table := facts.layout.table:
        found["data.table"] = table.name, "a line per case"
        if table.head:
            found["data.head"] = list(table.head), "what its columns are called, as its first line is a case"
        found["data.columns"] = table.described()["columns"], table.why
    if source.patient:
        count = f"{sum(facts.cases.values())} cases of {sum(facts.patients.values())} patients"
        found["data.patient"] = source.patient, f"a guess from the names: {count}; correct it"
    if label_map:
        what = "values in the masks" if facts.segments else "labels here"
        found["data.label_map"] = label_map, f"{what}: names in the plan"
    return found
