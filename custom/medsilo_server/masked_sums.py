"""Run the server's side of secure aggregation: forward messages, and add numbers that the server cannot read.

`KeyCollection` collects the sites' keys for a study, and `MaskedSums` adds the uploads of one round.
"""

from collections.abc import Collection, Sequence

import numpy as np

from medsilo.core.errors import ParticipationError, Refused
from medsilo.core.tensors import Tensors
from medsilo_secagg import letters, masks
from medsilo_secagg.fixed_point import as_words
from medsilo_secagg.identity import Signer
from medsilo_secagg.shamir import combine
from medsilo_secagg.streams import Words, add_streams
from medsilo_secagg.terms import SealedBlock, Terms


class KeyCollection:
    def __init__(self, terms: Terms, signer: Signer | None = None) -> None:
        """Create an empty collection of keys.

        Args:
            signer: Verifies the sites' signatures. Without a signer, only the hospitals notice false signatures.
        """
        self.terms, self._signer = terms, signer
        self._introductions: dict[str, letters.Introduction] = {}

    def add(self, site: str, introduction: letters.Introduction) -> None:
        self.terms.place(site)
        if introduction.site != site:
            raise Refused(f"{site}: its keys are those of another site")
        masks.check_public(site, introduction.channel)
        if self._signer:
            content = masks.introduced(self.terms, site, introduction.channel)
            self._signer.check(site, introduction.certificates, introduction.signature, content)
        self._introductions[site] = introduction

    def assembly(self) -> letters.Roster:
        """Return the keys of all sites; raise ParticipationError if any are missing."""
        missing = [site for site in self.terms.sites if site not in self._introductions]
        if missing:
            raise ParticipationError(
                f"secure aggregation: the keys of {', '.join(missing)} are missing; "
                "begin again with the sites that sent keys"
            )
        return letters.Roster(introductions=tuple(self._introductions[site] for site in self.terms.sites))


class MaskedSums:
    """Adds the uploads of a round as they arrive, and removes the masks with shares that the sites reveal."""

    def __init__(self, terms: Terms, number: int, blocks: Sequence[SealedBlock]) -> None:
        self.terms, self.number, self.blocks = terms, number, tuple(blocks)
        self._offers: dict[str, letters.Offer] = {}
        self._dealt: tuple[letters.Offered, ...] = ()
        self._came: set[str] = set()
        self._sums = {block.name: np.zeros(block.flat.words, "<u8") for block in blocks}
        self._survivors: tuple[str, ...] = ()
        self._reveals: dict[str, letters.Reveal] = {}

    # ------------------------------------------------------------------ offers
    def offer(self, site: str, offer: letters.Offer) -> None:
        """For the round, add a site's key and encrypted shares; raise Refused if the key or the shares are invalid or
        late.
        """
        own = offer.offered
        if self._dealt:
            raise Refused(f"{site}: its keys come too late for round {self.number}")
        if (own.site, own.round) != (site, self.number):
            raise Refused(f"{site}: its keys belong to another site, or to another round than {self.number}")
        masks.check_public(site, own.mask)
        if set(offer.boxes) != set(self.terms.sites) - {site}:
            raise Refused(f"{site}: it must send one encrypted share to each other site")
        self._offers[site] = offer

    def deals(self, among: Collection[str] = ()) -> dict[str, letters.KeyShares]:
        """Begin a round with the sites that have offered keys; for each site in the round, return a message with keys
        and shares.

        Args:
            among: The sites that may take part. If `among` is empty, all sites may take part.
        """
        self._offers = {site: offer for site, offer in self._offers.items() if site in (among or self.terms.sites)}
        self._enough(len(self._offers), self.terms.least, "offered keys")
        self._dealt = tuple(self._offers[site].offered for site in sorted(self._offers))
        return {
            site: letters.KeyShares(
                round=self.number,
                offers=self._dealt,
                boxes={other: own.boxes[site] for other, own in self._offers.items() if other != site},
            )
            for site in self._offers
        }

    # ------------------------------------------------------------------ uploads
    def add(self, site: str, sealed: Tensors) -> None:
        """Add a site's masked numbers; raise Refused if the numbers are invalid, or if they arrive after the call of
        `survivors`.
        """
        if not self._dealt or site not in self._offers:
            raise Refused(f"{site}: it is not in round {self.number}")
        if self._survivors or site in self._came:
            raise Refused(f"{site}: it sent its masked numbers of round {self.number} twice, or too late")
        if set(sealed) != set(self._sums):
            raise Refused(f"{site}: its masked numbers lack a block of round {self.number}, or have one block too many")
        came = {block.name: as_words(site, sealed[block.name], block.flat.words) for block in self.blocks}
        for name, words in came.items():
            np.add(self._sums[name], words, out=self._sums[name])
        self._came.add(site)

    # ------------------------------------------------------------------ unmasking
    def survivors(self) -> letters.UnmaskingRequest:
        """Stop accepting uploads, and name the sites whose uploads were added; raise ParticipationError if too few
        sites uploaded.
        """
        if not self._survivors:
            self._enough(len(self._came), self.terms.least, "sealed")
            self._survivors = tuple(sorted(self._came))
        return letters.UnmaskingRequest(round=self.number, sites=self._survivors)

    def reveal(self, site: str, message: letters.Reveal) -> None:
        if site not in self._survivors or message.round != self.number:
            raise Refused(f"{site}: it is not asked for shares of round {message.round}")
        if set(message.added) != set(self._survivors) or set(message.dropped) != set(self._offers) - set(
            self._survivors
        ):
            raise Refused(f"{site}: it must send one share for each site of round {self.number}")
        self._reveals[site] = message

    def open(self) -> dict[str, Words]:
        self._enough(len(self._reveals), self.terms.threshold, "helped to unmask")
        context, place = masks.context_of(self.terms, self.number, self._dealt), self.terms.place
        seeds = {site: self._secret(site, added=True) for site in self._survivors}
        agreed = {}
        for gone in self._offers.keys() - seeds.keys():
            key = self._secret(gone, added=False)
            for site in self._survivors:
                agreed[place(site), place(gone)] = masks.agree(key, site, self._offers[site].offered.mask)
        sums = {}
        for name, words in self._sums.items():
            sums[name] = words.copy()
            streams = [masks.own_mask(seed, context, name, -1) for seed in seeds.values()]
            streams += [masks.pair_mask(secret, context, name, pair, -1) for pair, secret in agreed.items()]
            add_streams(sums[name], streams)
        return sums

    def _secret(self, site: str, added: bool) -> bytes:
        """Combine the shares of a site's secret. The secret is the mask seed if the site's upload is in the sum, and
        otherwise the site's mask key.
        """
        told = {
            self.terms.place(helper) + 1: (letter.added if added else letter.dropped)[site]
            for helper, letter in self._reveals.items()
        }
        secret = combine(told, self.terms.threshold)
        if secret is None or not (added or masks.public_of(secret) == self._offers[site].offered.mask):
            raise ParticipationError(
                f"secure aggregation: the sum of round {self.number} cannot be unmasked, because the shares of {site} "
                f"are wrong; start the study again without that site"
            )
        return secret

    def _enough(self, count: int, least: int, did: str) -> None:
        if count < least:
            raise ParticipationError(
                f"secure aggregation: only {count} sites have {did} in round {self.number}; it takes "
                f"{least} sites to unmask a sum"
            )
