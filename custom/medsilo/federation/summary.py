"""The outcome of a study as summary.json has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.core.memory import most_held
from medsilo.core.package import package_facts
from medsilo.federation.asking import Exchange
from medsilo.plan import Plan
from medsilo.runs.messages import Delivered, Joined, SiteAnswer, Tested
from medsilo.runs.record import now
from medsilo.tasks.metrics import added
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class Account:
    """What a summary is made of."""

    plan: Plan
    study: str
    engine: str
    sites: Sequence[str]
    everyone: Sequence[str]
    required: int
    parameters: int
    rounds: Sequence[dict[str, Any]]
    done: int
    ends: Mapping[str, Exchange]
    details: dict[str, Any]


def summarise(account: Account, reason: str | None, started: str, seconds: float) -> dict[str, Any]:
    """Return who did what, with which outcome; a study that failed has a summary, too."""
    plan = account.plan
    sites = {site: _site_summary(account, site) for site in account.sites}
    unseen = {site: _site_summary(account, site) for site in account.everyone if site not in account.sites}
    tests = [facts["test"] for facts in sites.values() if facts["test"] and facts["test"][plan.task.metric] is not None]
    cases = sum(test["cases"] for test in tests)
    scores = [test[plan.task.metric] for test in tests]
    pooled = sum(test[plan.task.metric] * test["cases"] for test in tests)
    told = [tested.counts for site in account.sites if (tested := _tested(account, site))]
    return {
        "schema": 1,
        "status": "finished" if reason is None else "failed",
        "reason": reason,
        "method": plan.algorithm.name,
        "title": plan.algorithm.title,
        "task": plan.task.name,
        "task_title": plan.task.title,
        "synthetic": plan.task.synthetic,
        "engine": account.engine,
        "metric": plan.task.metric,
        "seed": plan.seed,
        "protocol": plan.protocol,
        "plan_hash": plan.hash,
        "package": package_facts(),
        "study": account.study,
        "network": plan.network.name,
        "parameters": account.parameters,
        "rounds": {"planned": plan.rounds, "done": account.done},
        "agreed": {
            "sites": list(account.sites),
            "minimum": account.required,
            "when_missing": plan.participation.when_missing,
        },
        "selected": {
            "by": "site" if plan.algorithm.outcome.personal else "mean",
            "rounds": {site: tested.selected for site in account.everyone if (tested := _tested(account, site))},
        },
        "sites": sites,
        "unseen": unseen,
        "mean_test": sum(scores) / len(scores) if scores else None,
        "pooled_test": pooled / cases if cases else None,
        "pooled": plan.task.figures(added(told)),
        "details": account.details,
        "seconds": round(seconds, 3),
        "memory": most_held(),
        "started": started,
        "ended": now(),
    }


def _site_summary(account: Account, site: str) -> dict[str, Any]:
    lines = [record["sites"].get(site) for record in account.rounds]
    known = [line for line in lines[: account.done] if line]
    joined, delivered, tested = (_reply(account, end, site) for end in ("join", "deliver", "test"))
    validation = [line["validation"] if line else None for line in lines]
    if "deliver" in account.ends:
        validation.append(delivered.validation if isinstance(delivered, Delivered) else None)
    reply = joined or delivered or tested
    return {
        "cases": reply.cases.model_dump() if reply else None,
        "classes": joined.classes if isinstance(joined, Joined) else None,
        "contributed": len(known),
        "missed": {str(r["round"]): reason for r in account.rounds if (reason := _absence(r, site))},
        "missed_ends": {
            task: f"{end.missing[site].kind}: {end.missing[site].reason}"
            for task, end in account.ends.items()
            if site in end.missing
        },
        "warnings": _warnings(account, site),
        "validation": validation,
        **_as_tested(account.plan.task, tested),
        "bytes_up": sum(line["bytes_up"] for line in known),
        "bytes_down": sum(line["bytes_down"] for line in known),
        "seconds": round(sum(line["seconds"] for line in known), 3),
        "memory": max((line["memory"] for line in known), default=None),
    }


def _as_tested(task: Task, tested: SiteAnswer | None) -> dict[str, Any]:
    if not isinstance(tested, Tested):
        return {"test": None, "figures": {}, "withheld": []}
    return tested_as(task, tested.test, tested.test_loss, tested.test_cases, tested.counts)


def tested_as(
    task: Task, score: float | None, loss: float | None, cases: int, counts: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return a site's test as the summary has it; `withheld` names what is not told because of too few cases."""
    return {
        "test": {task.metric: score, "loss": loss, "cases": cases},
        "figures": task.figures(dict(counts)),
        "withheld": sorted(task.layout.keys() - counts.keys()),
    }


def _reply(account: Account, end: str, site: str) -> SiteAnswer | None:
    """Return a site's answer before the first or after the last round."""
    return account.ends[end].replies.get(site) if end in account.ends else None


def _tested(account: Account, site: str) -> Tested | None:
    reply = _reply(account, "test", site)
    return reply if isinstance(reply, Tested) else None


def _warnings(account: Account, site: str) -> dict[str, list[str]]:
    """Return what a site had to say beside its answers, by round or end."""
    told = {str(record["round"]): record.get("warnings", {}).get(site) for record in account.rounds}
    told |= {end: reply.warnings for end in account.ends if (reply := _reply(account, end, site))}
    return {when: lines for when, lines in told.items() if lines}


def _absence(record: dict[str, Any], site: str) -> str | None:
    """Return why a site is missing from a round."""
    return next((f"{kind}: {record[kind][site]}" for kind in ("refused", "lost") if site in record[kind]), None)
