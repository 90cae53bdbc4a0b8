"""A site's memory across a restart, within a study. All of it is secret: it goes to the site's disk only."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError

from medsilo.core.errors import MedsiloError, Refused
from medsilo.sealing.letters import Assembly, Box, Bytes32, Letter, Offered, OneShare, RoundNumber, SiteName

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


class Unmasking(_Hidden):
    """The sums that a site has helped to open: one of each round, over the same sites, whatever the server asks.

    It is kept for the whole study: a round that is repeated after a failure adds the same sites, or else the two sums
    would tell the model of whoever is in one of them only.
    """

    added: dict[RoundNumber, Annotated[tuple[SiteName, ...], Field(strict=False)]] = {}
    contexts: dict[RoundNumber, Bytes32] = {}  # of the last time that a round was opened

    def allow(self, number: int, sites: tuple[str, ...], context: bytes) -> Self:
        """Return the memory with this one; raises Refused for a second, different one of a round."""
        earlier = self.added.get(number, sites)
        if earlier != sites:
            told = ", ".join(sorted(set(earlier) ^ set(sites)))
            raise Refused(
                f"the server: it asks for a second, different unmasking of round {number}: it differs in {told}, whose "
                "model the two sums would tell"
            )
        added, contexts = {**self.added, number: sites}, {**self.contexts, number: context}
        return self.model_copy(update={"added": added, "contexts": contexts})


class Secrets(_Hidden):
    """All that a site keeps of a sealed study."""

    terms: Bytes32  # digest
    site: SiteName
    channel: Bytes32
    signing: Bytes32
    assembly: Assembly | None = None
    turn: Turn | None = None
    unmasking: Unmasking = Unmasking()

    def to_bytes(self) -> bytes:
        """Return the secrets as a file holds them."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read what `to_bytes` returned; raises MedsiloError."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise MedsiloError(
                "sealing: this site's secrets are damaged or were changed; the study must begin anew with fresh keys"
            ) from None  # whose text could tell them
