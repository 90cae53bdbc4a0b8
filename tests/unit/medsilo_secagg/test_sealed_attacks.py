"""A server, which follows the protocol, and some hospitals attack a site that uses secure aggregation.

Each test searches for a site's model in all values that the attackers know. If one mask comes from a public key, the
attack succeeds, which shows that the search would find a model.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo_secagg import masks
from medsilo_secagg.fixed_point import SIGNED, as_words
from medsilo_secagg.letters import Offer
from medsilo_secagg.masks import agree
from medsilo_secagg.shamir import SHARE, combine
from medsilo_secagg.streams import Words, add_streams
from medsilo_secagg.terms import SealedBlock
from medsilo_server import masked_sums
from tests.sealed import Hospitals, as_groups, block, close, correlation, mean_of, names, numbers, terms

CHANCE = 0.01  # the largest absolute correlation that two unrelated vectors of this size have by chance
SIZE = 300_000


def read(words: Words, size: int = SIZE) -> Tensor:
    """Convert masked integers to floating-point numbers without removing the masks."""
    return torch.from_numpy(words[:size].view(SIGNED).astype(np.float64))


def words_of(own: SealedBlock, sealed: Tensors) -> Words:
    return as_words("site", sealed[own.name], own.flat.words).copy()


def with_known_key(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Derive the masks of one kind from a public value instead of a secret, both at the sites and in the attack."""
    honest = getattr(masks, what)
    monkeypatch.setattr(masks, what, lambda secret, *about: honest(bytes(32), *about))


def context_of(server: masked_sums.MaskedSums) -> bytes:
    return masks.context_of(server.terms, server.number, server._dealt)


def take_off_own(best: Words, server: masked_sums.MaskedSums, seed: bytes) -> None:
    add_streams(best, [masks.own_mask(seed, context_of(server), "model", -1)])


def take_off_pairs(best: Words, server: masked_sums.MaskedSums, place: int, secrets: dict[int, bytes]) -> None:
    """Remove a site's pairwise masks; the attack computes these masks from the secrets that the site shares with other
    sites.
    """
    context = context_of(server)
    add_streams(
        best,
        [masks.pair_mask(secret, context, "model", (place, other), -1) for other, secret in secrets.items()],
    )


def secret_part(models: dict[str, Tensors], target: str, honest: Sequence[str]) -> Tensor:
    """Return the target's model minus the mean of the honest sites' models, which the attackers know anyway."""
    known = sum(models[site]["a"] for site in honest) / len(honest)
    return models[target]["a"] - known  # type: ignore[no-any-return]


