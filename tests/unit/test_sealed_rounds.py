"""Sealed rounds give the right sums, whoever drops out and whenever, and end with the reason where too few are left."""

from itertools import combinations

import pytest
import torch

from medsilo.core.errors import MedsiloError, ParticipationError, PlanError, Refused
from medsilo.sealing.fixed_point import FixedPoint, Flat, integer_weights
from medsilo.sealing.keeping import SumMemory
from medsilo.sealing.letters import SIGNED_SHARE, Reveal
from medsilo.sealing.member import Member
from medsilo.sealing.signing import Unsigned
from medsilo.sealing.terms import SERVER, SealedBlock, Terms
from tests.sealed import Hospitals, as_groups, block, close, mean_of, names, numbers, terms

MOMENTS = ("before the upload", "after the upload", "during unmasking")


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_any_dropouts_at_any_moment(count: int) -> None:
    """As many as the threshold allows cost nothing but themselves; one more ends the round with the reason."""
    study = Hospitals(terms(count))
    models, sites, number = numbers(count), names(count), 0
    own = block(models, weights=(1,) * count)
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
            claim, sums = study.open(server, silent=gone)
            assert set(claim.sites) == added
            wanted = mean_of(models, added)
            for site in sites[:2]:
                assert close(study.members[site].open_sums(claim, [own], sums)["model"], wanted), (gone, moment)


def test_a_site_that_is_away_costs_nothing_and_comes_back() -> None:
    study, models = Hospitals(terms(5)), numbers(5)
    own = block(models, weights=(1,) * 5)
    for number, away in enumerate([{"site-1"}, {"site-3"}, set()], 1):
        server = study.begin(number, [own], without=away)
        study.seal(server, as_groups(models))
        claim, sums = study.open(server)
        for member in study.members.values():  # also those who were away
            assert close(member.open_sums(claim, [own], sums)["model"], mean_of(models, set(names(5)) - away))


def test_the_sum_does_not_depend_on_the_order_or_the_masks() -> None:
    opened = []
    for order in (names(4), names(4)[::-1]):
        study, models = Hospitals(terms(4)), numbers(4)
        own = block(models, weights=(1, 2, 3, 4), total=10)
        server = study.begin(1, [own])
        uploads = {
            site: study.members[site].seal(deal, [own], as_groups(models)[site])
            for site, deal in server.deals().items()
        }
        for site in order:
            server.add(site, uploads[site])
        claim, sums = study.open(server)
        opened.append(study.members["site-0"].open_sums(claim, [own], sums)["model"])
    assert all(torch.equal(opened[0][name], opened[1][name]) for name in ("a", "b"))


def test_weights_that_nobody_is_told() -> None:
    """Counts of cases are sealed, too: their sum divides the sum of the models that were multiplied by them."""
    study, models = Hospitals(terms(4)), numbers(4)
    cases = {"site-0": 10, "site-1": 25, "site-2": 3, "site-3": 40}
    ones = {site: {"cases": torch.ones(1)} for site in models}
    own = block(models, total=400)
    counts = SealedBlock("counts", Flat.of(ones["site-0"]), FixedPoint(1.0, 400))
    blocks = [own, counts]
    server = study.begin(1, blocks)
    groups = {site: {"model": models[site], "counts": ones[site]} for site in models}
    weights = {site: dict.fromkeys(("model", "counts"), number) for site, number in cases.items()}
    study.seal(server, groups, without={"site-2"}, weights=weights)
    claim, sums = study.open(server)
    member = study.members["site-1"]
    total = member.open_sums(claim, blocks, sums)["counts"]["cases"].item()
    assert total == 75
    opened = server.read(own, sums, int(total))
    assert close(opened, mean_of(models, claim.sites, cases), 1e-7)


