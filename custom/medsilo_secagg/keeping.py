"""A site's memory across a restart, within a study. All of it is secret: it goes to the site's disk only."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError

from medsilo.core.errors import MedsiloError
from medsilo_secagg.letters import Box, Bytes32, Names, Offered, OneShare, Roster, SecAggMessage, SiteName

Shares = tuple[OneShare, OneShare]  # of a site's seed, and of its key for pairs


class _Hidden(SecAggMessage):
    """A letter to oneself, whose content no text shows."""

    model_config = ConfigDict(hide_input_in_errors=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    __str__ = __repr__


class Turn(_Hidden):
    """A site's secrets in one round: used once."""

    offer: Offered
    mask: Bytes32
    seed: Bytes32
    shares: dict[SiteName, Annotated[Shares, Field(strict=False)]]  # of each site of the round, this one included
    boxes: dict[SiteName, Box]  # with shares for the others, as they were offered
    offers: Annotated[tuple[Offered, ...], Field(strict=False)] = ()  # of the round's sites, when it has sealed


class Secrets(_Hidden):
    """All that a site keeps of a sealed study. opened: by round, the sites in the sum that it has helped to open."""

    terms: Bytes32  # digest
    site: SiteName
    channel: Bytes32
    assembly: Roster | None = None
    turn: Turn | None = None
    opened: dict[int, Names] = {}

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read what a file holds of them; raises MedsiloError."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise MedsiloError(
                "secure aggregation: this site's secrets are damaged or were changed; "
                "the study must start again with fresh keys"
            ) from None  # whose text could tell them
