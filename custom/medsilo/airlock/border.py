"""The border checks and rounds a training script's answer before the hospital sends the answer.

The border takes only a few numbers from the script, which it rounds, and tensors whose names, shapes and types follow
from the plan. The hospital's process itself adds the study, package versions, run time, memory use and numbers of
cases.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medsilo.airlock.wire import Form, same_forms
from medsilo.core.errors import Refused
from medsilo.core.files import append_line, write_json
from medsilo.core.package import machine_facts
from medsilo.core.rounding import Resolution
from medsilo.core.tensors import Groups, packed
from medsilo.exchange.acceptance import Acceptance
from medsilo.exchange.checks import check_numbers
from medsilo.federation.protection import Protection
from medsilo.federation.script_bits import REAL, SCORES, Narrowing, bits_of
from medsilo.federation.site_context import SiteContext
from medsilo.runs.messages import DISCLOSED, PARTS, Joined, Request, SiteAnswer, StudyMessage
from medsilo.schedule.phase import Ranges, views
from medsilo.site.data_set import DataSet
from medsilo.site.settings import SCORE_ROUNDING, DataPart

LEFT = "left.jsonl"  # the file that logs the disclosed bits of each answer
CASES = "script.json"  # the file that stores the number of cases that the script reported
HELD = "this hospital held the answer back"  # beginning of the message that the server receives in place of an answer
PROTECTED = "this hospital's update as a whole, and not one patient"
# tensor elements per block; torch starts threads for larger blocks, and these threads would waste processor time
BLOCK = 1 << 15
LARGEST_POWER = 309  # finite float64 numbers are below 10 to this power
# Bits that a rejected answer can disclose: 5 bits in the reason, because there are fewer than 32 reasons, and the bits
# of its time
HELD_BITS = {"reasons": 5, "times": REAL}
NUMBERS = "its numbers are not those of this task"


class HeldBack(Refused):
    """The hospital does not send a script's answer. The server receives only the error's public text, which never
    quotes the script.
    """

    def __init__(self, subject: str, private: str = "") -> None:
        super().__init__(f"{HELD}: {subject}", private)


class Border:
    def __init__(self, context: SiteContext) -> None:
        self.context, self.plan, self.own = context, context.plan, context.settings.border
        self.layout = context.plan.layout()
        self.protection = Protection(context)
        self.acceptance = Acceptance(context.plan, context.study, context.trainers, context.sites)

    # ------------------------------------------------------------------ forms of tensors
    def check_forms(self, request: Request, forms: list[Form]) -> None:
        """Raise HeldBack unless the script sends exactly the tensors, shapes and types that follow from the plan."""
        try:
            same_forms(forms, self._expected(request))
        except Refused as error:
            raise HeldBack("its tensors are not those that the plan sends", str(error)) from error

    def _expected(self, request: Request) -> Groups:
        if request.task != "round":
            return {}
        phase, context, precision = (
            self.plan.course.phase_of(request.round),
            self.context,
            self.plan.transport.precision,
        )
        if not phase.trains_at(context.site, request.round, context.trainers, self.plan.seed):
            return {}
        sent = views(phase.sent, self.layout)
        return {group: {name: packed(own, precision) for name, own in named.items()} for group, named in sent.items()}

    # ------------------------------------------------------------------ an answer
    def answer(
        self, request: Request, given: Groups, facts: Mapping[str, Any], groups: Groups, **measured: float
    ) -> StudyMessage:
        self._check_numbers(request, groups)
        norm = self._norm(groups, given)
        if self.own.norm is not None and norm > self.own.norm:
            told = f"its update is larger than border.norm, {self.own.norm:g}, in this hospital's medsilo.yaml"
            raise HeldBack(told, f"its norm is {norm:g}")
        answer = self._answer(request, facts, measured)
        if self.own.changes:
            groups = self._changed(groups, given, norm, self._ranges(request))
        leaves = answer.message(groups)
        bits = bits_of(leaves, self._narrowing(answer))
        rho = None if self.own.noise is None or not groups else 0.5 / self.own.noise**2
        self._note(leaves, bits, rho)
        self.write_down(request, leaves, norm, bits, rho)
        return leaves

    def _note(self, leaves: StudyMessage, bits: Mapping[str, int], rho: float | None) -> None:
        """Record the answer's bits in the hospital's query budget; raise Refused if the budget is spent."""
        self.protection.note_script(leaves, bits, rho)

    def _check_numbers(self, request: Request, groups: Groups) -> None:
        phase = self.plan.course.phase_of(max(request.round, 1))
        try:
            check_numbers(groups, phase.sent, self._ranges(request), {})
        except Refused as error:
            raise HeldBack("its tensors hold what no training gives", str(error)) from error

    def _ranges(self, request: Request) -> dict[str, Ranges]:
        phase = self.plan.course.phase_of(max(request.round, 1))
        return {group.name: group.ranges(self.layout, self.plan.task) for group in phase.sent}

    def _answer(self, request: Request, facts: Mapping[str, Any], measured: Mapping[str, float]) -> SiteAnswer:
        own: dict[str, Any] = {
            "task": request.task,
            "round": request.round,
            "study": request.study,
            "packages": self.plan.code,
            "warnings": [],
            "suppressed": [],
            "noisy": [],
            **measured,
        }
        if request.task == "join":
            own |= {
                "shares": self.context.settings.shares(self.plan.task.synthetic) and not self.plan.sealed,
                "machine": machine_facts(),
                "absent": [],
                "steps": {},
                "classes": dict.fromkeys(PARTS),
            }
        declared = DISCLOSED[request.task]
        # undeclared values stay in the answer, so that `accepted` rejects it
        told = {name: value for name, value in facts.items() if name not in declared or declared[name].by_script}
        try:
            counted = self._cases(request, told)
            own |= {name: counted for name, one in declared.items() if one.form == "cases"}
            for name in (name for name in told if name in declared and declared[name].form == "count"):
                own[name] = max(min(self._multiple(told[name]), counted["train"]), 1)
            scores = {name: part for name, part in SCORES.items() if told.get(name) is not None}
            own |= {name: self._rounded(told[name], self._resolution(part, counted)) for name, part in scores.items()}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise HeldBack(NUMBERS, str(error)) from error
        return self.accepted(request, {**told, **own})

    def accepted(self, request: Request, facts: Mapping[str, Any]) -> SiteAnswer:
        """Check a script's facts in the same way as the server, and return the facts as a typed answer."""
        site, message = self.context.site, StudyMessage({}, dict(facts))
        try:
            answer = self.acceptance.accept(site, message, (request.task, request.round), ())
        except (Refused, TypeError, ValueError, KeyError, OverflowError) as error:
            raise HeldBack(NUMBERS, str(error)) from error
        if isinstance(answer, Joined):
            self.acceptance.joined[site] = answer
        return answer

    def _cases(self, request: Request, told: Mapping[str, Any]) -> dict[str, int]:
        """Return the numbers of cases that the script reported when joining a study; the script can't change these
        numbers later.
        """
        file = self.context.folder / CASES
        if request.task != "join" and file.exists():
            return {part: int(json.loads(file.read_text())[part]) for part in PARTS}
        counted = {part: self._multiple(told["cases"][part]) for part in PARTS}
        write_json(file, counted)
        return counted

    def _multiple(self, cases: Any) -> int:
        if not isinstance(cases, int) or isinstance(cases, bool) or cases < 0:
            raise ValueError("a number of cases must be whole")
        unit = self.context.settings.count_unit(self.plan.task.synthetic)
        return cases // unit * unit

    def _rounded(self, score: Any, resolution: Resolution) -> float:
        """Round a script's score or loss in the same way as a score that medsilo computes."""
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            raise ValueError("a score must be a finite number")
        if not self.protection.on:
            return float(score)
        width = 10.0 ** math.ceil(math.log10(abs(score))) if abs(score) > 1 else 1.0
        if step := resolution.step(0, width):
            score = round(score / step) * step
        return float(f"{score:.{self.own.digits - 1}e}")

    def _resolution(self, part: DataPart, counted: Mapping[str, int]) -> Resolution:
        """Return the rounding of a score, which depends on the number of patients in the data set. If this number is
        unknown, use the number of cases that the script reported.
        """
        if not self.protection.on:
            return Resolution()
        source = self.context.settings.data
        counts = DataSet.read(source.data_set).tells.get(part) if source and source.data_set else None
        patients = counts.patients if counts else counted[part] or sum(counted.values())
        return Resolution(weight=1 / max(patients, 1), patients=SCORE_ROUNDING)

    # ------------------------------------------------------------------ the update
    def _norm(self, groups: Groups, given: Groups) -> float:
        """Return the L2 norm of the update: the script's tensors minus the server's tensors, or minus zeros if the
        server sent none.
        """
        return math.hypot(*(_distance(own, before) for _, own, before in _pairs(groups, given)))

    @torch.no_grad()
    def _changed(self, groups: Groups, given: Groups, norm: float, ranges: Mapping[str, Ranges]) -> Groups:
        """Clip the update, add noise, and round to bfloat16, as far as the hospital's settings demand."""
        own = self.own
        scale = min(1.0, own.clip / norm) if own.clip is not None and norm else 1.0
        changed = {group: dict(tensors) for group, tensors in groups.items()}
        for (group, name), tensor, before in _pairs(groups, given):
            update = (tensor - before) * scale
            if own.noise is not None and own.clip is not None:
                update = self.context.with_noise(update.double(), own.noise * own.clip).to(tensor.dtype)
            if own.bfloat16:
                update = update.to(torch.bfloat16).to(tensor.dtype)
            # noise must not make a variance negative
            low, high = ranges.get(group, {}).get(name, (-math.inf, math.inf))
            changed[group][name] = (before + update).clamp(low, high)
        if own.noise is not None:
            for group, tensors in changed.items():
                changed[group] = {
                    name: _unnoised(tensor, given.get(group, {}).get(name)) for name, tensor in tensors.items()
                }
        return changed

    # ------------------------------------------------------------------ the log of disclosed bits
    def write_down(
        self, request: Request, leaves: StudyMessage, norm: float, bits: Mapping[str, int], rho: float | None
    ) -> None:
        line = {
            "task": request.task,
            "round": request.round,
            "bytes": leaves.size(),
            "tensors": sum(map(len, leaves.groups.values())),
            "norm": norm,
            "noise": None if rho is None else {"of": PROTECTED, "rho": rho},
            "bits": {kind: number for kind, number in bits.items() if number},
        }
        append_line(self.context.folder / LEFT, json.dumps(line))

    def note_failure(self, request: Request) -> None:
        """Charge a rejected answer to the query budget, because a script can encode information in the reason and the
        time of a rejection.
        """
        self.protection.enter("a script's answer that was held back", HELD_BITS)
        self.write_down(request, StudyMessage(), 0.0, HELD_BITS, None)

    def _narrowing(self, answer: SiteAnswer) -> Narrowing:
        cases = answer.cases.model_dump()
        parts: tuple[DataPart, ...] = ("train", "validation", "test")
        score = max(bits_of_score(self.own.digits, self._resolution(part, cases)) for part in parts)
        return Narrowing(score if self.protection.on else REAL, self.own.bfloat16, True)


