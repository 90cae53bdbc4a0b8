"""The outcome of a study as summary.json has it."""

from typing import TYPE_CHECKING, Any

from medsilo.core.memory import most_held
from medsilo.core.package import package_facts
from medsilo.runs.record import now
from medsilo.tasks.metrics import added
from medsilo.tasks.task import Task

if TYPE_CHECKING:
    from medsilo.federation.coordinator import Coordinator
    from medsilo.methods.base import Parcel


def summarise(led: "Coordinator", reason: str | None, started: str, seconds: float) -> dict[str, Any]:
    """Who did what, with which outcome; a study that failed has a summary, too."""
    plan, rules = led.plan, led.plan.participation
    sites = {site: _site_summary(led, site) for site in led.sites}
    unseen = {site: _site_summary(led, site) for site in led.everyone if site not in led.sites}
    tests = [facts["test"] for facts in sites.values() if facts["test"] and facts["test"][plan.task.metric] is not None]
    cases = sum(test["cases"] for test in tests)
    scores = [test[plan.task.metric] for test in tests]
    pooled = sum(test[plan.task.metric] * test["cases"] for test in tests)
    told = [reply.facts["counts"] for site in led.sites if (reply := _reply(led, "test", site))]
    return {
        "schema": 1,
        "status": "finished" if reason is None else "failed",
        "reason": reason,
        "method": plan.algorithm.name,
        "title": plan.algorithm.title,
        "task": plan.task.name,
        "task_title": plan.task.title,
        "synthetic": plan.task.synthetic,
        "engine": led.engine,
        "metric": plan.task.metric,
        "seed": plan.seed,
        "protocol": plan.protocol,
        "plan_hash": plan.hash,
        "package": package_facts(),
        "study": led.study,
        "network": plan.network.name,
        "parameters": led.parameters,
        "rounds": {"planned": plan.rounds, "done": led.done},
        "agreed": {"sites": led.sites, "minimum": led.required, "when_missing": rules.when_missing},
        "selected": {"by": "site" if led.personal else "mean", "rounds": _selected_rounds(led)},
        "sites": sites,
        "unseen": unseen,
        "mean_test": sum(scores) / len(scores) if scores else None,
        "pooled_test": pooled / cases if cases else None,
        "pooled": plan.task.figures(added(told)),
        "details": {**led.details, **plan.method.found(led.mixers, led.sites)},
        "seconds": round(seconds, 3),
        "memory": most_held(),
        "started": started,
        "ended": now(),
    }


def _selected_rounds(led: "Coordinator") -> dict[str, int]:
    tested = {site: _reply(led, "test", site) for site in led.everyone}
    return {site: int(reply.metrics["selected"] or 0) for site, reply in tested.items() if reply}


def _site_summary(led: "Coordinator", site: str) -> dict[str, Any]:
    lines = [record["sites"].get(site) for record in led.rounds]
    known = [line for line in lines[: led.done] if line]
    joined, delivered, tested = (_reply(led, end, site) for end in ("join", "deliver", "test"))
    validation = [line["validation"] if line else None for line in lines]
    if "deliver" in led.ends:
        validation.append(delivered.metrics.get("validation") if delivered else None)
    reply = joined or delivered or tested
    return {
        "cases": reply.facts["cases"] if reply else None,
        "classes": joined.facts["classes"] if joined else None,
        "contributed": len(known),
        "missed": {str(r["round"]): reason for r in led.rounds if (reason := _absence(r, site))},
        "missed_ends": {
            task: f"{end.missing[site].kind}: {end.missing[site].reason}"
            for task, end in led.ends.items()
            if site in end.missing
        },
        "warnings": _warnings(led, site),
        "validation": validation,
        **(tested_as(led.plan.task, tested) if tested else {"test": None, "figures": {}, "withheld": []}),
        "bytes_up": sum(line["bytes_up"] for line in known),
        "bytes_down": sum(line["bytes_down"] for line in known),
        "seconds": round(sum(line["seconds"] for line in known), 3),
        "memory": max((line["memory"] for line in known), default=None),
    }


def tested_as(task: Task, tested: "Parcel") -> dict[str, Any]:
    """A site's test as the summary has it; `withheld` names what the site does not tell because of too few cases."""
    counts = tested.facts["counts"]
    test = {task.metric: "test", "loss": "test_loss", "cases": "cases"}
    return {
        "test": {name: tested.metrics[key] for name, key in test.items()},
        "figures": task.figures(counts),
        "withheld": sorted(task.layout.keys() - counts.keys()),
    }


def _reply(led: "Coordinator", end: str, site: str) -> "Parcel | None":
    """A site's answer before the first or after the last round."""
    return led.ends[end].replies.get(site) if end in led.ends else None


def _warnings(led: "Coordinator", site: str) -> dict[str, list[str]]:
    """What a site had to say beside its answers, by round or end."""
    told = {str(record["round"]): record.get("warnings", {}).get(site) for record in led.rounds}
    told |= {end: reply.facts["warnings"] for end in led.ends if (reply := _reply(led, end, site))}
    return {when: lines for when, lines in told.items() if lines}


def _absence(record: dict[str, Any], site: str) -> str | None:
    """Why a site is missing from a round."""
    return next((f"{kind}: {record[kind][site]}" for kind in ("refused", "lost") if site in record[kind]), None)
