"""A hospital's own folder of files, images or recordings, that are made ready once and kept."""

import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from medsilo.core.errors import DataError, MedsiloError
from medsilo.tasks.listing import Entry, Listing
from medsilo.tasks.own.own_data import OwnData, dealt, divided
from medsilo.tasks.ready import Cache, Facts, HeldEntry, PreparedEntry, ReadyCases
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import PARTS, PartFacts, Problem, Survey, range_of, ranges_of, repeated


@dataclass(frozen=True)
class Found:
    """The cases of a folder, and how they are made ready."""

    listing: Listing
    classes: dict[str, int]  # by an entry's name, where one is known
    make: Callable[[Entry], PreparedEntry]
    settings: str  # what of the site's settings `make` depends on
    mark: int = 0  # on labels, of structures that nobody drew here


class OwnFolder(OwnData):
    """Files that lie in a folder, each with one case or several."""

    files: ClassVar[str] = "images"  # what they are called

    @abstractmethod
    def _found(self, source: DataSource, folder: Path) -> Found:
        """Return what lies in a folder."""

    @abstractmethod
    def _note(self, listing: Listing, every: Sequence[HeldEntry], source: DataSource) -> None:
        """Note what is odd about entries that could be read."""

    def _ranges(self, every: Sequence[HeldEntry]) -> dict[str, Any]:
        """Return what a survey tells of entries, by its fields; by default of images."""
        values = Counter(value for one in every for value in one.facts.values)
        return {
            "label_values": {str(value): values[value] for value in sorted(values)},
            "size": ranges_of(one.facts.size for one in every),
            "spacing": ranges_of(one.facts.spacing for one in every if one.facts.spacing),
            "intensity": range_of(value for one in every for value in one.facts.intensity),
        }

    def _chosen(self, facts: Facts) -> list[int]:
        """Return which of an entry's cases are used."""
        return list(range(facts.cases))

    def _examined(
        self, site: str, sites: Sequence[str], source: DataSource | None
    ) -> tuple[Survey, dict[str, ReadyCases]]:
        self.check_source(source)
        assert source is not None
        self.absent(source)  # which stops what can't be absent before anything is read
        found = self._found(source, self._folder(site, source))
        listing = found.listing
        if self.partition is not None:
            listing.entries = dealt(self.partition, site, sites, listing.entries, found.classes)
        parts = divided(listing, source, self.shares, self.split)
        unfolded = self.model_copy(update={"fold": None})  # files are made ready once for all folds
        holder = Cache(source, found.make, f"{unfolded.model_dump_json()} {found.settings}")
        wrong: defaultdict[str, list[str]] = defaultdict(list)
        held = {part: _held(parts[part], holder, wrong, self.files) for part in PARTS}
        for what, names in wrong.items():
            listing.add("left out", what, names)
        chosen = {part: [self._chosen(one.facts) for one in held[part]] for part in PARTS}
        ready = {part: ReadyCases(held[part], chosen[part], found.mark) for part in PARTS}
        every = [one for part in PARTS for one in held[part]]
        self._note(listing, every, source)
        shown = {part: self._part(ready[part]) for part in PARTS}
        self._told(listing, shown, source)
        listing.problems += _twice(held, self.files)
        copies = repeated(one.facts.digest for one in every)
        return self._survey(listing, shown, source, copies, **self._ranges(every)), ready

    def _part(self, data: ReadyCases) -> PartFacts:
        counts: Counter[int] = Counter()
        for one, cases in zip(data.held, data.chosen, strict=True):
            counts.update(label for case in cases for label in one.facts.shown[case])
        first = 1 if isinstance(self.goal, Segmentation) else 0  # background is no label
        shown = {name: counts[number] for number, name in enumerate(self.goal.label_names) if number >= first}
        return PartFacts(len(data), len(set(data.patients)), shown)


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


def _held(entries: Iterable[Entry], cache: Cache, wrong: dict[str, list[str]], files: str) -> list[HeldEntry]:
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
