"""The letters that server and sites send each other about sealing.

They are typed and of bounded size, and one that is wrong is refused in one line. In JSON bytes are hexadecimal digits.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from medsilo.core.errors import Refused
from medsilo.core.text import plain
from medsilo_secagg.identity import LONGEST_CERTIFICATE, LONGEST_SIGNATURE, MOST_CERTIFICATES
from medsilo_secagg.shamir import SHARE
from medsilo_secagg.terms import MOST_SITES

NONCE, TAG = 12, 16  # bytes
BOX = NONCE + TAG + 2 * SHARE  # with shares of both secrets of a site


def _from_hex(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > 2 * LONGEST_CERTIFICATE:  # the longest of all
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
    """A typed message. Types are strict, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, sender: str, values: Any) -> Self:
        """Check what came; raises Refused, naming the sender."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = plain(".".join(map(str, first["loc"])), 80) or "content"
            raise Refused(f"{sender}: its {cls.__name__} has a wrong {where}: {plain(first['msg'], 120)}") from error

    def facts(self) -> dict[str, Any]:
        """Return the letter as JSON can hold it, without what it need not say."""
        return self.model_dump(mode="json", exclude_defaults=True)


P = TypeVar("P")


def needed(sender: str, part: P | None) -> P:
    """Return what a letter must hold here; raises Refused, naming the sender, where it is missing."""
    if part is None:
        raise Refused(f"{sender}: its message lacks a requested part")
    return part


# ------------------------------------------------------------ a study begins
class Introduction(SecAggMessage):
    """A site's fresh X25519 key for one study, signed with its certificate."""

    site: SiteName
    channel: Bytes32
    certificates: Annotated[tuple[Certificate, ...], Field(max_length=MOST_CERTIFICATES, strict=False)]
    signature: Signature


class Roster(SecAggMessage):
    """The keys of all sites, in the order of the terms, as the server relays them."""

    introductions: Annotated[tuple[Introduction, ...], Field(max_length=MOST_SITES, strict=False)]


# ------------------------------------------------------------ a round
class Offered(SecAggMessage):
    """A site's fresh X25519 key for the masks of one round."""

    round: RoundNumber
    site: SiteName
    mask: Bytes32


class Offer(SecAggMessage):
    """A site's offer for a round, with shares of its two secrets in a box for each other hospital."""

    offered: Offered
    boxes: Annotated[dict[SiteName, Box], BySite]


class KeyShares(SecAggMessage):
    """The sites that take part in a round, and the boxes for one of them, as the server relays them."""

    round: RoundNumber
    offers: Annotated[tuple[Offered, ...], Field(max_length=MOST_SITES, strict=False)]
    boxes: Annotated[dict[SiteName, Box], BySite]


class UnmaskingRequest(SecAggMessage):
    """The sites whose uploads the server has and adds: it asks for what takes the masks off their sum."""

    round: RoundNumber
    sites: Names


class Reveal(SecAggMessage):
    """One share for each site of a round: of its own mask's seed if it is added, else of its key for pairs."""

    round: RoundNumber
    added: Annotated[dict[SiteName, OneShare], BySite]
    dropped: Annotated[dict[SiteName, OneShare], BySite]
