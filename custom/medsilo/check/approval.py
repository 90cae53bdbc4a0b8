"""Describe a plan, and its changes since the study's last approved plan, for the person who approves the plan."""

import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medsilo.check.hospital_checks import KitAtHome, budget_of_kit, files_of
from medsilo.check.kit import Kit
from medsilo.check.result import APPROVAL, Finding
from medsilo.core.errors import MedsiloError
from medsilo.core.package import in_words
from medsilo.core.text import plain
from medsilo.runs.event_chain import REMEDY, EventChain
from medsilo.site.accepted_settings import AcceptedSettings, check_there
from medsilo.site.approvals import ApprovalLimits, AskingPlan, Decision, study_in_words
from medsilo.site.job_code import JobCode
from medsilo.site.settings import SiteSettings

if TYPE_CHECKING:  # accepting settings does not need the plan's classes, whose import is slow
    from medsilo.plan import Plan

LONGEST_VALUE = 200  # the description of a plan shows at most this many bytes of a value
UNAPPROVED = "approval: none in medsilo.yaml, so plans run here that nobody at this hospital has approved"
ABSENT: Any = object()  # marks a key that is missing from a plan
SENTENCE_END = re.compile(r"[:;] |\. (?=[A-Z`])|\.$")  # matches the end of a description's first sentence
NAMES = {"algorithm.name": "the method", "task.name": "the task", "network.name": "the network"}
CHECKS = {
    "settings": "`local/` has not changed since the hospital's engineer accepted it",
    "events": "nobody changed or removed a line of the kit's `events.log` before the last line that the kit's key "
    "signed",
    APPROVAL: "with `approval: required`, you approved this plan",
}


def accepted_findings(kit: Kit, settings: SiteSettings, accept: bool) -> Iterator[Finding]:
    """Compare a hospital's settings with the settings that the hospital's engineer accepted; if `accept` is true,
    accept the present settings instead.
    """
    if kit.party != "hospital":  # persons and relays do not train, so their kits have no accepted settings
        return
    local = kit.folder.parent / "local"
    check_there(local)
    budget = budget_of_kit(settings, local, kit.name)
    accepted = AcceptedSettings(files_of(kit), budget.folder if budget else None)
    if not accept and (since := accepted.check()):
        yield Finding("settings", "ok", f"nothing in local/ changed since {since}")
    # `accept` and `begin` return an empty result if the settings promise no protection
    elif not (accepted.accept(settings) if accept else accepted.begin(settings)):
        return
    elif accept:
        yield Finding("settings", "ok", "local/ is accepted as it is now")
    else:
        what = "local/ is signed as it is now, which nobody confirmed"
        yield Finding("settings", "note", what, "read it; a change from now on stops this site until --accept")


def event_findings(kit: Kit, accept: bool) -> Iterator[Finding]:
    """Verify the signature of the kit's events.log; if `accept` is true, first sign the log as it is now."""
    if kit.party not in ("hospital", "server"):
        return
    chain = EventChain(files_of(kit))
    if accept:
        chain.sign(accept=True)
    try:
        if told := chain.check():
            yield Finding("events", "ok", told)
    except MedsiloError as error:
        yield Finding("events", "stops", str(error), REMEDY, (error.private,) if error.private else ())


def approval_findings(home: KitAtHome, plan: "Plan", job_code: JobCode | None = None) -> Iterator[Finding]:
    """Report whether the hospital has approved a plan; report nothing if the hospital requires no approval."""
    if home.settings.approval_of(plan.task.synthetic) == "none":
        if home.settings.protects(plan.task.synthetic):
            yield Finding("settings", "note", UNAPPROVED, "write approval: required")
        return
    told, runs = standing(home, plan, job_code=job_code)
    remedy = "" if runs else f"medsilo approve {plan.hash} --kit KIT"
    yield Finding(APPROVAL, "ok" if runs else "note", told, remedy)


def standing(
    home: KitAtHome, plan: "Plan", sites: Collection[str] = (), job_code: JobCode | None = None
) -> tuple[str, bool]:
    """Return a description of the hospital's last decision about a plan, and True if the plan may run at this
    hospital.
    """
    decision, own = home.approvals.last(plan.hash), plan.participation.everyone
    if decision is None:
        return "nobody has decided about this plan yet", False
    brought = job_code.facts() if job_code else None
    data = home.approvals.data
    if objection := decision.objection("this plan", own, sites, 0, plan.code, data, time.time(), brought):
        return f"this hospital {objection}", False
    if why := _not_its_words(home, plan):
        return why, False
    approved = "this plan is approved with this code" if brought else "this plan is approved"
    return ", ".join([approved, *decision.limits.words()]), True


def never_runs(home: KitAtHome, plan: "Plan", limits: ApprovalLimits, sites: Collection[str] = ()) -> str:
    """Return the reason why a plan could not run here even if it were approved with the given limits, or "" if it could
    run.
    """
    named = plan.participation.everyone
    if named and home.kit.name not in named:
        return f"{home.kit.name} is not in this plan, which names {plain(', '.join(named), 200)}"
    if why := _not_its_words(home, plan):
        return why
    others = sorted({*named, *sites} - set(limits.sites)) if named else ["sites that the plan does not name"]
    return f"--sites leaves out {plain(', '.join(others), 200)}" if limits.sites and others else ""


