"""Attack a hospital's privacy ledger as somebody who can write the ledger's files but does not have the kit's key."""

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from medsilo.cli import main
from medsilo.core.errors import MedsiloError, Refused
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.account import ledger_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import training_site
from medsilo.plan import parse_plan
from medsilo.runs.messages import SiteWarning, StudyMessage
from medsilo.runs.paths import LEDGER_HEADS, site_folder
from medsilo.site.accepted_settings import REMEMBERED, AcceptedSettings
from medsilo.site.kit import KitFiles
from medsilo.site.ledger import KEPT, OWN_KEY, CountedStudy, Ledger, ledgers
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import SiteSettings
from medsilo.site.signing import own_key
from medsilo_server.ledger_watch import LedgerWatch
from tests import inprocess
from tests.unit.exchange.test_hostile_answers import odd
from tests.unit.site.test_account import PRIVATE, ask, settings_of, weights
from tests.unit.site.test_approvals import WANTED, Home, make_kit
from tests.unit.site.test_ledger import DATA, DEMANDS, ONE, ROUND, cost, filled

HARMLESS = [ROUND[0].model_copy(update={"of": ROUND[0].of.model_copy(update={"noise": 1e6})})]
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    (tmp_path / "kit").mkdir()
    return tmp_path / "kit"


def of_kit(folder: Path, kit: Path | None, key: ec.EllipticCurvePrivateKey = KEY, rounds: int = 3) -> Ledger:
    ledger = Ledger(folder, DATA, key, kit)
    for number in range(rounds):
        ledger.charge(CountedStudy(ONE, DEMANDS), f"round {number + 1}", f"attempt{number}", ROUND)
    return ledger


def whole_history(folder: Path) -> None:
    shutil.rmtree(folder / "ledger")
    Ledger(folder, DATA).charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt0", HARMLESS)


def behind_the_first_line(folder: Path) -> None:
    """Keep the ledger's first line, which is signed with the kit's key, and sign all further lines with another key."""
    ledger = Ledger(folder, DATA, OTHER)
    [first, *_] = ledger.file.read_bytes().splitlines()
    ledger.file.write_bytes(first + b"\n")
    ledger.accept()
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt0", HARMLESS)


def head_alone(folder: Path) -> None:
    ledger = Ledger(folder, DATA, OTHER)
    ledger.file.write_bytes(b"".join(line + b"\n" for line in ledger.file.read_bytes().splitlines()[:2]))
    lines = ledger.file.read_bytes().splitlines()
    ledger._write_head(len(lines), hashlib.sha256(lines[-1]).hexdigest())


@pytest.mark.parametrize("rewrite", [whole_history, behind_the_first_line, head_alone])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_history_that_another_key_signed_is_none(
    rewrite: Callable[[Path], None], keeps: bool, tmp_path: Path, kit: Path
) -> None:
    of_kit(tmp_path, kit)
    rewrite(tmp_path)
    if not keeps:
        (kit / KEPT.format(DATA)).unlink()
    ledger = Ledger(tmp_path, DATA, KEY, kit)
    for use in (ledger.standing, lambda: ledger.charge(CountedStudy(ONE), "round 4", "new", ROUND)):
        with pytest.raises(MedsiloError, match="privacy ledger was changed or is damaged"):
            use()


@pytest.mark.parametrize("gone", [False, True])
def test_the_kit_tells_of_a_ledger_that_was_put_back_or_taken_away(gone: bool, tmp_path: Path, kit: Path) -> None:
    of_kit(tmp_path, kit, rounds=1)
    shutil.copytree(tmp_path / "ledger", tmp_path / "earlier")
    ledger = of_kit(tmp_path, kit)
    shutil.rmtree(tmp_path / "ledger")
    if not gone:
        shutil.copytree(tmp_path / "earlier", tmp_path / "ledger")
    with pytest.raises(
        MedsiloError, match="its head is not there" if gone else "4 lines were written, and 2 are there"
    ):
        ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)
    assert ledgers(tmp_path, kit) == [DATA]
    ledger.accept()
    assert ledger.standing().epsilon(1e-5) == (0 if gone else cost(1))