@pytest.mark.parametrize("left_out", ["", "pair_mask"])
@pytest.mark.parametrize("count, threshold", [(4, 3), (6, 5)])
def test_the_server_and_all_helpers_but_the_threshold(
    count: int, threshold: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack removes the target's own mask, and all pairwise masks between the target and the helping hospitals."""
    if left_out:
        with_known_key(monkeypatch, left_out)
    study, models = Hospitals(terms(count, threshold=threshold)), numbers(count, SIZE)
    own = block(models)
    target, helpers = "site-0", names(count)[-(threshold - 1) :]
    honest = [site for site in names(count) if site not in helpers]
    server = study.begin(1, [own])
    uploads = study.seal(server, as_groups(models))
    study.open(server)
    best = words_of(own, uploads[target])
    take_off_own(best, server, server._secret(target, True))
    public, known = server._offers[target].offered.mask, dict[int, bytes]()
    for site in honest[1:] if left_out else ():
        known[study.terms.place(site)] = b"any"
    for helper in helpers:
        turn = study.members[helper]._kept.turn
        assert turn
        known[study.terms.place(helper)] = agree(turn.mask, target, public)
    take_off_pairs(best, server, 0, known)
    found = correlation(read(best), secret_part(models, target, honest))
    assert found > 0.5 if left_out else found < CHANCE


@pytest.mark.parametrize("left_out", ["", "own_mask"])
def test_an_upload_that_comes_after_its_site_was_given_up(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's own mask still hides a late upload, although other sites have revealed the site's pairwise keys."""
    if left_out:
        with_known_key(monkeypatch, left_out)
    study, models = Hospitals(terms(4)), numbers(4, SIZE)
    own = block(models)
    server = study.begin(1, [own])
    deal = server.deals()["site-3"]
    late = words_of(own, study.members["site-3"].seal(deal, [own], as_groups(models)["site-3"]))
    study.seal(server, as_groups(models), without={"site-3"})
    sums = study.open(server)
    assert close(own.read(sums["model"], 3), mean_of(models, names(3)))
    revealed = server._secret("site-3", False)

    def with_all(now: masked_sums.MaskedSums) -> dict[int, bytes]:
        return {place: agree(revealed, site, now._offers[site].offered.mask) for place, site in enumerate(names(3))}

    take_off_pairs(late, server, 3, with_all(server))
    take_off_own(late, server, b"any")
    found = correlation(read(late), models["site-3"]["a"])
    assert found > 0.99 if left_out else found < CHANCE
    # in the next round, the attackers use all secrets of the earlier round against the same site
    server = study.begin(2, [own])
    again = words_of(own, study.seal(server, as_groups(models))["site-3"])
    study.open(server)
    take_off_own(again, server, server._secret("site-3", True))
    take_off_pairs(again, server, 3, with_all(server))
    assert correlation(read(again), models["site-3"]["a"]) < CHANCE


def test_fewer_shares_than_the_threshold_are_not_the_secret() -> None:
    study = Hospitals(terms(6, threshold=4))
    server = study.begin(1, [block(numbers(6))])
    deals = server.deals()
    shares = {}
    for helper in names(6)[3:]:
        turn = study.members[helper]._begun(deals[helper])
        shares[study.terms.place(helper) + 1] = turn.shares["site-0"][0]
    turn = study.members["site-0"]._kept.turn  # type: ignore[assignment]
    assert len(shares) == 3 and all(len(share) == SHARE for share in shares.values())
    assert combine(shares, 3) != turn.seed
    shares[1] = turn.shares["site-0"][0]
    assert combine(shares, 4) == turn.seed


def test_a_server_that_deals_the_round_differently_reads_noise() -> None:
    """All masks depend on the list of the sites that take part in the round.

    If the server sends a shorter list to one site, nobody can remove the masks from the sum.
    """
    study, models = Hospitals(terms(5, threshold=4)), numbers(5, SIZE)
    own, groups = block(models), as_groups(models)
    server = study.begin(1, [own])
    deals = server.deals()
    deals["site-0"] = deals["site-0"].model_copy(update={"offers": deals["site-0"].offers[:4]})
    for site, deal in deals.items():
        server.add(site, study.members[site].seal(deal, [own], groups[site]))
    for site in names(5)[1:]:
        server.reveal(site, study.members[site].unmask(server.survivors()))
    words = server.open()["model"]
    with pytest.raises(Refused, match="a sum cannot be unmasked"):
        own.read(words, 5)
    assert max(correlation(read(words), models[site]["a"]) for site in names(5)) < CHANCE


def test_letters_of_wrong_size_or_form() -> None:
    study = Hospitals(terms(3))
    good = study.members["site-0"].offer(1).facts()
    offered = good["offered"]
    for changed, said in (
        ({"round": -1}, "offered.round"),
        ({"round": "1"}, "offered.round"),
        ({"mask": "ab"}, "offered.mask"),
        ({"mask": "no digits"}, "offered.mask"),
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
    server = masked_sums.MaskedSums(study.terms, 1, [block(models)])
    offer = study.members["site-1"].offer(1)
    with pytest.raises(Refused, match="site-0:.*round than 1"):
        server.offer("site-0", offer)
    with pytest.raises(Refused, match="site-1:.*each other site"):
        server.offer("site-1", offer.model_copy(update={"boxes": {}}))
    with pytest.raises(Refused, match="site-0:.*of another site"):
        study.gathering.add("site-0", study.members["site-1"].introduction())
    with pytest.raises(Refused, match="nobody: not a site of this study"):
        study.gathering.add("nobody", study.members["site-1"].introduction())


def test_a_public_key_that_agrees_on_nothing() -> None:
    with pytest.raises(Refused, match="site-1: its public key is unsuitable"):
        masks.agree(bytes(31) + b"\1", "site-1", bytes(32))
