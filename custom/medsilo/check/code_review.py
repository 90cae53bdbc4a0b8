"""Show a job's code to a reviewer: every file, and each file's differences from the last approved code."""

import difflib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medsilo.check.machine import without_walls
from medsilo.core.text import plain, printable
from medsilo.site.accepted_settings import moment
from medsilo.site.approvals import Decision
from medsilo.site.job_code import JobCode
from medsilo.site.settings import SiteSettings

MOST_COMPARED = 5000  # for files with more lines than this, the review shows the whole file instead of the differences
BINARY = "(no text: a person cannot read it here)"
UNSEEN = "(some letters steer a screen or cannot be seen; they are shown as spaces)"
RIGHTS = {  # rights of a job's code, by the setting `airlock`
    "off": "The code runs as the account that runs this kit. It may read and write every file that this account may, "
    "start programs and open connections; no wall is around it.",
    "required": "The code runs in this hospital's airlock: it has no network, and reads its own folder, Python's "
    "packages, and what the hospital names.",
}
State = Literal["new", "changed", "same", "gone"]


@dataclass(frozen=True)
class FileReview:
    name: str
    size: int
    hash: str
    state: State  # how the file differs from the last approved code
    lines: tuple[str, ...]  # for a new file, all its lines; for a changed file, the differences; otherwise, no lines

    @property
    def head(self) -> str:
        if self.state == "gone":
            return f"{self.name}: gone"
        return f"{self.name}: {self.state}, {self.size:,} bytes, SHA-256 {self.hash}"


def review(code: JobCode, before: JobCode | None = None) -> list[FileReview]:
    """Return all files of a job's code, and also the files that only the earlier approved code `before` contains."""
    return list(_files(code, before))


def _files(code: JobCode, before: JobCode | None) -> Iterator[FileReview]:
    old = before.files if before else {}
    for name in sorted({*code.files, *old}):
        now, then = code.files.get(name), old.get(name)
        state: State = "gone" if now is None else "new" if then is None else "same" if now == then else "changed"
        lines = () if state in ("same", "gone") else tuple(_lines(now or b"", then))
        yield FileReview(name, len(now or b""), hashlib.sha256(now or b"").hexdigest(), state, lines)


def _lines(now: bytes, then: bytes | None) -> Iterator[str]:
    text, old = _text(now), [] if then is None else _text(then)
    if text is None:
        yield BINARY
        return
    shown = [printable(line.expandtabs(4)) for line in text]
    if any(map(str.__ne__, shown, (line.expandtabs(4) for line in text))):
        yield UNSEEN
    if then is None or old is None or max(len(text), len(old)) > MOST_COMPARED:
        yield from shown
        return
    told = difflib.unified_diff([printable(line.expandtabs(4)) for line in old], shown, "approved", "now", lineterm="")
    yield from list(told)[2:] or [BINARY]


def _text(content: bytes) -> list[str] | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.split("\n")[: -1 if text.endswith("\n") else None]


def code_words(code: JobCode, settings: SiteSettings, before: tuple[Decision, JobCode] | None) -> list[tuple[str, str]]:
    """Describe a job's code and the rights of the code to a reviewer, as pairs of a heading and a text."""
    versions = code.facts().versions
    imports = sorted(code.imports)
    own = [name for name in imports if name in sys.stdlib_module_names]
    others = [name for name in imports if name not in sys.stdlib_module_names]
    data = settings.data.folder if settings.data else None
    last = "no code was approved here before"
    if before:
        decision, earlier = before
        last = f"{earlier.hash[:12]}, by {decision.by}, {moment(decision.at)}"
    return [
        ("code", f"SHA-256 {code.hash}, {len(code.files)} files, {code.size:,} bytes"),
        ("approved last", last),
        ("packages", ", ".join(f"{name} {plain(version, 60)}" for name, version in versions.items())),
        ("imports", f"{plain(', '.join(others)) or 'nothing'}; of Python's own: {plain(', '.join(own)) or 'nothing'}"),
        (
            "may read",
            f"{_rights(settings)} {f'This hospital names its data in {data}.' if data else ''}".strip(),
        ),
    ]


def _rights(settings: SiteSettings) -> str:
    if settings.airlock == "off":
        return RIGHTS["off"]
    unwalled = without_walls(settings)
    return f"{RIGHTS['off']} So it is because {unwalled}." if unwalled else RIGHTS["required"]
