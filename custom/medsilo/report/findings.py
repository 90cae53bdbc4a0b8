"""Say what the runs show, in sentences and small tables, and what they do not show. No drawing, no HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from medsilo.report.read import RunResult, all_sites, spans
from medsilo.report.table import number

MOST_ABSENCE_NOTICES = 6
STANDS_OUT = "Stands out"
MOST_SITES_IN_A_SENTENCE = 5
SYNTHETIC = (
    "The data are synthetic. The numbers show that the software works; they say nothing about patients, and the order "
    "of the methods may differ on real images."
)
CHOSEN = (
    "What is tested was chosen on validation data, unless the method or the plan takes the last round, so validation "
    "scores look better than those of new data. Test data were used once per run."
)


@dataclass(frozen=True)
class Notice:
    """Something a reader must know before any number."""

    kind: Literal["failed", "missing", "caution", "synthetic"]
    word: str
    text: str


@dataclass(frozen=True)
class Answer:
    """The answer in one sentence, what qualifies it, and further sentences."""

    headline: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """The price that one site paid in one round, on average over the rounds in which sites contributed."""

    label: str
    total_seconds: float | None
    seconds: float | None
    bytes_up: float | None
    bytes_down: float | None
    memory: int | None  # the most that a process held


def is_local(run: RunResult) -> bool:
    """Every site trained alone."""
    return run.summary.method == "local"


def is_central(run: RunResult) -> bool:
    """All data lay in one place."""
    return run.summary.method == "central"


def is_reference(run: RunResult) -> bool:
    """Runs that no federation makes: they are what federations are held against."""
    return is_local(run) or is_central(run)


def answer(runs: Sequence[RunResult]) -> Answer:
    """Return which method scores highest on average, said no louder than one run each allows."""
    differences = incomparable(runs)
    if differences:
        return Answer(f"These runs are listed but not ranked, because they differ in {' and '.join(differences)}.")
    complete = [run for run in runs if _complete(run, all_sites(runs))]
    ranked = sorted((run for run in complete if not is_reference(run)), key=_mean, reverse=True)
    if not ranked:
        headline = "No federated run finished with a test score at every site, so there is nothing to rank."
        return Answer(headline, _references(complete))
    remarks = (_seed_remark(ranked), *_joining(ranked[0], complete, all_sites(runs)), *_references(complete))
    return Answer(_alone_is_best(ranked, complete) or _headline(ranked, len(all_sites(runs))), remarks)


def incomparable(runs: Sequence[RunResult]) -> list[str]:
    """Return what differs between runs so that their scores must not be ranked."""
    views = {
        "task": lambda run: run.summary.task,
        "metric": lambda run: run.summary.metric,
        "protocol": lambda run: run.summary.protocol,
        "seed": lambda run: run.summary.seed,
    }
    differences = [name for name, view in views.items() if len({view(run) for run in runs}) > 1]
    finished = [run for run in runs if not run.failed]
    for site in all_sites(runs):
        if len({run.test_cases(site) for run in finished} - {None}) > 1:
            return [*differences, "the number of test cases"]
    return differences


def notices(runs: Sequence[RunResult]) -> list[Notice]:
    """All that belongs on the first screen beside the answer, the gravest first."""
    reasons = [f"{run.label}: {run.summary.reason or 'no reason given'}" for run in runs if run.failed]
    failed = [Notice("failed", "Failed", reason) for reason in reasons]
    missing = [notice for run in runs for notice in _missing(run)]
    left = len(missing) - MOST_ABSENCE_NOTICES
    if left > 0:
        rest = f"{left} more such {'entry' if left == 1 else 'entries'} under Participation."
        missing = [*missing[:MOST_ABSENCE_NOTICES], Notice("missing", "Missing", rest)]
    told = [
        Notice("caution", "Caution", f"{run.label}: {line}") for run in runs for line in run.summary.details.cautions
    ]
    told += [
        Notice("caution", "Sealing", f"{run.label}: {' '.join(sealing.protects)} The keys rest on {sealing.keys}.")
        for run in runs
        if (sealing := run.summary.details.sealing)
    ]
    told += [
        Notice("caution", STANDS_OUT, f"{run.label}: {line}")
        for run in runs
        for lines in run.summary.stands_out.values()
        for line in lines
    ]
    return failed + missing + told + _cautions(runs) + _synthetic(runs)


def costs(runs: Sequence[RunResult]) -> list[Cost]:
    """Return what each run cost, in the runs' order."""
    return [
        Cost(
            run.label,
            run.summary.seconds,
            _per_contribution(run, "seconds"),
            _per_contribution(run, "bytes_up"),
            _per_contribution(run, "bytes_down"),
            max(filter(None, [run.summary.memory, *(run.site(site).memory for site in run.sites)]), default=None),
        )
        for run in runs
    ]


