"""Compare a plan's scored answers with a hospital's quotas, and a plan's privacy with the hospital's privacy budget."""

import secrets
from collections import Counter
from collections.abc import Iterator

from medsilo.check.result import Finding
from medsilo.core.errors import MedsiloError
from medsilo.core.text import epsilon_text, size_text
from medsilo.federation.limits import LEAST_LEARNING, asked_of, learning_per_answer
from medsilo.federation.private_site import COUNTS_REFUSED, NUMBERS, WHAT, how_told
from medsilo.federation.protection import (
    SHARES,
    not_its_folds,
    not_its_words,
    planned_answers,
    read_for,
    with_own_split,
)
from medsilo.plan import Plan
from medsilo.privacy.guarantees import PROTECTIVE_EPSILON
from medsilo.runs.disclosed import CASES
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import ledger_of
from medsilo.site.query_budget import QueryBudget, data_set
from medsilo.site.settings import PrivacyRequirements, SiteSettings, Told
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import Survey

CHECKS = {
    "quotas": "the plan stays within [your limits](join.md#your-limits); the plan's timeout counts as the "
    "duration of a round",
    "privacy": "enough of your privacy budget is left",
}


def source_of(
    plan: Plan, settings: SiteSettings, budget: QueryBudget | None, only_tested: bool = False, at_hospital: bool = True
) -> DataSource | None:
    """Return a site's data source with the split into training, validation and test that a study would use.

    A hospital splits its patients at random once, and reuses that split in all studies. If one person owns all sites,
    as in 'medsilo run', the plan defines the split.
    """
    source = read_for(plan, settings.data, only_tested)
    if source is None or not settings.protects(plan.task.synthetic) or not plan.task.split_by_site:
        return source
    if budget and (budget.has_key or (at_hospital and budget.may_begin)):
        return with_own_split(source, budget, data_set(source, plan.task.name), writes=False)
    if not at_hospital:
        return source
    return source.model_copy(update={"shares": source.shares or SHARES}).drawn_by(secrets.randbits(32))


def limit_findings(plan: Plan, settings: SiteSettings, budget: QueryBudget | None, survey: Survey) -> Iterator[Finding]:
    where = "quotas"
    over = [one for one in asked_of(plan, plan.parameters) if one.asked > one.most]
    for one in over:
        told = f"the plan asks for {one.asked:.10g} {one.unit}, and a hospital gives {one.most:.10g} at most"
        yield Finding(where, "stops", told, f"ask the lead for less: {one.remedy}")
    train = survey.parts["train"].cases if survey.parts else 0
    if train and learning_per_answer(plan, train) < LEAST_LEARNING:
        told = "learning rate × steps is next to nothing for each answer with scores"
        yield Finding(where, "stops", told, f"ask the lead for a plan that trains ({LEAST_LEARNING:g} or more)")
    if not over:
        memory = f"{size_text(settings.most_memory)} of memory for training" if settings.isolated else "any memory"
        yield Finding(where, "ok", f"the plan stays within this site's own limits; {memory}")
    if not settings.protects(plan.task.synthetic):
        return
    if plan.task.deals:
        told = "the plan deals a hospital's patients to simulated sites (task.partition)"
        yield Finding(where, "stops", told, "ask the lead to remove it")
    if fold_refused := not_its_folds(plan, settings):
        yield Finding.stopping(where, fold_refused)
    if words_refused := not_its_words(plan, settings):
        yield Finding.stopping("data", words_refused)
    if budget and budget.has_key:
        yield from _budget(plan, settings, budget)


def _budget(plan: Plan, settings: SiteSettings, budget: QueryBudget) -> Iterator[Finding]:
    """Stop a plan that asks for more scored answers than a new lead may have. If only the lead with the fewest answers
    left may not run it, yield a note.
    """
    used = budget.used(data_set(settings.data, plan.task.name))
    for part, planned in planned_answers(plan).items():
        allowed, most = settings.most_answers(part), max((count[part] for count in used.values()), default=0)
        told = f"{part}: the plan asks for {planned} answers with scores, one lead may have {allowed}"
        if planned > allowed:
            yield Finding("quotas", "stops", told, "see answers in medsilo.yaml")
        elif planned > allowed - most:
            told += f"; a lead who had {most} already would be refused"
            yield Finding("quotas", "note", told, "see answers in medsilo.yaml")


def answers_wanted(plan: Plan, settings: SiteSettings, budget: QueryBudget, lead: str) -> str:
    """State in one sentence how many scored answers a plan needs, and how many scored answers the lead may still
    receive.
    """
    if not settings.protects(plan.task.synthetic):
        return "not counted: no patient's data are read, or they are public"
    used = budget.used(data_set(settings.data, plan.task.name)).get(lead, Counter[str]())
    parts = (
        f"{planned:,} of {max(0, settings.most_answers(part) - used[part]):,} over {CASES[part]} cases"
        for part, planned in planned_answers(plan).items()
    )
    return f"{', '.join(parts)}, which this lead has left"


