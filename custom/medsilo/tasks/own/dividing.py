"""Divide a listing's cases: among simulated sites, and into training, validation and test."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from medsilo.tasks.listing import Entry, Listing
from medsilo.tasks.partition import Partition
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import Shares, part_alone, parts_by_rank
from medsilo.tasks.survey import PARTS


def dealt(
    partition: Partition, site: str, sites: Sequence[str], entries: Sequence[Entry], classes: Mapping[str, int]
) -> list[Entry]:
    """Return a simulated site's share of one folder. classes: of each case, by its name."""
    order = sorted(sites)
    owners = partition.deal(
        [entry.patient for entry in entries],
        [classes.get(entry.name, 0) for entry in entries],
        [entry.site for entry in entries],
        order,
    )
    return [entries[place] for place in owners[order.index(site)]]


def divided(listing: Listing, source: DataSource, shares: Shares, split: int) -> dict[str, list[Entry]]:
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
