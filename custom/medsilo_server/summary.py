"""Make the summary of a study, which summary.json contains."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.core.parent_watch import most_held
from medsilo.core.rounding import step_of_at_least
from medsilo.exchange.acceptance import Acceptance
from medsilo.runs.messages import Delivered, Joined, SiteAnswer, Tested
from medsilo.runs.provenance import now
from medsilo.runs.rounds import Round
from medsilo.runs.schema import (
    Agreement,
    Details,
    RoundCount,
    Selection,
    SiteResult,
    StudyFacts,
    SubgroupResult,
    Summary,
)
from medsilo.runs.site_files import Package, Readiness
from medsilo.tasks.metrics import BY_PATIENT, CONFUSION, Counts, added
from medsilo.tasks.objective import judged_by
from medsilo.tasks.task import Task
from medsilo_server.requests import Exchange
from medsilo_server.server_state import ServerState


@dataclass(frozen=True)
class StudyUsage:
    acceptance: Acceptance  # the plan, and the names of the training sites and of the evaluation sites
    state: ServerState
    engine: str
    rounds: Sequence[Round]
    ends: Mapping[str, Exchange]

    def reply(self, end: str, site: str) -> SiteAnswer | None:
        """Return a site's answer to a request outside rounds (`join`, `deliver` or `test`), or None."""
        return self.ends[end].replies.get(site) if end in self.ends else None

    def tested(self, site: str) -> Tested | None:
        answer = self.reply("test", site)
        return answer if isinstance(answer, Tested) else None


def summarise(led: StudyUsage, reason: str | None, passing: bool, started: str, seconds: float) -> Summary:
    """Return the summary of a finished or failed study.

    Args:
        passing: True if the cause of the failure is temporary.
    """
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
    """Return two mean test scores: `mean_test` over sites, and `pooled_test` over the sites' test cases.

    Sites that do not disclose their score are left out. If sites annotated different structures, each structure's score
    is averaged over the sites that annotated the structure, and then the mean over structures is taken. The sites' own
    means over structures would not be comparable, because these means may cover different structures.
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


def _scored(results: Iterable[tuple[SiteResult, float | None]]) -> list[tuple[float, float]]:
    return [(score, own.test["cases"] or 0) for own, score in results if own.test and score is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _site_result(led: StudyUsage, site: str) -> SiteResult:
    task, lines = led.acceptance.plan.task, [line.sites.get(site) for line in led.rounds]
    # in a study with a training script, 0 cases mean that the script did not state the number of cases
    unstated = None if task.scripted else 0
    known = [line for line in lines[: led.state.done] if line]
    joined, delivered, tested = led.reply("join", site), led.reply("deliver", site), led.tested(site)
    validation = [line.validation if line else None for line in lines]
    if "deliver" in led.ends:
        validation.append(delivered.validation if isinstance(delivered, Delivered) else None)
    reply = joined or delivered or tested
    step = joined.steps.get("test", 0.0) if isinstance(joined, Joined) else 0.0
    return SiteResult(
        cases={part: cases or unstated for part, cases in reply.cases} if reply else None,
        patients={part: patients or unstated for part, patients in reply.patients} if reply else None,
        classes=joined.classes if isinstance(joined, Joined) else None,
        machine=joined.machine if isinstance(joined, Joined) else {},
        absent=joined.absent if isinstance(joined, Joined) else [],
        steps={**joined.steps} if isinstance(joined, Joined) else {},
        contributed=len(known),
        missed={line.round: reason for line in led.rounds if (reason := line.absence(site))},
        missed_ends={end: own.missing[site].text for end, own in led.ends.items() if site in own.missing},
        warnings=_warnings(led, site),
        validation=validation,
        **(_tested(task, tested, tested.cases.test or unstated, step) if tested else {}),
        bytes_up=sum(line.bytes_up for line in known),
        bytes_down=sum(line.bytes_down for line in known),
        seconds=round(sum(line.seconds for line in known), 3),
        memory=max((line.memory for line in known if line.memory is not None), default=None),
        readiness=_readiness(joined, delivered),
    )


def _tested(task: Task, tested: Tested, cases: int | None, step: float) -> dict[str, Any]:
    return tested_as(task, dict(tested), cases, tested.threshold, step, tested.counted.test)


def _readiness(joined: SiteAnswer | None, delivered: SiteAnswer | None) -> Readiness | None:
    """Return the readiness report that a site sent when it joined. If the speed of the connection was measured again
    when the final model was delivered, the report has the newer speed.
    """
    found = joined.readiness if joined else None
    measured = delivered.readiness if delivered else None
    return found.changed(line=measured.line) if found and measured else found


def tested_as(
    task: Task,
    facts: Mapping[str, Any],
    cases: int | None,
    threshold: float | None,
    step: float = 0.0,
    counted: int | None = None,
) -> dict[str, Any]:
    """Convert a site's test result to the form that summary.json uses.

    The key `suppressed` names the metrics that the site does not disclose because it has too few cases.

    Args:
        step: The site's rounding step for its score, or 0 if the site does not round.
        counted: The number of patients if the site rounds its score, and otherwise the number of cases.
    """
    counts: Counts = facts["counts"]
    known, of_classes = counts_of(task, dict(counts), threshold), task.goal.classifies
    return {
        "test": {task.goal.metric: facts["test"], "loss": facts["test_loss"], "cases": cases},
        "figures": task.goal.figures(known),
        "figure_ranges": dict(_ranges(task, counts, counted or cases, step)) if step and cases else {},
        "suppressed": sorted(task.goal.layout.keys() - counts.keys()),
        "decisions": of_classes.decisions(known, threshold) if of_classes and CONFUSION in known else None,
        "subgroups": [SubgroupResult(**dict(one)) for one in facts.get("subgroups", ())],
    }


def _ranges(task: Task, counts: Counts, counted: int, step: float) -> Iterator[tuple[str, tuple[float, float]]]:
    """For each rounded mean, yield the smallest and the largest value that the exact mean may have.

    A mean over some of the cases is rounded more coarsely than a mean over all cases, because each patient then has a
    larger weight.
    """
    for name, length in task.goal.layout.items():
        if length != 2 or name not in counts or not counts[name][1]:
            continue
        (total, number), (low, high) = counts[name], task.goal.told_range(name.removesuffix(BY_PATIENT))
        share = 1.0 if name.endswith(BY_PATIENT) else min(number / counted, 1.0)
        half = step_of_at_least(step / share * (high - low)) / 2
        ends = max(total / number - half, low), min(total / number + half, high)
        yield name, (float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}"))


def counts_of(task: Task, counts: Counts, threshold: float | None) -> Counts:
    """Return the counts that a site sent, and for a classification also the counts that follow from the sent counts."""
    of_classes = task.goal.classifies
    return of_classes.with_derived(counts, threshold) if of_classes else counts


def _warnings(led: StudyUsage, site: str) -> dict[str, list[str]]:
    told = {str(line.round): line.warnings.get(site, []) for line in led.rounds}
    told |= {end: reply.notes for end in led.ends if (reply := led.reply(end, site))}
    return {when: lines for when, lines in told.items() if lines}
