"""Attacks on sealing by a server and hospitals that help it, and lies of a server that sites refuse.

Forbidden knowledge is looked for with all that a coalition holds, and found where a mask is left out: so these tests
can fail.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo.sealing import masks, member, relay
from medsilo.sealing.fixed_point import SIGNED, as_words, integer_weights
from medsilo.sealing.letters import Deal, Offer, SumClaim, Survivors, UnmaskingRequest
from medsilo.sealing.masks import agree, own_mask, pair_mask
from medsilo.sealing.shamir import SHARE, combine
from medsilo.sealing.streams import Words, add_streams
from medsilo.sealing.terms import SERVER, SealedBlock
from tests.sealed import Hospitals, as_groups, block, close, correlation, mean_of, names, numbers, terms

CHANCE = 0.01  # |correlation| that a stranger's numbers have with a model of so many
SIZE = 300_000


def read(words: Words, size: int = SIZE) -> Tensor:
    """Return words as the numbers that they would be without masks, as far as one can tell."""
    return torch.from_numpy(words[:size].view(SIGNED).astype(np.float64))


def words_of(own: SealedBlock, sealed: Tensors) -> Words:
    return as_words("site", sealed[own.name], own.flat.words).copy()


def without(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Leave a mask out, at the sites and where the server takes it off."""
    monkeypatch.setattr(masks, what, lambda *args: (bytes(32), 0))


def secret_part(models: dict[str, Tensors], target: str, honest: Sequence[str]) -> Tensor:
    """Return what the agreed sum, less what the helpers sent, does not tell of a model."""
    known = sum(models[site]["a"] for site in honest) / len(honest)
    return models[target]["a"] - known  # type: ignore[no-any-return]


