"""A hospital's side of sealed mixing.

A study: `Member.begin`, `introduction`, `meet`.
A round: `offer`, `seal`, `confirm`, `unmask`, and `open_sums`.

Whatever a call returns may leave the site only after `saved()` and its memory were written to its disk: a key that is
used a second time after a crash would tell what it hides. All that comes is checked, and refused in one line that names
who sent it.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from secrets import token_bytes
from typing import Self

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.spill import bytes_of
from medsilo.core.tensors import Groups, Tensors
from medsilo.sealing import letters, masks
from medsilo.sealing.channels import Assembled, Channels, box_of, told_boxes, told_subject, told_tensors
from medsilo.sealing.fixed_point import Flat, as_tensor, as_words
from medsilo.sealing.keeping import NOTHING, Secrets, SumMemory, SumNote, Turn
from medsilo.sealing.shamir import split
from medsilo.sealing.signing import Signer
from medsilo.sealing.streams import KEY, Words, add_streams
from medsilo.sealing.terms import SERVER, SealedBlock, Terms, check_blocks, check_hidden

SERVER_SAYS = "the server"


class Member:
    """One hospital of a sealed study."""

    def __init__(self, terms: Terms, signer: Signer, secrets: Secrets, memory: SumMemory) -> None:
        if secrets.terms != terms.digest:
            raise MedsiloError("sealing: what this site kept is of another study, plan or set of sites; start again")
        self.terms, self.site = terms, secrets.site
        self._signer, self._kept, self.memory = signer, secrets, memory

    def __repr__(self) -> str:
        return f"<Member {self.site} of {self.terms.study}>"

    @classmethod
    def begin(cls, terms: Terms, site: str, signer: Signer, memory: SumMemory) -> Self:
        """Return a site with fresh keys. memory: the site's one of the study, whatever keys it had before."""
        terms.place(site)
        kept = Secrets(terms=terms.digest, site=site, channel=token_bytes(KEY), signing=token_bytes(KEY))
        return cls(terms, signer, kept, memory)

    @classmethod
    def load(cls, terms: Terms, signer: Signer, saved: bytes, memory: SumMemory) -> Self:
        """Return the site that `saved` tells."""
        return cls(terms, signer, Secrets.from_bytes(saved), memory)

    def saved(self) -> bytes:
        """Return what the site must keep, all of it secret."""
        return self._kept.model_dump_json().encode()

    # ------------------------------------------------------------------ a study begins
    @property
    def has_met(self) -> bool:
        """Return whether this site has got the keys of the others."""
        return self._kept.assembly is not None

    def introduction(self) -> letters.Introduction:
        """Return this site's fresh keys, signed."""
        channel, signing = self._public_keys()
        return letters.Introduction(
            site=self.site,
            channel=channel,
            signing=signing,
            certificates=self._signer.certificates,
            signature=self._signer.sign(masks.introduced(self.terms, self.site, channel, signing)),
        )

    def unmasked(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the last sums that this site has helped to open: a round that is repeated must add the same sites."""
        last = sorted(self.memory.notes.items())[-letters.TOLD_SUMS :]
        return tuple((number, note.sites) for number, note in last)

    def _public_keys(self) -> tuple[bytes, bytes]:
        signing = Ed25519PrivateKey.from_private_bytes(self._kept.signing)
        return masks.public_of(self._kept.channel), signing.public_key().public_bytes_raw()

    def meet(self, assembly: letters.Assembly) -> None:
        """Check the keys of all sites, as the server relays them, and take them."""
        Assembled(self.terms, assembly.introductions)  # raises where these are other sites
        mine = self._public_keys()
        for own in assembly.introductions:
            if own.site == self.site:
                if (own.channel, own.signing) != mine:
                    raise Refused("the server: it relays other keys of this site than it sent")
                continue
            content = masks.introduced(self.terms, own.site, own.channel, own.signing)
            self._signer.check(own.site, own.certificates, own.signature, content)
        if self._kept.assembly and self._kept.assembly != assembly:
            raise Refused("the server: it relays other keys of the sites than before")
        self._keep(assembly=assembly)

    @cached_property
    def _linked(self) -> Channels:
        kept = self._kept
        if kept.assembly is None:
            raise MedsiloError("sealing: this site has not got the keys of the others yet")
        return Channels(self.site, kept.channel, kept.signing, Assembled(self.terms, kept.assembly.introductions))

    def _keep(self, **changed: object) -> None:
        self._kept = self._kept.model_copy(update=changed)

    # ------------------------------------------------------------------ what hospitals tell each other
    def tell(self, number: int, name: str, tensors: Tensors) -> Tensor:
        """Return tensors as bytes that every hospital can read, and the server cannot.

        They are in one box; its key, drawn for it, lies in a box for each hospital behind it.
        """
        content = b"".join(bytes_of(tensors[key].detach().cpu().contiguous()) for key in sorted(tensors))
        key = token_bytes(KEY)
        box = box_of(key, content, "told", self.site, number, name)
        boxes = [self._linked.lock(site, key, told_subject(number, name, box)) for site in self.terms.sites]
        return torch.frombuffer(bytearray(b"".join((box, *boxes))), dtype=torch.uint8)

    def told(self, site: str, number: int, name: str, flat: Flat, sealed: Tensor) -> Tensors:
        """Return what another hospital told all; raises Refused, naming it, unless it is of this round and name."""
        self.terms.place(site)
        content, box = told_boxes(site, sealed, len(self.terms.sites), self.terms.place(self.site))
        key = self._linked.unlock(site, box, told_subject(number, name, content))
        return told_tensors(key, content, site, number, name, flat)

    def complain_of_told(self, site: str, number: int, name: str, sealed: Tensor) -> bytes:
        """Return this site's signature on that it can make nothing of what another told."""
        content, box = told_boxes(site, sealed, len(self.terms.sites), self.terms.place(self.site))
        return self._linked.complaint(site, box, told_subject(number, name, content))

    def defend(self, accusations: Sequence[letters.Accusation]) -> dict[str, bytes]:
        """Return the one-time keys of boxes that their readers complain of, so that all can see what is in them.

        Each opens one box, to what its reader could read by itself. It must be just the box that this site signed: of
        one that the server changed on its way an honest reader complains, too.
        """
        keys = {}
        for own in accusations:
            if own.sender != self.site:
                raise Refused("the server: it asks this site to show what another one sent")
            self._linked.all.check_box(own)
            self._linked.all.check_complaint(own)
            keys[own.reader] = self._linked.once(own.reader, own.subject)
        return keys

    # ------------------------------------------------------------------ a round
    def offer(self, number: int) -> letters.Offer:
        """Return fresh keys for a round, and shares of their secrets for each other site.

        It takes the place of an earlier offer, which can then be sealed with no more. Asked again before the round has
        begun, because the answer was lost, it is the same.
        """
        turn = self._kept.turn
        if turn and turn.own.round == number and turn.context is None:
            return letters.Offer(offered=turn.own, boxes=turn.boxes)
        terms, channels, mask, seed = self.terms, self._linked, token_bytes(KEY), token_bytes(KEY)
        public, commitment = masks.public_of(mask), masks.commitment_of(seed)
        signature = channels.sign(masks.offered(channels.all.digest, number, self.site, public, commitment))
        own = letters.Offered(round=number, site=self.site, mask=public, commitment=commitment, signature=signature)
        count = len(terms.sites)
        parts = zip(split(seed, terms.threshold, count), split(mask, terms.threshold, count), strict=True)
        shares = {
            site: (self._signed(own, site, True, of_seed), self._signed(own, site, False, of_mask))
            for site, (of_seed, of_mask) in zip(terms.sites, parts, strict=True)
        }
        boxes = {
            site: channels.lock(site, b"".join(both), masks.dealt(own))
            for site, both in shares.items()
            if site != self.site
        }
        self._keep(turn=Turn(own=own, mask=mask, seed=seed, shares={self.site: shares[self.site]}, boxes=boxes))
        return letters.Offer(offered=own, boxes=boxes)

    def _signed(self, own: letters.Offered, reader: str, added: bool, share: bytes) -> bytes:
        return share + self._linked.sign(masks.shared(self._linked.all.digest, own, reader, added, share))

    def check_deal(self, deal: letters.Deal) -> dict[str, bytes]:
        """Return complaints of boxes in which this site finds no shares that their senders signed, by sender."""
        against = {}
        for own in deal.offers:
            try:
                if own.site != self.site:
                    self._shares_of(own, deal)
            except Refused:
                if (box := deal.boxes.get(own.site)) is not None:
                    against[own.site] = self._linked.complaint(own.site, box, masks.dealt(own))
        return against

    def seal(
        self,
        deal: letters.Deal,
        blocks: Sequence[SealedBlock],
        groups: Groups,
        weights: Mapping[str, int] | None = None,
        given: bytes = NOTHING,
    ) -> Tensors:
        """Return what this site sends in a round: one row of words for each block.

        weights: by block whose weights are not public, what this site multiplies its own by; 1 if not given.
        given: stands for what this site was given of what all have in common; where another was given something else,
            the masks do not cancel.
        """
        check_blocks(self.terms, blocks)
        turn = self._begun(deal)
        context = masks.context_of(self._linked.all.digest, deal.round, deal.offers, blocks, given)
        others = [own for own in deal.offers if own.site != self.site]
        pairs = {own.site: masks.agree(turn.mask, own.site, own.mask) for own in others}
        sealed = {}
        for block in blocks:
            words = self._encoded(block, groups, weights or {})
            streams = [masks.own_mask(turn.seed, context, block, 1)]
            for site, secret in pairs.items():
                pair = (self.terms.place(self.site), self.terms.place(site))
                streams.append(masks.pair_mask(secret, context, block, pair, 1))
            if (key := self._reader_key(block, self.site, context)) is not None:
                streams.append((key, 1))
            add_streams(words, streams)
            sealed[block.name] = as_tensor(words)
        self._keep(turn=turn.model_copy(update={"context": context, "given": given}))
        return sealed

    def seal_for_all(self, number: int, block: SealedBlock, tensors: Tensors, asked: bytes) -> Words:
        """Return this site's words of a sum that opens by itself as soon as those of all sites have come.

        They have masks of pairs alone, so that no smaller sum opens, and nobody has shares of anything. With the same
        keys no number may be sealed twice. asked: stands for what all sites were asked.
        """
        words, mine = self._encoded(block, {block.name: tensors}, {}), self.terms.place(self.site)
        keys = {
            place: self._linked.secret(site, "sum of all", number, block.digest, asked)
            for place, site in enumerate(self.terms.sites)
            if site != self.site
        }
        add_streams(words, [(key, 1 if mine < place else -1) for place, key in keys.items()])
        return words

    def has_sealed(self, deal: letters.Deal) -> bool:
        """Return whether this site has sealed what it sends in this very round, with these offers."""
        turn = self._kept.turn
        return turn is not None and turn.context is not None and turn.offers == deal.offers

    def _begun(self, deal: letters.Deal) -> Turn:
        """Return this site's turn in the round that the server deals, with the shares of the others."""
        turn, names = self._kept.turn, tuple(own.site for own in deal.offers)
        if turn is None or turn.own not in deal.offers or turn.own.round != deal.round:
            raise Refused(
                f"the server: it begins round {deal.round} without the keys that this site offered for it last: it "
                "replays a round, or swaps keys"
            )
        if turn.context is not None:
            raise Refused(f"the server: it asks for a second upload of round {deal.round} under the same masks")
        if list(names) != sorted(set(names)) or len(names) < self.terms.least:
            raise Refused(
                f"the server: it begins round {deal.round} with {len(names)} sites; it needs {self.terms.least}, each "
                "once and in order"
            )
        shares = dict(turn.shares)
        for own in deal.offers:
            if own.round != deal.round:
                raise Refused(f"{own.site}: its keys are of round {own.round}, not {deal.round}")
            self._linked.all.check_offered(own)
            if own.site != self.site:
                shares[own.site] = self._shares_of(own, deal)
        return turn.model_copy(update={"shares": shares, "offers": deal.offers})

    def _shares_of(self, own: letters.Offered, deal: letters.Deal) -> tuple[bytes, bytes]:
        if own.site not in deal.boxes:
            raise Refused(f"{own.site}: its shares for this site are missing")
        both = self._linked.unlock(own.site, deal.boxes[own.site], masks.dealt(own))
        return self._linked.all.shares_in(both, own, self.site)

    def confirm(self, survivors: letters.Survivors, blocks: Sequence[SealedBlock]) -> bytes:
        """Sign whose uploads are added. From now on this site helps to open no other sum of this round."""
        _, note = self._agreed(survivors.round, survivors.sites, blocks)
        self.memory.note(survivors.round, note)
        return self._linked.sign(masks.confirmed(note.context, survivors.sites))

    def unmask(self, request: letters.UnmaskingRequest, blocks: Sequence[SealedBlock]) -> letters.Reveal:
        """Return one share of one secret of each site of the round: never of both.

        Asked again for the same, it answers the same.
        """
        turn, note = self._agreed(request.round, request.sites, blocks)
        self._check_confirmations(note.context, request)
        self.memory.note(request.round, note)
        added = set(request.sites)
        return letters.Reveal(
            round=request.round,
            added={site: seed for site, (seed, _) in turn.shares.items() if site in added},
            dropped={site: key for site, (_, key) in turn.shares.items() if site not in added},
        )

    def _agreed(self, number: int, sites: tuple[str, ...], blocks: Sequence[SealedBlock]) -> tuple[Turn, SumNote]:
        """Return this site's turn and what it remembers of the sum, if these sites may be added; raises Refused."""
        turn = self._kept.turn
        if turn is None or turn.context is None or turn.own.round != number:
            raise Refused(f"the server: it asks to unmask round {number}, in which this site sealed nothing")
        names = [own.site for own in turn.offers]
        if list(sites) != sorted(set(sites)) or not set(sites) <= set(names):
            raise Refused(f"the server: the sites that it adds in round {number} are not of the round, each once")
        if self.site not in sites:
            raise Refused(f"the server: it asks this site to unmask a sum of round {number} that it is not in")
        if len(sites) < self.terms.least:
            raise Refused(
                f"the server: it asks to unmask a sum of {len(sites)} sites in round {number}; fewer than "
                f"{self.terms.least} are not opened"
            )
        if masks.context_of(self._linked.all.digest, number, turn.offers, blocks, turn.given) != turn.context:
            raise Refused(f"the server: the blocks or weights of round {number} are not those that were sealed")
        places = {self.terms.place(site) for site in sites}
        for block in blocks:
            check_hidden(self.terms, block, places)
        note = SumNote(sites=sites, weights=masks.weights_of(self.terms, sites, blocks), context=turn.context)
        self.memory.check(number, note)
        return turn, note

    def _check_confirmations(self, context: bytes, request: letters.UnmaskingRequest) -> None:
        if not set(request.confirmations) <= set(request.sites):
            raise Refused(f"the server: it relays confirmations of sites that it does not add in round {request.round}")
        if len(request.confirmations) < self.terms.threshold:
            raise Refused(
                f"the server: {len(request.confirmations)} sites have confirmed the sum of round {request.round}; it "
                f"needs {self.terms.threshold}"
            )
        for site, signature in request.confirmations.items():
            self._linked.all.check_confirmation(site, signature, context, request.sites)

    def open_sums(self, claim: letters.SumClaim, blocks: Sequence[SealedBlock], sums: Tensors) -> Groups:
        """Return the sums of a round that this site may read, by block; divided by the weights where all know these."""
        self.memory.check_claim(claim)
        places = [self.terms.place(site) for site in claim.sites]
        opened = {}
        for block in blocks:
            if block.reader not in (SERVER, self.site):
                continue
            came = as_words(SERVER_SAYS, sums.get(block.name), block.flat.words)
            words = came.copy()
            keys = [self._reader_key(block, site, claim.context) for site in claim.sites]
            add_streams(words, [(key, -1) for key in keys if key is not None])
            opened[block.name] = block.read(words, places)
        return opened

    def _reader_key(self, block: SealedBlock, sender: str, context: bytes) -> bytes | None:
        """Return the key by which a sender hides its numbers from all but the sum's reader; None if from nobody."""
        purpose = ("reader", context, block.digest, sender)
        if block.reader == SERVER or block.reader == sender:
            return None
        return self._linked.secret(block.reader if sender == self.site else sender, *purpose)

    def _encoded(self, block: SealedBlock, groups: Groups, weights: Mapping[str, int]) -> Words:
        if block.weights is not None:
            weight = block.weights[self.terms.place(self.site)]
        else:
            weight = weights.get(block.name, 1)
            if weight * len(self.terms.sites) > block.fixed.weights and weight != 1:
                raise Refused(f"the weight {weight} for {block.name} is too large for the range that was chosen")
        if block.name not in groups:
            raise MedsiloError(f"sealing: there are no tensors for {block.name}")
        return block.flat.encode(groups[block.name], block.fixed, weight)
