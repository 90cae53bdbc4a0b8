"""Run a hospital's side of secure aggregation.

At the start of a study, callers use `Member.begin`, `introduction` and `meet`. In each round, callers use `offer`,
`seal` and `unmask`.

The caller must write the bytes of `saved()` to the site's disk before the result of a call leaves the site. If the
bytes were not on disk, a site could use a key again after a crash, which would disclose masked numbers. Every received
message is checked, and an invalid message is rejected with one line that names the message's sender.
"""

from collections.abc import Mapping, Sequence
from secrets import token_bytes
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.tensors import Groups, Tensors
from medsilo_secagg import letters, masks
from medsilo_secagg.fixed_point import as_tensor
from medsilo_secagg.identity import Signer
from medsilo_secagg.letters import Box, Bytes32, Names, Offered, OneShare, Roster, SecAggMessage, SiteName
from medsilo_secagg.shamir import SHARE, split
from medsilo_secagg.streams import KEY, add_streams
from medsilo_secagg.terms import SealedBlock, Terms

SERVER_SAYS = "the server"

# A site's secret state of secure aggregation in a study. The secret state is only written to the site's own disk.
Shares = tuple[OneShare, OneShare]  # a pair of shares: of a site's mask seed, and of the site's mask key


class _Hidden(SecAggMessage):
    """Secret state that never appears in error messages or other texts."""

    model_config = ConfigDict(hide_input_in_errors=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    __str__ = __repr__


class Turn(_Hidden):
    """A site's secrets for one round, which must be used only once."""

    offer: Offered
    mask: Bytes32
    seed: Bytes32
    # the shares that this site holds: shares of the secrets of all sites in the round, including its own secrets
    shares: dict[SiteName, Annotated[Shares, Field(strict=False)]]
    boxes: dict[SiteName, Box]  # encrypted shares for the other sites, in the form in which they were sent
    # keys of the sites in the round; set when this site has masked its numbers
    offers: Annotated[tuple[Offered, ...], Field(strict=False)] = ()


class Secrets(_Hidden):
    """A site's saved state of secure aggregation. For each round, `opened` names the sites in the sum that the site
    helped to unmask.
    """

    terms: Bytes32
    site: SiteName
    channel: Bytes32
    assembly: Roster | None = None
    turn: Turn | None = None
    opened: dict[int, Names] = {}

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse a site's saved state; raise MedsiloError if the state is damaged."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise MedsiloError(
                "secure aggregation: this site's secrets are damaged or were changed; "
                "the study must start again with fresh keys"
            ) from None  # the original validation error is left out, because it could disclose the secrets