def test_a_kit_without_the_ledgers_head_is_refused_until_the_engineer_accepts(tmp_path: Path, kit: Path) -> None:
    """Without the head that the kit stores, nobody would notice that somebody has restored an old ledger."""
    ledger = of_kit(tmp_path, kit, rounds=1)
    shutil.copytree(tmp_path / "ledger", tmp_path / "earlier")
    of_kit(tmp_path, kit)
    shutil.rmtree(tmp_path / "ledger")
    shutil.copytree(tmp_path / "earlier", tmp_path / "ledger")
    (kit / KEPT.format(DATA)).unlink()
    for use in (ledger.standing, lambda: ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)):
        with pytest.raises(MedsiloError, match=r"the head that the kit keeps is not there.*accept"):
            use()
    ledger.accept()
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)
    assert (kit / KEPT.format(DATA)).read_bytes() == ledger.head.read_bytes()


def test_a_later_kit_is_let_in_by_the_engineer_and_signed_by_the_key_before(tmp_path: Path, kit: Path) -> None:
    of_kit(tmp_path, kit)
    later = Ledger(tmp_path, DATA, OTHER, kit)
    with pytest.raises(MedsiloError, match="another key than this hospital's own"):
        later.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)
    assert later.accept(KEY)
    standing = later.standing()
    assert standing.entries[-2].handed == standing.keys[-1] != standing.keys[-2] == standing.keys[1]
    assert standing.epsilon(1e-5) == cost(3)
    later.charge(CountedStudy(ONE, DEMANDS), "round 4", "new", ROUND)
    with pytest.raises(MedsiloError, match="another key than this hospital's own"):
        Ledger(tmp_path, DATA, KEY, kit).standing()
    third_key, fourth_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    third = Ledger(tmp_path, DATA, third_key, kit)
    assert third.accept(OTHER) and third.standing().epsilon(1e-5) == cost(4)
    fourth = Ledger(tmp_path, DATA, fourth_key, kit)
    assert fourth.accept(third_key) and fourth.standing().epsilon(1e-5) == cost(4)


def test_the_ledger_of_other_data_is_not_this_one(tmp_path: Path) -> None:
    """A ledger of another data set has valid signatures, but is not accepted for this data set."""
    of_kit(tmp_path, None)
    other = Ledger(tmp_path, "f" * 16, KEY)
    other.plan(CountedStudy(ONE, DEMANDS), ROUND)
    shutil.copy(Ledger(tmp_path, DATA).file, other.file)
    shutil.copy(Ledger(tmp_path, DATA).head, other.head)
    with pytest.raises(MedsiloError, match="line 1 does not follow"):
        Ledger(tmp_path, "f" * 16, KEY).standing()


def test_a_ledger_from_before_the_kit_goes_on_when_the_engineer_says_so(tmp_path: Path, kit: Path) -> None:
    filled(tmp_path)
    own = Ledger(tmp_path, DATA, KEY, kit)
    with pytest.raises(MedsiloError, match="the kit's"):
        own.standing()
    assert own.accept() and own.standing().epsilon(1e-5) == cost(3)


def test_without_a_kit_no_later_key_goes_on_by_itself(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "ledger" / OWN_KEY).rename(tmp_path / OWN_KEY)
    later = Ledger(tmp_path, DATA, OTHER)
    assert not later.accept() and later.standing().epsilon(1e-5) == cost(3)
    with pytest.raises(MedsiloError, match="line 5 is.*not let in"):
        Ledger(tmp_path, DATA).standing()


def test_the_key_before_lets_in_one_key_and_no_other(tmp_path: Path) -> None:
    filled(tmp_path)
    Ledger(tmp_path, DATA, OTHER).accept()
    first = own_key(tmp_path / "ledger" / OWN_KEY, "x")
    (tmp_path / "ledger" / OWN_KEY).unlink()
    assert Ledger(tmp_path, DATA).standing().epsilon(1e-5) == cost(3)
    lines = Ledger(tmp_path, DATA).file.read_bytes().splitlines(keepends=True)
    for kept, key in ((lines, first), (lines[:-1], KEY)):
        Ledger(tmp_path, DATA).file.write_bytes(b"".join(kept))
        Ledger(tmp_path, DATA, key).accept()
        with pytest.raises(MedsiloError, match=f"line {len(kept) + 1} is.*not let in"):
            Ledger(tmp_path, DATA).standing()


