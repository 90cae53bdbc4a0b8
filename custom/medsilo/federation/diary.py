"""A site's diary of one study: what left, and what was refused and why. It never leaves the site."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from medsilo.core.errors import Died
from medsilo.core.files import FILE, make_folder
from medsilo.core.text import plain
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import DIARY
from medsilo.runs.schema import DiaryLine
from medsilo.site.approvals import MOST_ROUNDS


class Diary:
    """The diary's file. A line that can't be written is no reason to end a study."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def began(self, plan: Plan, lead: str) -> None:
        """Note that a process begins to work for a study."""
        self._add(kind="began", plan=plan.hash, method=plan.algorithm.title, rounds=plan.rounds, lead=lead)

    def answered(self, asked: dict[str, Any], reply: Parcel) -> None:
        """Note an answer that is about to leave."""
        told = {key: reply.facts.get(key, 0.0) for key in ("seconds", "memory")}
        self._add(kind="answered", bytes=reply.size(), **_where(asked), **told)

    def failed(self, asked: dict[str, Any], error: Exception, reason: str) -> None:
        """Note that there is no answer, and why."""
        self._add(kind="died" if isinstance(error, Died) else "refused", reason=reason, **_where(asked))

    def _add(self, **told: Any) -> None:
        line = DiaryLine(at=time.time(), **told).model_dump(mode="json", exclude_defaults=True)
        with suppress(OSError):
            make_folder(self._folder)
            descriptor = os.open(self._folder / DIARY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE)
            with os.fdopen(descriptor, "ab") as file:
                file.write(json.dumps(line).encode() + b"\n")


def _where(asked: dict[str, Any]) -> dict[str, Any]:
    number = asked.get("round")
    known = isinstance(number, int) and 0 <= number <= MOST_ROUNDS
    return {"task": plain(asked.get("task", ""), 40), "round": number if known else 0}
