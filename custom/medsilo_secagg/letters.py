"""Define the messages of secure aggregation between the server and the sites.

Messages are typed and of limited size, and an invalid message is rejected with a one-line error. In JSON, bytes are
written as hexadecimal digits.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from medsilo.core.errors import Refused
from medsilo.core.text import plain
from medsilo_secagg.identity import LONGEST_CERTIFICATE, LONGEST_SIGNATURE, MOST_CERTIFICATES
from medsilo_secagg.shamir import SHARE
from medsilo_secagg.terms import MOST_SITES

NONCE, TAG = 12, 16  # bytes of a cipher's nonce and authentication tag
BOX = NONCE + TAG + 2 * SHARE  # bytes of an encrypted pair of key shares


def _from_hex(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > 2 * LONGEST_CERTIFICATE:
        raise ValueError("too long")
    return bytes.fromhex(value)


Digits = PlainSerializer(lambda value: value.hex(), when_used="json")
Bytes32 = Annotated[bytes, BeforeValidator(_from_hex), Digits, Field(min_length=32, max_length=32)]
OneShare = Annotated[bytes, BeforeValidator(_from_hex), Digits, Field(min_length=SHARE, max_length=SHARE)]
Box = Annotated[bytes, BeforeValidator(_from_hex), Digits, Field(min_length=BOX, max_length=BOX)]
Certificate = Annotated[bytes, BeforeValidator(_from_hex), Digits, Field(min_length=1, max_length=LONGEST_CERTIFICATE)]
Signature = Annotated[bytes, BeforeValidator(_from_hex), Digits, Field(max_length=LONGEST_SIGNATURE)]
SiteName = Annotated[str, Field(min_length=1, max_length=200)]
RoundNumber = Annotated[int, Field(ge=0, le=10_000_000)]
Names = Annotated[tuple[SiteName, ...], Field(max_length=MOST_SITES, strict=False)]
BySite = Field(max_length=MOST_SITES)


class SecAggMessage(BaseModel):
    """Base class of the messages of secure aggregation. Types are strict, and unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, sender: str, values: Any) -> Self:
        """Parse a received message; if the message is invalid, raise Refused with the sender's name."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = plain(".".join(map(str, first["loc"])), 80) or "content"
            raise Refused(f"{sender}: its {cls.__name__} has a wrong {where}: {plain(first['msg'], 120)}") from error

    def facts(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)


P = TypeVar("P")


def needed(sender: str, part: P | None) -> P:
    """Return an optional field of a message; if the field is missing, raise Refused with the sender's name."""
    if part is None:
        raise Refused(f"{sender}: its message lacks a requested part")
    return part


# ------------------------------------------------------------ start of a study
class Introduction(SecAggMessage):
    """A site's new X25519 key for one study, signed with the site's certificate."""

    site: SiteName
    channel: Bytes32
    certificates: Annotated[tuple[Certificate, ...], Field(max_length=MOST_CERTIFICATES, strict=False)]
    signature: Signature


class Roster(SecAggMessage):
    """The keys of all sites, in the order of the sites' names; the server sends this message to all sites."""

    introductions: Annotated[tuple[Introduction, ...], Field(max_length=MOST_SITES, strict=False)]


# ------------------------------------------------------------ a round
class Offered(SecAggMessage):
    """A site's new X25519 key for the masks of one round."""

    round: RoundNumber
    site: SiteName
    mask: Bytes32


class Offer(SecAggMessage):
    """A site's key for a round, and the encrypted shares of the site's two secrets for each other hospital."""

    offered: Offered
    boxes: Annotated[dict[SiteName, Box], BySite]


class KeyShares(SecAggMessage):
    """The server's message to one participant of a round: the keys of all participants, and the encrypted shares for
    this participant.
    """

    round: RoundNumber
    offers: Annotated[tuple[Offered, ...], Field(max_length=MOST_SITES, strict=False)]
    boxes: Annotated[dict[SiteName, Box], BySite]


class UnmaskingRequest(SecAggMessage):
    """Asks sites for the shares that unmask a sum, and names the sites whose uploads are in the sum."""

    round: RoundNumber
    sites: Names


class Reveal(SecAggMessage):
    """A site's shares of other sites' secrets. For each site in the sum, `added` contains a share of this site's mask
    seed. For each site that dropped out, `dropped` contains a share of this site's mask key.
    """

    round: RoundNumber
    added: Annotated[dict[SiteName, OneShare], BySite]
    dropped: Annotated[dict[SiteName, OneShare], BySite]
