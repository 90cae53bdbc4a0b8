"""Hospitals that send what nobody can use, or say so of others: they are left out by proof, and nobody else is."""

from collections.abc import Callable
from pathlib import Path
from secrets import token_bytes
from typing import Any

import pytest
import torch

from medsilo.core.errors import ParticipationError, Refused
from medsilo.federation.asking import Missing
from medsilo.federation.coordinator import Coordinator
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.sealing import letters, masks
from medsilo.sealing.channels import Assembled, Channels, verdict
from medsilo.sealing.member import Member
from medsilo.sealing.shamir import split
from medsilo.sealing.streams import KEY
from tests import sealed
from tests.attacks.test_secure_aggregation import GO_ON, HOSPITALS, RULES, Hospitals, lead
from tests.conftest import make_plan
from tests.unit.test_coordinator import LOST, Answers

REST = HOSPITALS[:3]
Lock = Callable[[Channels, str, bytes, bytes], bytes]
honest_lock: Lock = Channels.lock


def plan_of(method: str = "fedavg", *changes: str) -> Plan:
    return make_plan(method, *RULES, "transport.sealing=pairwise", *(changes or GO_ON), sites=HOSPITALS)


def resigned(own: Channels, reader: str, subject: bytes, box: bytes) -> bytes:
    return box + own.sign(own.all.said_of("box", own.site, reader, subject, box))


def noise(own: Channels, reader: str, content: bytes, subject: bytes) -> bytes:
    """A box of noise that d has signed."""
    box = honest_lock(own, reader, content, subject)[: -letters.SIGNATURE]
    return resigned(own, reader, subject, box[:KEY] + token_bytes(len(box) - KEY))


def unsigned(own: Channels, reader: str, content: bytes, subject: bytes) -> bytes:
    return honest_lock(own, reader, content, subject)[:-1] + b"x"


def other_content(own: Channels, reader: str, content: bytes, subject: bytes) -> bytes:
    """A box that opens, with something else in it."""
    return honest_lock(own, reader, token_bytes(len(content)), subject)


def anothers_key(own: Channels, reader: str, content: bytes, subject: bytes) -> bytes:
    """A box under a public key of which d knows no private one."""
    box = honest_lock(own, reader, content, subject)[: -letters.SIGNATURE]
    return resigned(own, reader, subject, token_bytes(KEY) + box[KEY:])


SPOILT = [noise, unsigned, other_content, anothers_key]


def spoils(monkeypatch: pytest.MonkeyPatch, how: Lock, about: bytes = b"shares", reader: str = "a") -> None:
    """Let d spoil its boxes for one hospital."""

    def lock(own: Channels, to: str, content: bytes, subject: bytes) -> bytes:
        spoilt = own.site == "d" and to == reader and about in subject
        return (how if spoilt else honest_lock)(own, to, content, subject)

    monkeypatch.setattr(Channels, "lock", lock)


def left_out(server: Coordinator, site: str = "d") -> bool:
    """Return whether all rounds went on without this site alone."""
    return all(line.answered == [other for other in HOSPITALS if other != site] for line in server.rounds)


