"""Describe a site's data by counts, and suppress small counts."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch.utils.data import Dataset

from medsilo.check.result import Cell, Finding, Severity, Table
from medsilo.federation.disclosure import SCORED, is_swayed, resolution_of
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.scored_together import AUROC, IN_WORDS
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.site_data import SiteData, labels_of, patients_of
from medsilo.tasks.survey import Survey

# Texts in place of a count: too small to be shown, and of data that were not read
SUPPRESSED, UNREAD = "suppressed", "not read"
HELD = " by structure and column"
SMALL = 10  # for fewer patients than this number, the check warns that scores are imprecise
LARGER = "bring more patients, or give these parts more of them (data.shares, where no table fixes the parts)"
COARSE = 0.1  # with a wider rounding step than this, scores are too coarse to compare models
FREQUENT = "; the score leaves with task.score=accuracy, which hides a rare class"
FINER = {AUROC: "; task.score=balanced_accuracy has steps half as wide"}
IDENTIFIERS = "Training reads PatientID alone, to keep a patient in one part; none of them is kept or leaves."
UNEVEN = 20  # the check warns if the largest class has more cases than the smallest class times this factor
CHECKS = {
    "data": "unreadable files; missing or wrong labels; patients in more than one of training, validation and test; "
    "copied images; empty masks; data of one class only"
}


def data_findings(survey: Survey, plan: Plan, least: int) -> Iterator[Finding]:
    where, unit = "data", unit_of(plan)
    for problem in survey.problems:
        told, _, remedy = problem.told(partial(_of_all, survey=survey, least=least)).partition("; ")
        told += "; left out" if problem.severity == "left out" else ""
        severity: Severity = "stops" if problem.severity == "stops" else "note"
        yield Finding(where, severity, told, remedy, problem.private)
    # class balance and numbers of cases mean little if the data are faulty
    if not survey.parts or not survey.usable:
        return
    if plan.task.goal.classifies:
        yield from _balance(survey.parts["train"].classes, plan.task.goal.classes, least, unit)
    read = ", ".join(f"{_shown(part.cases, least)} {name}" for name, part in survey.parts.items())
    told = f"{read} {unit} read"
    if (tested := survey.parts["test"].patients) >= least and tested:
        margin = min(98 / math.sqrt(tested), 50)
        told += f"; with {tested} test patients the 95 % margin of a share is ± {margin:.0f} points"
    yield Finding(where, "ok", told)
    yield from _small({name: part.patients for name, part in survey.parts.items()}, plan, least)


def unit_of(plan: Plan) -> str:
    """Return the plural name of the network's inputs: slices or cases."""
    return "slices" if plan.task.sliced else "cases"


def _small(patients: Mapping[str, int], plan: Plan, least: int) -> Iterator[Finding]:
    """Warn if so few patients have validation or test cases that the hospital would suppress the score, or that the
    score would be imprecise.
    """
    scored = {name: patients[name] for name in ("validation", "test")}
    if few := [name for name, count in scored.items() if 0 < count < least]:
        told = f"{' and '.join(few)}: fewer than {least} patients, so their score stays here (min_patients_per_metric)"
        yield Finding("data", "note", told, LARGER)
    if plan.task.split_by_site and (small := [name for name, count in scored.items() if least <= count < SMALL]):
        told = f"{' and '.join(small)}: fewer than {SMALL} patients, so chance moves their scores by much"
        yield Finding("data", "note", told, LARGER)


def score_findings(data: SiteData, plan: Plan, settings: SiteSettings) -> Iterator[Finding]:
    """Warn if a class has few patients, so that the hospital suppresses the plan's score, or rounds it coarsely."""
    goal, synthetic = plan.task.goal, plan.task.synthetic
    least = settings.least(synthetic)
    for part in SCORED:
        own: Dataset = getattr(data, part)
        names, labels = patients_of(own), labels_of(own)
        sway = goal.sway(own, names, least) if goal.classifies and labels is not None else None
        if sway is None or labels is None or len(set(names)) < least:
            continue
        resolution = resolution_of(settings, synthetic, names, sway)
        held, step = is_swayed(resolution, sway, least), resolution.step(*goal.metric_range)
        if not held and sway == math.inf:
            told = f"{part}: one class only, so the {IN_WORDS[goal.metric]} is undefined, and means leave it out"
            yield Finding("data", "note", told, LARGER)
            continue
        if not held and step <= COARSE:
            continue
        sizes = Counter(label for _, label in {*zip(names, labels.tolist(), strict=True)})
        fewest = min(sizes[label] for label in range(goal.classes))
        rarest = f"the rarest class has {fewest if fewest >= least else f'fewer than {least}'} patients"
        says = "stays here" if held else f"leaves in steps of {step:g}, too coarse to tell models apart"
        told = f"{part}: {rarest}, so the {IN_WORDS[goal.metric]} {says}"
        yield Finding("data", "note", told, LARGER + (FREQUENT if held else FINER.get(goal.metric, "")))


def _balance(classes: Mapping[str, int], known: int, least: int, unit: str) -> Iterator[Finding]:
    present = [count for count in classes.values() if count]
    if len(present) == 1:
        yield Finding("data", "note", "the training part has one class only", "a method with personal models may suit")
    elif len(present) < known:
        yield Finding("data", "note", f"the training part has {len(present)} of the task's {known} classes")
    if present and min(present) >= least and max(present) >= UNEVEN * min(present):
        times = max(present) / min(present)
        told = f"the training part's largest class has {times:.0f} times the {unit} of its smallest"
        yield Finding("data", "note", told, "look at balanced_accuracy rather than accuracy")