# ------------------------------------------------------------ what cannot be found out
@pytest.mark.parametrize("left_out", ["", "pair_mask"])
@pytest.mark.parametrize("count, threshold", [(4, 3), (6, 5)])
def test_the_server_and_all_helpers_but_the_threshold(
    count: int, threshold: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the target's upload, after unmasking its own mask too, and the keys of every pair with a helper."""
    if left_out:
        without(monkeypatch, left_out)
    study, models = Hospitals(terms(count, threshold=threshold)), numbers(count, SIZE)
    own = block(models, weights=(1,) * count, reader=SERVER)
    target, helpers = "site-0", names(count)[-(threshold - 1) :]
    honest = [site for site in names(count) if site not in helpers]
    server = study.begin(1, [own])
    uploads = study.seal(server, as_groups(models))
    study.open(server)
    best = words_of(own, uploads[target])
    add_streams(best, [own_mask(server._secret(target, True), server._context, own, -1)])
    if not left_out:
        for helper in helpers:
            turn = study.members[helper]._kept.turn
            assert turn
            secret = agree(turn.mask, target, server._offers[target].offered.mask)
            pair = (0, int(helper.removeprefix("site-")))
            add_streams(best, [pair_mask(secret, server._context, own, pair, -1)])
    found = correlation(read(best), secret_part(models, target, honest))
    assert found > 0.5 if left_out else found < CHANCE


@pytest.mark.parametrize("left_out", ["", "own_mask"])
def test_an_upload_that_comes_after_its_site_was_given_up(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have revealed its key for pairs; its own mask still hides it. Its other rounds stay hidden, too."""
    if left_out:
        without(monkeypatch, left_out)
    study, models = Hospitals(terms(4)), numbers(4, SIZE)
    own = block(models, weights=(1,) * 4, reader=SERVER)
    server = study.begin(1, [own])
    deal = server.deals()["site-3"]
    late = words_of(own, study.members["site-3"].seal(deal, [own], as_groups(models)["site-3"]))
    study.seal(server, as_groups(models), without={"site-3"})
    claim, sums = study.open(server)
    assert close(server.read(own, sums), mean_of(models, claim.sites))
    revealed = server._secret("site-3", False)
    for site in claim.sites:
        secret = agree(revealed, site, server._offers[site].offered.mask)
        add_streams(late, [pair_mask(secret, server._context, own, (3, int(site[-1])), -1)])
    found = correlation(read(late), models["site-3"]["a"])
    assert found > 0.99 if left_out else found < CHANCE
    # The next round of the same site, with all that was revealed in this one
    server = study.begin(2, [own])
    again = words_of(own, study.seal(server, as_groups(models))["site-3"])
    study.open(server)
    add_streams(again, [own_mask(server._secret("site-3", True), server._context, own, -1)])
    for site in claim.sites:
        secret = agree(revealed, site, server._offers[site].offered.mask)
        add_streams(again, [pair_mask(secret, server._context, own, (3, int(site[-1])), -1)])
    assert correlation(read(again), models["site-3"]["a"]) < CHANCE


@pytest.mark.parametrize("left_out", [False, True])
def test_a_row_is_noise_to_all_but_its_hospital(left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and every other hospital together cannot read the sum that is sealed to one."""
    if left_out:
        monkeypatch.setattr(member.Member, "_reader_key", lambda *args: None)
    study, models = Hospitals(terms(4)), numbers(4, SIZE)
    row = integer_weights([0.4, 0.3, 0.2, 0.1])
    own = block(models, total=1 << 16, reader="site-0", weights=row)
    server = study.begin(1, [own])
    study.seal(server, as_groups(models))
    claim, sums = study.open(server)
    wanted = mean_of(models, names(4), dict(zip(names(4), row, strict=True)))["a"]
    best = read(words_of(own, sums))
    found = max(correlation(best, wanted), *(correlation(best, models[site]["a"]) for site in names(4)))
    assert found > 0.5 if left_out else found < CHANCE
    assert study.members["site-1"].open_sums(claim, [own], sums) == {}


def test_fewer_shares_than_the_threshold_are_not_the_secret() -> None:
    study = Hospitals(terms(6, threshold=4))
    server = study.begin(1, [block(numbers(6))])
    deals = server.deals()
    shares = {}
    for helper in names(6)[3:]:
        both = study.members[helper]._shares_of(server._offers["site-0"].offered, deals[helper])
        shares[study.terms.place(helper) + 1] = both[0][:SHARE]
    turn = study.members["site-0"]._kept.turn
    assert turn and len(shares) == 3
    assert combine(shares, 3) != turn.seed
    shares[1] = turn.shares["site-0"][0][:SHARE]
    assert combine(shares, 4) == turn.seed


# ------------------------------------------------------------ a server that lies
Round = tuple[Hospitals, relay.MaskedSums, SealedBlock, dict[str, Tensors]]


@pytest.fixture
def sealed_round() -> Round:
    """A round of five hospitals in which all have sealed."""
    study, models = Hospitals(terms(5)), numbers(5)
    own = block(models, weights=(1,) * 5)
    server = study.begin(1, [own])
    study.seal(server, as_groups(models))
    return study, server, own, models


def test_two_unmaskings_of_a_round(sealed_round: Round) -> None:
    """Also in another process, and when the round is begun again with fresh keys."""
    study, server, own, models = sealed_round
    study.open(server)
    fewer = Survivors(round=1, sites=names(4))
    site = study.members["site-0"]
    with pytest.raises(Refused, match="the server: it asks for a second, different unmasking of round 1: .* site-4"):
        site.confirm(fewer, [own])
    study.restart("site-0")
    again = study.begin(1, [own], without={"site-4"})
    study.seal(again, as_groups(models))
    with pytest.raises(Refused, match="second, different unmasking of round 1"):
        study.members["site-0"].confirm(again.survivors(), [own])
    same = study.begin(1, [own])  # after a failure of the server, with all who were in the first
    study.seal(same, as_groups(models))
    claim, sums = study.open(same)
    assert close(study.members["site-0"].open_sums(claim, [own], sums)["model"], mean_of(models, names(5)))


def test_both_masks_of_a_site(sealed_round: Round) -> None:
    """A site reveals one share of each site: it answers the same again, and nothing else."""
    study, server, own, _ = sealed_round
    claim, _ = study.open(server)
    site, request = study.members["site-1"], server.request()
    reveal = site.unmask(request, [own])
    assert set(reveal.added) == set(claim.sites) and not reveal.dropped
    assert site.unmask(request, [own]) == reveal
    with pytest.raises(Refused, match="second, different unmasking"):
        site.unmask(request.model_copy(update={"sites": names(4)}), [own])


def test_survivors_that_are_not_opened(sealed_round: Round) -> None:
    study, _, own, _ = sealed_round
    site = study.members["site-0"]
    for sites, said in (
        (names(2), "a sum of 2 sites in round 1; fewer than 3"),
        (names(5)[1:], "a sum of round 1 that it is not in"),
        ((*names(3), "site-9"), "are not of the round"),
        (names(3)[::-1], "are not of the round, each once"),
        (("site-0", "site-0", "site-1"), "are not of the round, each once"),
    ):
        with pytest.raises(Refused, match=f"the server: .*{said}"):
            site.confirm(Survivors(round=1, sites=sites), [own])
    with pytest.raises(Refused, match="round 2, in which this site sealed nothing"):
        site.confirm(Survivors(round=2, sites=names(5)), [own])


def test_confirmations_that_are_few_or_false(sealed_round: Round) -> None:
    """Different survivors told to different sites gather too few signatures each; signatures cannot be made up."""
    study, server, own, _ = sealed_round
    told = {site: names(5) for site in names(5)[:2]} | {site: names(5)[1:] for site in names(5)[2:]}
    signed = {site: study.members[site].confirm(Survivors(round=1, sites=sites), [own]) for site, sites in told.items()}
    for sites in (names(5), names(5)[1:]):
        own_kind = {site: signature for site, signature in signed.items() if told[site] == sites}
        asked = next(iter(own_kind))
        if len(own_kind) < study.terms.threshold:
            request = UnmaskingRequest(round=1, sites=sites, confirmations=own_kind)
            with pytest.raises(Refused, match="2 sites have confirmed the sum of round 1; it needs 3"):
                study.members[asked].unmask(request, [own])
    mixed = {site: signed[site] for site in names(5)[:3]}
    with pytest.raises(Refused, match="site-2: it did not sign the survivors as the server tells them"):
        study.members["site-0"].unmask(UnmaskingRequest(round=1, sites=names(5), confirmations=mixed), [own])
    strange = {**signed, "site-9": bytes(64)}
    with pytest.raises(Refused, match="confirmations of sites that it does not add"):
        study.members["site-0"].unmask(UnmaskingRequest(round=1, sites=names(5), confirmations=strange), [own])
    with pytest.raises(Refused, match="site-2: it did not sign the survivors"):
        server.survivors()
        server.confirmation("site-2", study.members["site-2"].confirm(Survivors(round=1, sites=told["site-2"]), [own]))


def test_a_round_that_is_replayed() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models, weights=(1,) * 4)
    server = study.begin(1, [own])
    old = server.deals()["site-0"]
    groups = as_groups(models)["site-0"]
    study.seal(server, as_groups(models))
    site = study.members["site-0"]
    with pytest.raises(Refused, match="the server: it asks for a second upload of round 1"):
        site.seal(old, [own], groups)
    site.offer(2)
    with pytest.raises(Refused, match="the server: it begins round 1 without the keys .* it replays a round"):
        site.seal(old, [own], groups)
    second = study.begin(2, [own])
    deal = second.deals()["site-0"]
    offers = (deal.offers[0], old.offers[1], *deal.offers[2:])  # one of the round before
    with pytest.raises(Refused, match="site-1: its keys are of round 1, not 2"):
        site.seal(deal.model_copy(update={"offers": offers}), [own], groups)
    with pytest.raises(Refused, match="site-1: what it sent through the server cannot be opened"):
        site.seal(deal.model_copy(update={"boxes": {**deal.boxes, "site-1": old.boxes["site-1"]}}), [own], groups)


def test_keys_of_a_round_that_are_swapped() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models, weights=(1,) * 4)
    deal = study.begin(1, [own]).deals()["site-0"]
    site, groups = study.members["site-0"], as_groups(models)["site-0"]

    def with_offer(place: int, **changed: Any) -> Deal:
        false = deal.offers[place].model_copy(update=changed)
        return deal.model_copy(update={"offers": (*deal.offers[:place], false, *deal.offers[place + 1 :])})

    for false, said in (
        (with_offer(1, mask=bytes(32)), "site-1: it did not sign its keys for round 1"),
        (with_offer(2, commitment=bytes(32)), "site-2: it did not sign its keys"),
        (with_offer(0, mask=bytes(32)), "the server: it begins round 1 without the keys that this site offered"),
        (deal.model_copy(update={"offers": deal.offers[:2]}), "the server: it begins round 1 with 2 sites; it needs 3"),
        (deal.model_copy(update={"offers": deal.offers[::-1]}), "the server: .*each once and in order"),
        (deal.model_copy(update={"boxes": {}}), "site-1: its shares for this site are missing"),
    ):
        with pytest.raises(Refused, match=said):
            site.seal(false, [own], groups)
    site.seal(deal, [own], groups)