# ---------------------------------------------------------------------------------------------------- the server's part
def place_of(root: Path, photos: Path, kit: KitFiles | None = None) -> SiteContext:
    settings = settings_of(photos, epsilon=20.0)
    return SiteContext(parse_plan(PRIVATE), "a", ["a"], settings, site_folder(root / "study", "a"), kit=kit)


@pytest.mark.slow
def test_a_hospital_is_shown_its_own_earlier_heads(photos: Path, tmp_path: Path) -> None:
    """After an engineer restored the ledger and the kit from an old copy, the server sends a later ledger head that the
    hospital had signed.

    A hospital whose ledger is older than the ledger head from the server sends no answer.
    """
    files = make_kit(tmp_path / "kit", "a")
    place = place_of(tmp_path, photos, files)
    one = training_site(place)
    first = one.answer(ask(place.plan, weights(one), 1))
    shutil.copytree(tmp_path, tmp_path.with_name("earlier"), dirs_exist_ok=True)
    late = one.answer(ask(place.plan, weights(one), 2))
    head = late.facts["ledger"]
    assert head["lines"] == first.facts["ledger"]["lines"] + 1 and head["began"] == first.facts["ledger"]["began"]

    shutil.rmtree(tmp_path)
    shutil.copytree(tmp_path.with_name("earlier"), tmp_path)
    two = training_site(place)
    invented = {**head, "lines": head["lines"] + 5}
    elsewhere = {**head, "began": "5" * 64}
    known = [first.facts["ledger"], invented, elsewhere]
    two.answer(ask(place.plan, weights(two), 1, ledgers=known))
    with pytest.raises(Refused, match="lines, and here are"):
        two.answer(ask(place.plan, weights(two), 2, ledgers=[head]))


