"""The content of a hospital's ledger and the price of a plan: for `medsilo ledger`, the check and the leak report."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from medsilo.check.result import Finding
from medsilo.core.errors import MedsiloError
from medsilo.federation.private_numbers import COUNTS_REFUSED, NUMBERS, WHAT, how_told
from medsilo.plan import Plan
from medsilo.privacy.accounting import epsilon_of
from medsilo.privacy.agreed import Demands, Told, stricter
from medsilo.site.book import Book, data_set
from medsilo.site.ledger import Ledger, LedgerStanding
from medsilo.site.settings import SiteSettings

DELTA = 1e-5  # where neither the hospital nor its ledger names one


@dataclass(frozen=True)
class StudySpent:
    """The cost of one study."""

    study: str
    plan: str
    method: str
    lead: str
    answers: int
    epsilon: float | None  # by itself; None: no bound holds


@dataclass(frozen=True)
class LedgerSpent:
    """The content of one data set's ledger."""

    data: str
    lines: int
    head: str
    delta: float
    epsilon: float | None  # of all studies together
    allowed: float | None
    studies: tuple[StudySpent, ...]

    @property
    def left(self) -> float | None:
        """Return how far the total is from what is allowed."""
        return None if self.epsilon is None or self.allowed is None else max(0.0, self.allowed - self.epsilon)


def spent(ledger: Ledger, demands: Demands | None) -> LedgerSpent:
    """Return what a ledger says; raises MedsiloError where it was changed."""
    standing = ledger.standing()
    named = [entry.delta for entry in standing.entries if entry.delta is not None]
    delta = demands.delta if demands else named[-1] if named else DELTA
    return LedgerSpent(
        ledger.data,
        len(standing.entries),
        standing.head,
        delta,
        _known(standing.epsilon(delta)),
        demands.epsilon if demands else None,
        tuple(_of_study(standing, study, delta) for study in standing.studies()),
    )


def _of_study(standing: LedgerStanding, study: str, delta: float) -> StudySpent:
    entries = [entry for entry in standing.entries if entry.spending and entry.spending.study == study]
    spending = entries[-1].spending
    assert spending
    answers = sum(entry.kind == "charged" for entry in entries)
    cost = _known(epsilon_of(standing.of(study), delta))
    return StudySpent(study, spending.plan, spending.method, spending.lead, answers, cost)


def _known(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def in_words(epsilon: float | None) -> str:
    """Return an ε as people read it."""
    return "no bound" if epsilon is None else f"{epsilon:.3f}"


def spending_lines(found: LedgerSpent) -> list[str]:
    """Return what a ledger says, in lines."""
    allowed = "" if found.allowed is None else f" of {found.allowed:g} allowed, about {in_words(found.left)} left"
    lines = [
        f"data set {found.data}: ε = {in_words(found.epsilon)} at δ = {found.delta:g}{allowed}",
        f"  {found.lines} lines, the last one {found.head[:16]}",
    ]
    for one in found.studies:
        lead = f", submitted by {one.lead}" if one.lead else ""
        lines.append(
            f"  {one.study}: {one.method}{lead}, answers: {one.answers}, ε = {in_words(one.epsilon)} by itself"
        )
    return lines


# ---------------------------------------------------------------------------------------------------- before a study
def privacy_findings(plan: Plan, settings: SiteSettings, book: Book | None) -> Iterator[Finding]:
    """Yield whether plan and hospital agree on privacy, what the study costs, and what is left."""
    demands, where = settings.privacy, "privacy"
    if plan.privacy is None:
        if demands:
            told = "this hospital demands differential privacy, and the plan promises none"
            yield Finding(where, "stops", told, "ask the lead for a plan with a section privacy")
        return
    promise = stricter(plan.privacy, demands)
    told = f"the study may cost ε = {promise.epsilon:g} at δ = {promise.delta:g} for each {promise.unit}"
    if how_told(plan, demands, "counts", settings.protects(plan.task.synthetic)) == "silent":
        what, _, todo = COUNTS_REFUSED.partition(": ")
        yield Finding(where, "stops", what, todo)
    if demands is None:
        yield Finding(where, "note", told, "say in medsilo.yaml what all studies may cost together (privacy)")
        return
    spent_so_far = 0.0
    if book:
        ledger = Ledger(book.folder, data_set(settings.data.folder if settings.data else None, plan.task.name))
        try:
            spent_so_far = ledger.standing().epsilon(demands.delta) if ledger.exists else 0.0
        except MedsiloError as error:
            yield Finding(where, "stops", str(error), "put the ledger back from a copy")
            return
    told += f"; earlier studies of these data cost ε = {in_words(_known(spent_so_far))} of {demands.epsilon:g} allowed"
    fits = spent_so_far < demands.epsilon
    yield Finding(where, "ok" if fits else "stops", told, "" if fits else "see medsilo ledger show")


def price_list(plan: Plan, settings: SiteSettings) -> list[tuple[str, str]]:
    """Return what leaves and what it costs: noisy, declared public, withheld, or not protected."""
    demands = settings.privacy
    rows = []
    phases = [stretch.phase for stretch in plan.course.stretches()]
    once = {group.name for phase in phases if phase.releases for group in phase.sent}
    for group in dict.fromkeys(group.name for phase in phases for group in phase.sent):
        price = _price_of_means(plan, demands) if group in once else _price_of_tensors(plan, demands)
        rows.append((f"tensors: {group}", price))
    for told in dict.fromkeys(told for numbers in NUMBERS.values() for told in numbers):
        rows.append((WHAT[told], _price_of_numbers(plan, told, settings)))
    return rows


def _price_of_tensors(plan: Plan, demands: Demands | None) -> str:
    if plan.privacy is None:
        return "not protected"
    promise = stricter(plan.privacy, demands)
    networks = ", ".join(plan.private.networks)
    return (
        f"sampled Gaussian noise on each step's gradient of {networks}; all tensors of all rounds together at most "
        f"ε = {promise.epsilon:g} at δ = {promise.delta:g} for each {promise.unit}"
    )


def _price_of_means(plan: Plan, demands: Demands | None) -> str:
    if plan.privacy is None or plan.privacy.statistics is None:
        return "not protected"
    share = plan.privacy.statistics.epsilon * stricter(plan.privacy, demands).epsilon / plan.privacy.epsilon
    return (
        f"each {stricter(plan.privacy, demands).unit}'s part is cut to {plan.privacy.statistics.clip:g}, and the sum "
        f"has Gaussian noise; ε = {share:.3g} for all of the study, part of the study's"
    )


def _price_of_numbers(plan: Plan, told: Told, settings: SiteSettings) -> str:
    demands = settings.privacy
    if plan.privacy is None:
        return "not protected"
    guarded = demands is not None or settings.protects(plan.task.synthetic)
    how = how_told(plan, demands, told, guarded)
    if how == "noisy":
        kind, offer = ("geometric", plan.privacy.counts) if told == "counts" else ("Laplace", plan.privacy.scores)
        assert offer
        share = offer.epsilon * stricter(plan.privacy, demands).epsilon / plan.privacy.epsilon
        what = "drawn once" if told == "counts" else "on the score; nothing else of it leaves"
        return f"{kind} noise {what}; ε = {share:.3g} for all of the study, part of the study's"
    if how == "silent":
        return "not declared public: this hospital does not join" if told == "counts" else "0: does not leave"
    if demands and told in demands.public:
        return f"0: declared public ({demands.public[told]})"
    return "not protected"