def test_weights_that_are_told_differently_open_nothing() -> None:
    """A server that tells one site to count and the others not to gets noise, not that site's model."""
    study, models = Hospitals(terms(4)), numbers(4, SIZE)
    told = {
        site: block(models, weights=(1, 0, 0, 0) if site == "site-0" else (1,) * 4, reader=SERVER) for site in names(4)
    }
    server = study.begin(1, [told["site-1"]])
    for site, deal in server.deals().items():
        server.add(site, study.members[site].seal(deal, [told[site]], as_groups(models)[site]))
    survivors = study.request(server, names(4)[1:])
    for site in names(4)[1:]:
        server.reveal(site, study.members[site].unmask(survivors, [told[site]]))
    _, sums = server.open()
    with pytest.raises(Refused, match="a sum does not open"):
        server.read(told["site-1"], sums)
    assert correlation(read(words_of(told["site-1"], sums)), models["site-0"]["a"]) < CHANCE
    with pytest.raises(Refused, match="the server: the blocks or weights of round 1 are not those that were sealed"):
        study.members["site-0"].unmask(survivors, [told["site-1"]])


def test_a_round_that_is_dealt_differently_opens_nothing() -> None:
    """One site is told that fewer take part, so that the others' keys could take off all masks that it puts on."""
    study, models = Hospitals(terms(5, threshold=4)), numbers(5, SIZE)
    own = block(models, weights=(1,) * 5, reader=SERVER)
    server, groups = study.begin(1, [own]), as_groups(models)
    deals = server.deals()
    deals["site-0"] = deals["site-0"].model_copy(update={"offers": deals["site-0"].offers[:4]})
    for site, deal in deals.items():
        server.add(site, study.members[site].seal(deal, [own], groups[site]))
    whole, fewer = server.survivors(), Survivors(round=1, sites=names(4))
    with pytest.raises(Refused, match="the server: the sites that it adds in round 1 are not of the round"):
        study.members["site-0"].confirm(whole, [own])
    false = study.members["site-0"].confirm(fewer, [own])
    for site in names(5)[1:]:
        server.confirmation(site, study.members[site].confirm(whole, [own]))
    request = server.request()
    of_others = {**request.confirmations, "site-0": false}
    with pytest.raises(Refused, match="site-0: it did not sign the survivors"):
        study.members["site-1"].unmask(request.model_copy(update={"confirmations": of_others}), [own])
    asked = UnmaskingRequest(round=1, sites=names(4), confirmations={s: of_others[s] for s in names(4)})
    with pytest.raises(Refused, match="site-1: it did not sign the survivors"):
        study.members["site-0"].unmask(asked, [own])
    for site in names(5)[1:]:
        server.reveal(site, study.members[site].unmask(request, [own]))
    opened = words_of(own, server.open()[1])
    assert max(correlation(read(opened), models[site]["a"]) for site in names(5)) < CHANCE


