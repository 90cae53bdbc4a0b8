"""The ledger's total cost is never below the cost of the sent answers, even if processes die.

The ledger detects changes of its file, and rejects studies that would exceed the privacy budget.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from medsilo.core.errors import MedsiloError, Refused
from medsilo.privacy.accounting import epsilon
from medsilo.privacy.mechanisms import Charge, Gaussian, Public
from medsilo.site.ledger import OWN_KEY, CountedStudy, Ledger, LedgerEntry, Spending, ledgers
from medsilo.site.settings import PrivacyRequirements
from tests.histories import DATA, MOST_LINES, Job, dying, ended, live

DELTA = 1e-5
DEMANDS = PrivacyRequirements(epsilon=1.0, delta=DELTA)
ONE, TWO = Spending(study="one", plan="p", method="FedAvg", lead="l"), Spending(study="two", plan="q", method="FedBN")
ROUND = [Charge(what="weights", of=Gaussian(noise=10.0))]


def cost(rounds: int) -> float:
    return epsilon(ROUND * rounds, DELTA)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, DATA)


def filled(folder: Path, rounds: int = 3) -> Ledger:
    ledger = Ledger(folder, DATA)
    for number in range(rounds):
        ledger.charge(CountedStudy(ONE, DEMANDS), f"round {number + 1}", f"attempt{number}", ROUND)
    return ledger


# ---------------------------------------------------------------------------------------------------- entries
def test_every_answer_is_an_entry_with_the_total_so_far(tmp_path: Path) -> None:
    filled(tmp_path)
    standing = Ledger(tmp_path, DATA).standing()
    assert [entry.kind for entry in standing.entries] == ["opened", "charged", "charged", "charged"]
    assert [entry.epsilon for entry in standing.entries[1:]] == [cost(1), cost(2), cost(3)]
    assert standing.epsilon(DELTA) == cost(3) == standing.entries[-1].epsilon
    last = standing.entries[-1]
    assert last.spending == ONE and last.what == "round 3" and last.delta == DELTA and last.charges == tuple(ROUND)
    assert ledgers(tmp_path) == [DATA]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "ledger").iterdir())


def test_an_answer_is_entered_once(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
    ledger.charge(CountedStudy(TWO, DEMANDS), "round 1", "attempt", ROUND)
    assert ledger.standing().epsilon(DELTA) == cost(2)


def test_over_the_budget_is_refused_and_nothing_is_written(ledger: Ledger) -> None:
    tight = PrivacyRequirements(epsilon=cost(2), delta=DELTA)
    ledger.charge(CountedStudy(ONE, tight), "round 1", "1", ROUND)
    ledger.charge(CountedStudy(TWO, tight), "round 1", "2", ROUND)
    before = ledger.file.read_bytes()
    with pytest.raises(Refused, match=r"costs ε = .* allows .*\(privacy\.epsilon"):
        ledger.charge(CountedStudy(ONE, tight), "round 2", "3", ROUND)
    with pytest.raises(Refused, match="privacy.epsilon"):
        ledger.afford(CountedStudy(ONE, tight), ROUND)
    assert ledger.file.read_bytes() == before
    ledger.charge(CountedStudy(ONE, PrivacyRequirements(epsilon=cost(3), delta=DELTA)), "round 2", "3", ROUND)


def test_a_study_is_let_in_only_with_all_that_it_plans(ledger: Ledger) -> None:
    budget = PrivacyRequirements(epsilon=cost(5), delta=DELTA)
    ledger.plan(CountedStudy(ONE, budget), ROUND * 3)
    with pytest.raises(Refused, match="with earlier studies of these data"):
        ledger.plan(CountedStudy(TWO, budget, lambda study: study == "one"), ROUND * 3)
    ledger.plan(CountedStudy(TWO, budget), ROUND * 3)
    ledger.charge(CountedStudy(TWO, budget), "round 1", "a", ROUND)
    # the planned cost of a resumed study includes the study's earlier charges
    ledger.plan(CountedStudy(TWO, budget), ROUND * 3)


def test_of_a_study_that_is_let_in_again_the_last_plan_counts(ledger: Ledger) -> None:
    budget = PrivacyRequirements(epsilon=cost(5), delta=DELTA)
    two = CountedStudy(TWO, budget, lambda study: study == "one")
    for rounds, refused in ((4, True), (1, False), (3, True), (2, False)):
        ledger.plan(CountedStudy(ONE, budget), ROUND * rounds)
        with pytest.raises(Refused) if refused else nullcontext():
            ledger.plan(two, ROUND * 3)
    assert ledger.standing().studies() == ["one", "two"] and ledger.standing().charged == {}


def test_a_study_without_room_is_told_so_before_work_is_done_for_it(ledger: Ledger) -> None:
    """A study may exceed the allowed ε by 0.01, because medsilo computes costs only to this accuracy.

    The ledger counts an admitted study with the study's planned cost.
    """

    def allowing(epsilon: float) -> CountedStudy:
        return CountedStudy(ONE, PrivacyRequirements(epsilon=epsilon, delta=DELTA))

    ledger.expect(allowing(cost(3) - 0.009), ROUND * 3)
    with pytest.raises(Refused, match="privacy.epsilon"):
        ledger.plan(allowing(cost(3) - 0.009), ROUND * 3)
    with pytest.raises(Refused, match="privacy.epsilon"):
        ledger.expect(allowing(cost(3) - 0.011), ROUND * 3)
    ledger.plan(allowing(cost(2)), ROUND * 2)
    ledger.expect(allowing(cost(2)), ROUND * 9)
    with pytest.raises(Refused, match="privacy.epsilon"):
        ledger.expect(allowing(cost(1)), ROUND)
    assert ledger.standing().charged == {}


def test_a_plan_of_many_rounds_is_one_short_line(ledger: Ledger) -> None:
    planned = [*ROUND, Charge(what="counts", of=Public(reason="known"))] * 20_000
    ledger.plan(CountedStudy(ONE, PrivacyRequirements(epsilon=900, delta=DELTA)), planned)
    [charge] = ledger.standing().entries[-1].charges
    assert charge.of == Gaussian(noise=10.0, count=20_000) and ledger.file.stat().st_size < 3000


# ---------------------------------------------------------------------------------------------------- tampering
def lines_of(ledger: Ledger) -> list[bytes]:
    return ledger.file.read_bytes().splitlines()


def write_lines(ledger: Ledger, lines: list[bytes]) -> None:
    ledger.file.write_bytes(b"".join(line + b"\n" for line in lines))


def less_noise(line: bytes) -> bytes:
    values = json.loads(line)
    values["content"]["charges"][0]["of"]["noise"] = 1000.0
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


TAMPERED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "the last line cut": lambda lines: lines[:-1],
    "all cut": lambda lines: [],
    "one taken out": lambda lines: [*lines[:2], *lines[3:]],
    "two exchanged": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "one twice": lambda lines: [*lines, lines[-1]],
    "a charge made smaller": lambda lines: [*lines[:3], less_noise(lines[3])],
    "an early charge made smaller": lambda lines: [lines[0], less_noise(lines[1]), *lines[2:]],
    "written in another form": lambda lines: [*lines[:3], lines[3].replace(b":", b": ", 1)],
    "no JSON": lambda lines: [*lines[:3], b"x"],
    "the last one without its beginning": lambda lines: [*lines[:3], b"\0" * 9 + lines[3][9:]],
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_changed_ledger_is_noticed_and_nothing_leaves(tmp_path: Path, how: str) -> None:
    ledger = filled(tmp_path)
    write_lines(ledger, TAMPERED[how](lines_of(ledger)))
    for reader in (ledger, Ledger(tmp_path, DATA)):
        with pytest.raises(MedsiloError, match="privacy ledger was changed or is damaged"):
            reader.standing()
        with pytest.raises(MedsiloError, match="nothing leaves"):
            reader.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)


def test_a_head_that_is_gone_or_changed_is_noticed(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    early = json.loads(ledger.head.read_text())
    early["content"]["lines"] = 1
    for content in (None, "x", json.dumps(early, indent=1) + "\n", ledger.head.read_text() + " "):
        ledger.head.unlink(missing_ok=True)
        if content is not None:
            ledger.head.write_text(content)
        with pytest.raises(MedsiloError, match="its head"):
            ledger.standing()


def test_the_last_line_of_another_history_is_noticed(tmp_path: Path) -> None:
    """An attacker replaces the ledger's file by an older file with valid signatures, but cannot replace the ledger's
    head.
    """
    ledger = filled(tmp_path)
    files = {path: path.read_bytes() for path in (ledger.file, ledger.head)}
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "one", ROUND)
    other = ledger.file.read_bytes()
    for path, content in files.items():
        path.write_bytes(content)
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "another", ROUND)
    ledger.file.write_bytes(other)
    with pytest.raises(MedsiloError, match="line 5 is not the one that was written"):
        ledger.standing()


def test_a_line_of_another_key_is_noticed_and_a_new_key_goes_on(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "one")
    forger = filled(tmp_path / "two", 2)
    forged = lines_of(ledger)[:1] + lines_of(forger)[1:2]
    assert (tmp_path / "one/ledger" / OWN_KEY).read_bytes() != (tmp_path / "two/ledger" / OWN_KEY).read_bytes()
    values = json.loads(forged[1])
    values["content"]["previous"] = json.loads(lines_of(ledger)[1])["content"]["previous"]
    write_lines(ledger, [forged[0], json.dumps(values, sort_keys=True, separators=(",", ":")).encode()])
    with pytest.raises(MedsiloError, match="line 2 was.*signature is forged"):
        ledger.standing()


@pytest.mark.parametrize("kind", ["rsa", "elliptic"])
def test_the_key_of_a_kit_signs_and_a_later_one_goes_on(tmp_path: Path, kind: str) -> None:
    filled(tmp_path, 1)
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256R1())
    ledger = Ledger(tmp_path, DATA, key)
    assert ledger.accept()
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 2", "b", ROUND)
    standing = Ledger(tmp_path, DATA, key).standing()
    assert [entry.kind for entry in standing.entries] == ["opened", "charged", "opened", "opened", "charged"]
    assert standing.epsilon(DELTA) == cost(2)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, -0.5])
def test_a_line_that_was_cut_off_by_a_death_counts_for_nothing(tmp_path: Path, share: float) -> None:
    """If `share` is positive, the process died after writing this fraction of the ledger's last line.

    If `share` is negative, zero bytes stand at the place of the last line's beginning, as a power cut may leave them.
    """
    ledger = filled(tmp_path)
    whole = ledger.file.read_bytes()
    head = ledger.head.read_bytes()
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)
    added = len(ledger.file.read_bytes()) - len(whole)
    with ledger.file.open("rb+") as file:
        if share < 0:
            file.seek(len(whole))
            file.write(b"\0" * int(added * (1 + share)))
        else:
            file.truncate(len(whole) + max(1, int(added * share)))
    ledger.head.write_bytes(head)  # the process died before writing the new head
    standing = Ledger(tmp_path, DATA).standing()
    assert standing.torn and standing.epsilon(DELTA) == cost(3)
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "again", ROUND)
    assert ledger.standing().epsilon(DELTA) == cost(4) and not ledger.standing().torn


@pytest.mark.slow
@pytest.mark.parametrize("step", [41, pytest.param(2, marks=pytest.mark.long)])
def test_a_death_at_every_line_of_the_first_answer(tmp_path: Path, step: int) -> None:
    """The process dies at each line of the code that writes the ledger, once for each line.

    After a restart of the process, the answer is sent once and charged once.
    """
    codes, once = [], cost(1)
    for lines in range(1, MOST_LINES, step):
        job = Job(tmp_path / str(lines), "study", Gaussian(noise=10.0))
        job.root.mkdir()
        codes.append(ended(dying(lambda job=job: job.answer(1, 0), lines)))
        entered = Ledger(job.root / "book", DATA).standing()
        left = job.left()
        assert all(entered.has("study", attempt) for attempt in left)
        assert all(entered.has("study", attempt) for attempt in job.usable_states())
        assert ended(dying(lambda job=job: job.answer(1, 0), None)) == 0
        after = job.account().ledger.standing()
        assert len(job.left()) == 1 and after.epsilon(DELTA) == once
    assert set(codes) == {0, 9} and codes.count(9) > 5


def check_history(root: Path, seed: int, demands: PrivacyRequirements | None = None) -> float:
    root.mkdir()
    history = live(root, seed, demands)
    left = {attempt: job for job in history.jobs for attempt in job.left()}
    standing = Ledger(root / "book", DATA).standing()
    entered = {entry.attempt: entry for entry in standing.entries if entry.kind == "charged"}
    assert len(entered) == sum(entry.kind == "charged" for entry in standing.entries)
    assert all(_study(entered[attempt]) == job.study for attempt, job in left.items())
    drawn = [tuple(values) for job in history.jobs for values in job.left().values()]
    assert len(set(drawn)) == len(drawn)  # no two answers have the same noise, even after a process was forked
    unsent = [entry for attempt, entry in entered.items() if attempt not in left]
    # a restarted process sends the answer that it has already charged, unless a new answer is requested
    assert len(unsent) <= history.asked_anew
    of = {job.study: job.of for job in history.jobs}
    charged = [Charge(what="left", of=job.of) for job in left.values()]
    true = epsilon(charged, DELTA)
    charged += [Charge(what="never sent", of=of[_study(entry)]) for entry in unsent]
    found = standing.epsilon(DELTA)
    assert found == epsilon(charged, DELTA) >= true
    # the ledger also counts answers that were charged but never sent
    assert found - true <= epsilon(charged[len(left) :], DELTA)
    return found - true


def _study(entry: LedgerEntry) -> str:
    assert entry.spending
    return entry.spending.study


@pytest.mark.slow
def test_histories(tmp_path: Path) -> None:
    assert check_history(tmp_path / "0", 0) <= 0.02
    check_history(tmp_path / "budget", 1000, PrivacyRequirements(epsilon=50, delta=DELTA))


@pytest.mark.long
@pytest.mark.parametrize("count", [5, 200])
def test_many_histories(count: int, tmp_path: Path) -> None:
    """Histories depend on the number of lines of the ledger's code, so after a change of this code, a seed gives
    another history.

    In the random histories, one answer costs an ε of at most 0.05.
    """
    above = [check_history(tmp_path / str(seed), seed) for seed in range(1, 1 + count)]
    print(f"above the truth: {sum(one > 0 for one in above)} of {count}, at most {max(above):.4f}")
    assert max(above) <= 0.02


@pytest.mark.long
def test_a_history_is_what_its_seed_says(tmp_path: Path) -> None:
    told = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        live(tmp_path / name, 5)
        entries = Ledger(tmp_path / name / "book", DATA).standing().entries
        told.append([(entry.kind, entry.what, entry.spending, entry.epsilon) for entry in entries])
    assert told[0] == told[1] and len({entry[2] for entry in told[0]}) > 1


def test_two_processes_that_charge_at_once_never_pass_the_budget(tmp_path: Path) -> None:
    tight = PrivacyRequirements(epsilon=cost(3), delta=DELTA)

    def spend(spending: Spending) -> None:
        ledger = Ledger(tmp_path, DATA)
        for number in range(4):
            try:
                ledger.charge(CountedStudy(spending, tight), "round", f"{spending.study}{number}", ROUND)
            except Refused:
                return

    children = [dying(lambda own=own: spend(own), None) for own in (ONE, TWO)]
    assert [ended(child) for child in children] == [0, 0]
    standing = Ledger(tmp_path, DATA).standing()
    assert standing.epsilon(DELTA) == cost(3)
    assert sum(entry.kind == "charged" for entry in standing.entries) == 3
