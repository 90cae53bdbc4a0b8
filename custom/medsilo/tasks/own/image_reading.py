"""Read a hospital's images for the tasks `nifti-folder` and `image-folder`. Only sites import this module."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.learning.compute import labels_in
from medsilo.tasks.cache import HeldEntry, PreparedEntry
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.headers import is_turned
from medsilo.tasks.intensity import Bytes, numbers_of
from medsilo.tasks.own.folder import MOST_VOXELS, FolderTask
from medsilo.tasks.own.image_patches import middle_of
from medsilo.tasks.scans import Scan, resized, resized_to_nearest
from medsilo.tasks.sources import FEWEST, DataSource
from medsilo.tasks.survey import Problem, digest

SHOWN = 8  # limit on the number of values that an error message lists
BYTE, DARKEST = 255, 65_535 // 16  # largest 8-bit and largest 12-bit value
RARELY = (
    f"masks have a value that no label of the plan stands for, and fewer than {FEWEST} patients have; it counts as "
    "background"
)
DARK = "images of 16 bits use 12 or fewer, so that they are nearly black here; agree on task.intensity percentiles"


def made(
    task: FolderTask,
    files: tuple[Path, ...],
    label: Path | int,
    patient: str,
    mask: Callable[[Scan, Path], np.ndarray],
    numbers: dict[int, int],
) -> PreparedEntry:
    """Read one image and the label of the image, and convert both to the network's inputs and targets."""
    # nobody can know whether the mask was drawn before or after an EXIF rotation of the image
    if isinstance(label, Path) and any(map(is_turned, (*files, label))):
        raise DataError("images are stored rotated, as their EXIF orientation says; save them upright")
    scan = task.scan_of(files)
    # measure the range first, because z-score scaling changes the values in place
    between = float(scan.values.min()), float(scan.values.max())
    inputs = task.inputs_of(scan)
    values: tuple[int, ...] = ()
    if isinstance(label, Path):
        labels = mask(scan, label)
        values = tuple(np.flatnonzero(np.bincount(labels.ravel())).tolist())
        table = np.zeros(values[-1] + 1, np.uint8)
        table[list(values)] = [numbers.get(value, 0) for value in values]
        cases = task.as_cases(torch.from_numpy(table[labels])[None])
        targets = resized_to_nearest(cases, inputs.shape[2:])[:, 0]
    else:
        targets = torch.full((len(inputs),), label)
    return task.prepared(
        inputs,
        targets,
        [tuple(torch.unique(labels_in(target)).tolist()) for target in targets],
        digest=digest(torch.from_numpy(np.ascontiguousarray(scan.values))),
        size=scan.values.shape[:0:-1],
        spacing=tuple(float(length) for length in scan.spacing) if scan.values.ndim == 4 else (),
        intensity=between,
        values=values,
    )


def inputs_of(task: FolderTask, scan: Scan) -> Tensor:
    values = scan.values
    if len(values) != task.channels:
        alpha = len(values) == task.channels + 1 and values.dtype.kind == "u"
        hint = "; remove the alpha channel, which is not opaque" if alpha else ""
        raise DataError(f"images have {len(values)} channels, but the plan reads {task.channels}{hint}")
    if values.ndim != task.stored + 1:
        kinds = ("flat images", "volumes") if task.stored == 3 else ("volumes", "flat images")
        raise DataError(f"the files are {kinds[0]}, but the plan reads {kinds[1]}")
    image = torch.from_numpy(numbers_of(values, task.intensity))
    if not image.isfinite().all():
        raise DataError("images have values that are NaN or infinite")
    cases = task.as_cases(image)
    grid = task.grid_of(tuple(cases.shape[2:]), scan.spacing)
    if math.prod(grid) > MOST_VOXELS:
        raise DataError(f"images would have more than {MOST_VOXELS} voxels in the plan's target_spacing")
    cases = resized(cases, grid)
    # scale all slices of a volume together
    ready = task.intensity.apply(cases.transpose(0, 1)).transpose(0, 1)
    if not ready.isfinite().all():
        raise DataError(
            "the plan's intensity scale turns images into NaN; does an image have a single value everywhere?"
        )
    return ready if task.segments else middle_of(ready, task.size[::-1])


def note(task: FolderTask, listing: CaseIndex, every: Sequence[HeldEntry], source: DataSource) -> None:
    if task.segments:
        known = set(task.mask_values(source))
        rare = {int(value) for value in source.rare(whose(every))}
        odd = [one.entry.name for one in every if {*one.facts.values} & rare - known]
        listing.add("note", RARELY, odd)
        if strangers := sorted({int(value) for value in whose(every)} - known - rare):
            shown = ", ".join(map(str, strangers[:SHOWN])) + (", ..." if len(strangers) > SHOWN else "")
            what = f"no label of the plan stands for the masks' values {shown}; say in data.label_map what they are"
            listing.add("stops", what, [one.entry.name for one in every if set(one.facts.values) & set(strangers)])
        _note_undrawn(task, listing, every, source)
        empty = [one.entry.name for one in every if not any(any(labels) for labels in one.facts.shown)]
        listing.add("note", "masks are empty: no structure of the plan is in them", empty)
    if task.stored == 2 and isinstance(task.intensity, Bytes):
        listing.add("note", DARK, [one.entry.name for one in every if BYTE < one.facts.intensity[1] <= DARKEST])


def whose(every: Sequence[HeldEntry]) -> dict[str, set[str]]:
    """Map each value in masks to the patients whose masks contain it."""
    found: dict[str, set[str]] = {}
    for one in every:
        for value in one.facts.values:
            found.setdefault(str(value), set()).add(one.entry.patient)
    return found


def _note_undrawn(task: FolderTask, listing: CaseIndex, every: Sequence[HeldEntry], source: DataSource) -> None:
    """Record masks that contain a structure although the site declares that it did not annotate it."""
    shown = [{label for labels in one.facts.shown for label in labels} for one in every]
    undrawn = set(task.undrawn(source))
    drawn = [one.entry for one, labels in zip(every, shown, strict=True) if labels & undrawn]
    # If few patients are affected, only a note is made, because a rejection would disclose something about single
    # patients' masks
    few = source.split is not None and len({entry.patient for entry in drawn}) < FEWEST
    what = "masks show a structure that data.unannotated names; correct it, or data.label_map"
    listing.add("note" if few else "stops", what, [entry.name for entry in drawn])
    for number, name in enumerate(task.labels, 1):
        if task.may_be_absent and number not in undrawn and not any(number in labels for labels in shown):
            what = f"no mask shows {name!r}: name it in data.unannotated if nobody drew it; now it counts as not there"
            listing.problems.append(Problem("note", what, len(every)))
