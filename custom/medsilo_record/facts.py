"""The entries of a record: what medsilo knows of a study at one hospital, and blanks for what it does not know.

Nothing is typed here that the package says elsewhere: sentences come from the plan, the settings, the leak report.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from medsilo.check import demands, leaks
from medsilo.check.approving import plan_in_words
from medsilo.check.at_home import KitAtHome
from medsilo.core.package import package_facts
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.site.policy import Policy
from medsilo.site.settings import SiteSettings
from medsilo_record.outcomes import promises, table

OWN_FILTERS = ".".join(("medsilo", "flare", "filters", ""))
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")  # of Markdown


@dataclass(frozen=True)
class RecordEntry:
    """One thing that a form asks for. says: its sentences; blank: what only the hospital can fill in.

    relation, kind, narrower: its place in the Data Privacy Vocabulary, and its class where the condition of its name
    holds (`Case.lacks`).
    """

    part: str  # the heading that it stands under
    key: str
    title: str
    says: tuple[str, ...]
    blank: str
    relation: str
    kind: str
    narrower: str


@dataclass(frozen=True)
class Case:
    """One study at one hospital. home: its kit. counts: its cases and patients, where they could be read."""

    plan: Plan
    settings: SiteSettings
    policy: Policy
    site: str = ""
    home: KitAtHome | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def synthetic(self) -> bool:
        return self.plan.task.synthetic

    @cached_property
    def lacks(self) -> dict[str, str]:
        """The conditions of promises that do not hold here: in words."""
        plan, settings, around = self.plan, self.settings, self.home.around if self.home else []
        coarse = (
            settings.protects(self.synthetic) and settings.patients_in_step(False) and settings.count_unit(False) > 1
        )
        accepted = self.home and (settings.approval == "required" or settings.privacy)
        found = {
            "privacy": (plan.privacy, "the plan promises no differential privacy"),
            "budget": (plan.privacy and settings.privacy, "no budget of differential privacy is counted"),
            "coarse": (coarse and not plan.privacy, "scores and counts are told by other rules, or exactly"),
            "sealing": (plan.transport.sealed, "the plan seals nothing (transport.sealing)"),
            "approval": (settings.approval == "required", "medsilo.yaml has no approval: required"),
            "accepted": (accepted, "no kit was given, or medsilo.yaml demands neither approval nor privacy"),
            "strict": (self.home and not around, "; ".join(around) or "no kit was given to this record"),
            "robust": (plan.mixing.robust, "the plan has no robust rule (mixing.robust)"),
            "cap": (plan.mixing.share_cap, "the plan has no mixing.share_cap"),
        }
        return {name: why for name, (holds, why) in found.items() if not holds}

    def counted(self, what: str) -> int | None:
        """Return the number of cases or patients, in the hospital's own steps; None where it may not be told."""
        settings, total = self.settings, self.counts.get(what, 0)
        hidden = self.plan.privacy and not (settings.privacy and "counts" in settings.privacy.public)
        if hidden or self.synthetic or total < settings.least(False):
            return None
        return settings.resolution([], False).count(total)


def record_of(case: Case) -> list[RecordEntry]:
    """Return all entries of a record, in the order of the forms: those of forms.csv, with what is said under each."""
    said, found = _said(case), []
    for part, key, title, blank, *place in table("forms.csv"):
        known = key == "hospital" and case.site
        found.append(RecordEntry(part, key, title, tuple(said.get(key, ())), "" if known else blank, *place))
    return found


