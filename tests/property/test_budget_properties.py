"""Test properties of a hospital's two budgets with random studies in random order, and with processes that die.

A hospital never exceeds its budget. A study keeps the budget with which the hospital admitted the study. Processes only
append to budget files, and a new process reads the earlier counts from the files.
"""

import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medsilo.core.errors import Refused
from medsilo.privacy.accounting import epsilon
from medsilo.privacy.mechanisms import Charge, Gaussian
from medsilo.site.ledger import SLACK, CountedStudy, Ledger, Spending
from medsilo.site.query_budget import ANSWERS, QueryBudget, Requester
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from tests.property.drawn import FIXED

DELTA, NOISE = 1e-5, {"one": 10.0, "two": 20.0, "three": 12.5}  # δ, and each study's noise for one answer
studies = st.sampled_from([*NOISE])
TORN = st.sampled_from([b"x", b'{"certified":""', b"\0" * 40, b"\0" * 40 + b'"}\n'])


class Budget(RuleBasedStateMachine):
    file: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="medsilo-budget-"))
        self.running: dict[str, int] = {}  # number of answers that each study may still send
        self.counted: Counter[str] = Counter()  # number of answers of each study that left the hospital
        self.before = b""
        self.fresh()

    def fresh(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @property
    def content(self) -> bytes:
        path = self.folder / self.file
        return path.read_bytes() if path.exists() else b""

    @rule()
    def another_process(self) -> None:
        self.fresh()

    @rule(study=studies)
    def end(self, study: str) -> None:
        self.running.pop(study, None)

    @invariant()
    def only_added_to(self) -> None:
        assert self.content.startswith(self.before)
        self.before = self.content


class LedgerBudget(Budget):
    file = "book/ledger/data.jsonl"

    @initialize(answers=st.integers(1, 12))
    def allow(self, answers: int) -> None:
        self.demands = PrivacyRequirements(epsilon=epsilon(self.charges("one") * answers, DELTA), delta=DELTA)

    def charges(self, study: str) -> list[Charge]:
        return [Charge(what="weights", of=Gaussian(noise=NOISE[study]))]

    def fresh(self) -> None:
        self.ledger = Ledger(self.folder / "book", "data")

    def of(self, study: str) -> CountedStudy:
        spending = Spending(study=study, plan="p", method="FedAvg")
        return CountedStudy(spending, self.demands, lambda other: other in self.running)

    @rule(study=studies, rounds=st.integers(1, 6))
    def let_in(self, study: str, rounds: int) -> None:
        self.running.pop(study, None)
        with suppress(Refused):
            self.ledger.plan(self.of(study), self.charges(study) * rounds)
            self.running[study] = max(0, rounds - self.counted[study])

    @rule(study=studies)
    def answer(self, study: str) -> None:
        promised = self.running.get(study, 0)
        with suppress(*[] if promised else [Refused]):
            self.ledger.charge(self.of(study), "round", f"{study} {self.counted[study]}", self.charges(study))
            self.counted[study] += 1
            if study in self.running:
                self.running[study] = max(0, promised - 1)

    @rule(study=studies)
    def answer_again(self, study: str) -> None:
        if self.counted[study]:
            self.ledger.charge(self.of(study), "round", f"{study} {self.counted[study] - 1}", self.charges(study))

    @precondition(lambda self: self.before)
    @rule(torn=TORN)
    def die_while_writing(self, torn: bytes) -> None:
        with (self.folder / self.file).open("ab") as file:
            file.write(torn)
        self.before = self.content[: len(self.before)]
        self.ledger.expect(self.of("one"), [])
        with suppress(Refused):
            self.ledger.plan(self.of("three"), [])
        assert torn not in self.content

    @invariant()
    def never_overspent(self) -> None:
        if not self.before:
            return
        standing = self.ledger.standing()
        assert standing.epsilon(DELTA) <= self.demands.epsilon + SLACK
        left = Counter({Gaussian(noise=NOISE[study]): count for study, count in self.counted.items() if count})
        assert Counter(dict(standing.charged)) == left
        told = [entry.epsilon for entry in standing.entries if entry.kind == "charged"]
        assert told == sorted(told) and not standing.torn


class Answers(QueryBudget):
    def __init__(self, folder: Path, running: dict[str, int]) -> None:
        super().__init__(folder)
        self.running_now = running

    def runs(self, study: str) -> bool:
        return study in self.running_now


class AnswerBudget(Budget):
    file = f"book/{ANSWERS}"

    @initialize(most=st.integers(0, 10))
    def allow(self, most: int) -> None:
        self.limits = SiteSettings(answers=most)
        self.torn = 0

    def fresh(self) -> None:
        self.budget = Answers(self.folder / "book", self.running)

    @rule(study=studies, rounds=st.integers(0, 6))
    def let_in(self, study: str, rounds: int) -> None:
        self.running.pop(study, None)
        with suppress(Refused):
            planned = {"train": 0, "validation": rounds, "test": 0}
            self.budget.admit(Requester("lead", "data", study), planned, self.limits)
            self.running[study] = max(0, rounds - self.counted[study])

    @rule(study=studies)
    def answer(self, study: str) -> None:
        promised = self.running.get(study, 0)
        with suppress(*[] if promised and not self.torn else [Refused]):
            self.budget.note(Requester("lead", "data", study), {"validation": 1}, self.limits)
            self.counted[study] += 1
            if study in self.running:
                self.running[study] = max(0, promised - 1)

    @rule(study=studies)
    def answer_to_another_lead(self, study: str) -> None:
        if not self.torn:
            self.budget.note(Requester("other", "data", study), {"train": 1}, self.limits)

    @precondition(lambda self: self.before)
    @rule(torn=TORN)
    def die_while_writing(self, torn: bytes) -> None:
        with (self.folder / self.file).open("ab") as file:
            file.write(torn)
        self.torn += 1

    @invariant()
    def never_overspent(self) -> None:
        answered = self.budget.used("data")["lead"]["validation"]
        assert sum(self.counted.values()) <= self.limits.answers
        assert answered >= sum(self.counted.values())
        assert self.torn or answered == sum(self.counted.values())


TestTheLedgersBudget = LedgerBudget.TestCase
TestTheLedgersBudget.settings = settings(max_examples=12, stateful_step_count=20, **FIXED)
TestTheAnswersBudget = AnswerBudget.TestCase
TestTheAnswersBudget.settings = settings(max_examples=25, stateful_step_count=25, **FIXED)