def cost_baseline(runs: Sequence[RunResult]) -> Cost | None:
    """FedAvg's cost, which the others are held against."""
    return next((cost for run, cost in zip(runs, costs(runs), strict=True) if run.summary.method == "fedavg"), None)


def limits(runs: Sequence[RunResult]) -> list[str]:
    """Return what no reader may conclude from this page."""
    found = []
    if any(run.summary.synthetic for run in runs):
        found.append(SYNTHETIC)
    if len(runs) > 1:
        found.append(
            "Each row is a single run with a single seed. Another seed moves every score, and without repeated runs "
            "nobody can tell a difference between methods from chance. The highest of several scores is also higher "
            "than the same method would score again."
        )
    else:
        found.append("This is a single run with a single seed. Another seed changes every score, by an unknown amount.")
    known = [
        (cases, run.tested_in_words(site), site)
        for run in runs
        for site in run.sites
        if (cases := run.test_cases(site))
    ]
    if known:
        cases, words, site = min(known)
        detail = f"{site} has the smallest test set, {words}"
        if all(run.summary.metric == "accuracy" for run in runs):
            detail += f": one more or less right moves its accuracy by {1 / cases:.3f}"
        found.append(f"{detail}.")
    return [*found, CHOSEN]


def _headline(ranked: Sequence[RunResult], sites: int) -> str:
    best, metric = ranked[0], ranked[0].summary.metric
    over = f"over {sites} sites" if sites > 1 else "at the one site"
    score = number(best.summary.mean_test)
    if len(ranked) == 1:
        return f"{best.label} reaches a mean test {metric} of {score} {over}."
    level = [run.label for run in ranked if number(run.summary.mean_test) == score]
    if len(level) > 1:
        return f"{_listed(level)} share the highest mean test {metric}, {score} {over}."
    second = ranked[1]
    return (
        f"{best.label} has the highest mean test {metric}, {score} {over}; "
        f"next is {second.label} with {number(second.summary.mean_test)}."
    )


def _alone_is_best(ranked: Sequence[RunResult], complete: Sequence[RunResult]) -> str:
    """Return the headline where no federation reaches what sites reach by themselves; empty if one does."""
    local, best = _local(complete), ranked[0]
    if local is None or _mean(best) >= _mean(local):
        return ""
    return (
        f"Training alone has the highest mean test {best.summary.metric}, {number(_mean(local))}; the best federation "
        f"is {best.label} with {number(_mean(best))}."
    )


def _seed_remark(ranked: Sequence[RunResult]) -> str:
    seed = ranked[0].summary.seed
    which = "one seed" if seed is None else f"one seed ({seed})"
    if len(ranked) == 1:
        return f"This is one run with {which}: the result of another seed is not known."
    return f"Each method was run once, with {which}, and another seed may change their order: no winner is claimed."


def _joining(best: RunResult, complete: Sequence[RunResult], sites: Sequence[str]) -> list[str]:
    local = _local(complete)
    if local is None:
        return []
    differences = [(site, _difference(best.score(site), local.score(site)) or 0.0) for site in sites]
    better = sum(difference > 0 for _, difference in differences)
    worse = sum(difference < 0 for _, difference in differences)
    verdict = f"Does joining pay? Against training alone, {best.label} is higher at {better} of {len(sites)} sites"
    verdict += f" and lower at {worse}" if worse else ""
    if len(sites) <= MOST_SITES_IN_A_SENTENCE:
        by_site = [f"{site} {signed(difference)}" for site, difference in differences]
        verdict += f" ({', '.join(by_site)})"
    return [f"{verdict}."]