def _said(case: Case) -> dict[str, Iterable[str]]:
    """Return the sentences of each entry."""
    plan, build, report = case.plan, package_facts(), _report(case)
    size = sum(leak.bytes * leak.rounds for leak in leaks.leaks(plan))
    shares = case.settings.shares(case.synthetic) and not plan.transport.sealed
    own = [group.name for group in plan.course.delivery.given if group.personal and group.stand_in]
    personal = "go to hospitals that agreed, too" if shares and own else "stay here, or the method has none"
    return {
        "hospital": [f"This record is that of the site {case.site}."] if case.site else [],
        "study": [f"medsilo {build['version']}, build {build['hash']}; plan {plan.hash}."],
        "purpose": _purpose(plan),
        "subjects": _subjects(case),
        "data": _data(plan),
        "recipients": _recipients(plan),
        "leaves": _leaving(case),
        "retention": _kept(),
        "measures": _measures(case),
        "description": (f"{sentence(name)}: {what.rstrip('.')}." for name, what in plan_in_words(plan)),
        "necessity": [
            f"{size:,} bytes of tensors leave in {plan.rounds} rounds.",
            *(line for line in report if line.startswith("No image")),
        ],
        "privacy": _bounds(case),
        "sealing": plan.transport.promises,
        "approval": _approval(case),
        "limits": _limits(case),
        "report": report,
        "accuracy": [f"Models are chosen and tested by {plan.task.goal.metric}, at each hospital on its own patients."],
        "decisions": ["Training decides nothing about a patient."],
        "rights": [
            "A case that is removed from the folder is in no study that begins afterwards.",
            "A delivered model does not change when a case is removed; it has to be trained again without it.",
        ],
        "risks": _risks(case),
        "personal": [f"Models of this hospital alone {personal}."],
    }


def _purpose(plan: Plan) -> Iterator[str]:
    many = f"{len(plan.participation.everyone)} hospitals" if plan.participation.everyone else "several hospitals"
    yield f"Training a model by {many} together, without bringing their patients' data to one place."
    yield f"{type(plan.task).title}; method: {plan.algorithm.title}."


def _subjects(case: Case) -> Iterator[str]:
    if case.synthetic:
        yield "None: the cases of this task are drawn by a computer."
        return
    yield "Patients of this hospital whose cases lie in the folder that its medsilo.yaml names."
    if case.settings.public_data:
        yield "The hospital has declared that nobody behind these data needs protection (public_data)."
    cases, patients, unit = case.counted("cases"), case.counted("patients"), case.settings.count_unit(False)
    steps = f", in steps of {unit}" if unit > 1 else ""
    if cases is None or patients is None:
        yield "Their number is not written here: the data were not read, are few, or their number costs privacy."
    else:
        yield f"{cases} cases of {patients} patients{steps}."


def _data(plan: Plan) -> Iterator[str]:
    task = plan.task
    if not task.synthetic:
        yield "Data concerning health (GDPR Art. 9)."
    if names := getattr(task, "input_names", ()):
        yield f"Of each case a network reads {len(names)} numbers: {', '.join(names)}."
    else:
        yield f"Of each case a network reads numbers of the shape {' x '.join(map(str, task.shape or ()))}."
    labels = f", one of {', '.join(task.goal.label_names)}" if task.goal.label_names else ""
    yield f"It learns the outcome of each case{labels}."
    yield "A patient's name or number serves here to keep all cases of a patient in one part, and does not leave."


def _recipients(plan: Plan) -> Iterator[str]:
    others = ", ".join(plan.participation.everyone) or "all that are connected"
    yield f"Hospitals of the study: {others}."
    up = [leak.group for leak in leaks.leaks(plan)]
    down = [group.name for stretch in plan.course.stretches() for group in stretch.phase.given]
    down += [group.name for group in plan.course.delivery.given]
    for way, groups in (("Hospital to server", up), ("Server to hospital", down)):
        yield f"{way}: {', '.join(dict.fromkeys(groups)) or 'no tensors'}."
    yield (
        "Hospital to server, every round and at the end: cases of each part, losses, scores and counts, seconds, "
        "memory, medsilo's version and hash."
    )
    yield f"Server to lead, when the job ends: {', '.join(paths.PUBLISHED)}."


def _leaving(case: Case) -> Iterator[str]:
    prices = dict(demands.price_list(case.plan, case.settings))
    read = " The server reads sums of it alone." if case.plan.transport.sealed else " The server reads it as it is."
    for leak in leaks.leaks(case.plan):
        if not case.policy.lets_out(leak.group):
            yield f"{leak.group} does not leave: privacy.json of this hospital refuses it."
            continue
        bound = prices[f"tensors: {leak.group}"]
        yield f"{leak.group}: rounds {leak.when}, {leak.bytes:,} bytes a round; {bound}.{read}"
    for what, price in prices.items():
        if not what.startswith("tensors: "):
            yield f"{sentence(what)}: {price}."