def test_half_of_the_hospitals_work_out_the_others_from_rows() -> None:
    """As the terms say: two of four have two equations of the two other models."""
    study, models = Hospitals(terms(4, threshold=4)), numbers(4)
    matrix = [integer_weights(row) for row in ([4, 3, 2, 1], [1, 4, 3, 2], [2, 1, 4, 3], [3, 2, 1, 4])]
    blocks = [
        block(models, site, 1 << 16, reader=site, weights=row) for site, row in zip(names(4), matrix, strict=True)
    ]
    server = study.begin(1, blocks)
    study.seal(server, as_groups(models, *names(4)))
    claim, sums = study.open(server)
    left = []
    for site, row in zip(names(2), matrix, strict=False):
        mixture = study.members[site].open_sums(claim, blocks, sums)[site]["a"].double()
        left.append(mixture - sum(row[place] / 65536 * models[names(4)[place]]["a"] for place in (0, 1)))
    equations = torch.tensor([row[2:] for row in matrix[:2]], dtype=torch.float64) / 65536
    solved = torch.linalg.solve(equations, torch.stack(left))
    assert (solved[0] - models["site-2"]["a"]).abs().max() < 1e-4


def test_a_sum_of_another_round_or_of_other_sites() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models, weights=(1,) * 4)
    server = study.begin(1, [own])
    study.seal(server, as_groups(models))
    claim, sums = study.open(server)
    site = study.members["site-0"]
    for false, said in (
        (SumClaim(round=1, context=claim.context, sites=names(3)), "the sites in its sum of round 1"),
        (SumClaim(round=1, context=bytes(32), sites=names(4)), "its sum of round 1 is not of the round"),
    ):
        with pytest.raises(Refused, match=f"the server: {said}"):
            site.open_sums(false, [own], sums)
    with pytest.raises(Refused, match="a sum does not open"):
        site.open_sums(claim, [own], {"model": sums["model"] + 1})
    with pytest.raises(Refused, match="the server: what it sealed is not a tensor"):
        site.open_sums(claim, [own], {})