def _references(complete: Sequence[RunResult]) -> tuple[str, ...]:
    known = [f"{run.label} {number(run.summary.mean_test)}" for run in complete if is_reference(run)]
    return (f"For reference, mean over sites: {'; '.join(known)}.",) if known else ()


def signed(value: float | None) -> str:
    """A difference with its sign, three decimals, with a true minus."""
    if value is None:
        return number(None)
    return "±0.000" if value == 0 else f"{value:+.3f}".replace("-", "−")


def _difference(one: float | None, other: float | None) -> float | None:
    """Rounded as it is shown, so that a sentence never says 'higher' beside ±0.000."""
    return None if one is None or other is None else round(one - other, 3)


def _missing(run: RunResult) -> list[Notice]:
    found, absences = [], run.absences()
    for site in dict.fromkeys(absence.site for absence in absences):
        own = [absence for absence in absences if absence.site == site]
        rounds = {absence.round for absence in own}
        reasons = "; ".join(dict.fromkeys(absence.text for absence in own))
        which = f"round{'s' if len(rounds) > 1 else ''} {spans(rounds)} of {run.summary.rounds.planned}"
        word = "Refused" if all(absence.kind == "refused" for absence in own) else "Missing"
        found.append(Notice("missing", word, f"{run.label}: {site} in {which} – {reasons}"))
    return found


def _cautions(runs: Sequence[RunResult]) -> list[Notice]:
    found = []
    for run in runs:
        planned, done = run.summary.rounds.planned, run.summary.rounds.done
        if not run.failed and done < planned:
            found.append(f"{run.label} finished with {done} of {planned} planned rounds.")
        if len({tuple(sorted(machine.items())) for site in run.sites if (machine := run.site(site).machine)}) > 1:
            found.append(
                f"{run.label}: its sites ran different versions or processors, so its last digits are their own."
            )
        lacks = {site: tuple(run.site(site).absent) for site in run.sites}
        if len(set(lacks.values())) > 1:
            told = ", ".join(f"{site} not {' and '.join(names)}" for site, names in lacks.items() if names)
            found.append(
                f"{run.label}: its sites do not have the same ({told}). Scores of sites that drew different "
                "structures are of different things: compare a structure. Their mean is one over structures."
            )
        untested = [site for site in run.sites if run.score(site) is None]
        if not run.failed and untested:
            found.append(f"{run.label} has no test score for {_listed(untested)}; its mean leaves them out.")
    if len({run.summary.package.hash for run in runs}) > 1:
        found.append("The runs were made with different versions of the package (see Provenance).")
    return [Notice("caution", "Caution", text) for text in found]


def _synthetic(runs: Sequence[RunResult]) -> list[Notice]:
    if not any(run.summary.synthetic for run in runs):
        return []
    text = "No patient's image was used; the scores say nothing about patients."
    return [Notice("synthetic", "Synthetic data", text)]


def _local(runs: Sequence[RunResult]) -> RunResult | None:
    return next((run for run in runs if is_local(run) and not run.failed), None)


def _complete(run: RunResult, sites: Sequence[str]) -> bool:
    """A mean over fewer sites is another quantity and must not be ranked beside a full one."""
    return not run.failed and run.summary.mean_test is not None and all(run.score(site) is not None for site in sites)


def _mean(run: RunResult) -> float:
    return run.summary.mean_test or 0.0


def _per_contribution(run: RunResult, field: str) -> float | None:
    """Total over sites divided by all contributions; one site's missing value makes the average missing too."""
    total, contributions = 0.0, 0
    for site in run.sites:
        value, rounds = getattr(run.site(site), field), run.site(site).contributed
        if value is None or rounds is None:
            return None
        total, contributions = total + value, contributions + rounds
    return total / contributions if contributions else None


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
