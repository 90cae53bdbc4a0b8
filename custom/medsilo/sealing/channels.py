"""Channels from one hospital to another through a server that cannot read them, and who spoiled what came.

A box to one hospital has a one-time key, and its sender's signature. Where a reader complains of it, its sender reveals
the private half of that key: so everybody can see what is in this box, and in no other.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from secrets import token_bytes

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor, uint8

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo.sealing.fixed_point import Flat
from medsilo.sealing.letters import BOXED, NONCE, SIGNATURE, SIGNED_SHARE, TAG, Accusation, Introduction, Offered
from medsilo.sealing.masks import agree, confirmed, offered, public_of, shared
from medsilo.sealing.streams import KEY, derive, digest, statement
from medsilo.sealing.terms import Terms

LOCKED = NONCE + TAG  # that a box has more than its content
KEY_BOX = KEY + BOXED


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
        keys = [part for own in self.introductions for part in (own.site, own.channel, own.signing)]
        self.digest = digest("assembly", terms.digest, *keys)  # stands for the terms and the keys of all sites

    def key_of(self, site: str) -> bytes:
        """Return a site's public key for boxes."""
        return self.introductions[self.terms.place(site)].channel

    def check_offered(self, own: Offered) -> None:
        """Raise Refused, naming the site, unless it signed this offer in this study."""
        content = offered(self.digest, own.round, own.site, own.mask, own.commitment)
        self._check(own.site, own.signature, content, f"its keys for round {own.round}")

    def check_confirmation(self, site: str, signature: bytes, context: bytes, sites: Sequence[str]) -> None:
        """Raise Refused, naming the site, unless it confirmed just these survivors."""
        self._check(site, signature, confirmed(context, sites), "the survivors")

    def shares_in(self, content: bytes, own: Offered, reader: str) -> tuple[bytes, bytes]:
        """Return the shares that a dealer's box holds for a reader; raises Refused unless it signed both."""
        of_seed, of_mask = content[:SIGNED_SHARE], content[SIGNED_SHARE:]
        self.check_share(own, reader, True, of_seed)
        self.check_share(own, reader, False, of_mask)
        return of_seed, of_mask

    def check_share(self, own: Offered, reader: str, added: bool, share: bytes) -> None:
        """Raise Refused, naming the dealer, unless it signed this share of a secret of its offer for this reader."""
        content = shared(self.digest, own, reader, added, share[:-SIGNATURE])
        self._check(own.site, share[-SIGNATURE:], content, f"a share of {reader}")

    def check_complaint(self, own: Accusation) -> None:
        """Raise Refused, naming the reader, unless it complained of this box."""
        self._check(own.reader, own.complaint, self.said_of("complaint", own.sender, own.reader, own.subject, own.box))

    def said_of(self, what: str, sender: str, reader: str, subject: bytes, box: bytes) -> bytes:
        """Return what is signed of a box: by its sender, or by a reader who complains."""
        return statement(what, self.digest, sender, reader, subject, box)

    def check_box(self, own: Accusation) -> None:
        """Raise Refused, naming the sender, unless it signed this box for this reader."""
        said = self.said_of("box", own.sender, own.reader, own.subject, own.box[:-SIGNATURE])
        self._check(own.sender, own.box[-SIGNATURE:], said, f"what is for {own.reader}")

    def content(self, own: Accusation, once: bytes) -> bytes:
        """Return what is in a box, by its one-time private key; raises Refused, naming the sender."""
        if public_of(once) != own.box[:KEY]:
            raise Refused(f"{own.sender}: it reveals another key than that of its box for {own.reader}")
        secret = agree(once, own.reader, self.key_of(own.reader))
        return self.opened(secret, own.sender, own.reader, own.subject, own.box)

    def opened(self, secret: bytes, sender: str, reader: str, subject: bytes, box: bytes) -> bytes:
        """Return what is in a box, by the secret that its one-time key and its reader's make; raises Refused."""
        try:
            return content_of(self.box_key(secret, sender, reader, subject, box[:KEY]), box[KEY:-SIGNATURE])
        except InvalidTag as error:
            raise Refused(f"{sender}: what it sent {reader} through the server cannot be opened") from error

    def box_key(self, secret: bytes, sender: str, reader: str, subject: bytes, public: bytes) -> bytes:
        """Return the key of one box."""
        return derive(secret, "box", self.digest, sender, reader, subject, public)

    def _check(self, site: str, signature: bytes, content: bytes, what: str = "its words") -> None:
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
            self._agreed[other] = agree(self._channel, other, self.all.key_of(other))
        return derive(self._agreed[other], "channel", self.all.digest, *purpose)

    def sign(self, content: bytes) -> bytes:
        """Return this site's signature within the study."""
        return Ed25519PrivateKey.from_private_bytes(self._signing).sign(content)

    def once(self, reader: str, subject: bytes) -> bytes:
        """Return the private key of one box that this site sends. No other box may have the same reader and subject."""
        return derive(self._channel, "one-time key", self.all.digest, reader, subject)

    def lock(self, reader: str, content: bytes, subject: bytes) -> bytes:
        """Return a box that only its reader can open, and only as what it is about."""
        once = self.once(reader, subject)
        public, secret = public_of(once), agree(once, reader, self.all.key_of(reader))
        box = public + box_of(self.all.box_key(secret, self.site, reader, subject, public), content)
        return box + self.sign(self.all.said_of("box", self.site, reader, subject, box))

    def unlock(self, sender: str, box: bytes, subject: bytes) -> bytes:
        """Return what another site put into a box; raises Refused, naming it."""
        unsaid = bytes(SIGNATURE)
        try:
            self.all.check_box(Accusation(sender=sender, reader=self.site, subject=subject, box=box, complaint=unsaid))
            return self.all.opened(agree(self._channel, sender, box[:KEY]), sender, self.site, subject, box)
        except Refused as error:
            raise Refused(
                f"{sender}: what it sent through the server cannot be opened: it was changed, is of another round, or "
                "the server told the two sites different keys"
            ) from error

    def complaint(self, sender: str, box: bytes, subject: bytes) -> bytes:
        """Return this site's signature on that it cannot use a box."""
        return self.sign(self.all.said_of("complaint", sender, self.site, subject, box))


