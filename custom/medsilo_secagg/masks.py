"""The masks of a round, as sites put them on and the server takes off what is left of them.

Site j sends y_j = w_j x_j + Σ_{k > j} p_jk - Σ_{k < j} p_jk + b_j (Bonawitz et al. 2017, section 4), over the sites k
of the round. The streams p_jk = p_kj come from X25519 keys that both drew for this round, b_j from a seed that j drew
for it. All depend on the round's context: plan, hospitals, threshold, number, and who is in it with which keys.

Why a dropout opens one round only: what the others then reveal is its X25519 key *of that round*. Its keys of other
rounds were drawn independently of it. Its upload of that round, if it comes late, stays under b_j, of which nobody then
reveals a share.
"""

from secrets import token_bytes

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from medsilo.core.errors import Refused
from medsilo_secagg.letters import NONCE, Offered
from medsilo_secagg.streams import Stream, derive, digest, statement
from medsilo_secagg.terms import Terms


def context_of(terms: Terms, number: int, offers: tuple[Offered, ...]) -> bytes:
    """Return bytes that stand for a round: the terms, its number, and who takes part with which keys."""
    return digest("round", terms.digest, number, *(part for own in offers for part in (own.site, own.mask)))


def introduced(terms: Terms, site: str, channel: bytes) -> bytes:
    """Return what a site's certificate signs when a study begins."""
    return statement("medsilo sealing introduction", terms.digest, site, terms.place(site), channel)


# ------------------------------------------------------------ keys that two sites agree on
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


# ------------------------------------------------------------ boxes with shares, from one site to another
def lock(secret: bytes, own: Offered, reader: str, content: bytes) -> bytes:
    """Return a box that only its reader opens, and only with this offer: so the offer is its sender's, too."""
    nonce = token_bytes(NONCE)
    return nonce + _cipher(secret, own.site, reader).encrypt(nonce, content, _about(own))


def unlock(secret: bytes, own: Offered, reader: str, box: bytes) -> bytes:
    """Return what is in a box; raises Refused, naming its sender."""
    try:
        return _cipher(secret, own.site, reader).decrypt(box[:NONCE], box[NONCE:], _about(own))
    except InvalidTag as error:
        raise Refused(
            f"{own.site}: its shares cannot be opened: they were changed, or are of other keys or of another round"
        ) from error


def _cipher(secret: bytes, sender: str, reader: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(secret, "box", sender, reader))


def _about(own: Offered) -> bytes:
    return statement("shares", own.round, own.site, own.mask)


# ------------------------------------------------------------ masks
def pair_mask(secret: bytes, context: bytes, block: str, pair: tuple[int, int], sign: int) -> Stream:
    """Return a pair's mask as the first place of the pair has it, or the second; sign -1 takes it off.

    pair: the place whose words it is for, and the other's.
    """
    key = derive(secret, "pair", context, block, min(pair), max(pair))
    return key, sign if pair[0] < pair[1] else -sign


def own_mask(seed: bytes, context: bytes, block: str, sign: int) -> Stream:
    """Return a site's own mask; sign -1 takes it off."""
    return derive(seed, "own", context, block), sign