def _not_its_words(home: KitAtHome, plan: "Plan") -> str | None:
    from medsilo.federation.protection import not_its_words

    return not_its_words(plan, home.settings) if home.settings.protects(plan.task.synthetic) else None


def plan_in_words(plan: "Plan") -> list[tuple[str, str]]:
    training, who, own = plan.training, plan.participation, plan.privacy
    promise = f"ε = {own.epsilon:g} at δ = {own.delta:g} for each {own.unit}" if own else "none"
    return [
        *study_in_words(plan.study.model_dump()),
        ("method", f"{plan.algorithm.title} ({plan.algorithm.name})"),
        ("task", f"{plan.task.name}, scored by {plan.task.goal.metric}"),
        ("network", f"{plan.network.name}, {plan.parameters:,} parameters of all networks together"),
        ("rounds", f"{plan.rounds}; passes over this hospital's training cases in each: {training.local_epochs}"),
        ("hospitals", ", ".join(who.everyone) or f"all that are connected, {who.minimum} at least"),
        *([("only tested", ", ".join(who.evaluation_sites))] if who.evaluation_sites else []),
        ("differential privacy", promise),
        ("secure aggregation", " ".join(plan.secure_aggregation.promises) or "none"),
        ("packages", ", ".join(f"{name} {in_words(facts)}" for name, facts in plan.code.items())),
    ]


@dataclass(frozen=True)
class Change:
    key: str
    meaning: str
    words: str


def changes_since(before: "Plan", plan: "Plan") -> list[Change]:
    from medsilo.plan import keys_of

    old, new = (dict(keys_of(own.resolved())) for own in (before, plan))
    differ = [key for key in sorted(old | new) if old.get(key, ABSENT) != new.get(key, ABSENT)]
    return [
        Change(key, _meaning(plan, key) or _meaning(before, key), _change(old.get(key, ABSENT), new.get(key, ABSENT)))
        for key in differ
    ]


def approved_before(home: KitAtHome, pending: AskingPlan, plan: "Plan") -> "tuple[Decision, Plan] | None":
    """Return the last approved plan of the same study as the given plan, together with the approval.

    Two plans belong to the same study if both plans have the same title. Two plans without titles belong to the same
    study if their study names are equal. Two plans whose leads are known belong to the same study only if the same lead
    submitted both plans. A canary belongs to no study.
    """
    kept = {one.hash: one for one in home.approvals.asked()}
    for decision in reversed(home.approvals.decisions()):
        earlier = kept.get(decision.plan)
        if decision.verdict != "approved" or earlier is None or earlier.hash == pending.hash or earlier.is_canary:
            continue
        if earlier.lead and pending.lead and earlier.lead != pending.lead:
            continue
        title = plain((earlier.plan.get("study") or {}).get("title") or "")
        if title == plain(plan.study.title) and (title or (earlier.study and earlier.study == pending.study)):
            with suppress(MedsiloError):
                return decision, home.plan_of(earlier)
    return None


def _meaning(plan: "Plan", key: str) -> str:
    """Return the first sentence of the description of a plan's key."""
    within: Any = plan
    description = ""
    for part in key.split("."):
        field = getattr(type(within), "model_fields", {}).get(part)
        description, within = (field.description if field else "") or "", getattr(within, part, None)
    return NAMES.get(key) or SENTENCE_END.split(description)[0].replace("`", "")


def _change(old: Any, new: Any) -> str:
    if old is ABSENT or new is ABSENT:
        return f"new: {_shown(new)}" if old is ABSENT else f"no longer there; it was {_shown(old)}"
    if isinstance(old, list) and isinstance(new, list):
        return "; ".join(_list_changes(old, new)) or f"in another order: {_shown(new)}"
    return _other(old, new)


def _other(old: Any, new: Any) -> str:
    now, then = _shown(new), _shown(old)
    return f"{now}, before {then}" if now != then else f"{now}, and not what was approved: read it in the whole plan"


def _list_changes(old: list[Any], new: list[Any]) -> Iterator[str]:
    """Yield texts about the items that were added to a list, removed from it, or changed."""
    then, now = ({_name(one): one for one in several} for several in (old, new))
    for told, names in (("now also", now.keys() - then.keys()), ("no longer", then.keys() - now.keys())):
        if names:
            yield f"{told} {plain(', '.join(sorted(names)), LONGEST_VALUE)}"
    for name in sorted(then.keys() & now.keys()):
        one, other = then[name], now[name]
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in other | one if other.get(key) != one.get(key)]
            differ = "; ".join(f"{key} {_other(one.get(key), other.get(key))}" for key in keys)
            yield from [f"{name}: {differ}"] if keys else []
        elif one != other:
            yield _other(one, other)


def _name(item: Any) -> str:
    return plain(item["name"] if isinstance(item, dict) and "name" in item else _in_words(item), LONGEST_VALUE)


def _shown(value: Any) -> str:
    return plain(_in_words(value), LONGEST_VALUE) or "nothing"


def _in_words(value: Any) -> str:
    """Return a plan's value as text without brackets and quotes."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "nothing"}[value]
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, dict):
        return "; ".join(f"{key} {_in_words(own)}" for key, own in value.items())
    return str(value)
