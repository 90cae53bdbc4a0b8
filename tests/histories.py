"""Histories of a hospital's studies for tests of its ledger: processes that die anywhere, resumes, forks, two at once.

Every attempt at an answer runs in a process of its own, which ends at once (no `finally`, no flush) when it reaches a
drawn line of the code that writes. What was sent stands in a file that only a whole send writes to.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from medsilo.core.files import load_facts, save_tensors
from medsilo.federation.account import PrivacyAccount
from medsilo.privacy.agreed import Demands
from medsilo.privacy.mechanisms import Charge, Gaussian, SampledGaussian
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.messages import Parcel
from medsilo.site.ledger import Ledger, Spending

TRACED = ("site/ledger.py", "federation/account.py", "federation/kept_answer.py", "core/files.py", "tests/histories.py")
DATA = "0123456789abcdef"
MOST_LINES = 900  # of the code that writes, in one attempt


@dataclass(frozen=True)
class Job:
    """One study at the hospital: what an answer of it costs, and where it keeps its files."""

    root: Path
    study: str
    of: Gaussian | SampledGaussian
    demands: Demands | None = None

    @property
    def folder(self) -> Path:
        return self.root / self.study

    @property
    def sent(self) -> Path:
        return self.root / f"{self.study}.sent"

    def account(self) -> PrivacyAccount:
        ledger = Ledger(self.root / "book", DATA)
        return PrivacyAccount(ledger, Spending(study=self.study, plan="p", method="FedAvg"), self.demands, self.folder)

    def answer(self, number: int, version: int) -> None:
        """Answer one request as a participant does. version: of what the server sends with it."""
        account = self.account()
        request = Parcel({"model": {"w": torch.tensor([float(version)])}}, {"task": "round", "round": number})
        reply = account.again(request)
        if reply is None:
            attempt = account.begin()
            noisy = NoiseSource().with_normal(torch.zeros(3), 1.0)
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.folder / f"state-{number}.safetensors", {"w": noisy}, {"attempt": attempt})
            reply = Parcel({"model": {"w": noisy}}, {"attempt": attempt}, 5, {"train_loss": 1.0})
            account.settle(request, reply, f"round {number}", [Charge(what="weights", of=self.of)])
        self._send(number, reply)

    def _send(self, number: int, reply: Parcel) -> None:
        line = json.dumps([number, reply.facts["attempt"], reply.groups["model"]["w"].tolist()]) + "\n"
        descriptor = os.open(self.sent, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def left(self) -> dict[str, list[float]]:
        """Return what left: each answer once, by its attempt; the same attempt is always the same answer."""
        found: dict[str, list[float]] = {}
        for line in self.sent.read_text().splitlines() if self.sent.exists() else ():
            _, attempt, values = json.loads(line)
            assert found.setdefault(attempt, values) == values
        return found

    def usable_states(self) -> list[str]:
        """The attempts whose state a later answer may follow from."""
        account = self.account()
        attempts = [load_facts(path)["attempt"] for path in self.folder.glob("state-*.safetensors")]
        return [attempt for attempt in attempts if account.counts(attempt)]


def dying(work: Callable[[], None], lines: int | None) -> int:
    """Begin the work in a process that ends after so many lines of the code that writes; return the process's id."""
    child = os.fork()
    if child:
        return child
    left = lines

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line" and left is not None:
            left -= 1
            if left <= 0:
                os._exit(9)
        return each

    try:
        if lines is not None:
            sys.settrace(each)
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass
class Turn:
    """The progress of a job."""

    job: Job
    number: int = 1
    version: int = 0


def live(root: Path, seed: int, demands: Demands | None = None) -> list[Job]:
    """Live through a history; return its jobs. All that was begun is resumed to its end."""
    draw = random.Random(seed)
    rounds = draw.randint(2, 4)
    mechanisms = [SampledGaussian(noise=12.0, rate=0.1, steps=4), Gaussian(noise=250.0)]
    turns = [Turn(Job(root, f"study{n}", draw.choice(mechanisms), demands)) for n in range(draw.randint(1, 2))]
    forks = draw.randint(0, 1)
    while unfinished := [turn for turn in turns if turn.number <= rounds]:
        together = unfinished if draw.random() < 0.5 else [draw.choice(unfinished)]
        ends = {id(turn): draw.randint(1, MOST_LINES) if draw.random() < 0.6 else None for turn in together}
        children = [
            (turn, dying(lambda turn=turn: turn.job.answer(turn.number, turn.version), ends[id(turn)]))
            for turn in together
        ]
        for turn, child in children:
            code = ended(child)
            assert code in (0, 9)
            if code == 0:
                turn.number, turn.version = turn.number + 1, turn.version + 1
            elif draw.random() < 0.05:
                turn.version += 1  # the server goes back, and sends another model with the same round
        if forks and draw.random() < 0.3:
            forks -= 1
            first = draw.choice(turns)
            turns.append(Turn(Job(root, "forked", first.job.of, demands), first.number, first.version))
            if first.job.folder.exists():
                (root / "forked").mkdir()
                for path in first.job.folder.glob("*.safetensors"):
                    (root / "forked" / path.name).write_bytes(path.read_bytes())
    return [turn.job for turn in turns]
