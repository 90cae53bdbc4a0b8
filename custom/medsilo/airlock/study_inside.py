"""The program that trains one of medsilo's own studies in a sandbox, and that sends requests about the query budget to
the process outside.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from socket import socket
from typing import Any

from medsilo.airlock.kept import KeptFiles
from medsilo.airlock.room import APP, WORK
from medsilo.airlock.study import KEEPS
from medsilo.airlock.wire import End
from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, ProcessDied
from medsilo.federation.refusals import details, is_out_of_memory, passes, public_reason
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.runs.messages import StudyMessage
from medsilo.site.query_budget import QueryBudget, Requester
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.sources import Draw, Memory


class RoomBook(QueryBudget):
    """Forwards each use of the hospital's query budget to the process outside the sandbox, which stores the budget."""

    def __init__(self, end: End) -> None:
        super().__init__(WORK / "nothing")
        self.end = end

    def _ask(self, does: str, **more: Any) -> Any:
        self.end.send("book", facts={"does": does, **more})
        head = self.end.receive()
        if head.kind != "book":
            raise MedsiloError("the hospital's process sent an unexpected answer to a request to its query budget")
        return head.facts["is"]

    def number(self, purpose: str) -> int:
        return int(self._ask("number", purpose=purpose))

    def places(self, data: str, split: int, writes: bool) -> Memory:
        def remembered(patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
            found = draw(self._ask("known", names=[*patients]))
            # the process outside returns the final assignment: an earlier assignment of a patient by another study wins
            if writes and for_good:
                return dict(self._ask("place", places=found, for_good=True))
            return found

        return remembered

    def near(self, data: str, parts: Mapping[DataPart, Sequence[str]], least: int) -> set[DataPart]:
        return set(self._ask("near", parts={part: [*names] for part, names in parts.items()}))

    def told_once(self, data: str, names: Sequence[str], least: int, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(self._ask("told_once", names=[*names], numbers=dict(numbers)))

    def note(
        self,
        requester: Requester,
        parts: Mapping[DataPart, int],
        settings: SiteSettings,
        sent: Mapping[str, int] | None = None,
    ) -> None:
        self._ask("note", times=dict(parts))


def main() -> None:
    exit_ = socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end = End(exit_)
    place = SiteContext.read(end.receive().facts, RoomBook(end))
    place.folder.mkdir(parents=True, exist_ok=True)
    kept = KeptFiles(end, place.folder, KEEPS)
    model_folders.look_in(APP / "config")
    site: Site | None = None
    while (head := end.receive()).kind == "ask":
        groups = end.tensors(head.tensors)
        try:
            site = site or training_site(place)
            reply = site.answer(StudyMessage(groups, head.facts), lambda: None)
            kept.hand_out()
        except Exception as error:
            text = f"{public_reason(error)}\n{details(error)}"
            print(text, file=sys.stderr, flush=True)
            died = isinstance(error, ProcessDied) or is_out_of_memory(error)
            end.send("failed", facts={"text": text[:1_000_000], "passes": passes(error), "died": died})
            continue
        end.send("answer", reply.groups, facts=reply.facts)


if __name__ == "__main__":
    main()
