"""The outcome of a study as summary.json has it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.core.parent_watch import most_held
from medsilo.federation.acceptance import Acceptance
from medsilo.federation.requests import Exchange
from medsilo.federation.server_state import ServerState
from medsilo.runs.messages import Delivered, Joined, SiteAnswer, Tested
from medsilo.runs.provenance import now
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Agreement, Details, RoundCount, Selection, SiteResult, StudyFacts, Summary
from medsilo.runs.site_files import Package, Readiness
from medsilo.tasks.metrics import CONFUSION, Counts, added
from medsilo.tasks.objective import judged_by
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class StudyUsage:
    """All that a summary is made of."""

    acceptance: Acceptance  # the plan, and the sites that train and that don't
    state: ServerState
    engine: str
    rounds: Sequence[Round]
    ends: Mapping[str, Exchange]  # what came of `join`, `deliver` and `test`, as far as they were asked

    def reply(self, end: str, site: str) -> SiteAnswer | None:
        """Return a site's answer before the first or after the last round."""
        return self.ends[end].replies.get(site) if end in self.ends else None

    def tested(self, site: str) -> Tested | None:
        """Return a site's test."""
        answer = self.reply("test", site)
        return answer if isinstance(answer, Tested) else None


def summarise(led: StudyUsage, reason: str | None, passing: bool, started: str, seconds: float) -> Summary:
    """Say who did what, with which outcome; a study that failed has a summary, too."""
    asked, state = led.acceptance, led.state
    plan, rules = asked.plan, asked.plan.participation
    sites = {site: _site_result(led, site) for site in asked.sites}
    tests = [tested for site in asked.sites if (tested := led.tested(site))]
    told = [counts_of(plan.task, tested.counts, tested.threshold) for tested in tests]
    return Summary(
        status="finished" if reason is None else "failed",
        reason=reason,
        passing=passing,
        method=plan.algorithm.name,
        title=plan.algorithm.title,
        task=plan.task.name,
        task_title=plan.task.title,
        synthetic=plan.task.synthetic,
        sliced=plan.task.sliced,
        engine=led.engine,
        metric=plan.task.goal.metric,
        seed=plan.seed,
        protocol=plan.protocol,
        plan_hash=plan.hash,
        packages={name: Package(**facts) for name, facts in plan.code.items()},
        study=asked.study,
        description=StudyFacts(**plan.study.model_dump()),
        labels=list(plan.task.goal.label_names),
        network=plan.network.name,
        parameters=sum(parameter.numel() for parameter in state.layout["model"].parameters()),
        rounds=RoundCount(planned=plan.rounds, done=state.done),
        agreed=Agreement(sites=list(asked.sites), minimum=rules.required, when_missing=rules.when_missing),
        selected=Selection(
            by="site" if plan.algorithm.outcome.personal else "mean",
            rounds={site: tested.selected for site in asked.everyone if (tested := led.tested(site))},
        ),
        sites=sites,
        evaluation_sites={site: _site_result(led, site) for site in asked.everyone if site not in asked.sites},
        **means(plan.task, sites),
        pooled=plan.task.goal.figures(added(told)),
        details=Details(**state.summary_details()),
        seconds=round(seconds, 3),
        memory=most_held(),
        started=started,
        ended=now(),
    )


def means(task: Task, sites: Mapping[str, SiteResult]) -> dict[str, float | None]:
    """Return the mean test score over the sites that tell theirs, and the mean over their cases.

    Where sites drew different structures, that is of each structure over the sites that drew it, and then the mean over
    structures: sites' own means are of different things then.
    """
    goal = task.goal
    judged = judged_by(goal, {site: own.absent for site, own in sites.items()})
    each = [[(sites[site], sites[site].figures.get(name)) for site in own] for name, own in judged.items()]
    known = [own for own in map(_scored, each) if own]
    known = known or [_scored([(own, own.test[goal.metric]) for own in sites.values() if own.test])]
    pooled = [(sum(score * count for score, count in own), sum(count for _, count in own)) for own in known]
    return {
        "mean_test": _mean([sum(score for score, _ in own) / len(own) for own in known if own]),
        "pooled_test": _mean([total / cases for total, cases in pooled if cases]),
    }


def _scored(told: Iterable[tuple[SiteResult, float | None]]) -> list[tuple[float, float]]:
    """Return scores that sites tell, with their test cases."""
    return [(score, own.test["cases"] or 0) for own, score in told if own.test and score is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _site_result(led: StudyUsage, site: str) -> SiteResult:
    task, lines = led.acceptance.plan.task, [line.sites.get(site) for line in led.rounds]
    unstated = None if task.scripted else 0  # cases of which a script says nothing
    known = [line for line in lines[: led.state.done] if line]
    joined, delivered, tested = led.reply("join", site), led.reply("deliver", site), led.tested(site)
    validation = [line.validation if line else None for line in lines]
    if "deliver" in led.ends:
        validation.append(delivered.validation if isinstance(delivered, Delivered) else None)
    reply = joined or delivered or tested
    return SiteResult(
        cases={part: cases or unstated for part, cases in reply.cases} if reply else None,
        classes=joined.classes if isinstance(joined, Joined) else None,
        machine=joined.machine if isinstance(joined, Joined) else {},
        absent=joined.absent if isinstance(joined, Joined) else [],
        steps={**joined.steps} if isinstance(joined, Joined) else {},
        contributed=len(known),
        missed={line.round: reason for line in led.rounds if (reason := line.absence(site))},
        missed_ends={end: own.missing[site].text for end, own in led.ends.items() if site in own.missing},
        warnings=_warnings(led, site),
        validation=validation,
        **(tested_as(task, dict(tested), tested.cases.test or unstated, tested.threshold) if tested else {}),
        bytes_up=sum(line.bytes_up for line in known),
        bytes_down=sum(line.bytes_down for line in known),
        seconds=round(sum(line.seconds for line in known), 3),
        memory=max((line.memory for line in known if line.memory is not None), default=None),
        readiness=_readiness(joined, delivered),
    )


def _readiness(joined: SiteAnswer | None, delivered: SiteAnswer | None) -> Readiness | None:
    """Return what a site told of itself on joining, with what was measured of its line on delivering."""
    found = joined.readiness if joined else None
    measured = delivered.readiness if delivered else None
    return found.changed(line=measured.line) if found and measured else found


def tested_as(task: Task, told: Mapping[str, Any], cases: int | None, threshold: float | None) -> dict[str, Any]:
    """Return a site's test as the summary has it; `suppressed` names what the site keeps because of too few cases."""
    counts: Counts = told["counts"]
    known, of_classes = counts_of(task, dict(counts), threshold), task.goal.classifies
    return {
        "test": {task.goal.metric: told["test"], "loss": told["test_loss"], "cases": cases},
        "figures": task.goal.figures(known),
        "suppressed": sorted(task.goal.layout.keys() - counts.keys()),
        "decisions": of_classes.decisions(known, threshold) if of_classes and CONFUSION in known else None,
    }


def counts_of(task: Task, counts: Counts, threshold: float | None) -> Counts:
    """Return a site's counts, of a classification with what follows from them."""
    of_classes = task.goal.classifies
    return of_classes.with_derived(counts, threshold) if of_classes else counts


def _warnings(led: StudyUsage, site: str) -> dict[str, list[str]]:
    """Return what a site had to say beside its answers, by round or end."""
    told = {str(line.round): line.warnings.get(site, []) for line in led.rounds}
    told |= {end: reply.warnings for end in led.ends if (reply := led.reply(end, site))}
    return {when: lines for when, lines in told.items() if lines}
