"""Compute the masks of a round, which sites add to their numbers and the server removes from the sum.

Site j sends y_j = w_j x_j + Σ_{k > j} p_jk - Σ_{k < j} p_jk + b_j (Bonawitz et al. 2017, section 4), where k are the
round's other sites. The random streams p_jk = p_kj come from X25519 keys that j and k create for the round. The stream
b_j comes from a seed that j creates for the round. All streams depend on the round's context: plan, hospitals,
threshold, round number, and the participants with their keys.

A site that drops out exposes its masks of one round only: the other sites then reveal only the site's X25519 key of
this round. The keys that a site uses in other rounds are independent of a revealed key. If the upload of a site that
dropped out arrives late, the site's mask b_j still protects the upload. No site reveals a share of b_j's seed.
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
    """Return the digest of a round's context: the study's terms, the round number, and the participants with their
    keys.
    """
    return digest("round", terms.digest, number, *(part for offer in offers for part in (offer.site, offer.mask)))


def introduced(terms: Terms, site: str, channel: bytes) -> bytes:
    """Return the bytes that a site signs when a study begins."""
    return statement("medsilo sealing introduction", terms.digest, site, terms.place(site), channel)


# ------------------------------------------------------------ key agreement between two sites
def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, site: str, public: bytes) -> bytes:
    """Return the shared secret of an X25519 key agreement; if the other site's public key is invalid, raise Refused
    with the site's name.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Refused(f"{site}: its public key is unsuitable for key agreement") from error


def check_public(site: str, public: bytes) -> None:
    """Raise Refused with the site's name if the site's public key is unsuitable for key agreement."""
    agree(bytes(32), site, public)


# ------------------------------------------------------------ encrypted shares, from one site to another
def lock(secret: bytes, keys: Offered, reader: str, content: bytes) -> bytes:
    """Encrypt key shares for one reader, in a way that also authenticates the sender's key of the round."""
    nonce = token_bytes(NONCE)
    return nonce + _cipher(secret, keys.site, reader).encrypt(nonce, content, _about(keys))


def unlock(secret: bytes, own: Offered, reader: str, box: bytes) -> bytes:
    """Decrypt key shares; if the shares were changed, raise Refused with the sender's name."""
    try:
        return _cipher(secret, own.site, reader).decrypt(box[:NONCE], box[NONCE:], _about(own))
    except InvalidTag as error:
        raise Refused(
            f"{own.site}: its shares cannot be decrypted: they were changed, or belong to other keys or another round"
        ) from error


def _cipher(secret: bytes, sender: str, reader: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(secret, "box", sender, reader))


def _about(keys: Offered) -> bytes:
    return statement("shares", keys.round, keys.site, keys.mask)


# ------------------------------------------------------------ masks
def pair_mask(secret: bytes, context: bytes, block: str, pair: tuple[int, int], sign: int) -> Stream:
    """Return the stream of random numbers with which two sites mask their numbers.

    Args:
        block: The name of the block of tensors that is masked.
        pair: The position of the site that uses the mask, and the position of the other site.
        sign: 1 to add the mask, or -1 to remove it.
    """
    key = derive(secret, "pair", context, block, min(pair), max(pair))
    return key, sign if pair[0] < pair[1] else -sign


def own_mask(seed: bytes, context: bytes, block: str, sign: int) -> Stream:
    """Return the stream of a site's own mask.

    Args:
        sign: 1 to add the mask, or -1 to remove it.
    """
    return derive(seed, "own", context, block), sign
