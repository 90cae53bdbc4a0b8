"""The outcome of a study as summary.json has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.core.memory import most_held
from medsilo.core.package import package_facts
from medsilo.methods.base import Parcel
from medsilo.plan import Plan
from medsilo.runs.record import now
from medsilo.runs.schema import Agreement, Details, Package, Round, RoundCount, Selection, SiteResult, Summary
from medsilo.tasks.metrics import added
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class Outcome:
    """All that a summary is made of."""

    plan: Plan
    study: str
    engine: str
    sites: Sequence[str]  # that train
    everyone: Sequence[str]  # those too that only see the outcome
    required: int
    parameters: int
    personal: bool  # every site has a model of its own
    done: int
    rounds: Sequence[Round]
    replies: Mapping[str, Mapping[str, Parcel]]  # by `join`, `deliver` and `test`, as far as they were asked; by site
    absences: Mapping[str, Mapping[str, str]]  # the same: why a site is missing
    details: Mapping[str, Any]

    def reply(self, end: str, site: str) -> Parcel | None:
        """Return a site's answer before the first or after the last round."""
        return self.replies.get(end, {}).get(site)


def summarise(led: Outcome, reason: str | None, started: str, seconds: float) -> Summary:
    """Say who did what, with which outcome; a study that failed has a summary, too."""
    plan = led.plan
    sites = {site: _site_result(led, site) for site in led.sites}
    selected = {site: reply.metrics["selected"] for site in led.everyone if (reply := led.reply("test", site))}
    told = [reply.facts["counts"] for site in led.sites if (reply := led.reply("test", site))]
    return Summary(
        status="finished" if reason is None else "failed",
        reason=reason,
        method=plan.algorithm.name,
        title=plan.algorithm.title,
        task=plan.task.name,
        task_title=plan.task.title,
        synthetic=plan.task.synthetic,
        engine=led.engine,
        metric=plan.task.metric,
        seed=plan.seed,
        protocol=plan.protocol,
        plan_hash=plan.hash,
        package=Package(**package_facts()),
        study=led.study,
        network=plan.network.name,
        parameters=led.parameters,
        rounds=RoundCount(planned=plan.rounds, done=led.done),
        agreed=Agreement(sites=list(led.sites), minimum=led.required, when_missing=plan.participation.when_missing),
        selected=Selection(
            by="site" if led.personal else "mean",
            rounds={site: int(number or 0) for site, number in selected.items()},
        ),
        sites=sites,
        unseen={site: _site_result(led, site) for site in led.everyone if site not in led.sites},
        **means(plan.task, sites),
        pooled=plan.task.figures(added(told)),
        details=Details(**led.details),
        seconds=round(seconds, 3),
        memory=most_held(),
        started=started,
        ended=now(),
    )


def means(task: Task, sites: Mapping[str, SiteResult]) -> dict[str, float | None]:
    """Return the mean test score over the sites that tell theirs, and the mean over their cases."""
    tests = [site.test for site in sites.values() if site.test]
    told = [(score, test["cases"] or 0) for test in tests if (score := test[task.metric]) is not None]
    cases = sum(count for _, count in told)
    return {
        "mean_test": sum(score for score, _ in told) / len(told) if told else None,
        "pooled_test": sum(score * count for score, count in told) / cases if cases else None,
    }


def _site_result(led: Outcome, site: str) -> SiteResult:
    lines = [line.sites.get(site) for line in led.rounds]
    known = [line for line in lines[: led.done] if line]
    joined, delivered, tested = (led.reply(end, site) for end in ("join", "deliver", "test"))
    validation = [line.validation if line else None for line in lines]
    if "deliver" in led.replies:
        validation.append(delivered.metrics.get("validation") if delivered else None)
    reply = joined or delivered or tested
    return SiteResult(
        cases=reply.facts["cases"] if reply else None,
        classes=joined.facts["classes"] if joined else None,
        contributed=len(known),
        missed={line.round: reason for line in led.rounds if (reason := line.absence(site))},
        missed_ends={end: missing[site] for end, missing in led.absences.items() if site in missing},
        warnings=_warnings(led, site),
        validation=validation,
        **(tested_as(led.plan.task, tested) if tested else {}),
        bytes_up=sum(line.bytes_up for line in known),
        bytes_down=sum(line.bytes_down for line in known),
        seconds=round(sum(line.seconds for line in known), 3),
        memory=max((line.memory for line in known if line.memory is not None), default=None),
    )


def tested_as(task: Task, tested: Parcel) -> dict[str, Any]:
    """Return a site's test as the summary has it; `withheld` names what the site keeps because of too few cases."""
    counts = tested.facts["counts"]
    test = {task.metric: "test", "loss": "test_loss", "cases": "cases"}
    return {
        "test": {name: tested.metrics[key] for name, key in test.items()},
        "figures": task.figures(counts),
        "withheld": sorted(task.layout.keys() - counts.keys()),
    }


def _warnings(led: Outcome, site: str) -> dict[str, list[str]]:
    """Return what a site had to say beside its answers, by round or end."""
    told = {str(line.round): line.warnings.get(site, []) for line in led.rounds}
    told |= {end: reply.facts["warnings"] for end in led.replies if (reply := led.reply(end, site))}
    return {when: lines for when, lines in told.items() if lines}
