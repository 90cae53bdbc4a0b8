"""Write the page with which a person reviews a hospital's data set.

The page shows pictures of ten cases, and lists columns, missing values and duplicate files.

The page contains patients' data, so it is stored beside the data set and never leaves the hospital.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from medsilo.core.text import counted
from medsilo.site.data_set import DataSet, KnownFile
from medsilo.tasks.columns import Columns, TextColumn
from medsilo.tasks.overlays import draw_found
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.sources import MISSING, DataSource
from medsilo.tasks.survey import Survey
from medsilo.tasks.task import Task
from medsilo_lab.report.read import picture_of
from medsilo_lab.report.template import fill
from medsilo_page.charts import Drawing

SHOWN = 10
BINS, WIDTH, HEIGHT = 20, 220, 56  # histogram: number of bins, and width and height in pixels
MOST_LEVELS = 12
MOST_NAMES = 20
LIMITS = (
    "Whether the labels are right: look at the pictures, and at cases of your own choice.",
    "Whether a patient has two names, or two patients share one.",
    "Anything about cases that were left out: private/ beside the data set names them.",
)


@dataclass(frozen=True)
class Picture:
    name: str
    caption: str
    image: str


@dataclass(frozen=True)
class ColumnFacts:
    name: str
    use: str
    missing: str
    values: str
    chart: Markup | str = ""


def page_of(
    data_set: DataSet, task: Task, data: SiteData, source: DataSource, files: Sequence[KnownFile], table: Columns | None
) -> str:
    least, words = 1, dict(data_set.in_words())
    parts = [
        (part, [getattr(data.survey.parts[part], key) if data.survey else 0 for key in ("patients", "cases")], counts)
        for part, counts in data_set.tells.items()
    ]
    asked = [f"{key}: {answer}" for key, answer in data_set.answers.items()]
    notices = [
        {"kind": "warning", "word": "left out", "text": f"{why}: {many:,}"} for why, many in data_set.left_out.items()
    ]
    notices += [{"kind": "note", "word": "note", "text": f"{what}: {many:,}"} for what, many in data_set.notes.items()]
    if not data_set.patients.known:
        told = "The data do not name the patients. Each case counts as a patient of its own, as a person said."
        notices.insert(0, {"kind": "warning", "word": "patients", "text": told})
    return fill(
        "data_set.html",
        f"Data set {data_set.name}",
        answer=f"{counted(data_set.patients.count, 'patient')}; {words['patients'].partition('; ')[2]}",
        context=f"Made on {data_set.made} of {counted(data_set.inventory.files, 'file')}, "
        f"{data_set.inventory.bytes / 1e6:,.1f} MB. Identity {data_set.identity[:12]}. "
        f"This page shows patients' data: it stays at this hospital.",
        notices=notices,
        limits=LIMITS,
        least=least,
        found=data_set.found,
        asked=asked,
        learns={key: _said(value) for key, value in data_set.learns.items()},
        parts=parts,
        words=data_set.words,
        hospitals=data_set.hospitals,
        pictures=[*_pictures(task, data)],
        columns=[*_columns(data_set, source, table)] if table else [],
        ranges=_ranges(data.survey),
        twice=_twice(files),
        names=MOST_NAMES,
    )


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _ranges(survey: Survey | None) -> dict[str, str]:
    if survey is None:
        return {}
    ranges: Mapping[str, Any] = {
        "size, voxels": survey.size,
        "spacing, mm": survey.spacing,
        "grey values": survey.intensity and (survey.intensity,),
        "length, s": survey.seconds and (survey.seconds,),
    }
    found = {what: " × ".join(f"{low:g} to {high:g}" for low, high in own) for what, own in ranges.items() if own}
    values = ", ".join(f"{value} ({counted(many, 'case')})" for value, many in survey.label_values.items())
    return found | ({"values in label files": values} if values else {})


def _twice(files: Sequence[KnownFile]) -> list[list[str]]:
    same = defaultdict[str, list[str]](list)
    for file in files:
        same[file.sha256].append(file.name)
    return [names for names in same.values() if len(names) > 1]


# ---------------------------------------------------------------------------------------------------- pictures
def _pictures(task: Task, data: SiteData) -> Iterator[Picture]:
    """Yield pictures of up to ten cases. In the picture of a case with a mask, outlines show the structures."""
    whole = [(part, number) for part in PARTS for number in range(len(getattr(data, part)))]
    step = max(1, len(whole) // SHOWN)
    with TemporaryDirectory() as folder:
        for part, number in whole[::step][:SHOWN]:
            image, target = getattr(data, part)[number][:2]
            if not isinstance(image, Tensor) or image.ndim not in (3, 4):
                return
            masks = _masks(task, target)
            none = torch.zeros((1, *image.shape[1:]), dtype=torch.bool)
            draw_found(
                image, torch.zeros_like(none), none if masks is None else masks, path := Path(folder, "case.png")
            )
            if drawn := picture_of(path):
                yield Picture(f"{part} {number + 1}", _caption(task, target, masks), drawn)


def _masks(task: Task, target: Tensor) -> Tensor | None:
    """Return the masks of a case's structures as a tensor [structures, (D,) H, W]. If the task is not a segmentation,
    return None.
    """
    if not isinstance(task.goal, Segmentation):
        return None
    many = int(target.max()) if target.numel() else 0
    return torch.stack([target == value for value in range(1, max(many, 1) + 1)])


def _caption(task: Task, target: Tensor, masks: Tensor | None) -> str:
    labels = tuple(getattr(task, "labels", ()))
    if masks is not None:
        shares = (float(mask.float().mean()) for mask in masks)
        names = labels[-len(masks) :] if len(labels) >= len(masks) else range(1, len(masks) + 1)
        return ", ".join(f"{name} {100 * share:.1f} %" for name, share in zip(names, shares, strict=False))
    if target.numel() == 1 and task.goal.classifies:
        place = int(target)
        return str(labels[place]) if place < len(labels) else str(place)
    return ""


# ---------------------------------------------------------------------------------------------------- columns
def _columns(data_set: DataSet, source: DataSource, table: Columns) -> Iterator[ColumnFacts]:
    roles = {str(name): role for role, name in source.columns.items() if isinstance(name, str)}
    outcome = {source.column(name) for name in source.outcome}
    uses = {name: _use(name, roles, outcome, source, data_set.words) for name in table.names}
    for name in sorted(table.names, key=lambda name: uses[name] == "not used"):
        column = table.column(name)
        known = ~column.isin({*MISSING, *source.missing, *source.codes.get(roles.get(name, name), ())})
        missing, lines = int((~known).sum()), len(known)
        if uses[name] in ("names the patient", "names the hospital", "not used"):
            values, chart = f"{len(np.unique(column.codes[known])):,} values", ""
        else:
            values, chart = _values(column[known], source.decimal, name, table.names.index(name))
        yield ColumnFacts(name, uses[name], f"{missing:,} of {lines:,}" if missing else "none", values, chart)


def _use(name: str, roles: Mapping[str, str], outcome: set[str], source: DataSource, words: Sequence[str]) -> str:
    role = roles.get(name, name)
    if name in outcome or role in source.outcome:
        return "outcome"
    if role in ("patient", "site", "part"):
        return {"patient": "names the patient", "site": "names the hospital", "part": "says the part"}[role]
    return "input" if role in words else "not used"


def _values(column: TextColumn, decimal: str, name: str, number: int) -> tuple[str, Markup | str]:
    numbers = column.numbers(decimal)
    finite = numbers[np.isfinite(numbers)]
    if len(finite) == len(numbers) and len(np.unique(finite)) > MOST_LEVELS:
        low, middle, high = np.percentile(finite, [0, 50, 100])
        return f"{low:g} to {high:g}, median {middle:g}", _histogram(finite, name, number)
    shown = column.shown()
    counts = np.bincount(shown.codes, minlength=len(shown.values))
    order = np.argsort(-counts, kind="stable")
    told = [f"{shown.values[place]} ({counts[place]:,})" for place in order[:MOST_LEVELS]]
    return ", ".join(told) + (f" and {len(order) - MOST_LEVELS:,} more" if len(order) > MOST_LEVELS else ""), ""


def _histogram(values: np.ndarray, name: str, number: int) -> Markup:
    counts, edges = np.histogram(values, BINS)
    key, most, wide = f"column-{number}", max(int(counts.max()), 1), WIDTH / BINS
    told = f"most between {edges[counts.argmax()]:g} and {edges[counts.argmax() + 1]:g}"
    svg = Drawing.start(WIDTH, HEIGHT + 16, key, f"Histogram of {name}", told, small=True)
    bars = svg.group("s0 bars")
    for place, count in enumerate(counts.tolist()):
        tall = HEIGHT * count / most
        bars.path("band", f"M{place * wide:.1f} {HEIGHT}v{-tall:.1f}h{wide - 1:.1f}v{tall:.1f}z")
    svg.text(f"{edges[0]:g}", 0, HEIGHT + 13)
    svg.text(f"{edges[-1]:g}", WIDTH, HEIGHT + 13, "end")
    return svg.markup()