def test_an_earlier_head_counts_until_the_engineer_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an engineer restored ledger and kit from an old copy, only the server knows the later charges."""
    clock, home = itertools.count(1_000), tmp_path / "home"
    monkeypatch.setattr("medsilo.site.ledger.time", SimpleNamespace(time=lambda: next(clock)))
    (home / "kit").mkdir(parents=True)
    of_kit(home, home / "kit", OTHER, rounds=1)
    Ledger(home, DATA, KEY, home / "kit").accept(OTHER)
    early = of_kit(home, home / "kit", rounds=2).signed_head()
    shutil.copytree(home, tmp_path / "earlier")
    head = of_kit(home, home / "kit").signed_head()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "earlier", home)
    ledger = Ledger(home, DATA, KEY, home / "kit")
    for number in range(3):
        ledger.charge(CountedStudy(ONE), "another round", f"other{number}", ROUND)
        with pytest.raises(Refused, match="a server knows 6 lines"):
            ledger.check_heads([early, head])
    ledger.accept()
    ledger.check_heads([early, head])


def test_no_head_hides_the_next_one(tmp_path: Path) -> None:
    early = of_kit(tmp_path / "a", None, rounds=0)
    early.afford(CountedStudy(ONE, DEMANDS), ROUND)
    first = early.signed_head()
    (tmp_path / "empty").mkdir()
    Ledger(tmp_path / "empty", DATA, KEY).check_heads([first])
    shutil.copytree(tmp_path / "a", tmp_path / "earlier")
    late = of_kit(tmp_path / "a", None, rounds=2).signed_head()
    elsewhere = of_kit(tmp_path / "b", None, rounds=4).signed_head()
    gone_back = Ledger(tmp_path / "earlier", DATA, KEY)
    for others in ([], [first], [{**late, "lines": 9}], [elsewhere], [first, {**late, "lines": 9}, elsewhere]):
        gone_back.check_heads(others)
        Ledger(tmp_path / "a", DATA, KEY).check_heads([*others, late])
        with pytest.raises(Refused, match="a server knows 3 lines"):
            gone_back.check_heads([*others, late])


OWN = {"kind": "state lost", "numbers": [1, 0]}


class Sends:
    def __init__(self, *heads: dict[str, Any]) -> None:
        self.heads, self.asked = list(heads), []  # type: ignore[var-annotated]

    def pause(self, seconds: float) -> None:
        """Return at once."""

    def ask(self, sites: Any, outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        self.asked.append(outgoing("a").facts)
        receive("a", StudyMessage(facts={"ledger": self.heads.pop(0), "warnings": [OWN]}))
        return {}


def test_the_server_names_a_hospital_whose_ledger_went_back(tmp_path: Path) -> None:
    heads = []
    for number in range(3):
        heads.append(of_kit(tmp_path / "one", None, rounds=number + 1).signed_head())
    fresh = of_kit(tmp_path / "two", None).signed_head()
    told: list[list[dict[str, Any]]] = []

    def ask(sends: Sends) -> None:
        watch = LedgerWatch(sends, tmp_path / LEDGER_HEADS)
        watch.ask(["a"], lambda site: StudyMessage(), lambda site, own: told.append(own.facts["warnings"]), 1)

    sends = Sends(*heads, heads[1], fresh)
    for _ in range(5):
        watch = LedgerWatch(sends, tmp_path / LEDGER_HEADS)
        watch.ask(
            ["a"],
            lambda site: StudyMessage(facts={"round": 1}),
            lambda site, own: told.append(own.facts["warnings"]),
            1,
        )
    assert told[:3] == [[OWN]] * 3
    assert SiteWarning.received(told[3][1]).text.startswith("its privacy ledger had 4 lines")
    assert SiteWarning.received(told[4][1]).text.startswith("it uses a privacy ledger")
    assert "ledgers" not in sends.asked[0] and sends.asked[2]["ledgers"] == [heads[1]]
    with pytest.raises(Refused, match="lines"):
        LedgerWatch(Sends({**fresh, "lines": "4"}), tmp_path / LEDGER_HEADS).ask(
            ["a"], lambda s: StudyMessage(), told.append, 1
        )


@pytest.mark.slow
def test_a_whole_study_after_the_ledger_was_put_back_says_so(photos: Path, tmp_path: Path) -> None:
    """Without a kit, nobody at the hospital can notice a restored ledger, so the server's record reports the restored
    ledger.
    """
    plan, own = parse_plan(PRIVATE, ["training.rounds=1"]), settings_of(photos, epsilon=20.0)
    inprocess.run(plan, folder=tmp_path / "one", settings=own)
    ledger = tmp_path / "_hospital/a/ledger"
    shutil.copytree(ledger, tmp_path / "earlier")
    inprocess.run(plan, folder=tmp_path / "two", settings=own)
    shutil.rmtree(ledger)
    shutil.copytree(tmp_path / "earlier", ledger)
    with pytest.raises(MedsiloError, match="a server knows"):
        inprocess.run(plan, folder=tmp_path / "three", settings=own)
    shutil.rmtree(ledger)
    summary = inprocess.run(plan, folder=tmp_path / "four", settings=own).summary
    assert "a privacy ledger" in summary.sites["a"].warnings["join"][-1]


# ---------------------------------------------------------------------------------------------------- for people
def test_the_command_knows_whose_key_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_kit(tmp_path / "kit", "a")
    book = QueryBudget(tmp_path / "kit/medsilo/_hospital/a")
    ledger = ledger_of(book, DATA, files)
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
    verify = ["ledger", "show", "--kit", str(tmp_path / "kit")]
    assert main(verify) == 0
    whole_history(book.folder)
    assert main(verify) == 1 and "another key" in capsys.readouterr().err
    assert main(["ledger", "accept", "--kit", str(tmp_path / "kit")]) == 0 and main(verify) == 0


def test_a_hospital_with_a_ledger_whose_accepted_settings_are_gone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attacker removes the accepted settings, changes medsilo.yaml, and removes the ledger or the head in the
    kit.
    """
    for gone in ((), (KEPT.format(DATA),), ("medsilo/_hospital/hospital-a/ledger",)):
        home = Home(tmp_path / str(len(str(gone))))
        book = QueryBudget(home.folder / "medsilo/_hospital/hospital-a")
        home.permission().accepted.begin(WANTED)  # type: ignore[union-attr]
        ledger_of(book, DATA, home.kit).charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
        (home.folder / "local/medsilo.yaml").write_text("device: cpu\n")
        for name in (REMEMBERED, *gone):
            path = home.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(Refused, match=r"accepted-settings.json is missing.*medsilo ledger accept"):
            home.permission(approval="none").check()
        kit = ["--kit", str(home.folder)]
        capsys.readouterr()
        assert main(["check", *kit, "--private", str(tmp_path / "private"), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["findings"]
        assert any(one["severity"] == "stops" and REMEMBERED in one["what"] for one in found)
        assert main(["ledger", "accept", *kit]) == 0
        home.permission(approval="none").check()


def test_a_hospital_that_never_promised_anything_goes_on(tmp_path: Path) -> None:
    home = Home(tmp_path / "kit")
    (home.folder / "local/medsilo.yaml").write_text("device: cpu\n")
    book = QueryBudget(home.folder / "medsilo/_hospital/hospital-a")
    for _ in range(2):
        AcceptedSettings(home.kit, book.folder).begin(SiteSettings())
        home.permission(approval="none").check()
        ledger_of(book, DATA, home.kit).charge(CountedStudy(ONE), "round 1", "attempt", ROUND)


# ---------------------------------------------------------------------------------------------------- odd heads
def odd_heads(head: dict[str, Any], drawn: random.Random, count: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(count):
        own: Any = dict(head)
        name = drawn.choice([*own, "more"])
        match drawn.randrange(5):
            case 0:
                own[name] = odd(drawn)
            case 1:
                own.pop(name, None)
            case 2:
                own |= {"lines": drawn.choice([-1, 0, 10**6, 2**70, 10**5000, float("nan")])}
            case 3:
                own |= {"began": drawn.randbytes(32).hex(), "hash": drawn.randbytes(32).hex()}
            case _:
                own = drawn.choice([odd(drawn), [own] * 3, {"ledger": own}])
        found.append(own)
    return found


def test_odd_heads_in_answers_are_refused_and_change_nothing_of_others(tmp_path: Path) -> None:
    drawn = random.Random(0)
    ours, theirs = (of_kit(tmp_path / name, None, rounds=2).signed_head() for name in ("ours", "theirs"))
    odd_ones, taken, got = odd_heads(theirs, drawn, 200), 0, list[tuple[str, Any]]()

    class Both(Sends):
        def ask(self, sites: Any, outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
            self.asked.append(outgoing("a").facts)
            receive("a", StudyMessage(facts={"ledger": ours}))
            return receive("b", StudyMessage(facts={"ledger": self.heads.pop(0)})) or {}  # type: ignore[func-returns-value]

    for own in odd_ones:
        got.clear()
        sends = Both(own)
        try:
            LedgerWatch(sends, tmp_path / LEDGER_HEADS).ask(
                ["a", "b"], lambda site: StudyMessage(), lambda site, reply: got.append((site, reply.facts)), 1
            )
            taken += 1
        except Refused as error:
            assert len(str(error)) < 1000 and "\n" not in str(error)
        assert got[0] == ("a", {"ledger": ours})
        assert sends.asked[0].get("ledgers", [ours]) == [ours]
    assert 0 < taken < 150


@pytest.mark.slow
def test_odd_heads_in_requests_are_refused_or_count_for_nothing(photos: Path, tmp_path: Path) -> None:
    drawn, place = random.Random(1), place_of(tmp_path, photos, make_kit(tmp_path / "kit", "a"))
    site = training_site(place)
    asked = ask(place.plan, weights(site), 1)
    first = site.answer(asked)
    head, refused = first.facts["ledger"], 0
    for own in odd_heads(head, drawn, 120):
        told = drawn.choice([[own], [head, own], own, [own] * 9])
        try:
            again = site.answer(replace(asked, facts={**asked.facts, "ledgers": told}))
            # the participant repeats the stored answer, so the ledger charges nothing
            assert again.facts == first.facts
        except Refused as error:
            refused += 1
            assert len(str(error)) < 1000 and "\n" not in str(error)
    assert refused > 40 and site.answer(asked).facts == first.facts
