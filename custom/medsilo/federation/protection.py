"""Protect a hospital's patients from a lead who asks much: a split of its own, and counted answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medsilo.core.errors import DataError, Refused, Unfit
from medsilo.federation.site_context import SiteContext
from medsilo.plan import Plan
from medsilo.runs.paths import hospital_folder
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import QueryBudget, Requester, data_set
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.sources import DataSource

UNFIT = (
    "this hospital's data do not fit the plan, or are too few for it; its engineer sees why with "
    "'medsilo check JOB --kit KIT'"
)
SHARES = (0.6, 0.2, 0.2)  # of patients, where a hospital names none


class Protection:
    """A site's protection in one study; it does nothing where nobody needs it."""

    def __init__(self, place: SiteContext) -> None:
        self.plan, self.site, self.settings, self.folder = place.plan, place.site, place.settings, place.folder
        self.on = self.settings.protects(self.plan.task.synthetic)
        self.book = book_of(self.settings, self.site, self.folder)
        source = self.settings.data
        self.asker = Requester(place.lead, data_set(source, self.plan.task.name), place.study)

    def admit(self) -> None:
        """Raise Refused, before data are read, for a study that asks for more than this hospital answers."""
        if not self.on:
            return
        if self.plan.task.deals:
            raise Refused(
                "the plan divides patients' data among simulated sites (task.partition); remove it, or set "
                f"public_data in the hospital's {FILE_NAME}"
            )
        if fold_refused := not_its_folds(self.plan, self.settings):
            raise Refused(fold_refused)
        self.book.admit(self.asker, planned_answers(self.plan), self.settings)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Refuse data that do not fit the plan, without a word of how many cases, or which columns, are the reason: a
        lead who chooses columns and levels would read patients from that."""
        try:
            yield
        except Unfit as error:
            if not self.on and self.settings.privacy is None:
                raise
            raise DataError(UNFIT, private=f"{error} {error.private}") from error

    def source(self) -> DataSource | None:
        """Return where the data are, with the split that this hospital decides by itself."""
        source = read_for(self.plan, self.settings.data, self.site in self.plan.participation.evaluation_sites)
        if not self.on or source is None or not self.plan.task.split_by_site:
            return source
        return with_own_split(source, self.book, self.asker.data)

    def warnings(self) -> list[str]:
        """Return what the lead should know of the split."""
        source = self.settings.data
        own = (source and source.shares) or SHARES
        if not self.on or not self.plan.task.split_by_site or getattr(self.plan.task, "shares", own) == own:
            return []
        return [
            f"this hospital divides its patients by itself ({', '.join(map(str, own))}); task.shares is not used here"
        ]

    def note(self, **parts: int) -> None:
        """Count what is about to leave; raises Refused when nothing is left of this hospital's budget."""
        told: Any = {part: int(times) for part, times in parts.items() if times}
        if self.on and told:
            self.book.note(self.asker, told, self.settings)


def read_for(plan: Plan, source: DataSource | None, only_tested: bool = False) -> DataSource | None:
    """Return the data as a plan has them read: where it promises privacy, each patient by itself.

    only_tested: whether the site does not train in this study.
    """
    return source and source.for_study(only_tested, bool(plan.privacy) and plan.task.split_by_site)


def not_its_folds(plan: Plan, settings: SiteSettings) -> str | None:
    """Return why a plan may not move this hospital's patients between parts; None where it may or doesn't."""
    fold, own = plan.task.fold, settings.data.folds if settings.data else None
    if fold is None or fold.of == own:
        return None
    has = "names no folds" if own is None else f"has {own}"
    return (
        f"the plan lets patients take turns in {fold.of} parts (task.fold), and this hospital {has}; ask it to set "
        f"data.folds: {fold.of} in its {FILE_NAME}"
    )


def book_of(settings: SiteSettings, site: str, folder: Path) -> QueryBudget:
    """Return what a site remembers. folder: the site's part of a run."""
    return QueryBudget((settings.state_dir or hospital_folder(folder)) / site)


def acquire_lock(plan: Plan, site: str, settings: SiteSettings, folder: Path) -> Callable[[], None]:
    """Take a study's place among those that a hospital works for at once; returns what gives it back. Raises Refused
    when all are taken."""
    if settings.studies is None and not settings.protects(plan.task.synthetic):
        return lambda: None  # a machine of one's own, where nothing is counted
    return book_of(settings, site, folder).begin(folder.parents[1].name, settings.studies).release


def with_own_split(source: DataSource, book: QueryBudget, data: str, writes: bool = True) -> DataSource:
    """Return the data with this hospital's own drawing, and its own shares where its settings name none.

    data: what stands for the data set; writes: whether parts that are drawn now are remembered.
    """
    split = book.number("split")
    own = source.model_copy(update={"shares": source.shares or SHARES})
    return own.drawn_by(split, book.places(data, split, writes))


def planned_answers(plan: Plan) -> dict[DataPart, int]:
    """Return how many answers with scores over each part a plan asks for; a threshold is one over validation
    cases."""
    outcome = plan.algorithm.outcome
    return {
        "train": plan.rounds,
        "validation": plan.validations + outcome.scores_besides + plan.has_threshold,
        "test": 1,
    }
