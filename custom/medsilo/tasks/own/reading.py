"""A hospital's own data, read: files are made ready once and kept, divided and surveyed. Only a site imports this."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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

# Of a site's settings, by which an entry is made ready.
HOW_READ = ("label_map", "unannotated", "recording_columns", "missing", "rate", "decimal")


def data_of(task: OwnData, site: str, sites: Sequence[str], source: DataSource | None) -> SiteData:
    """Return the parts of the plan's fold, if it has one: they are dealt before anything is standardised."""
    survey, parts = task._examined(site, sites, source)
    refuse_what_stops(survey.problems)
    data = SiteData(*(parts[part] for part in PARTS), survey=survey)
    if task.fold is not None:
        if survey.fixed:
            raise DataError("this site's table fixes who is tested, so there are no folds; compare without --folds")
        data = folded(data, task.fold, (source.split if source else None) or 0)
    return task._finished(data)


def survey_of(task: OwnData, site: str, sites: Sequence[str], source: DataSource | None) -> Survey:
    """Return what is found; nothing that data can cause is raised."""
    try:
        return task._examined(site, sites, source and source.once())[0]
    except MedsiloError as error:
        return Survey.stopped(str(error), error.private)


def folder_of(task: OwnData, site: str, source: DataSource) -> Path:
    """Return the folder of a site's data: of several hospitals that lie together, its own."""
    own = source.folder / site
    return own if task.partition is None and own.is_dir() and not own.is_symlink() else source.folder


def needed(source: DataSource) -> Sequence[str]:
    """Return the parts without which the site can't take part."""
    return ("test",) if source.only_tested else PARTS


def note_empty_parts(task: OwnData, listing: CaseIndex, parts: dict[str, PartFacts], source: DataSource) -> None:
    """Note parts that are empty, and a training part from which nothing is learned; nothing while something stops
    these data, as what is missing may be that."""
    if any(problem.severity == "stops" for problem in listing.problems):
        return
    for part in needed(source):
        if not parts[part].cases:
            lost = any(problem.severity == "left out" for problem in listing.problems)
            more = "bring more patients, or fix the parts by a column of a table"
            hint = "mend what is left out first, which may be all of it" if lost else more
            listing.problems.append(Problem("stops", f"the {part} part has no cases; {hint}"))
    shown = [label for label, cases in parts["train"].classes.items() if cases]
    if len(shown) == 1 and not isinstance(task.goal, Segmentation):
        what = "all training cases are of one class: this site's model of its own learns nothing"
        listing.problems.append(Problem("note", what, parts["train"].cases))


def told_in(task: OwnData, listing: CaseIndex, parts: dict[str, PartFacts], source: DataSource, **found: Any) -> Survey:
    """Return what there is to tell of a listing's cases. found: what else was found."""
    return Survey(
        parts,
        problems=tuple(listing.problems),
        fixed=any(entry.part for entry in listing.entries),
        patients_named=listing.patients_named,
        identifiers=listing.identifiers,
        absent=task.absent(source),
        **found,
    )


def dealt(
    partition: Partition, site: str, sites: Sequence[str], entries: Sequence[Entry], classes: Mapping[str, int | None]
) -> list[Entry]:
    """Return a simulated site's share of one folder. classes: of each case, by its name."""
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
    """Return the cases of each part: the table's; or by the patient's rank, or where privacy is promised by the hash of
    the patient alone, as the site or else the plan has it."""
    if any(entry.part for entry in listing.entries):
        place = {entry.patient: entry.part for entry in listing.entries}
    elif source.each_alone:
        own, number = source.shares or shares, split if source.split is None else source.split
        place = {entry.patient: part_alone(entry.patient, own, number) for entry in listing.entries}
    else:
        classes = _own_classes(listing.entries)
        split = split if source.split is None else source.split
        draw = partial(parts_by_rank, classes, source.shares or shares, split)
        usable = all(problem.severity != "stops" for problem in listing.problems)
        enough = len(classes) >= len(PARTS)
        if source.only_tested and not enough:
            draw = partial(_into_the_test, classes)
        place = source.parts(classes, draw, for_good=usable and (enough or source.only_tested))
    return {part: [entry for entry in listing.entries if place[entry.patient] == part] for part in PARTS}


def _own_classes(entries: Iterable[Entry]) -> dict[str, str]:
    """Return each patient's class as the site calls it, so that no plan moves anybody: that of most of the cases."""
    labels: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        labels[entry.patient][entry.label if isinstance(entry.label, str) else ""] += 1
    return {patient: min(own, key=lambda label: (-own[label], label)) for patient, own in labels.items()}


