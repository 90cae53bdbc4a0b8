"""Channels from one hospital to another through a server that cannot read them."""

from collections.abc import Sequence
from secrets import token_bytes

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from medsilo.core.errors import Refused
from medsilo.sealing.letters import Introduction, Offered
from medsilo.sealing.masks import agree, assembly_digest, confirmed, offered
from medsilo.sealing.streams import derive, statement
from medsilo.sealing.terms import Terms

NONCE, TAG = 12, 16  # bytes
BOXED = NONCE + TAG  # that a box has more than its content


def box_of(key: bytes, content: bytes, *about: str | int | bytes) -> bytes:
    """Return a box that only who has the key can open, and only as what it is about."""
    nonce = token_bytes(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, statement(*about))


def content_of(key: bytes, box: bytes, *about: str | int | bytes) -> bytes:
    """Return what is in a box; raises InvalidTag."""
    return ChaCha20Poly1305(key).decrypt(box[:NONCE], box[NONCE:], statement(*about))


class Assembled:
    """The keys of all sites of a study, and what can be checked with them."""

    def __init__(self, terms: Terms, introductions: Sequence[Introduction]) -> None:
        if tuple(own.site for own in introductions) != terms.sites:
            raise Refused("the server: the sites whose keys it relays are not those of the study, in their order")
        self.terms, self.introductions = terms, tuple(introductions)
        self.digest = assembly_digest(terms, self.introductions)

    def check_offered(self, own: Offered) -> None:
        """Raise Refused, naming the site, unless it signed this offer in this study."""
        content = offered(self.digest, own.round, own.site, own.mask, own.commitment)
        self._check(own.site, own.signature, content, f"its keys for round {own.round}")

    def check_confirmation(self, site: str, signature: bytes, context: bytes, sites: Sequence[str]) -> None:
        """Raise Refused, naming the site, unless it confirmed just these survivors."""
        self._check(site, signature, confirmed(context, sites), "the survivors")

    def _check(self, site: str, signature: bytes, content: bytes, what: str) -> None:
        key = self.introductions[self.terms.place(site)].signing
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
        except (InvalidSignature, ValueError) as error:
            raise Refused(f"{site}: it did not sign {what} as the server tells them") from error


class Channels:
    """A site's secret channels to the others of a study.

    Keys depend on the keys of all sites as this one was told them: between two that were told different ones nothing
    can be read.
    """

    def __init__(self, site: str, channel: bytes, signing: bytes, all_of: Assembled) -> None:
        self.site, self.all = site, all_of
        self._channel, self._signing = channel, signing
        self._agreed: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"<Channels of {self.site}>"

    def secret(self, other: str, *purpose: str | int | bytes) -> bytes:
        """Return a key that this site and another have, for one purpose."""
        if other not in self._agreed:
            own = self.all.introductions[self.all.terms.place(other)]
            self._agreed[other] = agree(self._channel, other, own.channel)
        return derive(self._agreed[other], "channel", self.all.digest, *purpose)

    def sign(self, content: bytes) -> bytes:
        """Return this site's signature within the study."""
        return Ed25519PrivateKey.from_private_bytes(self._signing).sign(content)

    def lock(self, other: str, content: bytes, *about: str | int | bytes) -> bytes:
        """Return a box that only the other site can open, and only as what it is about."""
        return box_of(self.secret(other, "box", self.site, other), content, *about)

    def unlock(self, sender: str, box: bytes, *about: str | int | bytes) -> bytes:
        """Return what another site put into a box; raises Refused, naming it."""
        key = self.secret(sender, "box", sender, self.site)
        try:
            return content_of(key, box, *about)
        except InvalidTag as error:
            raise Refused(
                f"{sender}: what it sent through the server cannot be opened: it was changed, is of another round, or "
                "the server told the two sites different keys"
            ) from error