def test_letters_of_wrong_size_or_form() -> None:
    study = Hospitals(terms(3))
    good = study.members["site-0"].offer(1).facts()
    offered = good["offered"]
    for changed, said in (
        ({"round": -1}, "offered.round"),
        ({"round": "1"}, "offered.round"),
        ({"mask": "ab"}, "offered.mask"),
        ({"mask": "no digits"}, "offered.mask"),
        ({"signature": "00" * 65}, "offered.signature"),
        ({"mask": "00" * 100_000}, "offered.mask"),
        ({"site": "s" * 201}, "offered.site"),
        ({"more": 1}, "offered.more"),
    ):
        with pytest.raises(Refused, match=f"site-0: its Offer has a wrong {said}"):
            Offer.read("site-0", {**good, "offered": {**offered, **changed}})
    for boxes in ({"site-1": "00"}, {f"site-{place}": good["boxes"]["site-1"] for place in range(300)}, [], None):
        with pytest.raises(Refused, match="site-0: its Offer has a wrong boxes"):
            Offer.read("site-0", {**good, "boxes": boxes})
    for values in (None, 3, [good], "offer"):
        with pytest.raises(Refused, match="site-0: its Offer"):
            Offer.read("site-0", values)


def test_letters_under_another_name() -> None:
    study, models = Hospitals(terms(4)), numbers(4)
    own = block(models, weights=(1,) * 4)
    server = relay.MaskedSums(study.terms, study.assembly, 1, [own])
    offer = study.members["site-1"].offer(1)
    with pytest.raises(Refused, match="site-0: its keys are of another site or round than 1"):
        server.offer("site-0", offer)
    with pytest.raises(Refused, match="site-1: its shares are not one box for each other site"):
        server.offer("site-1", offer.model_copy(update={"boxes": {}}))
    with pytest.raises(Refused, match="site-0: its keys are those of another site"):
        study.gathering.add("site-0", study.members["site-1"].introduction())
    with pytest.raises(Refused, match="nobody: not a site of this study"):
        study.gathering.add("nobody", study.members["site-1"].introduction())


def test_a_public_key_that_agrees_on_nothing() -> None:
    with pytest.raises(Refused, match="site-1: its public key is not one"):
        masks.agree(bytes(31) + b"\1", "site-1", bytes(32))