class Member:
    def __init__(self, terms: Terms, signer: Signer, secrets: Secrets) -> None:
        if secrets.terms != terms.digest:
            raise MedsiloError(
                "secure aggregation: this site's saved state belongs to another study, "
                "plan or set of sites; start again"
            )
        self.terms, self.site = terms, secrets.site
        self._signer, self._kept = signer, secrets

    def __repr__(self) -> str:
        return f"<Member {self.site} of {self.terms.study}>"

    @classmethod
    def begin(
        cls, terms: Terms, site: str, signer: Signer, opened: Mapping[int, tuple[str, ...]] | None = None
    ) -> Self:
        """Create the state of a hospital with new keys.

        Args:
            signer: Signs the hospital's keys, and verifies the keys of other hospitals.
            opened: For each round, the sites in the sum that this hospital already helped to unmask with earlier keys.
        """
        terms.place(site)
        return cls(
            terms, signer, Secrets(terms=terms.digest, site=site, channel=token_bytes(KEY), opened=dict(opened or {}))
        )

    @classmethod
    def load(cls, terms: Terms, signer: Signer, saved: bytes) -> Self:
        return cls(terms, signer, Secrets.from_bytes(saved))

    def saved(self) -> bytes:
        return self._kept.model_dump_json().encode()

    def _keep(self, **changed: object) -> None:
        self._kept = self._kept.model_copy(update=changed)

    # ------------------------------------------------------------------ start of a study
    @property
    def opened(self) -> dict[int, tuple[str, ...]]:
        return dict(self._kept.opened)

    def introduction(self) -> letters.Introduction:
        channel = masks.public_of(self._kept.channel)
        return letters.Introduction(
            site=self.site,
            channel=channel,
            certificates=self._signer.certificates,
            signature=self._signer.sign(masks.introduced(self.terms, self.site, channel)),
        )

    def meet(self, assembly: letters.Roster) -> None:
        if tuple(introduction.site for introduction in assembly.introductions) != self.terms.sites:
            raise Refused("the server: the sites whose keys it relays are not those of the study, in their order")
        for own in assembly.introductions:
            if own.site != self.site:
                self._signer.check(
                    own.site, own.certificates, own.signature, masks.introduced(self.terms, own.site, own.channel)
                )
            elif own.channel != masks.public_of(self._kept.channel):
                raise Refused("the server: it relays another key of this site than it sent")
        self._keep(assembly=assembly)

    def _secret(self, other: str) -> bytes:
        if self._kept.assembly is None:
            raise MedsiloError("secure aggregation: this site has not received the other sites' keys yet")
        return masks.agree(
            self._kept.channel, other, self._kept.assembly.introductions[self.terms.place(other)].channel
        )

    # ------------------------------------------------------------------ a round
    def offer(self, number: int) -> letters.Offer:
        """Return this site's new key for a round, and the encrypted shares of this site's two secrets for each other
        site.

        A new key with new shares replaces the earlier key and the earlier shares. If the server repeats the request
        before this site has masked its numbers, the site returns the same key and shares as before.
        """
        turn = self._kept.turn
        if turn and turn.offer.round == number and not turn.offers:
            return letters.Offer(offered=turn.offer, boxes=turn.boxes)
        terms, mask, seed = self.terms, token_bytes(KEY), token_bytes(KEY)
        own = letters.Offered(round=number, site=self.site, mask=masks.public_of(mask))
        pieces = (split(secret, terms.threshold, len(terms.sites)) for secret in (seed, mask))
        shares = dict(zip(terms.sites, zip(*pieces, strict=True), strict=True))
        boxes = {
            site: masks.lock(self._secret(site), own, site, b"".join(both))
            for site, both in shares.items()
            if site != self.site
        }
        self._keep(turn=Turn(offer=own, mask=mask, seed=seed, shares={self.site: shares[self.site]}, boxes=boxes))
        return letters.Offer(offered=own, boxes=boxes)

    def seal(
        self,
        key_shares: letters.KeyShares,
        blocks: Sequence[SealedBlock],
        groups: Groups,
        weights: Mapping[str, int] | None = None,
    ) -> Tensors:
        """Mask this site's numbers for a round, and return a tensor of 64-bit integers for each block.

        Args:
            key_shares: The keys and shares of the sites in the round.
            groups: The tensors of each block.
            weights: The weight of this site's numbers in each block; 1 by default.
        """
        turn = self._begun(key_shares)
        context = masks.context_of(self.terms, key_shares.round, key_shares.offers)
        mine = self.terms.place(self.site)
        pairs = {
            self.terms.place(offer.site): masks.agree(turn.mask, offer.site, offer.mask)
            for offer in key_shares.offers
            if offer.site != self.site
        }
        sealed = {}
        for block in blocks:
            words = block.flat.encode(groups[block.name], block.fixed, (weights or {}).get(block.name, 1))
            streams = [
                masks.pair_mask(secret, context, block.name, (mine, other), 1) for other, secret in pairs.items()
            ]
            add_streams(words, [masks.own_mask(turn.seed, context, block.name, 1), *streams])
            sealed[block.name] = as_tensor(words)
        self._keep(turn=turn)
        return sealed

    def has_sealed(self, key_shares: letters.KeyShares) -> bool:
        turn = self._kept.turn
        return turn is not None and bool(turn.offers) and turn.offers == key_shares.offers

    def _begun(self, key_shares: letters.KeyShares) -> Turn:
        """Check the server's message with keys and shares for a round, and return this site's secrets together with the
        shares of other sites' secrets.
        """
        turn, names = self._kept.turn, tuple(offer.site for offer in key_shares.offers)
        if turn is None or turn.offers or turn.offer not in key_shares.offers or turn.offer.round != key_shares.round:
            raise Refused(
                f"the server: it begins round {key_shares.round} without this site's latest keys, or asks for a second "
                f"upload under the same masks"
            )
        if list(names) != sorted(set(names)) or len(names) < self.terms.least:
            raise Refused(
                f"the server: it begins round {key_shares.round} with {len(names)} sites; it needs {self.terms.least}, "
                "each once and in order"
            )
        shares = dict(turn.shares)
        for own in key_shares.offers:
            if own.site != self.site:
                if own.round != key_shares.round or own.site not in key_shares.boxes:
                    raise Refused(f"{own.site}: its keys or shares for round {key_shares.round} are missing")
                both = masks.unlock(self._secret(own.site), own, self.site, key_shares.boxes[own.site])
                shares[own.site] = (both[:SHARE], both[SHARE:])
        return turn.model_copy(update={"shares": shares, "offers": key_shares.offers})

    def unmask(self, request: letters.UnmaskingRequest) -> letters.Reveal:
        """Return one share for each site of the round: a share of the site's mask seed or of its mask key, but never of
        both.

        A site helps to unmask only one sum in each round, because two sums that differ in one site would disclose that
        site's model. If the server repeats a request, the site repeats its answer.
        """
        turn, number, sites = self._kept.turn, request.round, request.sites
        if turn is None or not turn.offers or turn.offer.round != number:
            raise Refused(f"the server: it asks to unmask round {number}, in which this site masked nothing")
        if not {self.site} <= set(sites) <= set(turn.shares) or list(sites) != sorted(set(sites)):
            raise Refused(
                f"the server: the sum of round {number} has sites that are not in the round, or lacks this site"
            )
        if len(sites) < self.terms.least:
            raise Refused(
                f"the server: it asks to unmask a sum of {len(sites)} sites in round {number}; fewer than "
                f"{self.terms.least} are not opened"
            )
        if differs := sorted(set(self._kept.opened.get(number, sites)) ^ set(sites)):
            raise Refused(
                f"the server: it asks for a second, different sum of round {number}; the two sums would reveal the "
                f"model of {', '.join(differs)}"
            )
        self._keep(opened={**self._kept.opened, number: sites})
        return letters.Reveal(
            round=number,
            added={site: seed for site, (seed, _) in turn.shares.items() if site in sites},
            dropped={site: key for site, (_, key) in turn.shares.items() if site not in sites},
        )
