"""The server's side of a sealed study: it passes letters on, and adds up what it cannot read."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medsilo.core.errors import ParticipationError, Refused
from medsilo.core.tensors import Groups, Tensors
from medsilo.course.phase import Phase, views
from medsilo.federation.accepting import check_forms, check_numbers
from medsilo.federation.asking import Exchange, Questioner
from medsilo.federation.sealed.what import (
    MOST_AHEAD,
    WORDS,
    Blocks,
    Held,
    KeyAgreement,
    Matrix,
    OwnWeights,
    SealedGroup,
    SealedResult,
    ServerLetter,
    SiteLetter,
    bound_groups,
    given_of,
    mark_of,
    terms_of,
    words_for,
)
from medsilo.federation.seams import Missing
from medsilo.federation.server_state import RoundAggregation, ServerState
from medsilo.mixing.forms import Exchanged, Pulled, Rows, Summed
from medsilo.mixing.mixers import Compared, SimilarityMix, WeightedMean
from medsilo.runs.messages import Joined, Lettered, SiteAnswer, Task
from medsilo.sealing.channels import Assembled, told_boxes, told_subject, told_tensors, verdict
from medsilo.sealing.fixed_point import Flat
from medsilo.sealing.letters import Accusation, Assembly, Deal, SumClaim, needed
from medsilo.sealing.relay import Gathering, MaskedSums
from medsilo.sealing.signing import Certified, Signer, Unsigned
from medsilo.sealing.terms import Terms

Take = Callable[[str, SiteLetter], None]


class SealedServer(RoundAggregation):
    """Leads the sealed part of a study: it takes sums that no party alone can open in place of answers in clear."""

    def __init__(self, asker: Questioner, state: ServerState, signer: Signer | None = None) -> None:
        """signer: the server's own, which tells whose keys are signed falsely before anybody else is sent them."""
        super().__init__(state)
        self.signer = signer
        self.asker, self.plan, self.store = asker, state.plan, state.store
        self.layout, self.mixers = state.layout, state.mixers
        self.terms: Terms  # its sites have agreed on keys
        self.blocks: Blocks
        self._assembly: Assembly
        self.cautions: list[str] = []  # what is to be said of the sites at the end
        self._unmasked: dict[str, dict[int, tuple[str, ...]]] = {}  # site → round → whose sum it has helped to open
        self._told = ServerLetter()  # what all are told in a round
        self._deals: dict[str, Deal] = {}
        self._spoilers: dict[str, Missing] = {}  # who sent what nobody can use, or complained falsely
        self._round: MaskedSums | None = None
        self._begin({})

    # ------------------------------------------------------------------ the study begins
    def agree(self, joined: Mapping[str, Joined]) -> None:
        """Let the sites agree on fresh keys; without those that drop out meanwhile, as far as the plan allows it."""
        super().agree(joined)
        left, ahead = [site for site in self.state.sites if site in joined], dict[str, int]()
        transport, heaviest = self.plan.transport, max(joined[site].cases.train or 1 for site in left)
        while True:
            self.store.agreement = max(self.store.agreement, *ahead.values(), 0) + 1
            terms = terms_of(self.plan, self.asker.study, left)
            told = KeyAgreement(number=self.store.agreement, sites=tuple(left), heaviest=heaviest)
            here = self._agree(terms, told, ahead)
            if here == left and max(ahead.values(), default=0) < told.number:
                break
            left = here
        self.terms, self.blocks = terms, Blocks(self.plan, terms, heaviest)
        self._told = ServerLetter(current=self.store.agreement)
        signed = all(own.certificates for own in self._assembly.introductions)
        rest_on = Certified.said if signed else Unsigned.said
        facts = {"mode": transport.sealing, "keys": rest_on, "protects": transport.promises}
        self.state.details["sealing"] = facts

    def _agree(self, terms: Terms, agreement: KeyAgreement, ahead: dict[str, int]) -> list[str]:
        """Do the two steps; returns who is left after the first one that somebody did not do.

        ahead: takes the last agreement of sites that know a later one, each once.
        """
        gathering, told = Gathering(terms, self.signer), ServerLetter(agreement=agreement)

        def introduced(site: str, said: SiteLetter) -> None:
            if said.last and site not in ahead:
                if said.last > agreement.number + MOST_AHEAD:
                    raise Refused(f"{site}: it can't have agreed on keys {said.last} times")
                ahead[site] = said.last
                return
            gathering.add(site, needed(site, said.introduction))
            self._unmasked[site] = dict(said.unmasked)

        here = self._agreed(terms.sites, told, introduced)
        if here == list(terms.sites) and max(ahead.values(), default=0) < agreement.number:
            self._assembly = gathering.assembly()
            letter = ServerLetter(agreement=agreement, assembly=self._assembly)
            here = self._agreed(terms.sites, letter, lambda site, said: None)
        return here

    def _agreed(self, sites: Sequence[str], told: ServerLetter, take: Take) -> list[str]:
        """Tell all sites the same; returns who has answered."""
        exchange = self._ask("agree", 0, sites, lambda site: told, take)
        self.asker.check(exchange, "keys of the study")
        return sorted(exchange.replies)

    def _ask(
        self,
        task: Task,
        number: int,
        sites: Sequence[str],
        letter: Callable[[str], ServerLetter],
        take: Take,
        groups: Groups | None = None,
    ) -> Exchange:
        """Ask these sites, each with its letter; `take` is given a site's answer and raises Refused.

        groups: what all are sent beside.
        """

        def words(site: str) -> tuple[Groups, dict[str, Any]]:
            return groups or {}, {"sealing": letter(site).facts()}

        def taken(site: str, answer: SiteAnswer, sent: Groups) -> None:
            assert isinstance(answer, Lettered)
            check_forms(sent, {})
            take(site, SiteLetter.read(site, answer.sealing))

        return self.asker.ask(task, number, sites, words, taken)

    # ------------------------------------------------------------------ a round
    def _begin(self, groups: Mapping[str, SealedGroup]) -> None:
        self.groups = dict(groups)
        self._open: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in groups}  # whole numbers, by site
        self._boxes: dict[str, dict[str, Tensor]] = {name: {} for name in groups}  # what sites tell each other
        self._samples: dict[str, int] = {}

    def begin(self, number: int, phase: Phase) -> dict[str, Missing]:
        late = Missing("refused", "was not there when the sites agreed on keys; it may be when the study is resumed")
        absent = {site: late for site in self.state.sites if site not in self.terms.sites}
        rows: dict[str, Matrix] = {
            name: mixer.rows()
            for name, form in self.plan.sealed_forms(phase).items()
            if isinstance(form, Rows) and isinstance(mixer := self.mixers[name], SimilarityMix)
        }
        self._begin(self.blocks.of(phase, self.layout, rows))
        self._told = ServerLetter.model_validate({"current": self.store.agreement, "rows": rows})
        self._deals, self._round = {}, None
        blocks = [block for own in self.groups.values() for block in own.blocks.values()]
        if not blocks:
            return absent
        sums = self._round = MaskedSums(self.terms, self._assembly, number, blocks, self._given(phase))

        def offered(site: str, said: SiteLetter) -> None:
            sums.offer(site, needed(site, said.offer))

        again = self._repeated(number)
        honest = [site for site in again or self.terms.sites if site not in self._spoilers]
        exchange = self._ask("offer", number, honest, lambda site: self._told, offered)
        self.asker.check(exchange, f"keys of round {number}")
        self._check_deals(sums, number, exchange)
        self._deals = sums.deals()
        repeated = Missing("refused", f"round {number} is repeated with the hospitals whose sum was opened before")
        others = {site: repeated for site in self.terms.sites if again and site not in again}
        return {**absent, **others, **exchange.missing, **self._spoilers}

    # ------------------------------------------------------------------ who spoils a round
    def _check_deals(self, sums: MaskedSums, number: int, exchange: Exchange) -> None:
        """Have each hospital check the boxes it received; only a hospital that sent a bad one is left out."""
        deals, accusations = sums.deals(), list[Accusation]()

        def checked(site: str, said: SiteLetter) -> None:
            accusations.extend([sums.accusation(site, sender, own) for sender, own in sorted(said.complaints.items())])

        self._ask("deal", number, sorted(deals), lambda site: self._and(deal=deals[site]), checked)
        for site in self._settle(number, accusations, sums.use):
            sums.drop(site)
        self._leave_out(exchange, self._spoilers, f"keys of round {number} that can be used")

    def _settle(
        self, number: int, accusations: Sequence[Accusation], use: Callable[[Accusation, bytes], None]
    ) -> dict[str, Missing]:
        """Let senders show what is in the boxes that readers complain of; returns who spoilt one, and why.

        use: raises Refused for a content that is of no use.
        """
        all_of, keys = Assembled(self.terms, self._assembly.introductions), dict[str, Mapping[str, bytes]]()
        senders = sorted({own.sender for own in accusations})

        def letter(site: str) -> ServerLetter:
            return self._and(accusations=tuple(own for own in accusations if own.sender == site))

        if senders:
            self._ask("defend", number, senders, letter, lambda site, said: keys.update({site: said.keys}))
        found: dict[str, Missing] = {}
        for own in accusations:
            once = keys.get(own.sender, {}).get(own.reader)
            site, why = verdict(all_of, own, once, partial(use, own))
            found[site] = Missing("refused", why)
            self.store.proofs.append({"accusation": own.facts(), "key": once.hex() if once else "", "by": site})
            self.cautions.append(f"round {number}: {why}; {site} is left out")
        self._spoilers |= found
        return found

    def _leave_out(self, exchange: Exchange, gone: Mapping[str, Missing], what: str) -> None:
        """Go on without these sites; raises ParticipationError where too few are left."""
        for site in gone.keys() & exchange.replies.keys():
            del exchange.replies[site]
        exchange.missing = {**exchange.missing, **gone}
        self.asker.check(exchange, what)

    def _repeated(self, number: int) -> tuple[str, ...]:
        """Return whose sum was opened before the server stopped, where enough sites say so: a second one over others
        would tell the models of those that are in one of them only. Raises ParticipationError where they are not there.
        """
        told = [sums[number] for sums in self._unmasked.values() if number in sums]
        before = max(told, key=lambda sites: (told.count(sites), sites), default=())
        if told.count(before) < self.terms.threshold:
            return ()
        if gone := sorted(set(before) - set(self.terms.sites)):
            raise ParticipationError(
                f"sealing: the sum of round {number} over {', '.join(before)} was opened before the server stopped, so "
                f"the round can only be repeated with the same hospitals: wait for {', '.join(gone)}, or start again"
            )
        return before

    def _given(self, phase: Phase) -> bytes:
        """Return what stands for what all sites are given, as each of them works it out."""
        there, first = views(phase.given, self.layout), self.plan.participation.sites[0]
        marks, forms = {}, self.plan.sealed_forms(phase)
        for name in there.keys() & set(bound_groups(self.plan, phase)):
            kept = self.store.find(name, first) if isinstance(forms.get(name), Pulled) else None
            marks[name] = mark_of(kept.tensors, kept.held) if kept else mark_of(self.mixers[name].current(first))
        return given_of(self.plan, phase, marks)

    def _and(self, **more: Any) -> ServerLetter:
        """Return what all are told, and more."""
        return self._told.model_copy(update=more)

    def letters(self, site: str, groups: Groups) -> dict[str, Any]:
        if site not in self.terms.sites:
            return {}
        return self._and(held=self.store.told(groups, site), deal=self._deals.get(site)).facts()

    def expected(self, phase: Phase) -> Groups:
        clear = super().expected(phase)
        return {name: self.groups[name].expected() if name in self.groups else own for name, own in clear.items()}

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        clear = {name: tensors for name, tensors in groups.items() if name not in self.groups}
        super().take(site, clear, samples, phase)
        sealed = [(name, key, block) for name, own in self.groups.items() for key, block in own.blocks.items()]
        words = {block.name: groups[name][key] for name, key, block in sealed}
        if self._round is not None:
            self._round.add(site, words)
        for name, own in self.groups.items():
            self._open[name][site] = {key: groups[name][key] for key in own.beside}
            if isinstance(own.form, Exchanged):
                self._boxes[name][site] = groups[name][WORDS]
        self._samples[site] = samples

    # ------------------------------------------------------------------ a round ends
    def finish(self, number: int) -> None:
        """Let the sites open what the server may read, and keep for them what they read themselves."""
        if self._round is not None:
            self._add(self._round, number)
        for own in self.groups.values():
            if isinstance(own.form, Exchanged):
                self._compare(own, number)
        if self.cautions:
            self.state.details["cautions"] = [*self.plan.cautions(self.state.sites), *self.cautions]

    def _compare(self, own: SealedGroup, number: int) -> None:
        """Let the sites compare what they told each other; take the weights on which all agree.

        What cannot be used is left out, and all compare again.
        """
        mixer, boxes = self.mixers[own.name], dict(self._boxes[own.name])
        assert isinstance(mixer, Compared)
        exchange, found, accusations = self._compared(own, number, mixer.sites, boxes)
        while spoilt := self._settle(number, accusations, partial(self._use_told, own, number)):
            boxes = {site: box for site, box in boxes.items() if site not in spoilt}
            exchange, found, accusations = self._compared(own, number, mixer.sites, boxes)
        exchange.asked = sorted(self._boxes[own.name])
        self._leave_out(exchange, self._spoilers, f"weights of what was told in round {number}")
        agreed, odd = most_alike(found)
        other = Missing("refused", "made other weights of what the hospitals told each other")
        self._leave_out(exchange, dict.fromkeys(odd, other), f"weights that follow from round {number}")
        if odd:
            self.cautions.append(
                f"round {number}: {', '.join(odd)} made other weights of what the hospitals told each other than "
                "most did; look for a changed package or machine there"
            )
        mixer.take_weights(torch.tensor(agreed.weights, dtype=torch.float64))

    def _compared(
        self, own: SealedGroup, number: int, among: list[str], boxes: dict[str, Tensor]
    ) -> tuple[Exchange, dict[str, OwnWeights], list[Accusation]]:
        """Ask for the weights of what is in these boxes; returns them, and complaints of what is of no use."""
        told, found, accusations = self._and(among=tuple(among)), dict[str, OwnWeights](), list[Accusation]()

        def compared(site: str, said: SiteLetter) -> None:
            if said.complaints:
                against = sorted(said.complaints.items())
                accusations.extend([self._of_told(own, number, site, *each) for each in against])
                return
            comparison = needed(site, said.comparison)
            comparison.check(site)
            if comparison.round != number or list(comparison.sites) != among:
                raise Refused(f"{site}: its weights are of other sites or of another round than {number}")
            found[site] = comparison

        exchange = self._ask("compare", number, sorted(boxes), lambda site: told, compared, {own.name: boxes})
        return exchange, found, accusations

    def _told_by(self, own: SealedGroup, site: str, reader: str) -> tuple[bytes, bytes]:
        return told_boxes(site, self._boxes[own.name][site], len(self.terms.sites), self.terms.place(reader))

    def _of_told(self, own: SealedGroup, number: int, reader: str, sender: str, complaint: bytes) -> Accusation:
        """Return a site's complaint of what another told all; raises Refused, naming it, unless it signed that."""
        if sender not in self._boxes[own.name]:
            raise Refused(f"{reader}: it complains of a site that told nothing")
        content, box = self._told_by(own, sender, reader)
        subject = told_subject(number, own.name, content)
        accusation = Accusation(sender=sender, reader=reader, subject=subject, box=box, complaint=complaint)
        Assembled(self.terms, self._assembly.introductions).check_complaint(accusation)
        return accusation

    def _use_told(self, own: SealedGroup, number: int, accusation: Accusation, key: bytes) -> None:
        """Raise Refused where nobody can make anything of what a site told."""
        content, _ = self._told_by(own, accusation.sender, accusation.reader)
        tensors = told_tensors(key, content, accusation.sender, number, own.name, Flat.like(own.like))
        check_numbers({own.name: tensors}, [own.group], {own.name: own.group.ranges(self.layout, self.plan.task)}, {})

    def _open_sums(self, sums: MaskedSums, number: int) -> tuple[SumClaim, Tensors]:
        """Let the sites confirm whose uploads are added, and take off the masks; raises ParticipationError, with their
        reasons, where too few do."""
        survivors, missing = sums.survivors(), dict[str, Missing]()

        def ask(task: Task, told: ServerLetter, take: Take) -> None:
            missing.update(self._ask(task, number, survivors.sites, lambda site: told, take).missing)

        def confirmed(site: str, said: SiteLetter) -> None:
            sums.confirmation(site, needed(site, said.confirmation))

        def revealed(site: str, said: SiteLetter) -> None:
            sums.reveal(site, needed(site, said.reveal))

        try:
            ask("confirm", self._and(survivors=survivors), confirmed)
            ask("unmask", self._and(request=sums.request()), revealed)
            opened = sums.open()
            self.cautions += [
                f"round {number}: {site} revealed shares that nobody dealt it" for site in sorted(sums.liars)
            ]
            return opened
        except ParticipationError as error:
            reasons = sorted({gone.text for gone in missing.values()})
            raise ParticipationError("; ".join([str(error), *reasons])) from error

    def _add(self, sums: MaskedSums, number: int) -> None:
        claim, opened = self._open_sums(sums, number)
        survivors = sums.survivors()
        for own in self.groups.values():
            for key, block in own.blocks.items():
                held = Held(agreement=self.store.agreement, claim=claim)
                if isinstance(own.form, Summed):
                    mean = sums.read(block, opened, sum(self._weights(own, survivors.sites).values()))
                    self._hand_over(own, mean, survivors.sites)
                elif isinstance(own.form, Pulled):  # all are given the same, those that were missing too
                    mean = sums.read(block, opened)
                    self.store.keep(own.name, self.plan.participation.sites, SealedResult(mean, held))
                else:
                    readers = [site for site in survivors.sites if key == words_for(site)]
                    self.store.keep(own.name, readers, SealedResult({WORDS: opened[block.name]}, held))

    def _weights(self, own: SealedGroup, sites: Sequence[str]) -> dict[str, int]:
        return {site: own.weight(self._samples[site]) for site in sites}

    def _hand_over(self, own: SealedGroup, mean: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        """Give the mean that the server may read to the group's mixer, with the first site's whole numbers."""
        tensors = {**mean, **self._open[own.name][min(sites)]}
        tensors = {name: tensors[name] for name in own.like}
        assert isinstance(own.form, Summed)
        if own.form.enter is None:
            ranges = {own.name: own.group.ranges(self.layout, self.plan.task)}
            check_numbers({own.name: tensors}, [own.group], ranges, {})
        mixer = self.mixers[own.name]
        assert isinstance(mixer, WeightedMean)
        mixer.take_mean(tensors, {site: float(w) for site, w in self._weights(own, sites).items()})


def most_alike(found: Mapping[str, OwnWeights]) -> tuple[OwnWeights, list[str]]:
    """Return what more than half of the sites have computed, and the others; raises ParticipationError without it."""
    alike = {site: [other for other in sorted(found) if own.is_like(found[other])] for site, own in found.items()}
    most = max((alike[site] for site in sorted(alike)), key=len)
    if 2 * len(most) <= len(found):
        raise ParticipationError(
            f"sealing: no more than {len(most)} of {len(found)} hospitals ({', '.join(most)}) made the same weights of "
            "what all told each other; look for a changed package or machine at one of them"
        )
    return found[most[0]], sorted(set(found) - set(most))