def bits_of_score(digits: int, resolution: Resolution) -> int:
    """Return the number of bits that a script can hide in one rounded score.

    >>> bits_of_score(3, Resolution()), bits_of_score(3, Resolution(weight=1 / 200, patients=2))
    (21, 16)
    """
    values, exponents = 9 * 10 ** (digits - 1), 2 * LARGEST_POWER
    # between two consecutive powers of ten, a rounded score has at most 1 / step different values
    if step := resolution.step(0, 1):
        values, exponents = min(values, round(1 / step)), LARGEST_POWER
    return math.ceil(math.log2(2 * values * exponents + 1))


def _unnoised(tensor: Tensor, given: Tensor | None) -> Tensor:
    """Replace a script's integer tensor by the server's, because noise can't hide integers."""
    if tensor.is_floating_point():
        return tensor
    if given is None or given.shape != tensor.shape:
        raise HeldBack("it has whole numbers to send, on which this hospital's border.noise can't lie")
    return given.to(tensor.dtype)


def _distance(tensor: Tensor, before: Tensor) -> float:
    """Return the L2 norm of the difference between two tensors, computed block by block to save memory."""
    blocks = zip(tensor.reshape(-1).split(BLOCK), before.reshape(-1).split(BLOCK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm((one - other).float())) for one, other in blocks))


def _pairs(groups: Groups, given: Groups) -> list[tuple[tuple[str, str], Tensor, Tensor]]:
    """Pair each floating-point tensor of the script with the server's tensor of the same name, or with zeros if the
    server sent no such tensor.
    """
    found = []
    for group, own in groups.items():
        for name, tensor in own.items():
            if tensor.is_floating_point():
                before = given.get(group, {}).get(name)
                if before is None or before.shape != tensor.shape:
                    before = torch.zeros_like(tensor)
                found.append(((group, name), tensor, before.to(tensor.dtype)))
    return found
