"""Read a hospital's data: prepare and cache cases, divide them into training, validation and test, and make the survey.

Only sites import this module.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.package import facts_of, ours_behind
from medsilo.learning.partial_labels import mark_of
from medsilo.tasks.cache import Cache, Facts, HeldEntry, PreparedEntry, ReadyCases
from medsilo.tasks.case_index import CaseIndex, Entry
from medsilo.tasks.own.own_data import OwnData, OwnFolder
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.shares import PARTS, Partition, Shares
from medsilo.tasks.site_data import SiteData, folded
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import deal, part_alone, parts_by_rank
from medsilo.tasks.survey import PartFacts, Problem, Survey, digest, range_of, ranges_of, refuse_what_stops

# settings of a site that affect prepared images and recordings
HOW_READ = ("label_map", "unannotated", "recording_columns", "missing", "rate", "decimal")


def data_of(task: OwnData, site: str, sites: Sequence[str], source: DataSource | None) -> SiteData:
    """Return one site's training, validation and test data. They are divided first and standardised then, because only
    training cases may determine how.
    """
    survey, parts = task.examined(site, sites, source)
    refuse_what_stops(survey.problems)
    data = SiteData(*(parts[part] for part in PARTS), survey=survey)
    if task.fold is not None:
        if survey.fixed:
            raise DataError(
                "this site's table names the test patients, so a cross-validation is impossible; compare without "
                "--folds"
            )
        data = folded(data, task.fold, (source.split if source else None) or 0)
    return task.completed(data)


def survey_of(task: OwnData, site: str, sites: Sequence[str], source: DataSource | None) -> Survey:
    """Return the survey of a site's data, which lists faults of the data instead of raising an error."""
    try:
        return task.examined(site, sites, source and source.once())[0]
    except MedsiloError as error:
        return Survey.stopped(str(error), error.private)


def needed(source: DataSource) -> Sequence[str]:
    """Return the names of the parts (training, validation, test) that must contain cases."""
    return ("test",) if source.only_tested else PARTS


def note_empty_parts(task: OwnData, problems: list[Problem], parts: dict[str, PartFacts], source: DataSource) -> None:
    """Record a problem if a part (training, validation, test) has no cases, or if all training cases have one class.

    Nothing is recorded if another problem already stops training, because it may be the cause of an empty part.
    """
    if any(problem.severity == "stops" for problem in problems):
        return
    for part in needed(source):
        if not parts[part].cases:
            lost = any(problem.severity == "left out" for problem in problems)
            more = "bring more patients, or fix the parts by a column of a table"
            hint = "mend what is left out first, which may be all of it" if lost else more
            problems.append(Problem("stops", f"the {part} part has no cases; {hint}"))
    shown = [label for label, cases in parts["train"].classes.items() if cases]
    if len(shown) == 1 and not isinstance(task.goal, Segmentation):
        what = "all training cases are of one class: this site's model of its own learns nothing"
        problems.append(Problem("note", what, parts["train"].cases))


class Listed(Protocol):
    problems: list[Problem]
    patients_named: bool
    identifiers: dict[str, int]

    @property
    def fixed(self) -> bool: ...


def told_in(task: OwnData, listing: Listed, parts: dict[str, PartFacts], source: DataSource, **facts: Any) -> Survey:
    return Survey(
        parts,
        problems=tuple(listing.problems),
        fixed=listing.fixed,
        patients_named=listing.patients_named,
        identifiers=listing.identifiers,
        absent=task.absent(source),
        **facts,
    )


def dealt(
    partition: Partition, site: str, sites: Sequence[str], entries: Sequence[Entry], classes: Mapping[str, int | None]
) -> list[Entry]:
    """Divide images or recordings among simulated sites, and return those of one site.

    Args:
        classes: The class of each image or recording, by its name.
    """
    order = sorted(sites)
    owners = deal(
        partition,
        [entry.patient for entry in entries],
        [classes.get(entry.name) or 0 for entry in entries],
        [entry.site for entry in entries],
        order,
    )
    return [entries[place] for place in owners[order.index(site)]]


