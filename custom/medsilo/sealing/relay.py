"""The server's side of sealed mixing: it passes on what it cannot read, and adds up what it cannot read.

A study: `Gathering` collects the sites' keys. A round: `MaskedSums`, which lives as long as it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from medsilo.core.errors import MedsiloError, ParticipationError, Refused
from medsilo.core.tensors import Tensors
from medsilo.sealing import letters, masks
from medsilo.sealing.channels import Assembled
from medsilo.sealing.fixed_point import as_tensor, as_words
from medsilo.sealing.keeping import NOTHING
from medsilo.sealing.shamir import SHARE, combine
from medsilo.sealing.signing import Signer
from medsilo.sealing.streams import Words, add_streams
from medsilo.sealing.terms import SERVER, SealedBlock, Terms, check_blocks


class Gathering:
    """Collects the keys with which a study begins."""

    def __init__(self, terms: Terms, signer: Signer | None = None) -> None:
        """signer: checks who signed, as each hospital does; without one, a false signature is found by the others."""
        self.terms, self._signer = terms, signer
        self._introductions: dict[str, letters.Introduction] = {}

    def add(self, site: str, introduction: letters.Introduction) -> None:
        """Take a site's keys; raises Refused."""
        self.terms.place(site)
        if introduction.site != site:
            raise Refused(f"{site}: its keys are those of another site")
        masks.check_public(site, introduction.channel)
        if self._signer:
            content = masks.introduced(self.terms, site, introduction.channel, introduction.signing)
            self._signer.check(site, introduction.certificates, introduction.signature, content)
        self._introductions[site] = introduction

    def assembly(self) -> letters.Assembly:
        """Return the keys of all sites, for all of them."""
        missing = [site for site in self.terms.sites if site not in self._introductions]
        if missing:
            raise ParticipationError(
                f"sealing: the keys of {', '.join(missing)} are missing; begin again with the sites that are there"
            )
        return letters.Assembly(introductions=tuple(self._introductions[site] for site in self.terms.sites))