def test_a_sum_for_the_server() -> None:
    study, models = Hospitals(terms(3)), numbers(3)
    own = block(models, reader=SERVER, weights=(1, 1, 1))
    server = study.begin(1, [own])
    study.seal(server, as_groups(models))
    claim, sums = study.open(server)
    assert close(server.read(own, sums), mean_of(models, names(3)))
    opened = study.members["site-0"].open_sums(claim, [own], sums)["model"]  # as the server may tell it
    assert close(opened, mean_of(models, names(3)))


def dense(count: int) -> list[tuple[int, ...]]:
    drawn = torch.rand(count, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    return [integer_weights(row) for row in drawn.tolist()]


@pytest.mark.parametrize("gone", [set(), {"site-2"}])
def test_a_row_for_each_hospital(gone: set[str]) -> None:
    """A dense matrix: each hospital reads its own row and nobody else's."""
    study, models = Hospitals(terms(4)), numbers(4)
    rows = dict(zip(names(4), dense(4), strict=True))
    blocks = [block(models, f"for {site}", 1 << 16, reader=site, weights=row) for site, row in rows.items()]
    server = study.begin(1, blocks)
    study.seal(server, as_groups(models, *(each.name for each in blocks)), without=gone)
    claim, sums = study.open(server)
    for site, row in rows.items():
        opened = study.members[site].open_sums(claim, blocks, sums)
        assert set(opened) == {f"for {site}"}
        weights = dict(zip(names(4), row, strict=True))
        assert close(opened[f"for {site}"], mean_of(models, claim.sites, weights))


def test_what_hospitals_tell_each_other_past_the_server() -> None:
    """Bit for bit; not under another name, site or round, and not after a change."""
    study = Hospitals(terms(3))
    tensors = {"mean": torch.randn(4), "count": torch.tensor([7, 2**40]), "half": torch.ones(2, 2).bfloat16()}
    flat = Flat.like(tensors)
    sealed = study.members["site-0"].tell(2, "statistics", tensors)
    told = study.members["site-2"].told("site-0", 2, "statistics", flat, sealed)
    assert told.keys() == tensors.keys()
    assert all(torch.equal(told[name], tensors[name]) and told[name].dtype == tensors[name].dtype for name in told)
    assert study.members["site-0"].tell(2, "statistics", tensors).tolist() != sealed.tolist()
    changed = sealed.clone()
    changed[20] += 1
    short = study.members["site-0"].tell(2, "statistics", {**tensors, "mean": torch.randn(3)})
    for site, number, name, given in (
        ("site-1", 2, "statistics", sealed),
        ("site-0", 1, "statistics", sealed),
        ("site-0", 2, "else", sealed),
        ("site-0", 2, "statistics", changed),
        ("site-0", 2, "statistics", short),
        ("site-0", 2, "statistics", sealed[:-1]),
        ("site-0", 2, "statistics", sealed.float()),
    ):
        with pytest.raises(Refused, match=f"{site}: what it (sent through|told the)"):
            study.members["site-2"].told(site, number, name, flat, given)


# ------------------------------------------------------------ what is not opened
def test_what_would_tell_one_model() -> None:
    models = numbers(4)
    pairs = Hospitals(terms(4))
    for reader in (SERVER, "site-0"):
        few = block(models, weights=(1, 1, 0, 0), reader=reader)
        server = pairs.begin(1, [few])
        pairs.seal(server, as_groups(models))
        with pytest.raises(Refused, match="the model of one other"):
            pairs.open(server)


@pytest.mark.parametrize(
    "count, threshold, said",
    [
        (2, 2, "of two hospitals"),
        (300, 200, "of two hospitals"),
        (4, 2, "from 3 to 4"),
        (4, 5, "from 3 to 4"),
    ],
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
        (float("nan"), "b holds NaN"),
        (float("-inf"), "b holds -inf"),
    ):
        bad = {"a": models["site-0"]["a"], "b": torch.tensor([[0.0, value], [0.0, 0.0]])}
        with pytest.raises(Refused, match=said):
            study.members["site-0"].seal(deal, [own], {"model": bad})
    with pytest.raises(Refused, match="too large for the range"):
        study.members["site-0"].seal(deal, [own], {"model": models["site-0"]}, {"model": 2})


# ------------------------------------------------------------ wrong and late
def test_wrong_shares_do_no_harm_while_enough_are_right() -> None:
    study, models = Hospitals(terms(5, threshold=3)), numbers(5)
    own = block(models, weights=(1,) * 5)
    server = study.begin(1, [own])
    study.seal(server, as_groups(models), without={"site-4"})
    request = study.request(server, names(4))
    for site in request.sites:
        reveal = study.members[site].unmask(request, [own])
        if site == "site-0":
            wrong = {key: bytes(SIGNED_SHARE) for key in reveal.added}
            reveal = Reveal(round=1, added=wrong, dropped=dict.fromkeys(reveal.dropped, bytes(SIGNED_SHARE)))
        server.reveal(site, reveal)
    claim, sums = server.open()
    opened = study.members["site-1"].open_sums(claim, [own], sums)
    assert close(opened["model"], mean_of(models, claim.sites))
    server._reveals.pop("site-3")
    with pytest.raises(ParticipationError, match="only 2 sites have revealed the shares that site-. dealt them"):
        server.open()
    assert server.liars == {"site-0"}


def test_what_comes_late_or_twice_is_not_added() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models, weights=(1,) * 4)
    server = study.begin(1, [own], without={"site-3"})
    late = study.members["site-3"].offer(1)
    uploads = study.seal(server, as_groups(models))
    with pytest.raises(Refused, match="site-3: its keys come too late"):
        server.offer("site-3", late)
    with pytest.raises(Refused, match="site-0: it has already sent"):
        server.add("site-0", uploads["site-0"])
    with pytest.raises(Refused, match="site-3: it is not in round 1"):
        server.add("site-3", uploads["site-0"])
    server.survivors()
    with pytest.raises(Refused, match="site-0: what it sealed comes too late"):
        server.add("site-0", uploads["site-0"])


