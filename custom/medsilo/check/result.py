"""Findings of a check, in lines for a terminal and as JSON. Nothing in them may not be mailed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from medsilo.core.files import write_text
from medsilo.core.text import counted

Severity = Literal["ok", "note", "stops"]
Cell = str | int | float
APPROVAL = "approval"  # where a plan that nobody has approved yet is noted
HELP = "look it up in docs/study/help.md, or ask the lead"
MARKS: dict[Severity, str] = {"ok": "ok   ", "note": "note ", "stops": "STOPS"}


def aligned(rows: Sequence[Sequence[str | int | float]]) -> list[str]:
    """Rows below a heading, with their cells below each other: text to the left, numbers to the right."""
    columns = []
    for column in zip(*rows, strict=True):
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in column]
        numeric = len(rows) > 1 and all(isinstance(cell, int | float) for cell in column[1:])
        width = max(map(len, texts))
        columns.append([text.rjust(width) if numeric else text.ljust(width) for text in texts])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: where, what was found, what to do. No path, no file name, no patient in them."""

    where: str
    severity: Severity
    what: str
    remedy: str = ""
    private: tuple[str, ...] = ()  # what only the hospital may read: names of files

    @classmethod
    def stopping(cls, where: str, told: str, private: str = "") -> "Finding":
        """Return what stops a site, of an error's words: what is wrong, and after a semicolon what to do."""
        what, _, remedy = told.partition("; ")
        return cls(where, "stops", what, remedy or HELP, (private,) if private else ())

    def as_json(self) -> dict[str, str]:
        return {"where": self.where, "severity": self.severity, "what": self.what, "remedy": self.remedy}


@dataclass(frozen=True)
class Table:
    """Counts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "note": self.note}

    def as_text(self) -> list[str]:
        """Return its lines for a terminal."""
        lines = aligned([self.columns, *self.rows])
        return [self.title, *(f"  {line}" for line in lines), *([self.note] if self.note else [])]


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    facts: dict[str, str]  # who, which job, which package, when
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # that a round takes here, by the phases that were tried
    whole: bool = True  # whether a job was given, so that data were looked at

    @property
    def go(self) -> bool:
        """Return whether nothing stops this site from joining."""
        return all(finding.severity != "stops" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """In one line."""
        stops, notes = (
            counted(sum(own.severity == kind for own in self.findings), word)
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
        """The whole report; `schema` counts up when a key changes its meaning."""
        return {
            "schema": 1,
            "go": self.go and self.whole,
            "verdict": self.verdict,
            **self.facts,
            "findings": [finding.as_json() for finding in self.findings],
            "tables": [table.as_json() for table in self.tables],
        }

    def as_text(self) -> str:
        """The report for a terminal."""
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
        """Write what only the hospital may read to a file of its owner's; return whether there was anything."""
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
