"""A hospital's own data: what tasks that read images, tables and series have in common."""

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from torch.utils.data import Dataset

from medsilo.core.errors import DataError, MedsiloError, Refused
from medsilo.core.text import plain
from medsilo.learning.undrawn import marks_of_classes
from medsilo.tasks.listing import Entry, Listing
from medsilo.tasks.partition import Partition
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import Shares, part_alone, parts_by_rank
from medsilo.tasks.survey import PARTS, PartFacts, Problem, Survey
from medsilo.tasks.task import SiteData, Task, folded

FEWEST = 2  # classes between which something can be learned


class OwnData(Task):
    """Data that a site describes itself, with parts that it decides."""

    split_by_site: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    shares: Shares = Field(
        default=(0.6, 0.2, 0.2), description="of patients in training, validation and test, if the site fixes no parts"
    )
    split: int = Field(default=0, ge=0, lt=2**32, description="another number splits the patients in another way")
    partition: Partition | None = Field(default=None, description="deals one folder or table to simulated sites")

    @property
    def deals(self) -> bool:
        return self.partition is not None

    def across_patients(self) -> str:
        if self.deals:
            return "task.partition deals patients by their number, so that one who leaves moves others; leave it out"
        return ""

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        return self.read(site, sites, seed, None if folder is None else DataSource(folder=folder))

    def read(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
        return self._finished(self._checked(site, sites, source))

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
        """Return the parts of the plan's fold, if it has one: they are dealt before anything is standardised."""
        data = self._checked(site, sites, source)
        if self.fold is not None:
            if data.survey and data.survey.fixed:
                raise DataError("this site's table fixes who is tested, so there are no folds; compare without --folds")
            data = folded(data, self.fold, (source.split if source else None) or 0)
        return self._finished(data)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> Survey:
        try:
            return self._examined(site, sites, source and source.once())[0]
        except MedsiloError as error:
            return Survey.stopped(str(error), error.private)

    def _finished(self, data: SiteData) -> SiteData:
        """Return what depends on who is in the training part."""
        return data

    def _checked(self, site: str, sites: Sequence[str], source: DataSource | None) -> SiteData:
        survey, parts = self._examined(site, sites, source)
        wrong = [problem for problem in survey.problems if problem.severity == "stops"]
        if wrong:
            if any("no cases" in problem.what for problem in wrong):  # then those that were left out may be why
                wrong += [problem for problem in survey.problems if problem.severity == "left out"]
            private = "; ".join(name for problem in wrong for name in problem.private)
            raise DataError("; ".join(problem.counted for problem in wrong), private)
        return SiteData(*(parts[part] for part in PARTS), survey=survey)

    def absent(self, source: DataSource) -> tuple[str, ...]:
        """Return which of the plan's structures, classes, modalities and columns a site says that it has not.

        Of classes that one of its labels stands for it has the first.
        """
        if source.alike and not self.goal.classifies:
            raise DataError("data.label_map: one label can stand for several classes of cases, and for nothing else")
        names = {*source.absent, *(name for own in source.alike for name in own[1:])}
        if unknown := sorted({*names, *(own[0] for own in source.alike)} - {*self.may_be_absent}):
            known = ", ".join(self.may_be_absent) or "nothing in this task"
            key = "absent" if unknown[0] in source.absent else "label_map"
            raise DataError(f"data.{key}: {unknown[0]!r} can't be absent; {known} can", ", ".join(source.absent))
        return tuple(name for name in self.may_be_absent if name in names)

    def marks(self, source: DataSource) -> list[int]:
        """Return what is added to each class of a classification at a site, 0 where it tells all apart."""
        names = self.goal.label_names
        if not self.goal.classifies:
            return []
        said = [str(name) for own in source.label_map.values() for name in (own if isinstance(own, tuple) else (own,))]
        if twice := [name for own in source.alike for name in own if said.count(name) > 1]:
            raise DataError(f"data.label_map: {twice[0]!r} is listed more than once; name it once")
        alike = [[names.index(name) for name in own] for own in source.alike]
        absent = [names.index(name) for name in self.not_here(source)]
        if len(names) - len(absent) - sum(len(own) - 1 for own in alike) < FEWEST:
            raise DataError("of the plan's classes this site tells no two apart, so that nothing is learned here")
        return marks_of_classes(len(names), absent, alike)

    def not_here(self, source: DataSource) -> list[str]:
        """Return the classes of which a site has no case, also under no other's label."""
        within = {name for own in source.alike for name in own}
        return [name for name in self.goal.label_names if name in source.absent and name not in within]

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        """The plan's names of what a hospital need not have: structures, classes, modalities, columns."""
        return ()

    @abstractmethod
    def _examined(
        self, site: str, sites: Sequence[str], source: DataSource | None
    ) -> tuple[Survey, Mapping[str, Dataset]]:
        """Return what there is in a site's data, read once, and the parts."""

    def _folder(self, site: str, source: DataSource) -> Path:
        """Return the folder of a site's data: of several hospitals that lie together, its own."""
        own = source.folder / site
        return own if self.partition is None and own.is_dir() and not own.is_symlink() else source.folder

    @staticmethod
    def _needed(source: DataSource) -> Sequence[str]:
        """Return the parts without which the site can't take part."""
        return ("test",) if source.only_tested else PARTS

    def _told(self, listing: Listing, parts: dict[str, PartFacts], source: DataSource) -> None:
        """Note parts that are empty, and a training part from which nothing is learned."""
        for part in self._needed(source):
            if not parts[part].cases:
                lost = any(problem.severity == "left out" for problem in listing.problems)
                more = "bring more patients, or fix the parts by a column of a table"
                hint = "mend what is left out first, which may be all of it" if lost else more
                listing.problems.append(Problem("stops", f"the {part} part has no cases; {hint}"))
        shown = [label for label, cases in parts["train"].classes.items() if cases]
        if len(shown) == 1 and not isinstance(self.goal, Segmentation):
            what = "all training cases are of one class: this site's model of its own learns nothing"
            listing.problems.append(Problem("note", what, parts["train"].cases))

    def _survey(
        self, listing: Listing, parts: dict[str, PartFacts], source: DataSource, copies: int, **found: Any
    ) -> Survey:
        """Return what there is to tell of a listing's cases. copies: of other cases; found: what else was found."""
        left_out = [problem for problem in listing.problems if problem.severity == "left out"]
        unlabelled = sum(problem.count for problem in left_out if "no label" in problem.what)
        return Survey(
            parts,
            unreadable=sum(problem.count for problem in left_out) - unlabelled,
            unlabelled=unlabelled,
            patients_in_two_parts=sum(p.count for p in listing.problems if p.what.startswith("patients are in two")),
            duplicates=copies,
            problems=tuple(listing.problems),
            fixed=any(entry.part for entry in listing.entries),
            patients_named=listing.patients_named,
            identifiers=listing.identifiers,
            absent=self.absent(source),
            **found,
        )


def check_absent(told: Sequence[str], task: Task) -> None:
    """Raise Refused where a hospital says that it lacks what none may lack in a task's data."""
    if strangers := sorted(set(told) - set(task.may_be_absent if isinstance(task, OwnData) else ())):
        raise Refused(f"it lacks {plain(strangers[0], 40)}, which no hospital may lack in this plan")


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
