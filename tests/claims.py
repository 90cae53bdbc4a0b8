"""The promises of docs/privacy.md and the outcomes of `medsilo record`, each with the tests that show it.

    python -m tests.claims build/tests/*.xml      # which of them the tests of this build have shown

The tests run in `make test` and `make test-slow`, which write these files; a few in `make test-long` alone.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from medsilo_record.outcomes import outcomes
from tests.junit import SuiteResults, read_junit

PAGE = Path(__file__).parents[1] / "docs/privacy.md"
BEGINS, ENDS = "## Promises and the attacks on them", "\n## "
TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


@dataclass(frozen=True)
class Claim:
    """A promise, and the tests that attack it."""

    promise: str
    tests: tuple[str, ...]


def promised(page: str) -> tuple[Claim, ...]:
    """Return the rows of the tables of promises."""
    part = page.partition(BEGINS)[2].partition(ENDS)[0]
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return tuple(Claim(row[0].removeprefix("| "), tuple(TEST.findall(row[2]))) for row in rows if row[0] != "| promise")


OUTCOMES = tuple(Claim(f"{one.framework} {one.id}: {one.title}", one.tests) for one in outcomes() if one.tests)
CLAIMS = (*promised(PAGE.read_text("utf-8")), *OUTCOMES)


def why_not(claim: Claim, results: SuiteResults) -> list[str]:
    """Return why these results do not show a claim: not all of its tests ran and passed."""
    words = {"missing": "did not run", "skipped": "was skipped", "failed": "failed"}
    outcomes = {test: results.outcome(test) for test in claim.tests}
    return [f"{test} {words[outcome]}" for test, outcome in outcomes.items() if outcome != "passed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Say of each promise whether the results show it; returns 1 unless they show all, of this very build."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims", description="Which claims tests have shown.")
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit files of this build's tests")
    build = package_facts()["hash"]
    try:
        results = read_junit(*parser.parse_args(arguments).reports)
    except MedsiloError as error:
        print(error, file=sys.stderr)
        return 1
    if results.builds != {build}:
        print(f"these are not results of this build ({build[:12]}), so they show nothing", file=sys.stderr)
        return 1
    told = {claim: why_not(claim, results) for claim in CLAIMS}
    for claim, reasons in told.items():
        print(f"{'NOT SHOWN' if reasons else 'shown':<9}  {claim.promise}", *reasons, sep="\n           ")
    print(f"{sum(not reasons for reasons in told.values())} of {len(CLAIMS)} claims are shown by tests of this build")
    return 1 if any(told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
