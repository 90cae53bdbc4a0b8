"""Limit what a lead can learn about patients from many studies: the hospital's data split stays fixed, and answers are
counted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.core.errors import DataError, MedsiloError, Refused, UnfitData
from medsilo.federation.script_bits import bits_of, parts_in
from medsilo.federation.site_context import SiteContext
from medsilo.plan import Plan
from medsilo.runs.messages import SiteWarning, StudyMessage
from medsilo.runs.paths import hospital_folder
from medsilo.site.data_set import DataSet, check_accepted, check_unchanged
from medsilo.site.party import FILE_NAME
from medsilo.site.query_budget import QueryBudget, Requester, data_set
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.sources import DataSource

if TYPE_CHECKING:  # imported only for type checking, because only few studies need the privacy ledger
    from medsilo.site.ledger import Ledger

UNFIT = (
    "this hospital's data do not fit the plan, or are too few for it; its engineer sees why with "
    "'medsilo check JOB --kit KIT'"
)
UNREAD = "this hospital's data set can't be read; its engineer sees why with 'medsilo data check DATASET'"
NO_OUTCOME = (
    "this hospital's table has no declared outcome, and no plan may choose what is learned of patients; its engineer "
    "makes a data set: medsilo data TABLE"
)
DESCRIBED = (
    f"this hospital's {FILE_NAME} describes its data by keys, which no person accepted; its engineer makes a data set: "
    "medsilo data FOLDER"
)
SHOWN = 5  # maximum number of names that a refusal lists
SHARES = (0.6, 0.2, 0.2)  # default fractions of patients for training, validation and test


class Protection:
    """Applies the rules that protect a site's patients in one study. If the site's data need no protection, none of
    these rules applies.
    """

    def __init__(self, context: SiteContext) -> None:
        self.plan, self.site, self.settings, self.folder = context.plan, context.site, context.settings, context.folder
        self.kit = context.kit
        self.on = self.settings.protects(self.plan.task.synthetic)
        self.is_let_in = context.budget is not None
        self.budget = context.budget or budget_of(self.settings, self.site, self.folder)
        source = self.settings.data
        # the ledger of the data set, or None until the site has opened the ledger for a script's answer
        self._ledger: Ledger | None = None
        self.requester = Requester(context.lead, data_set(source, self.plan.task.name), context.study)

    def admit(self) -> None:
        """Raise Refused, before the site reads data, if the hospital's rules forbid a request of the study."""
        if not self.on or self.is_let_in:
            return
        if self.plan.task.deals:
            raise Refused(
                "the plan divides patients' data among simulated sites (task.partition); remove it, or set "
                f"public_data in the hospital's {FILE_NAME}"
            )
        if fold_refused := not_its_folds(self.plan, self.settings):
            raise Refused(fold_refused)
        if self.kit and self.settings.describes_data:
            raise Refused(DESCRIBED)
        if self.settings.data and self.settings.data.data_set:
            with MedsiloError.kept_back(UNREAD):
                DataSet.read(self.settings.data.data_set)
            check_accepted(self.settings.data.data_set, self.kit.key_for("data set") if self.kit else None)
            if words_refused := not_its_words(self.plan, self.settings):
                # The refusal stays at the hospital. If the lead saw refusals, the lead could try names, and so find out
                # which names the hospital's data contain.
                raise DataError(UNFIT, words_refused)
            check_unchanged(self.settings.data.data_set)
        if self.plan.task.names_outcome and self.settings.data and not self.settings.data.outcome:
            raise Refused(NO_OUTCOME)
        self.budget.admit(self.requester, planned_answers(self.plan), self.settings)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Within the context, hide the details of errors about data that do not fit the plan. A lead who chooses
        columns and levels could infer facts about patients from the details of errors.

        Details of errors about an accepted data set stay at the site, because the details may name the data set's
        columns and classes.
        """
        try:
            yield
        except DataError as error:
            accepted = bool(self.settings.data and self.settings.data.data_set)
            protected = self.on or self.settings.privacy is not None
            if not (protected and (accepted or isinstance(error, UnfitData))):
                raise
            raise DataError(UNFIT, private=f"{error} {error.private}") from error

    def source(self) -> DataSource | None:
        """Return the hospital's data source. If patients are protected, a seed of the hospital splits the data into
        training, validation and test.
        """
        source = read_for(self.plan, self.settings.data, self.site in self.plan.participation.evaluation_sites)
        if not self.on or source is None or not self.plan.task.split_by_site:
            return source
        return with_own_split(source, self.budget, self.requester.data)

    def warnings(self) -> list[SiteWarning]:
        """If the hospital's fractions of training, validation and test cases replace the plan's fractions, return a
        warning to the lead.
        """
        source = self.settings.data
        own = (source and source.shares) or SHARES
        if not self.on or not self.plan.task.split_by_site or getattr(self.plan.task, "shares", own) == own:
            return []
        return [SiteWarning(kind="own split", numbers=tuple(own))]

    def note(self, sent: Mapping[str, int] | None = None, **parts: int) -> None:
        """Count an answer in the query budget before the answer is sent; raises Refused if the query budget is spent.

        Args:
            sent: the bits that a training script sends, by kind of content
        """
        told: Any = {part: int(times) for part, times in parts.items() if times}
        if self.on and (told or sent is not None):
            self.budget.note(self.requester, told, self.settings, sent)

    def note_script(
        self, answer: StudyMessage, bits: Mapping[str, int] | None = None, rho: float | None = None
    ) -> None:
        """Record the capacity of a training script's answer, in bits, in the query budget and the signed ledger.

        Args:
            bits: the capacity by kind of content, if an airlock reduced it
            rho: the privacy charge for the noise that an airlock adds to the update
        """
        if not self.on:
            return
        bits = bits_of(answer) if bits is None else bits
        self.note(bits, **parts_in(answer))
        task, number = answer.facts["task"], answer.facts["round"]
        self.enter(f"a script's answer to {task} {number}" if number else f"a script's answer to {task}", bits, rho)

    def enter(self, purpose: str, bits: Mapping[str, int], rho: float | None = None) -> None:
        """Record in the signed ledger how many bits a training script may have sent."""
        if not self.on:
            return
        from medsilo.site.ledger import CountedStudy, Spending, ledger_of

        self._ledger = self._ledger or ledger_of(self.budget, self.requester.data, self.kit)
        own, plan = self.requester, self.plan
        spending = Spending(study=own.study, plan=plan.hash, method=plan.algorithm.title, lead=own.lead)
        self._ledger.enter(CountedStudy(spending), purpose, bits, rho)


def read_for(plan: Plan, source: DataSource | None, only_tested: bool = False) -> DataSource | None:
    """Return the hospital's data source with the changes that a plan requires. With differential privacy, each patient
    is assigned to training, validation or test independently of the other patients.

    Args:
        only_tested: whether the site is an evaluation site
    """
    return source and source.for_study(only_tested, bool(plan.privacy) and plan.task.split_by_site)


def not_its_folds(plan: Plan, settings: SiteSettings) -> str | None:
    """If the plan's number of folds differs from the hospital's number, return the reason for refusing the plan;
    otherwise, return None.
    """
    fold, own = plan.task.fold, settings.data.folds if settings.data else None
    if fold is None or fold.of == own:
        return None
    has = "names no folds" if own is None else f"has {own}"
    return (
        f"the plan lets patients take turns in {fold.of} parts (task.fold), and this hospital {has}; ask it to set "
        f"data.folds: {fold.of} in its {FILE_NAME}"
    )


def not_its_words(plan: Plan, settings: SiteSettings) -> str | None:
    """If the plan uses names, such as names of classes, that the accepted data set lacks, return a refusal that lists
    these names.

    The refusal depends only on the data set's description, so it does not disclose which names occur in the data.
    """
    folder = settings.data.data_set if settings.data else None
    unknown = DataSet.read(folder).unknown(plan.task.words) if folder else []
    if not unknown:
        return None
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    return (
        f"the plan has words that this hospital's data set does not: {', '.join(map(repr, unknown[:SHOWN]))}{more}; "
        f"ask for another plan, or say in {DataSet.FILE} what each is here, add it to words, and accept the set"
    )


def budget_of(settings: SiteSettings, site: str, folder: Path) -> QueryBudget:
    return QueryBudget((settings.state_dir or hospital_folder(folder)) / site)


def acquire_lock(plan: Plan, site: str, settings: SiteSettings, folder: Path) -> Callable[[], None]:
    """Reserve one of the hospital's slots for concurrent studies, and return the function that frees the slot.

    Raises Refused if all slots for studies are taken.
    """
    if settings.studies is None and not settings.protects(plan.task.synthetic):
        # Unprotected data need no slot if the hospital sets no limit on concurrent studies.
        return lambda: None
    return budget_of(settings, site, folder).begin(folder.parents[1].name, settings.studies).release


def with_own_split(source: DataSource, budget: QueryBudget, data: str, writes: bool = True) -> DataSource:
    """Return the data source with a split into training, validation and test cases, which depends on this hospital's
    secret seed. The split has the default fractions unless the hospital's settings state the fractions.

        writes: whether new assignments are saved
    """
    split = budget.number("split")
    own = source.model_copy(update={"shares": source.shares or SHARES})
    return own.drawn_by(split, budget.places(data, split, writes))


def planned_answers(plan: Plan) -> dict[DataPart, int]:
    """Return the number of training, validation and test scores that a plan requests; a threshold counts as a
    validation score.
    """
    outcome = plan.algorithm.outcome
    return {
        "train": plan.rounds,
        "validation": plan.validations + outcome.scores_besides + plan.has_threshold,
        "test": 1,
    }