# ------------------------------------------------------------------------------------------------ shares of masks
@pytest.mark.parametrize("how", SPOILT)
def test_boxes_of_noise_cost_their_sender_its_place_and_nobody_else(
    how: Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoils(monkeypatch, how)
    server = lead(plan_of(), tmp_path / "run", Hospitals(plan_of(), tmp_path / "run"))
    assert left_out(server)
    assert [line for line in server.state.details["cautions"] if "d is left out" in line]
    assert all("d: " in line.refused["d"] for line in server.rounds)


def test_a_study_that_stops_names_the_one_who_spoilt_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoils(monkeypatch, noise)
    plan = plan_of("fedavg", "participation.when_missing=stop")
    with pytest.raises(ParticipationError, match="3 of 4 sites answered.* d refused: d: what it sent a through the"):
        lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"))


def test_a_sender_that_does_not_show_its_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoils(monkeypatch, noise)

    def silent(site: str, asked: Parcel) -> Parcel | Missing:
        return LOST if asked.facts["task"] == "defend" else asked

    server = lead(plan_of(), tmp_path / "run", Hospitals(plan_of(), tmp_path / "run", silent))
    assert left_out(server) and "it does not show what it sent a" in server.rounds[0].refused["d"]


def complaining(hospitals: Hospitals, against: list[str]) -> Hospitals:
    """Let d complain of boxes that it can use."""
    honest_script = hospitals.script

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        found = honest_script(site, asked, work)
        if site == "d" and asked.facts["task"] == "deal" and not isinstance(found, Missing):
            seat = hospitals.participants["d"].participant.envelope._seat(1)  # type: ignore[union-attr]
            deal = letters.Deal.read("x", asked.facts["sealing"]["deal"])
            signed = {
                own.site: seat.member._linked.complaint(own.site, deal.boxes[own.site], masks.dealt(own)).hex()
                for own in deal.offers
                if own.site in against
            }
            found[0][1].facts["sealing"] = {"complaints": signed}
        return found

    hospitals.script = script
    return hospitals


@pytest.mark.parametrize("against", [["a"], ["a", "b", "c"]])
def test_a_false_complaint_costs_who_made_it(against: list[str], tmp_path: Path) -> None:
    hospitals = complaining(Hospitals(plan_of(), tmp_path / "run"), against)
    server = lead(plan_of(), tmp_path / "run", hospitals)
    assert left_out(server)
    assert "d: it complains of what" in server.rounds[0].refused["d"]


def test_every_hospital_can_check_the_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the box, signed by its sender, and the one-time key; the keys of all lie with each hospital."""
    spoils(monkeypatch, noise)
    hospitals = Hospitals(plan_of(), tmp_path / "run")
    server = lead(plan_of(), tmp_path / "run", hospitals)
    (proof,) = server.state.store.proofs
    own = letters.Accusation.read("the server", proof["accusation"])
    for site in REST:
        seat = hospitals.participants[site].participant.envelope._seat(1)  # type: ignore[union-attr]
        all_of = seat.member._linked.all
        all_of.check_complaint(own)
        assert verdict(all_of, own, bytes.fromhex(proof["key"]), lambda content: None)[0] == proof["by"] == "d"


def test_a_defence_opens_one_box_for_its_reader_alone() -> None:
    """The server that makes complaints up, or repeats one for another box, is shown nothing."""
    study = sealed.Hospitals(sealed.terms(5, threshold=4))
    server = study.begin(1, [sealed.block(sealed.numbers(5), weights=(1,) * 5)])
    deals, liar, target = server.deals(), study.members["site-4"], study.members["site-0"]
    box, subject = deals["site-4"].boxes["site-0"], masks.dealt(deals["site-4"].offers[0])
    true = server.accusation("site-4", "site-0", liar._linked.complaint("site-0", box, subject))
    (key,) = target.defend([true]).values()
    content = server.all.content(true, key)
    assert content == study.members["site-4"]._linked.unlock("site-0", box, subject)  # what the liar could read anyway
    for reader in sealed.names(5)[1:4]:
        forged = letters.Accusation(
            sender="site-0", reader=reader, subject=subject, box=deals[reader].boxes["site-0"], complaint=true.complaint
        )
        with pytest.raises(Refused, match=f"{reader}: it did not sign"):
            target.defend([forged])
        with pytest.raises(Refused, match="site-0: "):
            server.all.content(forged, key)
    with pytest.raises(Refused, match="to show what another one sent"):
        study.members["site-1"].defend([true])


@pytest.mark.parametrize("part", ["box", "subject"])
def test_a_server_that_changes_boxes_so_that_honest_readers_complain(part: str) -> None:
    """With all of a hospital's one-time keys it would have all shares of both of its masks."""
    study = sealed.Hospitals(sealed.terms(5, threshold=4))
    server = study.begin(1, [sealed.block(sealed.numbers(5), weights=(1,) * 5)])
    deals, target = server.deals(), study.members["site-0"]
    for reader in sealed.names(5)[1:]:
        deal, subject = deals[reader], masks.dealt(deals[reader].offers[0])
        box, offer = deal.boxes["site-0"], deal.offers[0]
        if part == "box":
            box = box[:-1] + bytes([box[-1] ^ 1])
        else:
            offer = offer.model_copy(update={"commitment": bytes(32)})
        changed = {"boxes": {**deal.boxes, "site-0": box}, "offers": (offer, *deal.offers[1:])}
        against = study.members[reader].check_deal(deal.model_copy(update=changed))
        assert set(against) == {"site-0"}
        for about in {subject, masks.dealt(offer)}:
            own = letters.Accusation(
                sender="site-0", reader=reader, subject=about, box=box, complaint=against["site-0"]
            )
            with pytest.raises(Refused, match="site-0: it did not sign|it did not sign its words"):
                target.defend([own])


# ------------------------------------------------------------------------------------------------ what opens a sum
def test_shares_that_nobody_dealt_cost_nothing_and_name_who_reveals_them() -> None:
    """The one that comes first spoils every choice of shares that it is in; signatures tell which these are."""
    count = 12
    sites = tuple(sorted(sealed.names(count)))
    study, models = sealed.Hospitals(sealed.terms(count, threshold=9, sites=sites)), sealed.numbers(count)
    block = sealed.block(models, weights=(1,) * count)
    server = study.begin(1, [block])
    study.seal(server, sealed.as_groups(models))
    request, liars = study.request(server, sites), {*sites[:3]}
    for site in server.survivors().sites:
        reveal = study.members[site].unmask(request, [block])
        if site in liars:
            false = {other: bytes(1) + token_bytes(len(share) - 1) for other, share in reveal.added.items()}
            reveal = reveal.model_copy(update={"added": false})
        server.reveal(site, reveal)
    claim, sums = server.open()
    assert sealed.close(server.read(block, sums), sealed.mean_of(models, claim.sites))
    assert server.liars == liars


def test_signed_shares_of_something_else_name_their_dealer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They open no sum, and it is proven whose they are. (With garbage in place of numbers nobody could tell.)"""
    study, models = sealed.Hospitals(sealed.terms(4)), sealed.numbers(4)
    block = sealed.block(models, weights=(1,) * 4)
    with monkeypatch.context() as patch:
        patch.setattr("medsilo.sealing.member.split", lambda secret, *given: split(token_bytes(32), *given))
        study.members["site-3"].offer(1)
    server = study.begin(1, [block])
    study.seal(server, sealed.as_groups(models))
    with pytest.raises(ParticipationError, match="site-3 has signed shares that do not make its masks"):
        study.open(server)


# ------------------------------------------------------------------------------------------------ keys and statistics
def test_a_public_key_that_agrees_on_nothing_costs_its_sender_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest_keys = Member._public_keys
    monkeypatch.setattr(
        Member, "_public_keys", lambda own: (bytes(32), honest_keys(own)[1]) if own.site == "d" else honest_keys(own)
    )
    assert left_out(lead(plan_of(), tmp_path / "run", Hospitals(plan_of(), tmp_path / "run")))


@pytest.mark.parametrize("how", [noise, other_content])
def test_statistics_that_one_hospital_cannot_open(how: Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoils(monkeypatch, how, b"key of told")
    plan = plan_of("adafed")
    server = lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"))
    assert all(line.answered == REST for line in server.rounds[1:])
    weights = torch.tensor(server.state.found()["similarity"]["weights"])
    assert not weights[:3, 3].any()


def test_statistics_that_no_data_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All can open them, and nobody can use them."""
    honest_tell = Member.tell

    def tell(own: Member, number: int, name: str, tensors: Any) -> Any:
        if own.site == "d":
            tensors = {key: part * float("nan") if part.is_floating_point() else part for key, part in tensors.items()}
        return honest_tell(own, number, name, tensors)

    monkeypatch.setattr(Member, "tell", tell)
    plan = plan_of("adafed")
    server = lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"))
    assert all(line.answered == REST for line in server.rounds[1:])
    assert any("d is left out" in line for line in server.state.details["cautions"])


def test_a_false_complaint_of_statistics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest_told = Member.told

    def told(own: Member, site: str, *given: Any) -> Any:
        if own.site == "d" and site == "a":
            raise Refused("a: false")
        return honest_told(own, site, *given)

    monkeypatch.setattr(Member, "told", told)
    plan = plan_of("adafed")
    server = lead(plan, tmp_path / "run", Hospitals(plan, tmp_path / "run"))
    assert all(line.answered == REST for line in server.rounds[1:])
    assert "d: it complains of what a sent it" in str(server.state.details["cautions"])


def test_the_wrong_one_time_key_is_no_defence() -> None:
    study = sealed.Hospitals(sealed.terms(4))
    server = study.begin(1, [sealed.block(sealed.numbers(4), weights=(1,) * 4)])
    deals = server.deals()
    box, subject = deals["site-3"].boxes["site-0"], masks.dealt(deals["site-3"].offers[0])
    own = server.accusation("site-3", "site-0", study.members["site-3"]._linked.complaint("site-0", box, subject))
    all_of = Assembled(study.terms, study.assembly.introductions)
    for once in (None, token_bytes(32)):
        assert verdict(all_of, own, once, lambda content: None)[0] == "site-0"
    with pytest.raises(Refused, match="site-1: it complains of a site that dealt it nothing"):
        server.accusation("site-1", "site-1", own.complaint)