def divided(listing: CaseIndex, source: DataSource, shares: Shares, split: int) -> dict[str, list[Entry]]:
    """Divide images or recordings into training, validation and test, by the table or by the hospital's split of
    patients.
    """
    fixed = {entry.patient: entry.part for entry in listing.entries} if listing.fixed else None
    place = drawn_parts(_own_classes(listing.entries), fixed, source, shares, split, listing.problems)
    return {part: [entry for entry in listing.entries if place[entry.patient] == part] for part in PARTS}


def drawn_parts(
    classes: Mapping[str, str],
    fixed: Mapping[str, str] | None,
    source: DataSource,
    shares: Shares,
    split: int,
    problems: Sequence[Problem],
) -> Mapping[str, str]:
    """Return the part (training, validation, test) of each patient.

    If a table assigns the patients, its assignment counts. Otherwise, the patients are sorted by a hash of their names,
    and divided in this order. Under differential privacy, the hash of a patient's name alone determines the part, so
    that no patient affects another.

    Args:
        classes: The name that the site gives the class of each patient.
        fixed: The part that the table assigns to each patient, if any.
        shares: The plan's fractions of patients for training, validation and test.
        split: The plan's seed.
    """
    if fixed is not None:
        return fixed
    own, number = source.shares or shares, split if source.split is None else source.split
    if source.each_alone:
        return {patient: part_alone(patient, own, number) for patient in classes}
    draw = partial(parts_by_rank, classes, own, number)
    usable = all(problem.severity != "stops" for problem in problems)
    enough = len(classes) >= len(PARTS)
    if source.only_tested and not enough:
        draw = partial(_into_the_test, classes)
    return source.parts(classes, draw, for_good=usable and (enough or source.only_tested))


def _own_classes(entries: Iterable[Entry]) -> dict[str, str]:
    """For each patient, return the most frequent class of the patient's cases, as the site names the class.

    The plan's names of classes are not used, because the split must not depend on the plan.
    """
    labels: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        labels[entry.patient][entry.label if isinstance(entry.label, str) else ""] += 1
    return {patient: min(own, key=lambda label: (-own[label], label)) for patient, own in labels.items()}


