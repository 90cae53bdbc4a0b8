"""Read test results from the JUnit XML that pytest writes."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from medsilo.core.errors import MedsiloError
from medsilo.core.package import PLACE, facts_of
from medsilo.core.text import plain

LARGEST = 100_000_000  # largest size of a JUnit file in bytes
LONGEST_REASON = 300  # largest number of characters in the reason for a failure
BEHIND = r"[\[(@]"  # characters that begin a test's parameters or pytest-xdist group
BUILD = "medsilo"  # the JUnit property with the tested package's hash
Outcome = Literal["passed", "failed", "skipped", "missing"]


@dataclass(frozen=True)
class CaseResult:
    test: str  # for example tests/unit/project/test_docs.py::test_links, without parameters
    name: str  # for example test_links[page]
    outcome: Outcome
    reason: str


class SuiteResults:
    def __init__(self, cases: Iterable[CaseResult], builds: Iterable[str] = ()) -> None:
        self.cases, self.builds = list(cases), set(builds)
        self._by_test: dict[str, list[CaseResult]] = defaultdict(list)
        for case in self.cases:
            self._by_test[case.test].append(case)

    def of(self, test: str) -> list[CaseResult]:
        return self._by_test.get(test, [])

    def outcome(self, test: str) -> Outcome:
        found = {case.outcome for case in self.of(test)}
        outcomes: tuple[Outcome, ...] = ("failed", "skipped", "passed")
        return next((outcome for outcome in outcomes if outcome in found), "missing")

    def count(self, outcome: Outcome) -> int:
        return sum(case.outcome == outcome for case in self.cases)


def build_hash() -> str:
    """Return a hash over all packages of this tree, which identifies the tested build."""
    names = sorted(path.parent.name for path in PLACE.glob("*/__init__.py"))
    return hashlib.sha256("".join(facts_of(name)["hash"] for name in names).encode()).hexdigest()


def read_junit(*paths: Path) -> SuiteResults:
    roots = [_root(path) for path in paths]
    cases = (_case(element) for root in roots for element in root.iter("testcase"))
    return SuiteResults(cases, (_build(root) for root in roots))


def _root(path: Path) -> ElementTree.Element:
    try:
        if path.stat().st_size > LARGEST:
            raise MedsiloError(f"{path} is larger than any test report; give pytest's --junitxml file")
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        why = type(error).__name__
        raise MedsiloError(f"{path} can't be read as JUnit XML ({why}); pytest --junitxml={path} writes it") from error


def _build(root: ElementTree.Element) -> str:
    stated = (own.get("value", "") for own in root.iter("property") if own.get("name") == BUILD)
    return plain(next(stated, ""))


def _case(element: ElementTree.Element) -> CaseResult:
    name, module = plain(element.get("name", "")), element.get("classname", "")
    if not module:
        name, module = "import", name
    test = f"{module.replace('.', '/')}.py::{re.split(BEHIND, name)[0]}"
    failed = next((child for kind in ("failure", "error") if (child := element.find(kind)) is not None), None)
    if failed is not None:
        return CaseResult(test, name, "failed", _reason(failed))
    skipped = element.find("skipped")
    return CaseResult(
        test, name, "passed" if skipped is None else "skipped", "" if skipped is None else _reason(skipped)
    )


def _reason(element: ElementTree.Element) -> str:
    said = element.get("message") or ""
    raised = [line[1:] for line in (element.text or "").splitlines() if line.startswith("E ")]
    return plain(raised[-1] if said == "collection failure" and raised else said, LONGEST_REASON)
