"""Generate random histories of a hospital's studies to test the hospital's ledger: processes die, resume, fork and run
in parallel.

Every attempt at an answer runs in a new process. The process may end at any line of the code that writes the ledger,
and then runs no `finally` block.

The seed determines after how many lines two parallel attempts take turns, so that a seed always gives the same history.
"""

import json
import os
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout

from medsilo.core.files import load_facts, save_tensors
from medsilo.federation.account import PrivacyAccount
from medsilo.privacy.mechanisms import Charge, Gaussian, SampledGaussian
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.messages import StudyMessage
from medsilo.site.ledger import CountedStudy, Ledger, Spending
from medsilo.site.settings import PrivacyRequirements

TRACED = (
    "site/ledger.py",
    "core/files.py",
    "federation/account.py",
    "tests/histories.py",
)
DATA = "0123456789abcdef"
# upper limit on the number of lines that the ledger's writing code runs during one attempt at an answer
MOST_LINES = 900
LONGEST_TURN = 200  # largest number of lines that a process runs before its parallel process continues


@dataclass(frozen=True)
class Job:
    root: Path
    study: str
    of: Gaussian | SampledGaussian
    demands: PrivacyRequirements | None = None

    @property
    def folder(self) -> Path:
        return self.root / self.study

    @property
    def sent(self) -> Path:
        return self.root / f"{self.study}.sent"

    def account(self) -> PrivacyAccount:
        ledger = Ledger(self.root / "book", DATA)
        spending = Spending(study=self.study, plan="p", method="FedAvg")
        return PrivacyAccount(ledger, CountedStudy(spending, self.demands), self.folder)

    def answer(self, number: int, version: int) -> None:
        account = self.account()
        request = StudyMessage({"model": {"w": torch.tensor([float(version)])}}, {"task": "round", "round": number})
        reply = account.again(request)
        if reply is None:
            attempt = account.begin()
            noisy = NoiseSource().with_normal(torch.zeros(3), 1.0)
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.folder / f"state-{number}.safetensors", {"w": noisy}, {"attempt": attempt})
            reply = StudyMessage({"model": {"w": noisy}}, {"attempt": attempt, "samples": 5, "train_loss": 1.0})
            account.settle(request, reply, f"round {number}", [Charge(what="weights", of=self.of)])
        self._send(number, reply)

    def _send(self, number: int, reply: StudyMessage) -> None:
        line = json.dumps([number, reply.facts["attempt"], reply.groups["model"]["w"].tolist()]) + "\n"
        descriptor = os.open(self.sent, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def left(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for line in self.sent.read_text().splitlines() if self.sent.exists() else ():
            _, attempt, values = json.loads(line)
            assert found.setdefault(attempt, values) == values
        return found

    def usable_states(self) -> list[str]:
        account = self.account()
        attempts = [load_facts(path)["attempt"] for path in self.folder.glob("state-*.safetensors")]
        return [attempt for attempt in attempts if account.counts(attempt)]


def dying(work: Callable[[], None], lines: int | None) -> int:
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


class TakingTurns:
    def __init__(self, work: Callable[[], None], lines: int | None) -> None:
        self.turns, its = socket.socketpair()
        self.child = dying(lambda: self._live(work, lines, its), None)
        its.close()

    def go(self, lines: int) -> bool:
        try:
            self.turns.sendall(lines.to_bytes(2, "big"))
            lives = bool(self.turns.recv(1))
        except OSError:
            lives = False
        if not lives:
            os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOWAIT)
        return lives

    def _live(self, work: Callable[[], None], lines: int | None, turns: socket.socket) -> None:
        self.turns.close()
        left, granted, acquire = lines, int.from_bytes(turns.recv(2), "big"), FileLock.acquire

        def pause() -> None:
            nonlocal granted
            turns.sendall(b".")
            granted = int.from_bytes(turns.recv(2), "big")

        def each(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left, granted
            if not frame.f_code.co_filename.endswith(TRACED):
                return None
            if event == "line":
                left, granted = left if left is None else left - 1, granted - 1
                if left == 0:
                    os._exit(9)
                if granted <= 0:
                    pause()
            return each

        def in_turn(lock: FileLock, *given: Any, **named: Any) -> Any:
            while True:
                try:
                    return acquire(lock, timeout=0)
                except Timeout:
                    pause()

        FileLock.acquire = in_turn  # type: ignore[method-assign]
        sys.settrace(each)
        work()


def at_once(works: list[tuple[Callable[[], None], int | None]], draw: random.Random) -> list[int]:
    own = [TakingTurns(work, lines) for work, lines in works]
    alive = list(own)
    while alive:
        one = draw.choice(alive)
        if not one.go(draw.randint(1, LONGEST_TURN)):
            alive.remove(one)
    for one in own:
        one.turns.close()
    return [ended(one.child) for one in own]


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


MECHANISMS = [SampledGaussian(noise=12.0, rate=0.1, steps=4), Gaussian(noise=250.0)]


@dataclass
class Turn:
    job: Job
    number: int = 1
    version: int = 0


@dataclass(frozen=True)
class History:
    jobs: list[Job]
    asked_anew: int


def live(root: Path, seed: int, demands: PrivacyRequirements | None = None) -> History:
    draw = random.Random(seed)
    rounds = draw.randint(2, 4)
    turns = [Turn(Job(root, f"study{n}", draw.choice(MECHANISMS), demands)) for n in range(draw.randint(1, 2))]
    forks, asked_anew = draw.randint(0, 1), 0
    while unfinished := [turn for turn in turns if turn.number <= rounds]:
        together = unfinished if draw.random() < 0.5 else [draw.choice(unfinished)]
        works = [
            (
                lambda turn=turn: turn.job.answer(turn.number, turn.version),
                draw.randint(1, MOST_LINES) if draw.random() < 0.6 else None,
            )
            for turn in together
        ]
        codes = at_once(works, draw) if len(works) > 1 else [ended(dying(*works[0]))]
        for turn, code in zip(together, codes, strict=True):
            assert code in (0, 9)
            if code == 0:
                turn.number, turn.version = turn.number + 1, turn.version + 1
            elif draw.random() < 0.05:
                turn.version += 1
                asked_anew += 1
        if forks and draw.random() < 0.3:
            forks -= 1
            first = draw.choice(turns)
            turns.append(Turn(Job(root, "forked", first.job.of, demands), first.number, first.version))
            if first.job.folder.exists():
                (root / "forked").mkdir()
                for path in first.job.folder.glob("*.safetensors"):
                    (root / "forked" / path.name).write_bytes(path.read_bytes())
    return History([turn.job for turn in turns], asked_anew)