def test_what_a_site_seals_must_have_the_form_that_was_agreed_on() -> None:
    study, models = Hospitals(terms(3)), numbers(3)
    own = block(models)
    server = study.begin(1, [own])
    deal = server.deals()["site-0"]
    words = study.members["site-0"].seal(deal, [own], {"model": models["site-0"]})["model"]
    for wrong, said in (
        ({}, "lacks a block"),
        ({"model": words[:-1]}, "has the shape"),
        ({"model": words.float()}, "not a tensor of 64-bit integers"),
        ({"model": "words"}, "not a tensor"),
        ({"model": words, "more": words}, "one too many"),
    ):
        with pytest.raises(Refused, match=f"site-0: .*{said}"):
            server.add("site-0", wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------ state
def test_a_site_that_keeps_nothing_secret_in_its_texts() -> None:
    study = Hospitals(terms(3))
    member = study.members["site-1"]
    member.offer(1)
    kept, channels = member._kept, member._linked
    assert kept.turn
    secrets = [kept.channel, kept.signing, kept.turn.mask, kept.turn.seed]
    assert all(secret.hex().encode() in member.saved() for secret in secrets)
    told = " ".join(f"{thing!r} {thing}" for thing in (member, kept, kept.turn, channels))
    assert not any(secret.hex() in told or repr(secret) in told for secret in secrets)
    assert told.startswith("<Member site-1 of s>")


def test_state_of_another_study_or_a_damaged_one() -> None:
    saved = Hospitals(terms(3)).members["site-1"].saved()
    with pytest.raises(MedsiloError, match="of another study"):
        Member.load(terms(3, study="other"), Unsigned(), saved, SumMemory())
    with pytest.raises(MedsiloError, match="secrets are damaged") as error:
        Member.load(terms(3), Unsigned(), saved[:-9], SumMemory())
    assert not error.value.private and error.value.__suppress_context__
