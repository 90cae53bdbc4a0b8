"""The evidence for a hospital's review: a "yes" only where a test of this very build ran and passed."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.core.package import package_facts
from medsilo.review.claims import CLAIMS, Claim
from medsilo.review.evidence_folder import CLAIMED, PACKAGES, PAGE, REPORTS, judge, write_evidence
from medsilo.review.installed import SBOM, installed, write_sbom
from medsilo.review.junit import BUILD, read_junit
from tests.conftest import make_plan

NAMED = sorted({test for claim in CLAIMS for test in claim.tests})
OWN = """import pytest
@pytest.mark.parametrize("n", [1, 2])
def test_both(n): pass
@pytest.mark.parametrize("n", [1, 2])
def test_one(n): assert n == 1, "the second differs"
def test_left_out(): pytest.skip("not here")
@pytest.mark.xdist_group("together")
def test_grouped(): pass
"""


@pytest.mark.parametrize("test", NAMED)
def test_a_claim_names_tests_that_the_gate_runs(test: str, root: Path) -> None:
    """Those of `make test-long` run before a release only."""
    file, name = test.split("::")
    (found,) = [
        node
        for node in ast.parse((root / file).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert not any(ast.unparse(mark) == "pytest.mark.long" for mark in found.decorator_list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pytest's own file about tests that pass, fail and are skipped."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_own.py").write_text(OWN)
    (folder / "tests" / "test_broken.py").write_text("import no_such_module\n")
    (folder / "conftest.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    command.append("--junitxml=report.xml")
    done = subprocess.run([*command, "--continue-on-collection-errors"], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 1
    return folder / "report.xml"


def claim_of(*names: str) -> Claim:
    return Claim("?", "!", tuple(f"tests/test_own.py::{name}" for name in names), "")


def test_only_what_ran_and_passed_is_shown(report: Path) -> None:
    results = read_junit(report)
    assert judge(claim_of("test_both", "test_grouped"), results).shown
    for name, why in (("test_one", "failed"), ("test_left_out", "was skipped"), ("test_gone", "did not run")):
        verdict = judge(claim_of("test_both", name), results)
        assert not verdict.shown and verdict.why_not == (f"tests/test_own.py::{name} {why}",)
    assert not judge(claim_of("test_both"), results, other_build=True).shown
    reasons = {case.test: case.reason for case in results.cases if case.outcome == "failed"}
    assert "the second differs" in reasons["tests/test_own.py::test_one"]
    assert "no_such_module" in reasons["tests/test_broken.py::import"]
    assert (results.count("passed"), results.count("failed"), results.count("skipped")) == (4, 2, 1)


def test_results_that_can_not_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text("<testsuites><testcase")
    with pytest.raises(MedsiloError, match="can't be read as JUnit XML"):
        read_junit(tmp_path / "report.xml")


def all_passed(path: Path, build: str) -> Path:
    """Write a report in which all that claims name passed; in pytest's form, whose reading is tested above."""
    cases = (test.partition(".py::") for test in NAMED)
    lines = (f'<testcase classname="{file.replace("/", ".")}" name="{name}" time="0.1"/>' for file, _, name in cases)
    stated = f'<properties><property name="{BUILD}" value="{build}"/></properties>'
    path.write_text(f"<testsuites><testsuite>{stated}{''.join(lines)}</testsuite></testsuites>")
    return path


def test_the_folder_is_whole(tmp_path: Path) -> None:
    plans = {"fedavg": make_plan("fedavg"), "local": make_plan("local")}
    report = all_passed(tmp_path / "test.xml", package_facts()["hash"])
    verdicts = write_evidence(tmp_path / "evidence", plans, [report])
    assert all(verdict.shown for verdict in verdicts)
    page = (tmp_path / "evidence" / PAGE).read_text()
    assert page.count("<strong>yes</strong>") == len(CLAIMS) and "not shown" not in page
    places = set(re.findall(r'href="#(test-[\w-]+)"', page))
    assert len(places) == len(NAMED) and all(f'<tr id="{place}">' in page for place in places)
    assert "What leaves a site under FedAvg" in (tmp_path / "evidence" / REPORTS / "fedavg.txt").read_text()
    packages = {own["name"]: own for own in json.loads((tmp_path / "evidence" / PACKAGES).read_text())}
    assert packages["torch"]["licence"] and len(packages["torch"]["hash"]) == 64
    claimed = json.loads((tmp_path / "evidence" / CLAIMED).read_text())
    assert claimed["medsilo"] == package_facts() and all(own["shown"] for own in claimed["claims"])


@pytest.mark.parametrize("build", ["", "0" * 64, None])
def test_without_tests_of_this_build_nothing_is_shown(build: str | None, tmp_path: Path) -> None:
    reports = [] if build is None else [all_passed(tmp_path / "test.xml", build)]
    assert not any(verdict.shown for verdict in write_evidence(tmp_path / "evidence", {}, reports))
    page = (tmp_path / "evidence" / PAGE).read_text()
    assert ("No tests were given" if build is None else "Tests of another build") in page
    assert "No job was given" in page and "<strong>yes</strong>" not in page


def test_every_package_has_a_licence_and_a_hash_or_says_that_it_has_not() -> None:
    found = installed()
    assert len(found) > 50 and all(own.licence and own.hash for own in found)
    assert {own.name: own.hash for own in found if own.name == "medsilo"} == {"medsilo": package_facts()["hash"]}


@pytest.mark.slow
def test_the_sbom_lists_what_is_installed(tmp_path: Path) -> None:
    write_sbom(tmp_path / SBOM)
    listed = json.loads((tmp_path / SBOM).read_text())
    assert listed["bomFormat"] == "CycloneDX"
    names = {own["name"].lower().replace("_", "-") for own in listed["components"]}
    assert {"nvflare", "torch", "pydantic"} <= names
