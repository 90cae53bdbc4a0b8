"""The claims that a hospital's data protection officer asks about, each with the tests that show it.

    python -m tests.claims build/tests/*.xml      # which of them the tests of this build have shown

Each test runs in `make test` or `make test-slow`, which write these files. docs/review.md has the claims as a table.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.markdown import table
from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from tests.junit import SuiteResults, read_junit


@dataclass(frozen=True)
class Claim:
    """A question, the answer that is claimed, the tests that show it, and what they leave open."""

    question: str
    answer: str
    tests: tuple[str, ...]
    left_open: str


CLAIMS = (
    Claim(
        "Do images, labels or names of patients or files leave the hospital?",
        "No message has a place for them. Texts of errors are in our own words; what names files or patients stays in "
        "errors.log.",
        (
            "tests/faults/test_simulator_faults.py::test_an_exception_at_a_site_is_a_refusal_without_patient_data",
            "tests/unit/test_executor.py::test_own_words_leave_the_site_and_those_of_others_do_not",
        ),
        "Weights and scores are computed from patients' data, and can tell something about them.",
    ),
    Claim(
        "Does the leak report list all that leaves?",
        "It is made from the same list of groups from which the hospital sends.",
        (
            "tests/unit/test_docs.py::test_every_group_that_leaves_is_named",
            "tests/unit/test_leaks.py::test_it_names_all_that_is_told_beside_tensors",
            "tests/unit/test_docs.py::test_readme_says_what_leaves_a_hospital",
        ),
        "It says what, not how much can be learned from it.",
    ),
    Claim(
        "Are few patients protected in scores and counts?",
        "Scores over few patients do not leave, others leave in coarse steps, counts in multiples, and answers are "
        "counted.",
        (
            "tests/unit/test_protection.py::test_by_default_both_studies_tell_of_the_same_patients",
            "tests/unit/test_protection.py::test_differencing_told_means_is_off_by_up_to_two_ranges",
            "tests/unit/test_book.py::test_a_server_that_asks_more_than_its_plan_said_gets_no_more_than_the_budget",
        ),
        "Crafted models tell bits of patients; two accounts of leads have two budgets unless limits.all_leads is set.",
    ),
    Claim(
        "Can the hospital bound what all studies together reveal?",
        "With 'privacy:' in medsilo.yaml it joins only studies with differential privacy, and a ledger counts every "
        "answer before it leaves.",
        (
            "tests/unit/test_account.py::test_a_study_is_charged_answer_by_answer_and_keeps_its_promise",
            "tests/unit/test_account.py::test_over_the_budget_is_refused_before_data_are_read",
            "tests/unit/test_ledger.py::test_a_changed_ledger_is_noticed_and_nothing_leaves",
        ),
        "Off by default. A copy of the data in another folder has another ledger.",
    ),
    Claim(
        "Are the hospital's limits out of a job's reach?",
        "Time, memory, disk and size are bounded by medsilo.yaml; a job that asks for more is refused in one line.",
        (
            "tests/unit/test_limits.py::test_each_limit_holds_and_says_which",
            "tests/unit/test_limits.py::test_a_plan_of_too_many_values_or_too_little_learning_is_refused",
        ),
        "The limits are as good as the numbers that the hospital sets.",
    ),
    Claim(
        "Does nothing run that the hospital has not approved?",
        "With 'approval: required' only plans run that its engineer has signed by their hash, and a withdrawal stops "
        "them.",
        (
            "tests/unit/test_approvals.py::test_a_study_runs_as_far_as_it_is_approved",
            "tests/unit/test_approvals.py::test_what_another_signed_or_somebody_edited_does_not_count",
        ),
        "Off by default. Who has the hospital's account can read its key and approve.",
    ),
    Claim(
        "Can a job bring code of its own?",
        "A strict hospital refuses code in jobs, and packages that medsilo.yaml does not name.",
        (
            "tests/secure/test_strict_hospital.py::test_jobs_that_try_to_loosen_it",
            "tests/unit/test_extend.py::test_a_site_refuses_a_package_that_its_settings_do_not_name",
        ),
        "A hospital with NVFlare's open default policy runs whatever a job brings.",
    ),
    Claim(
        "Do only members of the study take part, over encrypted lines?",
        "Mutual TLS with the study's own root; a wrong name, an edited kit and an expired certificate are refused.",
        (
            "tests/secure/test_not_let_in.py::test_a_certificate_of_another_root_or_an_expired_one_is_not_let_in",
            "tests/secure/test_not_let_in.py::test_a_wrong_name_or_an_edited_kit_is_not_let_in",
        ),
        "Sizes and times of messages are visible. A stolen kit is the hospital until the server is provisioned anew.",
    ),
    Claim(
        "Can the server be kept from reading this hospital's model?",
        "With 'transport.sealing' in the plan the server adds up masked values and holds no hospital's own.",
        (
            "tests/unit/test_sealed_attacks.py::test_the_server_and_all_helpers_but_the_threshold",
            "tests/unit/test_sealed_lies.py::test_the_server_reads_no_statistics",
        ),
        "Off by default: without sealing the server reads all that leaves.",
    ),
    Claim(
        "Can another hospital, or the server, end the study or fill this machine?",
        "Every message is bounded by what the plan needs and checked before it is used; a bad one costs its sender.",
        (
            "tests/unit/test_hostile_answers.py::test_a_hostile_answer_costs_its_sender_that_answer_and_nobody_else_anything",
            "tests/federation/test_gate.py::test_what_cannot_be_read_costs_its_sender_that_answer",
            "tests/federation/test_gate.py::test_a_site_takes_no_more_than_belongs_to_a_task",
        ),
        "A hospital whose NVFlare process dies ends the job in NVFlare 2.9; 'medsilo resume' goes on.",
    ),
    Claim(
        "Do all parties run the same code?",
        "Version and a hash over the package's files are compared before any data are read.",
        ("tests/unit/test_extend.py::test_another_version_or_other_files_are_refused",),
        "A hospital that lies about its hash.",
    ),
    Claim(
        "Are files from others safe to read?",
        "Models are safetensors, nothing is unpickled, and YAML has limits.",
        (
            "tests/unit/test_houserules.py::test_nothing_that_runs_what_it_reads",
            "tests/property/test_hostile_inputs.py::test_super_models",
            "tests/unit/test_yaml.py::test_bad_yaml_is_one_line_at_once",
        ),
        "NVFlare and the libraries that read images are trusted.",
    ),
    Claim(
        "Can a run be repeated?",
        "The same plan and seed give the same tensors, bit for bit, in one process and in NVFlare's simulator.",
        ("tests/federation/test_simulator.py::test_simulator_equals_the_loop",),
        "On the same kind of machine. Noise of differential privacy is new in every run, on purpose.",
    ),
    Claim(
        "Does an interrupted study lose results or count twice?",
        "After every round the state is on disk; a killed run goes on with the same numbers.",
        (
            "tests/faults/test_simulator_faults.py::test_a_killed_run_resumes_with_the_same_numbers",
            "tests/unit/test_ledger.py::test_histories",
        ),
        "At most the round that ran is repeated.",
    ),
)


def why_not(claim: Claim, results: SuiteResults) -> list[str]:
    """Return why these results do not show a claim: not all of its tests ran and passed."""
    words = {"missing": "did not run", "skipped": "was skipped", "failed": "failed"}
    outcomes = {test: results.outcome(test) for test in claim.tests}
    return [f"{test} {words[outcome]}" for test, outcome in outcomes.items() if outcome != "passed"]


def rows() -> str:
    """Return the claims as a table in Markdown."""
    told = [
        (claim.question, claim.answer, ", ".join(f"`{test}`" for test in claim.tests), claim.left_open)
        for claim in CLAIMS
    ]
    return table(("question", "claim", "tests that show it", "what is left open"), told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Say of each claim whether the results show it; returns 1 unless they show all, of this very build."""
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
        print(f"{'NOT SHOWN' if reasons else 'shown':<9}  {claim.question}", *reasons, sep="\n           ")
    print(f"{sum(not reasons for reasons in told.values())} of {len(CLAIMS)} claims are shown by tests of this build")
    return 1 if any(told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