def _into_the_test(classes: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of patients who are fewer than parts: who has none yet is tested."""
    return {patient: known.get(patient, "test") for patient in classes}


def prepared(
    inputs: Tensor, targets: Tensor, shown: Sequence[tuple[int, ...]], places: Tensor | None = None, **told: Any
) -> PreparedEntry:
    """Return an entry that is ready. shown: the labels that each of its cases shows; told: more of its facts."""
    low, high = told.pop("intensity", None) or map(float, inputs.aminmax())
    own = told.pop("digest", None) or digest(inputs)
    return PreparedEntry(inputs, targets, Facts(own, tuple(shown), (low, high), **told), places)


def classes_of(task: OwnFolder, listing: CaseIndex, source: DataSource) -> Mapping[str, int | None]:
    """Return the class of every entry of a classification, by its name; None where nothing is learned of it.

    Entries of a class that the plan does not have count as none of its classes: they leave the listing.
    """
    if not task.goal.classifies:
        return {}
    names = task.goal.label_names
    known = {str(number): number for number in range(len(names))} | {name: own for own, name in enumerate(names)}
    known |= {str(own): task.number_of(plans) for own, plans in source.label_map.items()}
    strangers = [entry for entry in listing.entries if str(entry.label) not in known]
    what = f"cases have a label that is not among the plan's ({', '.join(names)}); say under data what it is"
    what += f": label_map: {{your name: {names[0]}}}"
    listing.add("stops", what, [f"{entry.name}: {entry.label}" for entry in strangers])
    listing.entries = [entry for entry in listing.entries if str(entry.label) in known]
    return {entry.name: known[str(entry.label)] for entry in listing.entries}


def told_of(every: Sequence[Any]) -> dict[str, Any]:
    """Return what a survey tells of entries, by its fields; by default of images."""
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
    """Return what there is in a site's folder, read once, and the parts."""
    task.check_source(source)
    assert source is not None
    task.absent(source)  # which stops what can't be absent before anything is read
    listing = task.listing_of(source, folder_of(task, site, source))
    classes = task.classes_of(listing, source)
    make = partial(_made_of, task.maker(source), classes)
    if task.partition is not None:
        listing.entries = dealt(task.partition, site, sites, listing.entries, classes)
    parts = divided(listing, source, task.shares, task.split)
    unfolded = task.model_copy(update={"fold": None})  # files are made ready once for all folds
    code = [facts_of(name)["hash"] for name in sorted(ours_behind(task))]
    settings = f"{unfolded.model_dump_json()} {source.model_dump_json(include={*HOW_READ})} {code}"
    holder = Cache(source, make, settings, mark_of(task._undrawn(source)))
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    held = {part: _loaded(parts[part], holder, wrong, task.files) for part in PARTS}
    for what, names in wrong.items():
        listing.add("left out", what, names)
    chosen = {part: [task._chosen(one.facts) for one in held[part]] for part in PARTS}
    ready = {part: ReadyCases(held[part], chosen[part]) for part in PARTS}
    every = [one for part in PARTS for one in held[part]]
    task.note(listing, every, source)
    shown = {part: part_of(task, ready[part]) for part in PARTS}
    note_empty_parts(task, listing, shown, source)
    listing.problems += _twice(held, task.files)
    return told_in(task, listing, shown, source, **task.told_of(every)), ready


def part_of(task: OwnFolder, data: ReadyCases) -> PartFacts:
    """Return what there is to tell of one part."""
    counts: Counter[int] = Counter()
    for one, cases in zip(data.held, data.chosen, strict=True):
        counts.update(label for case in cases for label in one.facts.shown[case])
    first = 1 if isinstance(task.goal, Segmentation) else 0  # background is no label
    shown = {name: counts[number] for number, name in enumerate(task.goal.label_names) if number >= first}
    return PartFacts(len(data), len(set(data.patients)), shown)


def _made_of(make: Callable[..., PreparedEntry], labels: Mapping[str, int | None], entry: Entry) -> PreparedEntry:
    """Make an entry ready. labels: of those of a classification, by their names."""
    return make(entry.images, labels.get(entry.name, entry.label), entry.patient)


def _twice(held: dict[str, list[HeldEntry]], files: str) -> Iterator[Problem]:
    """Yield what there is to say of copies, with their names and the parts in which they lie."""
    places: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for part, entries in held.items():
        for one in entries:
            places[one.facts.digest].append((one.entry.name, part))
    groups = sorted(sorted(several) for several in places.values() if len(several) > 1)
    apart = [several for several in groups if len({part for _, part in several}) > 1]
    twice = f"{files} are there twice; remove the copies"
    known = f"{files} are there twice, in two parts, so that one is judged by what another knows; remove the copies"
    for what, found in ((twice, [own for own in groups if own not in apart]), (known, apart)):
        if found:
            names = tuple(" = ".join(f"{name} ({part})" for name, part in several) for several in found)
            yield Problem("note", what, sum(len(several) - 1 for several in found), names)


def _loaded(entries: Iterable[Entry], cache: Cache, wrong: dict[str, list[str]], files: str) -> list[HeldEntry]:
    """Return what can be read of these; what can't is noted."""
    held = []
    for entry in entries:
        try:
            held.append(cache.hold(entry))
        except DataError as error:
            wrong[re.sub(r"\d+ values", "values", str(error))].append(entry.name)
        except MedsiloError:  # not the file's fault
            raise
        except Exception as error:
            wrong[f"{files} can't be made ready ({type(error).__name__}); export them again"].append(entry.name)
    return held
