"""`medsilo evidence`: a folder that a hospital can review, with a page whose every "yes" a test of this build shows."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.check.leaks import describe, leaks, told_besides
from medsilo.core.files import write_json, write_text
from medsilo.core.package import package_facts
from medsilo.plan import Plan
from medsilo.report.evidence_page import Flow, ShownClaim, ShownTest, write_evidence_page
from medsilo.report.findings import Answer, Notice
from medsilo.review.claims import CLAIMS, LIMITS, Claim
from medsilo.review.installed import installed, without_licence
from medsilo.review.junit import SuiteResults, read_junit
from medsilo.runs.paths import PUBLISHED
from medsilo.site.settings import SiteSettings

PAGE, PACKAGES, CLAIMED = "index.html", "packages.json", "claims.json"
REPORTS, TESTS = "leak-reports", "tests"  # folders


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, and why the tests of this build do not show it, if they do not."""

    claim: Claim
    why_not: tuple[str, ...]

    @property
    def shown(self) -> bool:
        return not self.why_not


def judge(claim: Claim, results: SuiteResults, other_build: bool = False) -> JudgedClaim:
    """Return whether all tests of a claim ran and passed, in a run of this very build."""
    if other_build:
        return JudgedClaim(claim, ("the results are not of this build",))
    outcomes = {test: results.outcome(test) for test in claim.tests}
    words = {"missing": "did not run", "skipped": "was skipped", "failed": "failed"}
    return JudgedClaim(
        claim, tuple(f"{test} {words[outcome]}" for test, outcome in outcomes.items() if outcome != "passed")
    )


def write_evidence(folder: Path, plans: Mapping[str, Plan], reports: Sequence[Path]) -> list[JudgedClaim]:
    """Write page, packages, leak report of each plan and results of tests; return the verdicts.

    reports: JUnit files of this build's tests.
    """
    results, packages = read_junit(*reports), installed()
    build = package_facts()
    other = bool(reports) and results.builds != {build["hash"]}
    verdicts = [judge(claim, results, other) for claim in CLAIMS]
    write_json(folder / PACKAGES, [vars(own) for own in packages])
    for name, plan in plans.items():
        settings = SiteSettings()
        unknown = dict.fromkeys(plan.participation.sites, "no data were read")
        write_text(folder / REPORTS / f"{name}.txt", "\n".join(describe(plan, unknown, settings)) + "\n")
    for path in reports:
        (folder / TESTS).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / TESTS / path.name)
    claims = [{**vars(verdict.claim), "shown": verdict.shown, "why_not": verdict.why_not} for verdict in verdicts]
    write_json(folder / CLAIMED, {"medsilo": build, "claims": claims})
    write_evidence_page(
        folder / PAGE,
        build=build,
        answer=_answer(verdicts, results, reports),
        notices=_notices(plans, reports, other, results, list(without_licence(packages))),
        limits=LIMITS,
        claims=[
            ShownClaim(
                own.claim.question, own.claim.answer, own.shown, own.why_not, own.claim.tests, own.claim.left_open
            )
            for own in verdicts
        ],
        tests=[
            ShownTest(test, results.outcome(test), len(results.of(test)))
            for test in dict.fromkeys(test for claim in CLAIMS for test in claim.tests)
        ],
        files=[f"{TESTS}/{path.name}" for path in reports],
        flows=flows(plans),
        reports={name: f"{REPORTS}/{name}.txt" for name in plans},
        packages=[(own.name, own.version, own.licence, own.hash) for own in packages],
    )
    return verdicts


def flows(plans: Mapping[str, Plan]) -> list[Flow]:
    """Return who sends what to whom, from the list by which hospitals send."""
    found = []
    for name, plan in plans.items():
        for leak in leaks(plan):
            found.append(Flow(name, "hospital", "server", leak.group, f"rounds {leak.when}", leak.bytes))
        for stretch in plan.course.stretches():
            rounds = f"rounds {stretch.first} to {stretch.last}"
            found += (Flow(name, "server", "hospital", group.name, rounds, None) for group in stretch.phase.given)
        delivered = [group.name for group in plan.course.delivery.given]
        found += (Flow(name, "server", "hospital", group, "at the end", None) for group in delivered)
        found += (Flow(name, "hospital", "server", line, "see the report", None) for line in told_besides(plan))
    if plans:
        numbers = "cases of each part, losses, scores and counts, seconds, memory, medsilo's version and hash"
        found.append(Flow("every job", "hospital", "server", numbers, "every round and at the end", None))
        found.append(Flow("every job", "server", "lead", ", ".join(PUBLISHED), "when the job ends", None))
    return found


def _answer(verdicts: Sequence[JudgedClaim], results: SuiteResults, reports: Sequence[Path]) -> Answer:
    shown = sum(verdict.shown for verdict in verdicts)
    ran = (
        f"{results.count('passed')} tests passed, {results.count('failed')} failed, {results.count('skipped')} skipped."
    )
    headline = f"{shown} of {len(verdicts)} claims are shown by tests of this build that ran and passed."
    return Answer(headline, (ran,) if reports else ())


def _notices(
    plans: Mapping[str, Plan],
    reports: Sequence[Path],
    other_build: bool,
    results: SuiteResults,
    unlicensed: Sequence[str],
) -> list[Notice]:
    found = []
    if not reports:
        advice = "Run make test and make test-slow, and give their JUnit files with --tests."
        found.append(Notice("failed", "No tests were given", f"So no claim below is shown. {advice}"))
    if other_build:
        said = "The results state another hash of the package than this one has, or none, so no claim below is shown."
        found.append(Notice("failed", "Tests of another build", said))
    if results.count("failed"):
        found.append(Notice("failed", "Tests failed", f"{results.count('failed')} tests failed; tests/ says which."))
    if not plans:
        found.append(
            Notice("missing", "No job was given", "So nothing is said of what leaves. Give jobs to the command.")
        )
    if unlicensed:
        found.append(Notice("caution", "No licence stated", ", ".join(unlicensed)))
    return found
