"""A site's memory across a restart, within a study. All of it is secret: it goes to the site's disk only."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medsilo.core.errors import MedsiloError, Refused
from medsilo.sealing.letters import Assembly, Box, Bytes32, Letter, Offered, OneShare, SiteName, SumClaim

NOTHING = bytes(32)  # stands for a round in which sites are given nothing in common
Shares = tuple[OneShare, OneShare]  # of a site's seed, and of its key for pairs


class _Hidden(Letter):
    """A letter to oneself, whose content no text shows."""

    model_config = ConfigDict(hide_input_in_errors=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    __str__ = __repr__


class Turn(_Hidden):
    """A site's secrets in one round: used once."""

    own: Offered
    mask: Bytes32
    seed: Bytes32
    shares: dict[SiteName, Annotated[Shares, Field(strict=False)]]  # of each site of the round, this one included
    boxes: dict[SiteName, Box]  # with shares for the others, as they were offered
    offers: Annotated[tuple[Offered, ...], Field(strict=False)] = ()  # of the round's sites, when it has begun
    context: Bytes32 | None = None  # when it has sealed
    given: Bytes32 = NOTHING  # stands for what this site was given in the round


class SumNote(_Hidden):
    """A sum that a site has helped to open."""

    sites: Annotated[tuple[SiteName, ...], Field(strict=False)]
    weights: Bytes32  # stands for the weights with which their numbers were added
    context: Bytes32  # of the last time that it was opened


class SumMemory(BaseModel):
    """The sums of a study that a site has helped to open: one of each round, over the same sites with the same weights,
    whatever the server asks and however often it lets the hospitals agree on fresh keys.

    Two different sums of a round would tell the model of whoever is in one of them only, or counts more in one of them.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    notes: dict[int, SumNote] = {}

    def check(self, number: int, note: SumNote) -> None:
        """Raise Refused for a second, different sum of a round."""
        earlier = self.notes.get(number, note)
        if earlier.sites != note.sites:
            told = ", ".join(sorted(set(earlier.sites) ^ set(note.sites)))
            raise Refused(
                f"the server: it asks for a second, different unmasking of round {number}: it differs in {told}, whose "
                "model the two sums would tell"
            )
        if earlier.weights != note.weights:
            raise Refused(f"the server: it asks for a second unmasking of round {number} with other weights")

    def check_claim(self, claim: SumClaim) -> None:
        """Raise Refused where the server tells of a sum that this site has helped to open, and it was another."""
        known = self.notes.get(claim.round)
        if known and known.context != claim.context:
            raise Refused(f"the server: its sum of round {claim.round} is not of the round that this site sealed in")
        if known and known.sites != claim.sites:
            raise Refused(f"the server: the sites in its sum of round {claim.round} are not those that were unmasked")

    def note(self, number: int, note: SumNote) -> None:
        """Remember a sum that this site is about to help with; raises Refused for a second, different one."""
        self.check(number, note)
        self.notes[number] = note


class Secrets(_Hidden):
    """All that a site keeps of a sealed study."""

    terms: Bytes32  # digest
    site: SiteName
    channel: Bytes32
    signing: Bytes32
    assembly: Assembly | None = None
    turn: Turn | None = None

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read what a file holds of them; raises MedsiloError."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise MedsiloError(
                "sealing: this site's secrets are damaged or were changed; the study must start again with fresh keys"
            ) from None  # whose text could tell them
