"""After a power cut at any moment, all data reported as stored are on the disk, and readers reject partly written
files.

`tests/powercut.py` records the disk of a server and of a hospital, and medsilo's own code reads the recorded disks.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import make_folder, write_json
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute
from medsilo.plan import Plan
from medsilo.privacy.mechanisms import Charge, Gaussian
from medsilo.runs import paths
from medsilo.runs.rounds import Round
from medsilo.site.approvals import ApprovalLimits, Approvals
from medsilo.site.ledger import CountedStudy, Ledger, Spending
from medsilo.site.query_budget import ANSWERS, QueryBudget, Requester
from medsilo.site.settings import SiteSettings
from medsilo.site.signing import own_key
from medsilo_lab.testing import assert_same_run
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.powercut import Cut, Disk
from tests.unit.federation.test_participant import SMALL, planned

# number of simulated power cuts for each writer: after a change of the code, before a release, and at night
CUTS, MORE, MANY = 40, 200, 1000
KEY_OF = "this hospital's test"


def cut_often(count: int, folder: Path, write: Callable[[Disk], None], read: Callable[[Cut], None]) -> None:
    disk = Disk(folder / "disk")
    with disk.recorded():
        write(disk)
    assert all(fact.ended is not None for fact in disk.facts)
    for cut in disk.cuts(folder / "cuts", count, seed=count):
        try:
            read(cut)
        except (AssertionError, MedsiloError) as error:
            raise AssertionError(f"cut {cut.number}, after operation {cut.after}: {error!r}") from error


often = pytest.mark.parametrize(
    "count", [CUTS, pytest.param(MORE, marks=pytest.mark.slow), pytest.param(MANY, marks=pytest.mark.long)]
)


def last(values: list[int]) -> int:
    return max(values, default=0)


# ---------------------------------------------------------------------------------------------------- the record itself
def test_what_nobody_waited_for_may_be_lost_torn_or_out_of_order(tmp_path: Path) -> None:
    def careless(disk: Disk) -> None:
        with disk.keeping("b"):
            Path(disk.folder, "a.part").write_bytes(b"x" * 9000)
            Path(disk.folder, "a.part").replace(disk.folder / "a")
            (disk.folder / "b").write_bytes(b"y")

    disk = Disk(tmp_path / "disk")
    with disk.recorded():
        careless(disk)
    left = {
        tuple((path.name, path.read_bytes()) for path in sorted(cut.folder.iterdir()))
        for cut in disk.cuts(tmp_path / "cuts", 400)
        if cut.known
    }
    names = {tuple(name for name, _ in files) for files in left}
    assert names >= {(), ("a",), ("b",), ("a", "b"), ("a.part",)}
    assert len({content for files in left for name, content in files if name == "a"}) > 5


def test_what_was_waited_for_is_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    with disk.recorded():
        for number in range(3):
            with disk.keeping(number):
                write_json(disk.folder / "new" / f"{number}.json", [number])
    for cut in disk.cuts(tmp_path / "cuts", 200):
        for number in cut.known:
            assert json.loads((cut.folder / "new" / f"{number}.json").read_text()) == [number]


# ---------------------------------------------------------------------------------------------------- the server
def tensors_of(number: int) -> dict[str, torch.Tensor]:
    return {"model/w": torch.arange(2000) + number, "model/b": torch.tensor(float(number))}


def line_of(number: int) -> Round:
    nothing: dict[str, Any] = {"refused": {}, "lost": {}, "warnings": {}, "sites": {}}
    return Round(round=number, phase="train", seconds=0.1, asked=SITES, answered=SITES, **nothing)


@often
def test_checkpoints_outlive_the_power(count: int, tmp_path: Path) -> None:
    best_of = {1: None, 2: 1, 3: 1, 4: 3, 5: 3}

    def write(disk: Disk) -> None:
        record = Record(disk.folder / "run")
        make_folder(record.folder)
        for number, best in best_of.items():
            if best and best != best_of[number - 1]:
                record.keep_as_best(best)
            with disk.keeping(number):
                record.add_round(line_of(number))
                kept = best and {"round": best, "scores": {SITES[0]: 0.5}}
                facts = {"plan": "p", "sites": SITES, "best": kept, "settled": {}, "details": {}, "mixers": {}}
                record.save_checkpoint(number, tensors_of(number), facts)

    def read(cut: Cut) -> None:
        record = Record(cut.folder / "run")
        record.sweep()
        if not cut.known:
            with suppress(MedsiloError):
                record.load_checkpoint()
            return
        tensors, facts = record.load_checkpoint()
        done = facts["round"]
        assert done in cut.begun and done >= last(cut.known)
        assert all(torch.equal(tensors[name], own) for name, own in tensors_of(done).items())
        if best := best_of[done]:
            assert torch.equal(record.load_best(best)[0]["model/w"], tensors_of(best)["model/w"])
        assert [line.round for line in record.forget_after(done)] == list(range(1, done + 1))

    cut_often(count, tmp_path, write, read)


# ---------------------------------------------------------------------------------------------------- a hospital
@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("fedbn", *SMALL, "training.rounds=6")


@often
def test_a_site_s_state_outlives_the_power(count: int, tmp_path: Path, plan: Plan) -> None:
    def state_in(folder: Path) -> SiteState:
        return SiteState(plan, SITES[0], folder / "sites/a", Compute())

    def write(disk: Disk) -> None:
        state = state_in(disk.folder)
        for number in range(1, 5):
            for tensor in state.model.state_dict().values():
                tensor.fill_(number)
            state.done, state.best = number, number / 10
            with disk.keeping(number):
                state.save()

    def read(cut: Cut) -> None:
        state, kept = state_in(cut.folder), last(cut.known)
        for number in cut.known[-2:]:  # the server may have lost the last round
            assert state.restore_after(number, number) is None
            assert state.done == number and state.best == number / 10
            with torch.no_grad():
                state.done = -1
        assert state.restore_after(last(cut.begun), kept) is None
        assert kept <= state.done <= last(cut.begun)
        private = [tensor for name, tensor in state.model.state_dict().items() if "running_mean" in name]
        assert private and all((tensor == state.done).all() for tensor in private)

    cut_often(count, tmp_path, write, read)


STUDY = CountedStudy(Spending(study="one", plan="p", method="FedAvg", lead="l"))
ROUND = [Charge(what="weights", of=Gaussian(noise=10.0))]
# the ledger of a long study fills several pages of the disk
LONG = [Charge(what=f"group {number}", of=Gaussian(noise=900.0)) for number in range(120)]


@often
@pytest.mark.parametrize("with_kit", [False, pytest.param(True, id="with a kit")])
def test_the_privacy_ledger_outlives_the_power(count: int, with_kit: bool, tmp_path: Path) -> None:
    key = own_key(tmp_path / "key.pem", KEY_OF) if with_kit else None

    def ledger_in(folder: Path) -> Ledger:
        return Ledger(folder / "book", "0" * 16, key, folder if with_kit else None)

    def write(disk: Disk) -> None:
        for number in range(4):
            with disk.keeping(f"{number}"):
                ledger_in(disk.folder).charge(STUDY, "an answer", f"{number}", LONG if number == 1 else ROUND)

    def read(cut: Cut) -> None:
        def attempts() -> list[str]:
            entries = ledger_in(cut.folder).standing().entries
            return [entry.attempt for entry in entries if entry.kind == "charged"]

        there = attempts()
        assert there == cut.begun[: len(there)] and len(there) >= len(cut.known)
        ledger_in(cut.folder).charge(STUDY, "an answer after it", "later", ROUND)
        assert attempts() == [*there, "later"]

    cut_often(count // 2, tmp_path, write, read)


@often
def test_approvals_outlive_the_power(count: int, tmp_path: Path) -> None:
    key, hashes = own_key(tmp_path / "key.pem", KEY_OF), ["a" * 64, "b" * 64]
    deeds = [(hashes[0], "approved"), (hashes[1], "declined"), (hashes[0], "withdrawn"), (hashes[1], "approved")]

    def approvals_in(folder: Path) -> Approvals:
        return Approvals(folder / "book", key)

    def write(disk: Disk) -> None:
        for number, (plan, verdict) in enumerate(deeds):
            with disk.keeping(number):
                limits = ApprovalLimits(rounds=3)
                decision = approvals_in(disk.folder).decide(plan, verdict, "engineer", limits)
        for number in range(3):
            with disk.keeping(f"round {number}"):
                approvals_in(disk.folder).count(decision, f"round {number}")

    def read(cut: Cut) -> None:
        approvals = approvals_in(cut.folder)
        there = [(one.plan, one.verdict) for one in approvals.decisions()]
        known, begun = ([deeds[own] for own in facts if isinstance(own, int)] for facts in (cut.known, cut.begun))
        assert there == deeds[: len(there)] and len(known) <= len(there) <= len(begun)
        counted = [own for own in cut.known if isinstance(own, str)]
        if len(there) == len(deeds):
            decision = approvals.last(hashes[1])
            left = 0
            with suppress(Refused):
                for left in range(9):
                    approvals.count(decision, f"a round after the cut {left}")
            assert 3 - len(cut.begun) + len(deeds) <= left <= 3 - len(counted)

    cut_often(count, tmp_path, write, read)


@often
def test_the_query_budget_outlives_the_power(count: int, tmp_path: Path) -> None:
    limits, asker = SiteSettings(), Requester("lead", "data", "study")
    names = [f"patient {number}" for number in range(12)]

    def write(disk: Disk) -> None:
        book = QueryBudget(disk.folder / "book")
        with disk.keeping(("key", "")):
            book.key()
        with disk.keeping(("parts", "")):
            book.places("data", 1, True)(names, drawn("test"), True)
        with disk.keeping(("near", "")):
            assert not book.near("data", {"test": names}, 5)
        for number in range(1, 6):
            with disk.keeping(("answers", number)):
                book.note(asker, {"test": 1}, limits)

    def drawn(part: str) -> Callable[..., dict[str, str]]:
        return lambda known: {name: known.get(name, part) for name in names}

    def read(cut: Cut) -> None:
        book, known, begun = QueryBudget(cut.folder / "book"), dict(cut.known), dict(cut.begun)
        assert book.has_key or "key" not in known
        if "parts" in known:
            assert set(book.places("data", 1, False)(names, drawn("train"), False).values()) == {"test"}
        if "near" in known:
            assert book.near("data", {"test": names[:-1]}, 5) == {"test"}
        answered = book.counts()[asker].answered["test"]
        assert known.get("answers", 0) <= answered <= begun.get("answers", 0)
        book.note(asker, {"test": 1}, limits)
        later = book.counts()[asker].answered["test"]  # a partly written line counts as an answer
        assert answered < later <= begun.get("answers", 0) + 1
        assert (cut.folder / "book" / ANSWERS).read_bytes().endswith(b"\n")

    cut_often(count, tmp_path, write, read)


# ---------------------------------------------------------------------------------------------------- a whole study
@pytest.mark.slow
def test_a_study_goes_on_after_a_power_cut_with_the_same_numbers(tmp_path: Path) -> None:
    plan = planned("fedbn", [])
    disk = Disk(tmp_path / "disk")
    make_folder(disk.folder / "run")
    with disk.recorded():
        inprocess.run(plan, folder=disk.folder / "run")
    resumed = 0
    for cut in disk.cuts(tmp_path / "cuts", 24):
        record = Record(cut.folder / "run")
        if record.finished() or not record.can_go_on():
            continue
        inprocess.run(plan, folder=cut.folder / "run", resume=True)
        for path in record.checkpoints.iterdir():  # a power cut may bring back a removed file
            if not (disk.folder / "run" / paths.CHECKPOINTS / path.name).exists():
                path.unlink()
        assert_same_run(disk.folder / "run", cut.folder / "run")
        resumed += 1
    assert resumed >= 10 and (disk.folder / "run" / paths.SUMMARY).exists()
