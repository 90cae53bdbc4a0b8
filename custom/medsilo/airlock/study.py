"""A site that runs medsilo's own training in a sandbox (a room), so that image readers and PyTorch also run inside it.

The sandbox contains medsilo's participant and disclosure layer. The hospital's key, query budget, and records of
patients and counts stay outside. The program in the sandbox asks the process outside to consult the records and to
charge the budget. The process outside parses the program's answer into a typed message, and sends only this message.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.airlock.border import HELD_BITS, Border, HeldBack
from medsilo.airlock.room import OUTPUT, ability
from medsilo.airlock.site import Denied, RoomSite
from medsilo.airlock.wire import MAY_KEEP, Head
from medsilo.core.errors import MedsiloError, ProcessDied, Refused, TemporaryRefusal
from medsilo.core.section import Section
from medsilo.federation.permission import is_canary
from medsilo.federation.script_bits import ALL, Narrowing, parts_in
from medsilo.federation.site_context import SiteContext, promises_privacy
from medsilo.learning.compute import Stop
from medsilo.runs import paths
from medsilo.runs.messages import DISCLOSED, MOST_VALUES, Request, SiteAnswer, StudyMessage, check_values
from medsilo.site.airlock_settings import MiB
from medsilo.site.settings import DataPart

PROGRAM = "medsilo.airlock.study_inside"
# Files that the participant writes for the hospital, not counting the site's state files
WRITTEN = (
    *(paths.PROVENANCE, paths.METRICS, paths.CASES, paths.SUBGROUPS, paths.DATA, paths.WEIGHT),
    *(rf"{paths.PICTURES}/\w[\w.-]{{0,90}}\.png",),
)
KEEPS = re.compile("|".join([MAY_KEEP.pattern, *WRITTEN]), re.ASCII)
FAILED = "training in this hospital's room failed; its errors.log says why"
Names = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=10_000_000)]


class Wish(Section):
    """A request from the program in a sandbox to read or change the hospital's query budget."""

    does: Literal["number", "known", "place", "near", "told_once", "note"]
    purpose: Literal["", "split", "truncate"] = ""
    parts: dict[DataPart, Names] = {}  # for each part of the data, the patient of each case
    names: Names = []
    places: dict[str, DataPart] = {}  # the data part to which each patient is assigned
    for_good: bool = False
    # numbers that the program wants to disclose about the patients in `names`
    numbers: dict[str, Any] = {}
    # for each part of the data, the number of scored answers that the program is about to send
    times: dict[DataPart, Annotated[int, Field(ge=0, le=MOST_VALUES)]] = {}


class Failed(Section):
    """A message of the program in a sandbox about why it failed; its text never leaves the hospital."""

    text: Annotated[str, Field(max_length=1_000_000)]
    passes: bool
    died: bool


class StudyBorder(Border):
    """Checks the answers of medsilo's own training in a sandbox. Unlike a script's answers, the answers of medsilo's
    own training may contain counts, thresholds and missing labels.
    """

    def __init__(self, context: SiteContext) -> None:
        super().__init__(context)
        # scored answers to the current request that the query budget was already charged for, by part of the data
        self.noted = Counter[DataPart]()

    def _answer(self, request: Request, facts: Mapping[str, Any], measured: Mapping[str, float]) -> SiteAnswer:
        own = {
            "task": request.task,
            "round": request.round,
            "study": request.study,
            "packages": self.plan.code,
            **measured,
        }
        outside = {name for name, one in DISCLOSED[request.task].items() if one.form == "outside"}
        told = {name: value for name, value in facts.items() if name not in outside}
        return self.accepted(request, {**told, **own})

    def _note(self, leaves: Any, bits: Mapping[str, int], rho: float | None) -> None:
        """Charge the query budget for an answer's scores, unless the program has already done so."""
        told = parts_in(leaves).keys() - {part for part, times in self.noted.items() if times}
        self.protection.note(None, **dict.fromkeys(told, 1))

    def _narrowing(self, answer: SiteAnswer) -> Narrowing:
        return replace(ALL, halves=self.own.bfloat16)

    def note_failure(self, request: Request) -> None:
        self.write_down(request, StudyMessage(), 0.0, dict(HELD_BITS), None)