class MaskedSums:
    """A round: adds up uploads as they come, and takes off what masks are left with shares that the sites reveal."""

    def __init__(
        self,
        terms: Terms,
        assembly: letters.Assembly,
        number: int,
        blocks: Sequence[SealedBlock],
        given: bytes = NOTHING,
    ) -> None:
        """given: stands for what all sites are given in common before they train."""
        check_blocks(terms, blocks)
        self.terms, self.number, self.blocks, self.given = terms, number, tuple(blocks), given
        self.all = Assembled(terms, assembly.introductions)
        self._offers: dict[str, letters.Offer] = {}
        self._dealt: tuple[str, ...] = ()
        self._context = b""
        self._came: set[str] = set()
        self._sums: dict[str, Words] = {}
        self._survivors: tuple[str, ...] = ()
        self._confirmations: dict[str, bytes] = {}
        self._reveals: dict[str, letters.Reveal] = {}
        self.liars: set[str] = set()  # who revealed shares that nobody dealt them

    # ------------------------------------------------------------------ offers
    def offer(self, site: str, offer: letters.Offer) -> None:
        """Take a site's keys and shares for the round; raises Refused."""
        own = offer.offered
        if self._dealt:
            raise Refused(f"{site}: its keys come too late for round {self.number}")
        if (own.site, own.round) != (site, self.number):
            raise Refused(f"{site}: its keys are of another site or round than {self.number}")
        self.all.check_offered(own)
        masks.check_public(site, own.mask)
        if set(offer.boxes) != set(self.terms.sites) - {site}:
            raise Refused(f"{site}: its shares are not one box for each other site")
        self._offers[site] = offer

    def deals(self) -> dict[str, letters.Deal]:
        """Begin the round with the sites whose offers have come; return what each of them is sent.

        Called again, it begins without those that were dropped in the meantime.
        """
        self._enough(len(self._offers), self.terms.least, "offered keys")
        self._dealt = tuple(sorted(self._offers))
        offers = tuple(self._offers[site].offered for site in self._dealt)
        self._context = masks.context_of(self.all.digest, self.number, offers, self.blocks, self.given)
        return {
            site: letters.Deal(
                round=self.number,
                offers=offers,
                boxes={other: self._offers[other].boxes[site] for other in self._dealt if other != site},
            )
            for site in self._dealt
        }

    def drop(self, site: str) -> None:
        """Leave a site out that dealt what cannot be used, or complained falsely."""
        self._offers.pop(site, None)

    def accusation(self, reader: str, sender: str, complaint: bytes) -> letters.Accusation:
        """Return a site's complaint of a box that it was dealt; raises Refused, naming it, unless it signed that."""
        if sender == reader or not {sender, reader} <= set(self._dealt):
            raise Refused(f"{reader}: it complains of a site that dealt it nothing")
        offer = self._offers[sender]
        subject, box = masks.dealt(offer.offered), offer.boxes[reader]
        own = letters.Accusation(sender=sender, reader=reader, subject=subject, box=box, complaint=complaint)
        self.all.check_complaint(own)
        return own

    def use(self, own: letters.Accusation, content: bytes) -> None:
        """Raise Refused, naming the sender, unless a box holds the shares that it had to deal."""
        self.all.shares_in(content, self._offers[own.sender].offered, own.reader)

    # ------------------------------------------------------------------ uploads
    def add(self, site: str, sealed: Tensors) -> None:
        """Add what a site sealed; raises Refused. What comes after `survivors` was asked is not added."""
        if site not in self._dealt:
            raise Refused(f"{site}: it is not in round {self.number}")
        if self._survivors:
            raise Refused(f"{site}: what it sealed comes too late for round {self.number}")
        if site in self._came:
            raise Refused(f"{site}: it has already sent what it sealed in round {self.number}")
        if set(sealed) != {block.name for block in self.blocks}:
            raise Refused(f"{site}: what it sealed lacks a block of round {self.number}, or has one too many")
        came = [as_words(site, sealed[block.name], block.flat.words) for block in self.blocks]
        for block, words in zip(self.blocks, came, strict=True):
            if block.name in self._sums:
                np.add(self._sums[block.name], words, out=self._sums[block.name])
            else:
                self._sums[block.name] = words.copy()
        self._came.add(site)

    def survivors(self) -> letters.Survivors:
        """Close the round: return the sites whose uploads are added. Raises ParticipationError if they are too few."""
        if not self._survivors:
            self._enough(len(self._came), self.terms.least, "sealed")
            self._survivors = tuple(sorted(self._came))
        return letters.Survivors(round=self.number, sites=self._survivors)

    # ------------------------------------------------------------------ unmasking
    def confirmation(self, site: str, signature: bytes) -> None:
        """Take a site's signature on the survivors; raises Refused."""
        if site not in self._survivors:
            raise Refused(f"{site}: it is not in the sum of round {self.number}")
        self.all.check_confirmation(site, signature, self._context, self._survivors)
        self._confirmations[site] = signature

    def request(self) -> letters.UnmaskingRequest:
        """Return what the survivors are asked."""
        sites = self.survivors().sites
        self._enough(len(self._confirmations), self.terms.threshold, "confirmed the sum")
        return letters.UnmaskingRequest(round=self.number, sites=sites, confirmations=dict(self._confirmations))

    def reveal(self, site: str, letter: letters.Reveal) -> None:
        """Take the shares that a site reveals; raises Refused."""
        dropped = set(self._dealt) - set(self._survivors)
        if site not in self._survivors or letter.round != self.number:
            raise Refused(f"{site}: it is not asked for shares of round {letter.round}")
        if set(letter.added) != set(self._survivors) or set(letter.dropped) != dropped:
            raise Refused(f"{site}: its shares are not one for each site of round {self.number}")
        self._reveals[site] = letter

    def open(self) -> tuple[letters.SumClaim, Tensors]:
        """Take the masks off; return the sums, by block, and what whoever reads them must know.

        Those for SERVER are the sums themselves (see `read`); the others stay hidden from all but their readers.
        """
        self._enough(len(self._reveals), self.terms.threshold, "helped to unmask")
        seeds = {site: self._secret(site, True) for site in self._survivors}
        keys = {site: self._secret(site, False) for site in self._dealt if site not in seeds}
        sums = {block.name: self._sums[block.name].copy() for block in self.blocks}
        agreed = {
            (gone, site): masks.agree(key, site, self._offers[site].offered.mask)
            for gone, key in keys.items()
            for site in self._survivors
        }
        for block in self.blocks:
            streams = [masks.own_mask(seed, self._context, block, -1) for seed in seeds.values()]
            for (gone, site), secret in agreed.items():
                pair = (self.terms.place(site), self.terms.place(gone))
                streams.append(masks.pair_mask(secret, self._context, block, pair, -1))
            add_streams(sums[block.name], streams)
        claim = letters.SumClaim(round=self.number, context=self._context, sites=self._survivors)
        return claim, {name: as_tensor(words) for name, words in sums.items()}

    def read(self, block: SealedBlock, opened: Tensors, divisor: int | None = None) -> Tensors:
        """Return a sum that the server may read, divided by the weights where these are public."""
        if block.reader != SERVER:
            raise MedsiloError(f"sealing: the sum of {block.name} is not for the server")
        words = as_words("the server", opened[block.name], block.flat.words)
        return block.read(words, [self.terms.place(site) for site in self._survivors], divisor)

    def _secret(self, site: str, added: bool) -> bytes:
        """Return what the shares of a site's secret make: its own mask's seed if it is added, else its key."""
        own = self._offers[site].offered
        told = {helper: (reveal.added if added else reveal.dropped)[site] for helper, reveal in self._reveals.items()}
        secret = self._made_of(told, own, added)
        if secret is None:  # somebody's share is wrong: whose, its dealer's signature says
            for helper, share in list(told.items()):
                try:
                    self.all.check_share(own, helper, added, share)
                except Refused:
                    self.liars.add(helper)
                    del told[helper]
            self._enough(len(told), self.terms.threshold, f"revealed the shares that {site} dealt them")
            secret = self._made_of(told, own, added)
        if secret is None:
            raise ParticipationError(
                f"sealing: {site} has signed shares that do not make its masks, so the sum of round {self.number} "
                "cannot be opened; start the study again without it"
            )
        return secret

    def _made_of(self, told: Mapping[str, bytes], own: letters.Offered, added: bool) -> bytes | None:
        shares = {self.terms.place(helper) + 1: share[:SHARE] for helper, share in told.items()}
        secret = combine(shares, self.terms.threshold)
        if secret is None:
            return None
        fits = masks.commitment_of(secret) == own.commitment if added else masks.public_of(secret) == own.mask
        return secret if fits else None

    def _enough(self, count: int, least: int, did: str) -> None:
        if count < least:
            raise ParticipationError(
                f"sealing: only {count} sites have {did} in round {self.number}; it takes {least} to open a sum"
            )
