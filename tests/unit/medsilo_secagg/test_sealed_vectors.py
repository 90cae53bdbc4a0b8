"""Compare the package with values from a second implementation, which was written from the documented protocol only."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from medsilo_secagg import letters
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.identity import Unsigned
from medsilo_secagg.masks import context_of, own_mask
from medsilo_secagg.member import Member, Secrets, Turn
from medsilo_secagg.shamir import SHARE
from medsilo_secagg.streams import add_streams
from medsilo_secagg.terms import SealedBlock, Terms
from medsilo_server.masked_sums import MaskedSums
from tests.sealed_vectors import BOUND, DROPPED, FILE, NAME, NUMBERS, PLAN, ROUND, SITES, STUDY, THRESHOLD, Vectors

TERMS = Terms(STUDY, PLAN, SITES, THRESHOLD)


def expected() -> dict[str, Any]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


def test_the_file_is_what_the_second_implementation_makes() -> None:
    assert Vectors().facts() == expected()


def parts(own: Vectors) -> tuple[SealedBlock, letters.Roster, dict[str, letters.Offer]]:
    like = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    block = SealedBlock(NAME, Flat.of(like), FixedPoint(BOUND, 4))
    introductions = tuple(
        letters.Introduction(site=site, channel=own.channel[site], certificates=(), signature=b"") for site in SITES
    )
    offers = {}
    for site in SITES:
        offered = letters.Offered(round=ROUND, site=site, mask=own.mask[site])
        boxes = {other: own.box(site, other) for other in SITES if other != site}
        offers[site] = letters.Offer(offered=offered, boxes=boxes)
    return block, letters.Roster(introductions=introductions), offers


def member_of(own: Vectors, site: str, assembly: letters.Roster, offer: letters.Offer) -> Member:
    keys = {kind: bytes.fromhex(value) for kind, value in expected()["secrets"][site].items()}
    both = own.shares(site, site)
    shares = {site: (both[:SHARE], both[SHARE:])}
    turn = Turn(offer=offer.offered, mask=keys["mask"], seed=keys["seed"], shares=shares, boxes=offer.boxes)
    kept = Secrets(terms=TERMS.digest, site=site, channel=keys["channel"], assembly=assembly, turn=turn)
    return Member(TERMS, Unsigned(), kept)


def tensors_of(site: str) -> dict[str, torch.Tensor]:
    flat = torch.tensor(NUMBERS[site], dtype=torch.float32)
    return {"a": flat[:3], "b": flat[3:].reshape(2, 2)}


@pytest.mark.parametrize("gone", [(), (DROPPED,)], ids=["all", "one dropped out"])
def test_the_package_makes_the_same(gone: tuple[str, ...]) -> None:
    """Each hospital's messages and the sum equal the values of the second implementation in every bit."""
    own, wanted = Vectors(), expected()
    block, assembly, offers = parts(own)
    members = {site: member_of(own, site, assembly, offers[site]) for site in SITES}
    server = MaskedSums(TERMS, ROUND, [block])
    for site, offer in offers.items():
        server.offer(site, offer)
    deals = server.deals()
    context = context_of(TERMS, ROUND, server._dealt)
    assert (TERMS.digest, context) == tuple(bytes.fromhex(wanted[key]) for key in ("terms", "context"))
    for site, deal in deals.items():
        sealed = members[site].seal(deal, [block], {NAME: tensors_of(site)})
        assert sealed[NAME].numpy().tobytes().hex() == wanted["masked"][site]
        mask = np.zeros(block.flat.words, "<u8")
        secret = bytes.fromhex(wanted["secrets"][site]["seed"])
        add_streams(mask, [own_mask(secret, context, NAME, 1)])
        assert mask.tobytes().hex() == wanted["own masks"][site]
        if site not in gone:
            server.add(site, sealed)
    request = server.survivors()
    for site in request.sites:
        server.reveal(site, members[site].unmask(request))
    words = server.open()[NAME]
    assert words.tobytes().hex() == wanted[f"sum without {DROPPED}" if gone else "sum"]
    mean = torch.cat([tensor.reshape(-1) for tensor in block.read(words, len(request.sites)).values()])
    exact = torch.tensor([NUMBERS[site] for site in request.sites], dtype=torch.float64).mean(0)
    assert float((mean.double() - exact).abs().max()) <= 2 / own.scale + 1e-6