def data_tables(survey: Survey, plan: Plan, least: int) -> list[Table]:
    if not any(part.cases for part in survey.parts.values()):
        return []
    unit = unit_of(plan)
    rows = [[name, _shown(part.cases, least), _shown(part.patients, least)] for name, part in survey.parts.items()]
    tables = [Table(unit.capitalize(), ("part", unit, "patients"), rows, _note(least))]
    labels = sorted({label for part in survey.parts.values() for label in part.classes}, key=_number_first)
    if labels:
        tables.append(_classes(survey, labels, unit, least, plan.task.goal.classifies is not None))
    structures = labels if isinstance(plan.task.goal, Segmentation) else []
    named = dict.fromkeys([*structures, *survey.absent])
    if held := [[name, *_presence(name, name in structures, survey, least)] for name in named]:
        columns = ("name", "have it", "drawn, none there", "lack it or not drawn")
        tables.append(Table(unit.capitalize() + HELD, columns, held))
    measured = {
        "size{}, voxels": survey.size,
        "spacing{}, mm": survey.spacing,
        "intensity": survey.intensity and (survey.intensity,),
        "recordings, s": survey.seconds and (survey.seconds,),
    }
    if ranges := [line for name, found in measured.items() for line in _along(name, found or ())]:
        tables.append(Table("Ranges", ("quantity", "least", "greatest"), ranges))
    if survey.label_values:
        values = ", ".join(sorted(survey.label_values, key=_number_first))
        tables.append(Table("Label values", ("in the files",), [[values]]))
    if survey.identifiers:
        counts = shown_counts(list(survey.identifiers.values()), least, exclusive=False)
        lines = [[name, count] for name, count in zip(survey.identifiers, counts, strict=True)]
        tables.append(Table("Identifiers in DICOM headers", ("element", "series"), lines, IDENTIFIERS))
    return tables


def _classes(survey: Survey, labels: Sequence[str], unit: str, least: int, exclusive: bool) -> Table:
    parts = survey.parts.values()
    columns = [shown_counts([part.classes.get(label, 0) for label in labels], least, exclusive) for part in parts]
    none = ["not drawn"] * len(parts)
    rows = zip(labels, zip(*columns, strict=True), strict=True)
    lines = [[label, *(none if label in survey.absent else counts)] for label, counts in rows]
    title, first = (f"{unit} of each class", "class") if exclusive else (f"{unit} that show each label", "label")
    return Table(title.capitalize(), (first, *survey.parts), lines, _note(least))


def _note(least: int) -> str:
    beside = "and where one of them would follow from the others, the next smallest"
    return f"Counts from 1 to {least - 1} are suppressed, {beside} (min_patients_per_metric)." if least > 1 else ""


def _of_all(count: int, survey: Survey, least: int) -> Cell:
    """Show the number of cases or patients with a problem, unless this number or the number without the problem is
    small.
    """
    parts = survey.parts.values()
    wholes = sum(part.cases for part in parts), sum(part.patients for part in parts)
    return SUPPRESSED if any(0 < whole - count < least for whole in wholes) else _shown(count, least)


def _shown(count: int, least: int) -> Cell:
    return shown_counts([count], least, exclusive=False)[0]


def _presence(name: str, drawn: bool, survey: Survey, least: int) -> list[Cell]:
    """Count the cases with a structure, the cases in which annotators found no such structure, and the cases that were
    not annotated.

    If the count of one part of the data is suppressed, return only bounds, because exact sums would disclose this
    count.
    """
    cases = sum(part.cases for part in survey.parts.values())
    if name in survey.absent:
        return [0, 0, cases]
    if not drawn:
        return [cases, 0, 0]
    each = shown_counts([part.classes.get(name, 0) for part in survey.parts.values()], least, exclusive=False)
    told = [count for count in each if isinstance(count, int)]
    if len(told) == len(each):
        return [*shown_counts([sum(told), cases - sum(told)], least, exclusive=True), 0]
    return [f"at least {sum(told)}", f"at most {cases - sum(told)}", 0]


def in_words(row: Sequence[Cell] | None, sent: bool) -> Cell:
    if row is None:
        return "has it" if sent else UNREAD
    have, none, lack = row
    if have == "at least 0":
        return SUPPRESSED
    return f"lacks it ({lack})" if lack else f"{have}, none in {none}" if none else have


def shown_counts(counts: list[int], least: int, exclusive: bool) -> list[Cell]:
    """Suppress small counts. If only one count is small, also suppress the next smallest, because the known sum would
    disclose the small count.
    """
    hidden = [0 < count < least for count in counts]
    shown: list[Cell] = [f"fewer than {least}" if small else count for count, small in zip(counts, hidden, strict=True)]
    others = [place for place, small in enumerate(hidden) if not small and counts[place]]
    if exclusive and sum(hidden) == 1 and others:
        shown[min(others, key=lambda place: counts[place])] = SUPPRESSED
    return shown


def _along(name: str, ranges: Sequence[tuple[float, float]]) -> Iterator[list[Cell]]:
    for axis, (low, high) in zip("xyz", ranges, strict=False):
        yield [name.format(f" {axis}" if len(ranges) > 1 else ""), low, high]


def _number_first(label: str) -> tuple[bool, float, str]:
    number = label.lstrip("-").isdecimal()
    return (not number, float(label) if number else 0.0, label)
