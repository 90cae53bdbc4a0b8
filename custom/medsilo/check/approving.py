"""Reading a plan before it is approved: in words, and as a difference to the last one that was."""

import time
from collections.abc import Collection, Iterator
from typing import Any

from medsilo.check.at_home import KitAtHome, files_of
from medsilo.check.kit import Kit
from medsilo.check.result import APPROVAL, Finding
from medsilo.core.package import in_words
from medsilo.core.text import plain
from medsilo.plan import Plan, keys_of
from medsilo.site.accepted_settings import AcceptedSettings, check_there
from medsilo.site.approvals import ApprovalLimits, study_in_words
from medsilo.site.settings import SiteSettings

LONGEST_VALUE = 200  # bytes of a plan's value, as it is shown
ABSENT = "–"  # stands for the value of a key that a plan does not have


def accepted_findings(kit: Kit, settings: SiteSettings, accept: bool) -> Iterator[Finding]:
    """Yield whether the settings are those that the engineer accepted; they are from now on where that is said."""
    if kit.party != "hospital":  # of a person or a relay, which train nothing
        return
    check_there(kit.folder.parent / "local")
    accepted = AcceptedSettings(files_of(kit))
    if not accept and (since := accepted.check()):
        yield Finding("settings", "ok", f"nothing in local/ changed since {since}")
    elif not accepted.accept(settings):  # they promise nothing
        return
    elif accept:
        yield Finding("settings", "ok", "local/ is accepted as it is now")
    else:
        what = "local/ is signed as it is now, which nobody confirmed"
        yield Finding("settings", "note", what, "read it; a change from now on stops this site until --accept")


def approval_findings(home: KitAtHome, plan: Plan) -> Iterator[Finding]:
    """Yield whether a plan is approved, where this hospital wants that."""
    if home.settings.approval == "none":
        return
    told, runs = standing(home, plan)
    remedy = "" if runs else f"medsilo approve {plan.hash} --kit KIT"
    yield Finding(APPROVAL, "ok" if runs else "note", told, remedy)


def standing(home: KitAtHome, plan: Plan, sites: Collection[str] = ()) -> tuple[str, bool]:
    """Return what the last decision about a plan means now, and whether it may run here. sites: those that take part,
    where they are known."""
    decision, own = home.approvals.last(plan.hash), plan.participation.everyone
    if decision is None:
        return "nobody has decided about this plan yet", False
    if objection := decision.objection("this plan", own, sites, 0, plan.code, home.approvals.data, time.time()):
        return f"this hospital {objection}", False
    return ", ".join(["this plan is approved", *decision.limits.words()]), True


def never_runs(home: KitAtHome, plan: Plan, limits: ApprovalLimits, sites: Collection[str] = ()) -> str:
    """Return why an approval with these limits would let nothing run here; nothing where it would."""
    named = plan.participation.everyone
    if named and home.kit.name not in named:
        return f"{home.kit.name} is not in this plan, which names {plain(', '.join(named), 200)}"
    others = sorted({*named, *sites} - set(limits.sites)) if named else ["sites that the plan does not name"]
    return f"--sites leaves out {plain(', '.join(others), 200)}" if limits.sites and others else ""


def plan_in_words(plan: Plan) -> list[tuple[str, str]]:
    """Return what a plan is, for people: a heading and its text."""
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


def difference(plan: Plan, before: Plan) -> list[tuple[str, str, str]]:
    """Return each key that differs, with the value before and the one now."""
    old, new = (dict(keys_of(own.resolved())) for own in (before, plan))
    differ = [key for key in sorted(old | new) if old.get(key, ABSENT) != new.get(key, ABSENT)]
    return [(key, _shown(old.get(key, ABSENT)), _shown(new.get(key, ABSENT))) for key in differ]


def _shown(value: Any) -> str:
    return plain(value, LONGEST_VALUE)