def _kept() -> Iterator[str]:
    yield f"At the hospital: {', '.join(paths.OF_SITE)}."
    yield f"At the server: {', '.join(paths.OF_RUN)}."
    yield "medsilo removes none of these by itself; medsilo clean removes states of studies that have ended."


def _measures(case: Case) -> Iterator[str]:
    for promise in promises():
        if promise.when not in case.lacks:
            against = f" (against: {promise.against})" if promise.against else ""
            yield f"{sentence(promise.says)}{against}. Shown by {', '.join(promise.tests)}."


def _bounds(case: Case) -> Iterator[str]:
    plan, allowed = case.plan, case.settings.privacy
    if plan.privacy:
        bound = plan.privacy.under(allowed)
        yield (
            f"Differential privacy: all that leaves in this study together costs at most ε = {bound.epsilon:g} at "
            f"δ = {bound.delta:g} for each {bound.unit}, against everybody outside this hospital."
        )
    else:
        yield "The plan promises no differential privacy: no bound holds on what the tensors tell of one patient."
    if allowed:
        yield f"This hospital allows ε = {allowed.epsilon:g} at δ = {allowed.delta:g} for all studies of these data."
        prices = demands.price_list(plan, case.settings)
        yield from (f"{sentence(what)}: {price}." for what, price in prices if "declared public" in price)
    else:
        yield "This hospital demands no differential privacy and keeps no budget over several studies."
    known = (case.home.book, case.home.files) if case.home else (None, None)
    for finding in demands.privacy_findings(plan, case.settings, *known):
        if finding.severity == "stops":
            yield f"So this hospital refuses the plan: {finding.what}. To do: {finding.remedy}."
        elif case.home and allowed:
            yield f"{finding.what[0].upper()}{finding.what[1:]}."
    if allowed and not case.home:
        yield "What earlier studies of these data cost is in the ledger, which only a record made with --kit reads."


def _approval(case: Case) -> Iterator[str]:
    if case.settings.approval == "required":
        yield "No plan runs here that this hospital's engineer has not approved by its hash (approval: required)."
    else:
        yield "Any plan of the consortium runs here without this hospital's approval (approval: none)."
    if last := case.home.approvals.last(case.plan.hash) if case.home else None:
        yield ", ".join([f"This plan is {last.verdict} here", *last.limits.words()]) + "."
    else:
        yield "No decision of this hospital over this plan is known to this record."


def _limits(case: Case) -> Iterator[str]:
    for key, asked, most, unit in demands.limit_table(case.plan, case.settings).rows:
        few = "less than 0.01" if "e-" in str(asked) else asked
        yield f"{sentence(str(unit))} ({key}): asked {few}, allowed {most}."


def _report(case: Case) -> list[str]:
    """Return the leak report. Of filters that are not medsilo's the arguments are left out: they may name files."""
    own = tuple((path, args if path.startswith(OWN_FILTERS) else {}) for path, args in case.policy.filters)
    return leaks.describe(case.plan, case.settings, replace(case.policy, filters=own))


def _risks(case: Case) -> Iterator[str]:
    if not case.plan.privacy:
        yield "Whoever reads a model may find out whether a patient was in the data, or see parts of images in updates."
    if "sealing" in case.lacks:
        yield "The server and its administrators can read each hospital's update."
    if "robust" in case.lacks:
        yield "A hospital that sends wrong updates of usual size may spoil the model: the plan has no robust rule."
    if case.plan.algorithm.pooled:
        yield "The method pools all data."
    for promise in promises():
        if promise.when not in case.lacks and promise.not_covered:
            yield f"{sentence(promise.says)}. Left open: {plain_words(promise.not_covered)}."
    yield from (f"A job may reach files of this hospital: {why}." for why in (case.home.around if case.home else ()))
    yield "NVFlare, PyTorch and all packages of model.cdx.json are trusted."
    yield "Whoever administers a machine reads all that lies on it."


def sentence(given: str) -> str:
    """Return plain words that begin with a capital letter."""
    words = plain_words(given)
    return words[:1].upper() + words[1:]


def plain_words(given: str) -> str:
    """Return a sentence of the documentation without its links and marks."""
    return LINK.sub(r"\1", given).replace("`", "").strip().rstrip(".")
