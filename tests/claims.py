"""Check the promises of docs/trust/privacy.md with the tests that promises.yaml lists for each promise.

    python -m tests.claims build/tests/*.xml      # the promises that the tests of this build have shown
    make claims                                   # the same in the gate, after make test and make test-guards

`make test` and `make test-guards` run the tests of the promises and write the result files. A promise may also have a
long test, which `make test-long` runs every night and before a release. The check passes without the long tests, and
prints their names if they did not run.
"""

import argparse
import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.yaml_text import load_yaml
from tests.junit import SuiteResults, build_hash, read_junit

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("promises.yaml")
SKIPPED, LATER = "was skipped", "only make test-long runs"


@dataclass(frozen=True)
class Claim:
    promise: str
    tests: tuple[str, ...]


# The slow tests of the main claim: methods give the same bits over TLS, in the simulator, in a sandbox and after power
# cuts. A script gives the same bits with and without a sandbox. A file name stands for all slow tests in the file.
MISSION = (
    "tests/attacks/test_scripts_in_rooms.py",
    "tests/faults/test_power_cuts.py::test_a_study_goes_on_after_a_power_cut_with_the_same_numbers",
    "tests/federation/test_scripts.py::test_a_script_ends_with_the_same_bits_inside_and_outside_of_the_airlock",
    "tests/federation/test_scripts.py::test_hello_fedbn_keeps_each_sites_batch_norm",
    "tests/federation/test_simulator.py::test_rooms_in_the_simulator_equal_the_loop",
    "tests/secure/test_airlock_tls.py::test_a_stock_job_runs_in_rooms_and_nothing_of_it_elsewhere",
    "tests/secure/test_by_command.py::test_hospitals_check_and_approve_what_a_lead_submits_and_fetches",
    "tests/secure/test_mutual_tls.py::test_over_tls_equals_the_loop",
    "tests/secure/test_sealed_tls.py::test_sealed_over_tls_equals_the_loop",
    "tests/unit/airlock/test_airlock.py",
)
CLAIMS = tuple(Claim(one["promise"], tuple(one["tests"])) for one in load_yaml(LISTED.read_text("utf-8")))


def marks_of(test: str) -> list[str]:
    """Return the decorators of a test and the pytest marks of the test's file; raise an error for an unknown name."""
    file, _, name = test.partition("::")
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    (found,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    of_all = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "pytestmark"]
    marks = [*found.decorator_list, *(one for own in of_all for one in getattr(own, "elts", [own]))]
    return [ast.unparse(own) for own in marks]


def is_long(test: str) -> bool:
    """Return True if only `make test-long` runs a test."""
    return "pytest.mark.long" in marks_of(test)


def guards() -> list[str]:
    """Return the slow tests among the tests of promises and the tests in MISSION."""
    files = {test for test in MISSION if "::" not in test}
    named = {*MISSION, *(test for claim in CLAIMS for test in claim.tests)} - files
    slow = (test for test in named if "pytest.mark.slow" in " ".join(marks_of(test)) and not is_long(test))
    return sorted([*files, *slow])


def left_to_long(claim: Claim, results: SuiteResults) -> list[str]:
    return [test for test in claim.tests if results.outcome(test) == "missing" and is_long(test)]


def why_not(claim: Claim, results: SuiteResults, gate: bool = False) -> list[str]:
    words = {"missing": "did not run", "skipped": SKIPPED, "failed": "failed"}
    later = left_to_long(claim, results) if gate else []
    outcomes = {test: results.outcome(test) for test in claim.tests if test not in later}
    return [f"{test} {words[outcome]}" for test, outcome in outcomes.items() if outcome != "passed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result of each promise; return 1 unless this build's test results confirm all promises."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.claims", description="Print the claims that the tests have shown."
    )
    parser.add_argument("reports", nargs="*", type=Path, help="JUnit files of this build's tests")
    parser.add_argument(
        "--guards", action="store_true", help="print the slow tests that the gate runs, and nothing else"
    )
    parser.add_argument(
        "--gate",
        action="store_true",
        help="ignore tests that only `make test-long` runs, or that this machine skips",
    )
    build, given = build_hash(), parser.parse_args(arguments)
    if given.guards:
        print(*guards())
        return 0
    try:
        results = read_junit(*given.reports)
    except MedsiloError as error:
        print(error, file=sys.stderr)
        return 1
    if results.builds != {build}:
        print(f"these are not results of this build ({build[:12]}), so the results show no claim", file=sys.stderr)
        return 1
    told = {claim: why_not(claim, results, given.gate) for claim in CLAIMS}
    bad = [line for reasons in told.values() for line in reasons if not (given.gate and line.endswith(SKIPPED))]
    for claim, reasons in told.items():
        later = [f"{LATER} {test}" for test in left_to_long(claim, results)] if given.gate else []
        print(f"{'NOT SHOWN' if reasons else 'shown':<9}  {claim.promise}", *reasons, *later, sep="\n           ")
    print(f"{sum(not reasons for reasons in told.values())} of {len(CLAIMS)} claims are shown by tests of this build")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