class StudyRoom(RoomSite):
    ends_with = {"answer", "failed"}
    may_keep = KEEPS
    what = "the training"
    program = (sys.executable, "-P", "-u", "-m", PROGRAM)

    border: StudyBorder

    def __init__(self, context: SiteContext) -> None:
        super().__init__(context, StudyBorder(context))
        self.taken = 0  # total bytes of the program's requests to the query budget

    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        self.border.noted.clear()
        return super().answer(message, stop)

    def _begin(self) -> None:
        context = self.context
        settings = context.settings.model_copy(update={"state_dir": None, "airlock": "off"})
        if source := settings.data:
            settings = settings.model_copy(update={"data": source.model_copy(update={"cache_folder": None})})
        told = context.to_facts()
        folder = paths.site_folder(OUTPUT / context.study, context.site)
        own = {"settings": settings.model_dump(mode="json"), "folder": str(folder), "kit": None}
        self.end.send("begin", facts={**told, **own})

    def _take(self, head: Head) -> None:
        if head.kind != "book":
            return super()._take(head)
        wish = Wish.received(head.facts)
        self.taken += len(json.dumps(head.facts))
        if self.taken > self.context.settings.room.scratch * MiB:
            raise HeldBack("the program's requests to the query budget are larger than room.scratch")
        try:
            self.end.send("book", facts={"is": self._grant(wish)})
        except MedsiloError as error:
            raise Denied(str(error), error.private) from error

    def _grant(self, wish: Wish) -> Any:
        protection, settings = self.border.protection, self.context.settings
        budget, data = protection.budget, protection.requester.data
        least = settings.least(self.context.plan.task.synthetic)
        match wish.does:
            case "number":
                return budget.number(wish.purpose or "split")
            case "known" | "place":
                known: dict[str, str] = {}

                def draw(parts: Mapping[str, str]) -> dict[str, str]:
                    known.update(parts)
                    return {**wish.places, **known}

                good = wish.for_good and wish.does == "place"
                return budget.places(data, budget.number("split"), good)([*wish.places, *wish.names], draw, good)
            case "near":
                return sorted(budget.near(data, wish.parts, least))
            case "told_once":
                check_values(wish.numbers, MOST_VALUES)
                return budget.told_once(data, wish.names, least, wish.numbers)
        self.border.noted.update(wish.times)
        protection.note(None, **{str(part): times for part, times in wish.times.items()})
        return None

    def _listen(self) -> Head:
        head = super()._listen()
        if head.kind == "failed":
            told = Failed.received(head.facts)
            if told.died:  # the public reason of the error must not quote the program in the sandbox
                raise TrainingDied(FAILED, private=told.text)
            if told.passes:
                raise TrainingWaits(FAILED, private=told.text)
            raise Denied(FAILED, private=told.text)
        return head


class TrainingWaits(Denied, TemporaryRefusal):
    """Training failed, but another attempt may succeed."""


class TrainingDied(Denied, ProcessDied):
    """Training failed in an isolated process, and a new isolated process will continue the training."""


def room_of(context: SiteContext) -> Callable[[], StudyRoom] | None:
    """Return a function that creates the study's sandbox, or None if the study trains without a sandbox.

    Raises Refused if the hospital demands a sandbox, but the study or the machine does not support sandboxes.
    """
    settings, plan = context.settings, context.plan
    if settings.airlock == "off" or not settings.room.studies:
        return None
    if is_canary(context.asked):  # a canary study reads no patient data, so it needs no sandbox
        return None
    why = ""
    if promises_privacy(context):
        why = "the study promises differential privacy, whose ledger a room can't write"
    elif plan.sealed:
        why = "the study has secure aggregation, whose keys stay outside of rooms"
    elif plan.layers:
        why = f"the plan has layers ({plan.layers[0].name}), which change what a room may send"
    elif not ability().works:
        why = ability().lacks[0]
    if why and settings.airlock == "required":
        raise Refused(f"this hospital trains only in its airlock (room.studies): {why}")
    return None if why else partial(StudyRoom, context)
