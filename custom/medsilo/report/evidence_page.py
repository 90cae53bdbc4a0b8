"""The page of `medsilo evidence`: claims and the tests that show them, what travels, what is installed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.text import size_text
from medsilo.report.findings import Answer, Notice
from medsilo.report.template import fill, save


@dataclass(frozen=True)
class ShownClaim:
    """A claim with its verdict."""

    question: str
    answer: str
    shown: bool
    why_not: Sequence[str]
    tests: Sequence[str]
    left_open: str


@dataclass(frozen=True)
class ShownTest:
    """A test that a claim names, with its worst result and the number of its cases."""

    test: str
    outcome: str
    cases: int


@dataclass(frozen=True)
class Flow:
    """One thing that a party sends to another under a job."""

    job: str
    sender: str
    receiver: str
    what: str
    when: str
    bytes: int | None

    @property
    def size(self) -> str:
        """Return the bytes a round in words, where they are known."""
        return "" if self.bytes is None else f"{size_text(self.bytes)} a round"


def anchor(test: str) -> str:
    """Return the place of a test on the page."""
    return "test-" + re.sub(r"\W+", "-", test)


def write_evidence_page(
    destination: Path,
    *,
    build: Mapping[str, str],
    answer: Answer,
    notices: Sequence[Notice],
    limits: Sequence[str],
    claims: Sequence[ShownClaim],
    tests: Sequence[ShownTest],
    files: Sequence[str],
    flows: Sequence[Flow],
    reports: Mapping[str, str],
    packages: Sequence[tuple[str, str, str, str]],
) -> Path:
    """Write the page and return where it is."""
    page = fill(
        "evidence.html",
        f"Evidence for a review of medsilo {build['version']}",
        context=f"Build {build['hash']}",
        answer=answer,
        notices=notices,
        checks=[],
        limits=limits,
        claims=[(claim, [(test, anchor(test)) for test in claim.tests]) for claim in claims],
        tests=[(own, anchor(own.test)) for own in tests],
        files=files,
        flows=flows,
        reports=reports,
        packages=packages,
    )
    return save(page, destination)
