"""The masks of a round, as sites put them on and the server takes off what is left of them.

Site j sends y_j = w_j x_j + Σ_{k > j} p_jk - Σ_{k < j} p_jk + b_j (Bonawitz et al. 2017, section 4), over the sites k
of the round. The streams p_jk = p_kj come from X25519 keys that both drew for this round, b_j from a seed that j drew
for it. All depend on the round's context: its sites and their keys, what is added with which weights, and what the
sites were given. So sites that were told or given different things have masks that do not cancel.

Why a dropout opens one round only: what the others then reveal is its X25519 key *of that round*. Its keys of other
rounds were drawn independently of it, and the seeds of pairs are derived from those alone. Its upload of that round, if
one still comes, stays under b_j, of which no honest hospital then reveals a share.
"""

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from medsilo.core.errors import Refused
from medsilo.sealing.letters import Offered
from medsilo.sealing.streams import Stream, derive, digest, statement
from medsilo.sealing.terms import SealedBlock, Terms


def context_of(
    assembly: bytes, number: int, offers: Sequence[Offered], blocks: Sequence[SealedBlock], given: bytes
) -> bytes:
    """Return bytes that stand for a round: who takes part with which keys, what is added with which weights, and what
    all sites were given before they trained."""
    keys = [part for own in offers for part in (own.site, own.mask, own.commitment)]
    return digest("round", assembly, number, len(offers), *keys, given, *(block.digest for block in blocks))


def weights_of(terms: Terms, sites: Sequence[str], blocks: Sequence[SealedBlock]) -> bytes:
    """Return bytes that stand for the weights with which these sites' numbers are added."""
    places = [terms.place(site) for site in sites]
    parts: list[str | int] = []
    for block in blocks:
        parts += [block.name, *(("private",) if block.weights is None else (block.weights[place] for place in places))]
    return digest("weights", *parts)


def introduced(terms: Terms, site: str, channel: bytes, signing: bytes) -> bytes:
    """Return what a site's certificate signs when a study begins."""
    return statement("medsilo sealing introduction", terms.digest, site, terms.place(site), channel, signing)


def offered(assembly: bytes, number: int, site: str, mask: bytes, commitment: bytes) -> bytes:
    """Return what a site signs when it offers a key for a round."""
    return statement("offer", assembly, number, site, mask, commitment)


def dealt(own: Offered) -> bytes:
    """Return what a box with shares is about: one offer of one site."""
    return statement("shares", own.round, own.site, own.mask, own.commitment)


def shared(assembly: bytes, own: Offered, reader: str, added: bool, share: bytes) -> bytes:
    """Return what a site signs of a share: of its seed, which is revealed where it is added, or of its key."""
    return statement("share", assembly, own.round, own.site, own.mask, own.commitment, reader, int(added), share)


def confirmed(context: bytes, sites: Sequence[str]) -> bytes:
    """Return what a site signs when it confirms whose uploads are added."""
    return statement("confirmation", context, *sites)


def commitment_of(seed: bytes) -> bytes:
    """Return what tells whether a seed that was put together from shares is the right one."""
    return derive(seed, "commitment")


def public_of(private: bytes) -> bytes:
    """Return the public key of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, site: str, public: bytes) -> bytes:
    """Return the secret of an X25519 agreement with a site; raises Refused, naming it, where its key is none."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Refused(f"{site}: its public key is not one that keys can be agreed on with") from error


def check_public(site: str, public: bytes) -> None:
    """Raise Refused, naming the site, where no keys can be agreed on with its public key."""
    agree(bytes(32), site, public)


def pair_mask(secret: bytes, context: bytes, block: SealedBlock, pair: tuple[int, int], sign: int) -> Stream:
    """Return a pair's mask as the first place of the pair has it, or the second; sign -1 takes it off.

    pair: the place whose words it is for, and the other's.
    """
    key = derive(secret, "pair", context, block.digest, min(pair), max(pair))
    return key, sign if pair[0] < pair[1] else -sign


def own_mask(seed: bytes, context: bytes, block: SealedBlock, sign: int) -> Stream:
    """Return a site's own mask; sign -1 takes it off."""
    return derive(seed, "own", context, block.digest), sign
