"""Sums of masked models are correct whichever sites drop out, and whenever the sites drop out.

If too few sites remain, the round ends with an error that names the reason.
"""

from itertools import combinations

import pytest
import torch

from medsilo.core.errors import MedsiloError, ParticipationError, PlanError, Refused
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.identity import Unsigned
from medsilo_secagg.letters import KeyShares, Reveal, UnmaskingRequest
from medsilo_secagg.member import Member
from medsilo_secagg.shamir import SHARE
from medsilo_secagg.terms import SealedBlock, Terms
from tests.conftest import over_all
from tests.sealed import Hospitals, as_groups, block, close, mean_of, names, numbers, terms

MOMENTS = ("before the upload", "after the upload", "during unmasking")


@pytest.mark.parametrize(
    "count", [3, 4, pytest.param(5, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_any_dropouts_at_any_moment(count: int) -> None:
    """While enough sites remain, a site that drops out changes the sum only by its missing model."""
    study = Hospitals(terms(count))
    models, sites, number = numbers(count), names(count), 0
    own = block(models)
    threshold = study.terms.threshold
    allowed = [set(some) for size in range(count - threshold + 1) for some in combinations(sites, size)]
    for gone in (*allowed, set(sites[threshold - 1 :])):
        for moment in MOMENTS:
            number += 1
            left = count - len(gone)
            server = study.begin(number, [own])
            added = set(sites) - gone if moment == MOMENTS[0] else set(sites)
            study.seal(server, as_groups(models), without=set(sites) - added)
            if left < (study.terms.least if moment == MOMENTS[0] else threshold):
                with pytest.raises(ParticipationError, match=f"only {left} sites"):
                    study.open(server, silent=gone)
                continue
            sums = study.open(server, silent=gone)
            assert close(own.read(sums["model"], len(added)), mean_of(models, added)), (gone, moment)


def test_the_sum_does_not_depend_on_the_order_or_the_masks() -> None:
    opened = []
    for order in (names(4), names(4)[::-1]):
        study, models = Hospitals(terms(4)), numbers(4)
        own = block(models)
        server = study.begin(1, [own])
        uploads = {
            site: study.members[site].seal(deal, [own], as_groups(models)[site])
            for site, deal in server.deals().items()
        }
        for site in order:
            server.add(site, uploads[site])
        opened.append(own.read(study.open(server)["model"], 4))
    assert all(torch.equal(opened[0][name], opened[1][name]) for name in ("a", "b"))


def test_weights_that_nobody_is_told() -> None:
    """Masks also hide the sites' numbers of cases.

    The mean is the opened sum of the weighted models divided by the opened sum of the numbers of cases.
    """
    study, models = Hospitals(terms(4)), numbers(4)
    cases = {"site-0": 10, "site-1": 25, "site-2": 3, "site-3": 40}
    ones = {site: {"cases": torch.ones(1)} for site in models}
    own = block(models, one=40)
    counts = SealedBlock("counts", Flat.of(ones["site-0"]), FixedPoint(1.0, 160, 40))
    server = study.begin(1, [own, counts])
    groups = {site: {"model": models[site], "counts": ones[site]} for site in models}
    weights = {site: dict.fromkeys(("model", "counts"), number) for site, number in cases.items()}
    study.seal(server, groups, without={"site-2"}, weights=weights)
    sums = study.open(server)
    assert counts.read(sums["counts"])["cases"].item() == 75
    added = {"site-0", "site-1", "site-3"}
    assert close(own.read(sums["model"], 75), mean_of(models, added, cases), 1e-7)


# ------------------------------------------------------------------------------------------------------- rejected terms
@over_all(
    "count, threshold, said",
    [(2, 2, "of two hospitals"), (300, 200, "of two hospitals"), (4, 2, "3 to 4"), (4, 5, "3 to 4")],
)
def test_terms_that_protect_nobody(count: int, threshold: int, said: str) -> None:
    sites = tuple(sorted(names(count)))
    with pytest.raises(PlanError, match=said):
        Terms("s", "plan", sites, threshold)


def test_a_value_out_of_range_is_refused_by_name_before_anything_is_sealed() -> None:
    study, models = Hospitals(terms(3)), numbers(3)
    own = block(models)
    deal = study.begin(1, [own]).deals()["site-0"]
    for value, said in (
        (17.0, "b holds 17, beyond the bound"),
        (float("nan"), "b contains NaN"),
        (float("-inf"), "b holds -inf"),
    ):
        bad = {"a": models["site-0"]["a"], "b": torch.tensor([[0.0, value], [0.0, 0.0]])}
        with pytest.raises(Refused, match=said):
            study.members["site-0"].seal(deal, [own], {"model": bad})
    with pytest.raises(Refused, match="the weight 2 is not from 0 to 1"):
        study.members["site-0"].seal(deal, [own], {"model": models["site-0"]}, {"model": 2})


def test_one_sum_of_a_round_whatever_the_server_forgets() -> None:
    """If the server loses its state and repeats a round, the server can still open only a sum over the sites of the
    first attempt.
    """
    study, models = Hospitals(terms(5)), numbers(5)
    own, groups = block(models), as_groups(models)
    for number, begins_anew in ((1, False), (2, True)):
        server = study.begin(number, [own])
        study.seal(server, groups)
        first = study.open(server)["model"]
        if begins_anew:
            other = Hospitals(study.terms)
            other.members |= {
                site: Member.begin(study.terms, site, Unsigned(), member.opened)
                for site, member in study.members.items()
            }
            keys = tuple(member.introduction() for member in other.members.values())
            for member in other.members.values():
                member.meet(study.assembly.model_copy(update={"introductions": keys}))
            study = other
        fewer = study.begin(number, [own], without={"site-4"})
        study.seal(fewer, groups)
        with pytest.raises(Refused, match=f"sum of round {number}; .* site-4"):
            study.open(fewer)
        same = study.begin(number, [own])
        study.seal(same, groups)
        assert (study.open(same)["model"] == first).all()


def test_what_is_asked_to_be_unmasked_must_be_of_the_round() -> None:
    study, models = Hospitals(terms(5)), numbers(5)
    server = study.begin(1, [block(models)])
    study.seal(server, as_groups(models))
    site = study.members["site-0"]
    for sites, said in (
        (names(2), "a sum of 2 sites in round 1; fewer than 3"),
        (names(5)[1:], "are not in the round, or lacks this site"),
        ((*names(3), "site-9"), "are not in the round"),
        (names(3)[::-1], "are not in the round"),
        (("site-0", "site-0", "site-1"), "are not in the round"),
    ):
        with pytest.raises(Refused, match=f"the server: .*{said}"):
            site.unmask(UnmaskingRequest(round=1, sites=sites))
    with pytest.raises(Refused, match="round 2, in which this site masked nothing"):
        site.unmask(UnmaskingRequest(round=2, sites=names(5)))
    reveal = site.unmask(UnmaskingRequest(round=1, sites=names(4)))
    assert set(reveal.added) == set(names(4)) and set(reveal.dropped) == {"site-4"}, (
        "the answer must have one share for each site"
    )
    assert site.unmask(UnmaskingRequest(round=1, sites=names(4))) == reveal


# ------------------------------------------------------------------------------------------------------- wrong and late
def test_shares_that_do_not_fit_end_the_round_in_one_line() -> None:
    study, models = Hospitals(terms(5, threshold=3)), numbers(5)
    own = block(models)
    for number, spoils in enumerate(("added", "dropped"), 1):
        server = study.begin(number, [own])
        study.seal(server, as_groups(models), without={"site-4"})
        for site in server.survivors().sites:
            reveal = study.members[site].unmask(server.survivors())
            if site == "site-0":
                wrong = dict.fromkeys(getattr(reveal, spoils), bytes(SHARE))
                reveal = Reveal(**{**dict(reveal), spoils: wrong})
            server.reveal(site, reveal)
        with pytest.raises(MedsiloError, match="cannot be unmasked, because the shares of|a sum cannot be unmasked"):
            own.read(server.open()["model"], 4)


def test_what_comes_late_or_twice_is_not_added() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models)
    server = study.begin(1, [own], without={"site-3"})
    late = study.members["site-3"].offer(1)
    uploads = study.seal(server, as_groups(models))
    with pytest.raises(Refused, match="site-3: its keys come too late"):
        server.offer("site-3", late)
    with pytest.raises(Refused, match="site-3: it is not in round 1"):
        server.add("site-3", uploads["site-0"])
    with pytest.raises(Refused, match="site-0: .* round 1 twice, or too late"):
        server.add("site-0", uploads["site-0"])


def test_what_a_site_seals_must_have_the_form_that_was_agreed_on() -> None:
    study, models = Hospitals(terms(3)), numbers(3)
    own = block(models)
    server = study.begin(1, [own])
    deal = server.deals()["site-0"]
    good = study.members["site-0"].seal(deal, [own], as_groups(models)["site-0"])
    for bad, said in (
        ({}, "lack a block"),
        ({**good, "more": good["model"]}, "lack a block"),
        ({"model": good["model"][:-1]}, "have the shape"),
        ({"model": good["model"].double()}, "64-bit integers"),
    ):
        with pytest.raises(Refused, match=f"site-0: .*{said}"):
            server.add("site-0", bad)
    server.add("site-0", good)


def test_a_round_that_is_dealt_otherwise_than_it_was_offered() -> None:
    """Key shares can be decrypted only in their own round and with unchanged offers, so a site detects any change by
    the server.
    """
    study, models = Hospitals(terms(4)), numbers(4)
    own, groups = block(models), as_groups(models)["site-0"]
    old = study.begin(1, [own]).deals()["site-0"]
    deal = study.begin(2, [own]).deals()["site-0"]
    site = study.members["site-0"]

    def with_offer(place: int, **changed: object) -> KeyShares:
        false = deal.offers[place].model_copy(update=changed)
        return deal.model_copy(update={"offers": (*deal.offers[:place], false, *deal.offers[place + 1 :])})

    for false, said in (
        (old, "the server: it begins round 1 without this site's latest keys"),
        (with_offer(0, mask=bytes(32)), "the server: it begins round 2 without this site's latest keys"),
        (with_offer(1, mask=old.offers[1].mask), "site-1: its shares cannot be decrypted"),
        (with_offer(1, round=1), "site-1: its keys or shares for round 2 are missing"),
        (deal.model_copy(update={"boxes": {}}), "site-1: its keys or shares for round 2 are missing"),
        (deal.model_copy(update={"boxes": {**deal.boxes, "site-1": old.boxes["site-1"]}}), "site-1: its shares cannot"),
        (deal.model_copy(update={"offers": deal.offers[:2]}), "the server: it begins round 2 with 2 sites; it needs 3"),
        (deal.model_copy(update={"offers": deal.offers[::-1]}), "the server: .*each once and in order"),
    ):
        with pytest.raises(Refused, match=said):
            site.seal(false, [own], groups)
    site.seal(deal, [own], groups)
    with pytest.raises(Refused, match="asks for a.*the same masks"):
        site.seal(deal, [own], groups)


def test_an_offer_that_is_asked_for_again_is_the_same() -> None:
    study = Hospitals(terms(3))
    site = study.members["site-0"]
    first = site.offer(1)
    study.restart("site-0")
    assert study.members["site-0"].offer(1) == first
    assert study.members["site-0"].offer(2) != first


# ---------------------------------------------------------------------------------------------------------------- state
def test_a_site_that_keeps_nothing_secret_in_its_texts() -> None:
    study = Hospitals(terms(3))
    member = study.members["site-1"]
    member.offer(1)
    kept = member._kept
    assert kept.turn
    secrets = [kept.channel, kept.turn.mask, kept.turn.seed]
    assert all(secret.hex().encode() in member.saved() for secret in secrets)
    told = " ".join(f"{thing!r} {thing}" for thing in (member, kept, kept.turn))
    assert not any(secret.hex() in told or repr(secret) in told for secret in secrets)


def test_state_of_another_study_or_a_damaged_one() -> None:
    saved = Hospitals(terms(3)).members["site-1"].saved()
    with pytest.raises(MedsiloError, match="belongs to another study"):
        Member.load(terms(3, study="other"), Unsigned(), saved)
    with pytest.raises(MedsiloError, match="secrets are damaged") as error:
        Member.load(terms(3), Unsigned(), saved[:-9])
    assert not error.value.private and error.value.__suppress_context__
    with pytest.raises(MedsiloError, match="has not received the other sites"):
        Member.begin(terms(3), "site-0", Unsigned()).offer(1)


def test_a_study_begins_with_the_keys_of_all_sites() -> None:
    study = Hospitals(terms(3))
    study.gathering._introductions.pop("site-1")
    with pytest.raises(ParticipationError, match="the keys of site-1 are missing"):
        study.gathering.assembly()
