"""Test results of the same build must support all claims that a hospital reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import claims
from tests.claims import CLAIMS, MISSION, guards, is_long
from tests.junit import BUILD, build_hash

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


def test_every_promise_is_attacked_by_a_test_that_the_gate_runs() -> None:
    assert len(CLAIMS) > 25 and all(len(claim.promise) > 20 for claim in CLAIMS)
    assert [claim.promise for claim in CLAIMS if all(is_long(test) for test in claim.tests)] == []


def test_the_gate_runs_the_slow_tests_of_the_mission() -> None:
    assert {*MISSION} < {*guards()}


def test_the_page_makes_the_promises_that_have_tests(root: Path) -> None:
    part = (root / "docs/trust/privacy.md").read_text("utf-8").partition("\n## Promises")[2].partition("\n## ")[0]
    promises = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines() if line.startswith("| ")]
    assert [one for one in promises if one != "promise"] == [claim.promise for claim in CLAIMS]
    for claim in CLAIMS:
        for file, _, name in (test.partition("::") for test in claim.tests):
            assert f"\ndef {name}(" in (root / file).read_text("utf-8"), f"{file} has no {name}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_own.py").write_text(OWN)
    (folder / "tests" / "test_broken.py").write_text("import no_such_module\n")
    (folder / "conftest.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    # without --basetemp, pytest would delete folders of other test runs
    command += ["--junitxml=report.xml", "--basetemp=own"]
    done = subprocess.run([*command, "--continue-on-collection-errors"], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 1
    return folder / "report.xml"


def all_passed(path: Path, build: str) -> Path:
    cases = (test.partition(".py::") for test in NAMED)
    lines = (f'<testcase classname="{file.replace("/", ".")}" name="{name}" time="0.1"/>' for file, _, name in cases)
    stated = f'<properties><property name="{BUILD}" value="{build}"/></properties>'
    path.write_text(f"<testsuites><testsuite>{stated}{''.join(lines)}</testsuite></testsuites>")
    return path


def test_the_gate_waits_for_all_but_long_tests(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The gate fails if a result is missing, except for a long test.

    The gate names the tests that were skipped on this machine.
    """
    late = [test for test in NAMED if is_long(test)]
    assert 0 < len(late) < 10
    report = all_passed(tmp_path / "test.xml", build_hash())
    whole = report.read_text()

    def left_out(test: str, how: str = "") -> int:
        file, _, name = test.partition(".py::")
        case = f'<testcase classname="{file.replace("/", ".")}" name="{name}" time="0.1"/>'
        assert case in whole
        report.write_text(whole.replace(case, how and case.replace("/>", f">{how}</testcase>")))
        return claims.main(["--gate", str(report)])

    assert left_out(late[0]) == 0 and f"{claims.LATER} {late[0]}" in capsys.readouterr().out
    assert left_out(late[0], "<failure/>") == 1 and claims.LATER not in capsys.readouterr().out
    soon = next(test for test in NAMED if test not in late)
    assert left_out(soon) == 1 and f"{soon} did not run" in capsys.readouterr().out
    assert left_out(soon, "<skipped/>") == 0 and f"{soon} was skipped" in capsys.readouterr().out


@pytest.mark.parametrize("build", ["", "0" * 64])
def test_results_of_another_build_show_nothing(build: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert claims.main([str(all_passed(tmp_path / "test.xml", build))]) == 1
    said = capsys.readouterr()
    assert "not results of this build" in said.err and not said.out