# ---------------------------------------------------------------------------------------------------- privacy
def privacy_findings(
    plan: Plan, settings: SiteSettings, budget: QueryBudget | None, kit: KitFiles | None = None
) -> Iterator[Finding]:
    """Check a plan's privacy against the hospital's demands, and report the study's cost and the remaining budget."""
    demands, where = settings.privacy, "privacy"
    if plan.privacy is None:
        if demands:
            told = "this hospital demands differential privacy, and the plan promises none"
            yield Finding(where, "stops", told, "ask the lead for a plan with a section privacy")
        return
    promise = plan.privacy.under(demands)
    told = f"the study may cost ε = {promise.epsilon:g} at δ = {promise.delta:g} for each {promise.unit}"
    if how_told(plan, demands, "counts", settings.protects(plan.task.synthetic)) == "silent":
        what, _, todo = COUNTS_REFUSED.partition(": ")
        yield Finding(where, "stops", what, todo)
    if floors := floors_beside(plan, settings):
        yield Finding(where, "note", *floors)
    if demands is None:
        yield Finding(where, "note", told, "say in medsilo.yaml what all studies may cost together (privacy)")
        return
    spent_so_far = 0.0
    if budget:
        ledger = ledger_of(budget, data_set(settings.data, plan.task.name), kit)
        try:
            spent_so_far = ledger.standing().epsilon(demands.delta) if ledger.exists else 0.0
        except MedsiloError as error:
            yield Finding.stopping(where, str(error))
            return
    told += f"; earlier studies of these data cost ε = {epsilon_text(spent_so_far)} of {demands.epsilon:g} allowed"
    if spent_so_far < demands.epsilon:
        yield Finding(where, "ok", told)
    else:
        yield Finding(where, "stops", told, "see medsilo ledger show")


def floors_beside(plan: Plan, settings: SiteSettings) -> tuple[str, str] | None:
    """Explain why the hospital's minimum numbers of patients still apply although the plan adds noise; None if they
    don't apply.
    """
    if plan.privacy is None or not settings.protects(plan.task.synthetic):
        return None
    demands = settings.privacy
    promise = plan.privacy.under(demands)
    if promise.suffices(demands):
        return None
    both = "min_patients_per_metric, steps of scores and the memory of earlier groups hold beside the plan's noise"
    if demands is None:
        return (
            f"{both}, since this hospital itself demands none",
            "with privacy in medsilo.yaml noise takes their place",
        )
    return (
        f"{both}: ε = {promise.epsilon:g} is above {PROTECTIVE_EPSILON:g}",
        f"ask the lead for privacy.epsilon={PROTECTIVE_EPSILON:g} or less, and noise takes their place",
    )


def price_list(plan: Plan, settings: SiteSettings) -> list[tuple[str, str]]:
    """For each output of a plan, return a text about its protection and its privacy cost."""
    phases = [stretch.phase for stretch in plan.course.stretches()]
    once = {group.name for phase in phases if phase.releases for group in phase.sent}
    prices = {}
    for group in dict.fromkeys(group.name for phase in phases for group in phase.sent):
        price = _price_of_means if group in once else _price_of_tensors
        prices[f"tensors: {group}"] = price(plan, settings.privacy)
    prices |= {
        WHAT[number]: _price_of_numbers(plan, number, settings) for numbers in NUMBERS.values() for number in numbers
    }
    if plan.privacy:
        head = "0: hashes, the number of lines and the time, so that the server can check them"
        prices["the ledger's signed head"] = head
    return [*prices.items()]


def _price_of_tensors(plan: Plan, demands: PrivacyRequirements | None) -> str:
    if plan.privacy is None:
        return "not protected"
    promise = plan.privacy.under(demands)
    networks = ", ".join(plan.private.networks)
    return (
        f"sampled Gaussian noise on each step's gradient of {networks}; all tensors of all rounds together at most "
        f"ε = {promise.epsilon:g} at δ = {promise.delta:g} for each {promise.unit}"
    )


def _price_of_means(plan: Plan, demands: PrivacyRequirements | None) -> str:
    if plan.privacy is None or plan.privacy.statistics is None:
        return "not protected"
    promise, offer = plan.privacy.under(demands), plan.privacy.statistics
    share = offer.epsilon * promise.epsilon / plan.privacy.epsilon
    return (
        f"each {promise.unit}'s part is cut to {offer.clip:g}, and the sum has Gaussian noise; ε = {share:.3g} for all "
        "of the study, part of the study's"
    )


def _price_of_numbers(plan: Plan, number: Told, settings: SiteSettings) -> str:
    demands = settings.privacy
    if plan.privacy is None:
        return "not protected"
    guarded = demands is not None or settings.protects(plan.task.synthetic)
    how = how_told(plan, demands, number, guarded)
    if how == "noisy":
        offer = plan.privacy.counts if number == "counts" else plan.privacy.scores
        assert offer
        share = offer.epsilon * plan.privacy.under(demands).epsilon / plan.privacy.epsilon
        what = "drawn once" if number == "counts" else "on the score; nothing else of it leaves"
        beside = "; noise and this hospital's floors both hold" if floors_beside(plan, settings) else ""
        return f"geometric noise {what}; ε = {share:.3g} for all of the study, part of the study's{beside}"
    if how == "silent":
        return "not declared public: this hospital does not join" if number == "counts" else "0: does not leave"
    if demands and number in demands.public:
        return f"0: declared public ({demands.public[number]})"
    return "not protected"