def _into_the_test(classes: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Assign the patients of an evaluation site with fewer than three patients.

    Patients whom an earlier study assigned keep their part; all others become test patients.
    """
    return {patient: known.get(patient, "test") for patient in classes}


def prepared(
    inputs: Tensor, targets: Tensor, shapes: Sequence[tuple[int, ...]], places: Tensor | None = None, **facts: Any
) -> PreparedEntry:
    low, high = facts.pop("intensity", None) or map(float, inputs.aminmax())
    own = facts.pop("digest", None) or digest(inputs)
    return PreparedEntry(inputs, targets, Facts(own, tuple(shapes), (low, high), **facts), places)


def classes_of(task: OwnFolder, listing: CaseIndex, source: DataSource) -> Mapping[str, int | None]:
    """Map the name of each image or recording to its class; training ignores those without a class.

    Images or recordings with a class that the plan lacks are recorded and removed from the list.
    """
    if not task.goal.classifies:
        return {}
    names = task.goal.label_names
    known = {str(number): number for number in range(len(names))} | {name: own for own, name in enumerate(names)}
    known |= {str(own): task.number_of(plans) for own, plans in source.label_map.items()}
    listing.leave_out_rare(source, {entry.name: [str(entry.label)] for entry in listing.entries})
    strangers = [entry for entry in listing.entries if str(entry.label) not in known]
    what = f"cases have a label that is not among the plan's ({', '.join(names)}); say under data what it is"
    what += f": label_map: {{your name: {names[0]}}}"
    listing.add("stops", what, [f"{entry.name}: {entry.label}" for entry in strangers])
    listing.entries = [entry for entry in listing.entries if str(entry.label) in known]
    return {entry.name: known[str(entry.label)] for entry in listing.entries}


def told_of(every: Sequence[Any]) -> dict[str, Any]:
    """Return fields of the survey: the label values in masks, and the ranges of the images' sizes, spacings and
    intensities.
    """
    values = Counter(value for one in every for value in one.facts.values)
    return {
        "label_values": {str(value): values[value] for value in sorted(values)},
        "size": ranges_of(one.facts.size for one in every),
        "spacing": ranges_of(one.facts.spacing for one in every if one.facts.spacing),
        "intensity": range_of(value for one in every for value in one.facts.intensity),
    }


def examined(
    task: OwnFolder, site: str, sites: Sequence[str], source: DataSource | None
) -> tuple[Survey, dict[str, ReadyCases]]:
    """Read the files in a site's folder once; return the survey, and the training, validation and test part of the
    data.
    """
    task.check_source(source)
    assert source is not None
    task.absent(source)  # raises an error for an invalid data.unannotated before files are read
    listing = task.listing_of(source, source.folder_of(site, task.deals))
    classes = task.classes_of(listing, source)
    make = partial(_made_of, task.maker(source), classes)
    if task.partition is not None:
        listing.entries = dealt(task.partition, site, sites, listing.entries, classes)
    parts = divided(listing, source, task.shares, task.split)
    # no fold in the cache key, so that all folds share cached files
    unfolded = task.model_copy(update={"fold": None})
    code = [facts_of(name)["hash"] for name in sorted(ours_behind(task))]
    settings = f"{unfolded.model_dump_json()} {source.model_dump_json(include={*HOW_READ})} {code}"
    holder = Cache(source, make, settings, mark_of(task.undrawn(source)))
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    held = {part: _loaded(parts[part], holder, wrong, task.files) for part in PARTS}
    for what, names in wrong.items():
        listing.add("left out", what, names)
    chosen = {part: [task.chosen_cases(one.facts) for one in held[part]] for part in PARTS}
    ready = {part: ReadyCases(held[part], chosen[part]) for part in PARTS}
    every = [one for part in PARTS for one in held[part]]
    task.note(listing, every, source)
    shown = {part: part_of(task, ready[part]) for part in PARTS}
    note_empty_parts(task, listing.problems, shown, source)
    listing.problems += _twice(held, task.files)
    return told_in(task, listing, shown, source, **task.told_of(every)), ready


def part_of(task: OwnFolder, data: ReadyCases) -> PartFacts:
    """Count the cases, the patients and the labels of one part (training, validation or test)."""
    counts: Counter[int] = Counter()
    for one, cases in zip(data.held, data.chosen, strict=True):
        counts.update(label for case in cases for label in one.facts.shown[case])
    first = 1 if isinstance(task.goal, Segmentation) else 0  # label 0 of a segmentation is the background
    shown = {name: counts[number] for number, name in enumerate(task.goal.label_names) if number >= first}
    return PartFacts(len(data), len(set(data.patients)), shown)


def _made_of(make: Callable[..., PreparedEntry], labels: Mapping[str, int | None], entry: Entry) -> PreparedEntry:
    return make(entry.images, labels.get(entry.name, entry.label), entry.patient)


def _twice(held: dict[str, list[HeldEntry]], files: str) -> Iterator[Problem]:
    """Yield a problem for files that occur twice in one part of the data, and a problem for files that occur in two
    parts.
    """
    places: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for part, entries in held.items():
        for entry in entries:
            places[entry.facts.digest].append((entry.entry.name, part))
    groups = sorted(sorted(several) for several in places.values() if len(several) > 1)
    apart = [several for several in groups if len({part for _, part in several}) > 1]
    twice = f"{files} are there twice; remove the copies"
    known = f"{files} are there twice, in two parts, so that one is judged by what another knows; remove the copies"
    for what, found in ((twice, [group for group in groups if group not in apart]), (known, apart)):
        if found:
            names = tuple(" = ".join(f"{name} ({part})" for name, part in several) for several in found)
            yield Problem("note", what, sum(len(several) - 1 for several in found), names)


def _loaded(entries: Iterable[Entry], cache: Cache, wrong: dict[str, list[str]], files: str) -> list[HeldEntry]:
    """Prepare images or recordings. Collect the names of unreadable images or recordings in `wrong`, by reason."""
    held = []
    for entry in entries:
        try:
            held.append(cache.hold(entry))
        except DataError as error:
            wrong[re.sub(r"\d+ values", "values", str(error))].append(entry.name)
        except MedsiloError:  # no fault of a file, which would raise DataError
            raise
        except Exception as error:
            wrong[f"{files} can't be made ready ({type(error).__name__}); export them again"].append(entry.name)
    return held
