"""Define findings and reports of a check. Findings and reports contain no patient data, so people may mail them.

Each module of this package that yields findings describes them in its dictionary `CHECKS`, by topic. A table of the
documentation contains these descriptions.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from medsilo.core.errors import MedsiloError, UnfitData
from medsilo.core.files import write_text
from medsilo.core.text import counted

Severity = Literal["ok", "note", "stops"]
Cell = str | int | float
APPROVAL = "approval"  # topic of findings about a plan that is not yet approved
LESS_MEMORY = "end other programs, use a larger device, or ask the lead for a smaller training.batch_size"
HELP = "look it up with 'medsilo docs', or ask the lead"
MARKS: dict[Severity, str] = {"ok": "ok   ", "note": "note ", "stops": "STOPS"}


def aligned(rows: Sequence[Sequence[str | int | float]]) -> list[str]:
    """Format rows as lines with aligned columns: text is left-aligned, numbers are right-aligned."""
    columns = []
    for column in zip(*rows, strict=True):
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in column]
        numeric = len(rows) > 1 and all(isinstance(cell, int | float) for cell in column[1:])
        width = max(map(len, texts))
        columns.append([text.rjust(width) if numeric else text.ljust(width) for text in texts])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Finding:
    """A result of a check. Only `private` may contain paths, file names or patients."""

    where: str
    severity: Severity
    what: str
    remedy: str = ""
    private: tuple[str, ...] = ()  # file names and details of a finding that only the hospital may see

    @classmethod
    def stopping(cls, where: str, message: str, private: str = "") -> "Finding":
        """Convert an error message to a finding that stops a site; the remedy follows the first semicolon."""
        what, _, remedy = message.partition("; ")
        return cls(where, "stops", what, remedy or HELP, (private,) if private else ())

    def as_json(self) -> dict[str, str]:
        return {"where": self.where, "severity": self.severity, "what": self.what, "remedy": self.remedy}


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "note": self.note}

    def as_text(self) -> list[str]:
        lines = aligned([self.columns, *self.rows])
        return [self.title, *(f"  {line}" for line in lines), *([self.note] if self.note else [])]


@dataclass(frozen=True)
class Report:
    facts: dict[str, str]  # first lines of the report, such as site, packages, time and job
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    # predicted seconds of a round, for each training phase that was rehearsed
    seconds: list[float] = field(default_factory=list)
    whole: bool = True  # False if no job was given, because the data are then unchecked

    @property
    def go(self) -> bool:
        return all(finding.severity != "stops" for finding in self.findings)

    @property
    def verdict(self) -> str:
        stops, notes = (
            counted(sum(finding.severity == kind for finding in self.findings), word)
            for kind, word in (("stops", "finding"), ("note", "note"))
        )
        if self.go and not self.whole:
            return f"READY: nothing stops this machine ({notes}); the data were not looked at without a job"
        if self.go and any(own.where == APPROVAL and own.severity == "note" for own in self.findings):
            return f"GO once this hospital approves the plan: nothing else stops this site ({notes})"
        if self.go:
            return f"GO: nothing stops this site ({notes})"
        return f"NO-GO: {stops} must be settled first ({notes})"

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Increase `schema` if a key changes its meaning."""
        return {
            "schema": 1,
            "go": self.go and self.whole,
            "verdict": self.verdict,
            **self.facts,
            "findings": [finding.as_json() for finding in self.findings],
            "tables": [table.as_json() for table in self.tables],
        }

    def as_text(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines.append("")
        width = max((len(finding.where) for finding in self.findings), default=0)
        for finding in self.findings:
            lines.append(f"{MARKS[finding.severity]}  {finding.where.ljust(width)}  {finding.what}")
            if finding.remedy:
                lines.append(" " * (width + 9) + f"-> {finding.remedy}")
        for table in self.tables:
            lines += ["", *table.as_text()]
        return "\n".join([*lines, "", self.verdict])

    def write_private(self, path: Path) -> bool:
        """Write the private details of findings to a file that only the file's owner can read.

        Returns:
            False if there are no private details, so that no file was written
        """
        lines = [
            line
            for finding in self.findings
            if finding.private
            for line in (f"{finding.where}: {finding.what}", *(f"    {name}" for name in finding.private))
        ]
        if lines:
            write_text(path, "\n".join(["Only for this hospital: it names files and may name patients.", *lines, ""]))
            path.chmod(0o600)
        return bool(lines)


@contextmanager
def guarded(where: str, report: Report) -> Iterator[None]:
    """Convert an error in the `with` block to a finding. For errors of other libraries, leave out the message, because
    it may name files.
    """
    try:
        yield
    except MedsiloError as error:
        # unlike the lead, the hospital may read the error's cause
        why = error.__cause__ if isinstance(error.__cause__, UnfitData) else error
        report.findings.append(Finding.stopping(where, str(why), error.private))
    except Exception as error:
        private = tuple("".join(traceback.format_exception(error)).splitlines())
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            report.findings.append(
                Finding("memory", "stops", f"{where}: the memory did not suffice", LESS_MEMORY, private)
            )
        else:
            told = f"it failed with {type(error).__name__}"
            report.findings.append(Finding(where, "stops", told, "the hospital's own file has the details", private))