def verdict(all_of: Assembled, own: Accusation, once: bytes | None, use: Callable[[bytes], object]) -> tuple[str, str]:
    """Return who spoiled a box, and what it did: its sender, unless its one-time key shows that the reader can use it.

    once: that key; None where its sender reveals none. use: raises Refused for a content that is of no use.
    """
    try:
        all_of.check_box(own)
        if once is None:
            return own.sender, f"it does not show what it sent {own.reader}"
        use(all_of.content(own, once))
    except Refused as error:
        return own.sender, str(error)
    return own.reader, f"{own.reader}: it complains of what {own.sender} sent it, which can be used"


# ------------------------------------------------------------ what one tells all
def told_boxes(site: str, sealed: object, readers: int, place: int) -> tuple[bytes, bytes]:
    """Return the box of what a site told all, and that with its key for one reader; raises Refused, naming the site."""
    if not isinstance(sealed, Tensor) or sealed.dtype != uint8 or sealed.dim() != 1 or len(sealed) < KEY_BOX * readers:
        raise Refused(f"{site}: what it told the hospitals is no row of bytes, or too short")
    content = sealed.cpu().contiguous().numpy().tobytes()
    end = len(content) - KEY_BOX * readers
    mine = end + KEY_BOX * place
    return content[:end], content[mine : mine + KEY_BOX]


def told_subject(number: int, name: str, content: bytes) -> bytes:
    """Return what the box with the key of such a box is about."""
    return statement("key of told", number, name, sha256(content).digest())


def told_tensors(key: bytes, content: bytes, site: str, number: int, name: str, flat: Flat) -> Tensors:
    """Return what a site told all; raises Refused, naming it."""
    try:
        return flat.split(content_of(key, content, "told", site, number, name))
    except (InvalidTag, ValueError) as error:
        raise Refused(
            f"{site}: what it told the hospitals as {name} in round {number} cannot be opened: it was changed, or is "
            "of another round or size"
        ) from error
