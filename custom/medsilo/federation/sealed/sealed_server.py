"""The server's side of a sealed study: it passes letters on, and adds up what it cannot read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from medsilo.core.errors import ParticipationError, Refused
from medsilo.core.tensors import Groups, Modules
from medsilo.course.group import views
from medsilo.course.phase import Phase
from medsilo.federation.accepting import check_numbers
from medsilo.federation.asking import Exchange
from medsilo.federation.sealed.store import SealedResult, SealedStore
from medsilo.federation.sealed.what import (
    WORDS,
    Blocks,
    Held,
    KeyAgreement,
    Matrix,
    OwnWeights,
    SealedGroup,
    bound_groups,
    given_of,
    mark_of_group,
    terms_of,
    words_for,
)
from medsilo.federation.seams import Missing
from medsilo.mixing.forms import Exchanged, Rows, Summed
from medsilo.mixing.mixers import Compared, Mixer, SimilarityMix, WeightedMean
from medsilo.plan import Plan
from medsilo.runs.messages import Task
from medsilo.sealing.letters import (
    Assembly,
    Confirmation,
    Introduction,
    Offer,
    Reveal,
    Unmasked,
)
from medsilo.sealing.relay import Gathering, MaskedSums
from medsilo.sealing.signing import Certified, Unsigned
from medsilo.sealing.terms import Terms

Letters = dict[str, Any]
Enough = Callable[[Exchange, str], None]  # raises ParticipationError where too few have answered


class Ask(Protocol):
    """Asks these sites, each with its letters; `take` is given a site's answer and raises Refused."""

    def __call__(
        self,
        task: Task,
        number: int,
        sites: Sequence[str],
        letters: Callable[[str], Letters],
        take: Callable[[str, Letters], None],
        groups: Groups | None = None,
    ) -> Exchange:
        """Return what came of it. groups: what all are sent beside."""


class SealedServer:
    """Leads the sealed part of a study."""

    def __init__(
        self,
        plan: Plan,
        study: str,
        layout: Modules,
        mixers: Mapping[str, Mixer],
        store: SealedStore,
        ask: Ask,
        enough: Enough,
    ) -> None:
        self.plan, self.study, self.layout, self.mixers, self.store = plan, study, layout, mixers, store
        self._ask, self._enough = ask, enough
        self.terms: Terms
        self.blocks: Blocks
        self._assembly: Assembly
        self.keys = ""  # what they rest on, in words
        self.cautions: list[str] = []  # what is to be said of the sites at the end
        self._unmasked: dict[str, dict[int, tuple[str, ...]]] = {}  # site → round → whose sum it has helped to open
        self._deals: dict[str, Letters] = {}
        self._round: MaskedSums | None = None
        self._begin({})

    @property
    def sites(self) -> tuple[str, ...]:
        """Those who have agreed on keys."""
        return self.terms.sites

    # ------------------------------------------------------------------ the study begins
    def agree(self, sites: Sequence[str], heaviest: int) -> None:
        """Let the sites agree on fresh keys; without those that drop out meanwhile, as far as the plan allows it."""
        left = sorted(sites)
        while True:
            self.store.agreement += 1
            terms = terms_of(self.plan, self.study, left)
            told = KeyAgreement(number=self.store.agreement, sites=tuple(left), heaviest=heaviest)
            here = self._agree(terms, told)
            if here == left:
                self.terms, self.blocks = terms, Blocks(self.plan, terms, heaviest)
                return
            left = here

    def _agree(self, terms: Terms, agreement: KeyAgreement) -> list[str]:
        """Do the two steps; returns who is left after the first one that somebody did not do."""
        gathering, told = Gathering(terms), {"agreement": agreement.facts()}

        def introduced(site: str, letters: Letters) -> None:
            gathering.add(site, Introduction.read(site, letters.get("introduction")))
            self._unmasked[site] = dict(Unmasked.read(site, letters.get("unmasked")).sums)

        here = self._agreed(terms.sites, told, introduced)
        if here == list(terms.sites):
            self._assembly = gathering.assembly()
            signed = all(own.certificates for own in self._assembly.introductions)
            self.keys = Certified.said if signed else Unsigned.said
            letters = {**told, "assembly": self._assembly.facts()}
            here = self._agreed(terms.sites, letters, lambda site, letters: None)
        return here

    def _agreed(self, sites: Sequence[str], letters: Letters, take: Callable[[str, Letters], None]) -> list[str]:
        """Tell all sites the same; returns who has answered."""
        exchange = self._ask("agree", 0, sites, lambda site: letters, take)
        self._enough(exchange, "keys of the study")
        return sorted(exchange.replies)

    # ------------------------------------------------------------------ a round
    def _begin(self, groups: Mapping[str, SealedGroup]) -> None:
        self.groups = dict(groups)
        self._open: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in groups}  # whole numbers, by site
        self._boxes: dict[str, dict[str, Tensor]] = {name: {} for name in groups}  # what sites tell each other
        self._samples: dict[str, int] = {}
        self._rows: dict[str, Matrix] = {}

    def begin(self, number: int, phase: Phase) -> dict[str, Missing]:
        """Begin a round whose mixers are open; returns the sites that are not in it, and why."""
        rows: dict[str, Matrix] = {
            name: mixer.rows()
            for name, form in self.plan.sealed_forms(phase).items()
            if isinstance(form, Rows) and isinstance(mixer := self.mixers[name], SimilarityMix)
        }
        self._begin(self.blocks.of(phase, self.layout, rows))
        self._rows, self._deals, self._round = rows, {}, None
        blocks = [block for own in self.groups.values() for block in own.blocks.values()]
        if not blocks:
            return {}
        sums = self._round = MaskedSums(self.terms, self._assembly, number, blocks, self._given(phase))

        def offered(site: str, letters: Letters) -> None:
            sums.offer(site, Offer.read(site, letters.get("offer")))

        again = self._repeated(number)
        exchange = self._ask("offer", number, again or self.sites, lambda site: self._told(), offered)
        self._enough(exchange, f"keys of round {number}")
        self._deals = {site: {"deal": deal.facts()} for site, deal in sums.deals().items()}
        late = Missing("refused", f"round {number} is repeated with the hospitals whose sum was opened before")
        return {**{site: late for site in self.sites if again and site not in again}, **exchange.missing}

    def _repeated(self, number: int) -> tuple[str, ...]:
        """Return whose sum was opened before the server stopped, where enough sites say so: a second one over others
        would tell the models of those that are in one of them only. Raises ParticipationError where they are not there.
        """
        told = [sums[number] for sums in self._unmasked.values() if number in sums]
        before = max(told, key=lambda sites: (told.count(sites), sites), default=())
        if told.count(before) < self.terms.threshold:
            return ()
        if gone := sorted(set(before) - set(self.sites)):
            raise ParticipationError(
                f"sealing: the sum of round {number} over {', '.join(before)} was opened before the server stopped, so "
                f"the round can only be repeated with the same hospitals: wait for {', '.join(gone)}, or begin anew"
            )
        return before

    def _given(self, phase: Phase) -> bytes:
        """Return what stands for what all sites are given, as each of them works it out."""
        there, first = views(phase.given, self.layout), self.plan.participation.sites[0]
        marks = {
            name: mark_of_group(self.mixers[name].current(first))
            for name in bound_groups(self.plan, phase)
            if name in there
        }
        return given_of(self.plan, phase, marks)

    def _told(self) -> Letters:
        rows = {"rows": {group: dict(matrix) for group, matrix in self._rows.items()}} if self._rows else {}
        return {"current": self.store.agreement, **rows}

    def letters(self, site: str, groups: Groups) -> Letters:
        """Return what a site is told beside what it is sent in a round or after the last."""
        if site not in self.sites:
            return {}
        held = self.store.told(groups, site)
        return {**self._told(), **({"held": held} if held else {}), **(self._deals.get(site, {}))}

    def expected(self, clear: Groups) -> Groups:
        """Return the layout of what sites send, from that of a study in clear."""
        return {name: self.groups[name].expected() if name in self.groups else own for name, own in clear.items()}

    def take(self, site: str, groups: Groups, samples: int) -> None:
        """Take what a site sealed, whose form was checked."""
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

    def _compare(self, own: SealedGroup, number: int) -> None:
        """Let the sites compare what they told each other; take the weights on which all agree."""
        mixer, boxes = self.mixers[own.name], self._boxes[own.name]
        assert isinstance(mixer, Compared)
        told = {**self._told(), "among": mixer.sites}
        found: dict[str, OwnWeights] = {}

        def compared(site: str, letters: Letters) -> None:
            comparison = OwnWeights.read(site, letters.get("comparison"))
            comparison.check(site)
            if comparison.round != number or list(comparison.sites) != mixer.sites:
                raise Refused(f"{site}: its weights are of other sites or of another round than {number}")
            found[site] = comparison

        exchange = self._ask("compare", number, sorted(boxes), lambda site: told, compared, {own.name: boxes})
        agreed, odd = most_alike(found)
        for site in odd:
            del exchange.replies[site]
            exchange.missing = {
                **exchange.missing,
                site: Missing("refused", "made other weights of what the hospitals told each other"),
            }
        self._enough(exchange, f"weights that follow from round {number}")
        if odd:
            self.cautions.append(
                f"round {number}: {', '.join(odd)} made other weights of what the hospitals told each other than "
                "most did; look for a changed package or machine there"
            )
        mixer.take_weights(torch.tensor(agreed.weights, dtype=torch.float64))

    def _add(self, sums: MaskedSums, number: int) -> None:
        survivors = sums.survivors()
        if self.terms.confirm:

            def confirmed(site: str, letters: Letters) -> None:
                sums.confirmation(site, Confirmation.read(site, letters.get("confirmation")))

            told = {**self._told(), "survivors": survivors.facts()}
            self._ask("confirm", number, survivors.sites, lambda site: told, confirmed)
        request = sums.request()

        def revealed(site: str, letters: Letters) -> None:
            sums.reveal(site, Reveal.read(site, letters.get("reveal")))

        told_all = {**self._told(), "request": request.facts()}
        self._ask("unmask", number, survivors.sites, lambda site: told_all, revealed)
        claim, opened = sums.open()
        for own in self.groups.values():
            for key, block in own.blocks.items():
                if isinstance(own.form, Summed):
                    read = sums.read(block, opened, self._divisor(own, survivors.sites))
                    self._hand_over(own, own.divided(read), survivors.sites)
                else:
                    divisor, agreement = len(survivors.sites), self.store.agreement
                    held = Held(agreement=agreement, round=number, divisor=divisor, claim=claim.facts())
                    kept = SealedResult({WORDS: opened[block.name]}, held)
                    for site in survivors.sites:
                        if key in (WORDS, words_for(site)):
                            self.store.keep(own.name, site, kept)

    def _divisor(self, own: SealedGroup, sites: Sequence[str]) -> int:
        """Return what a sum is divided by; 1 where what its weights add up to is sealed in it."""
        return 1 if own.counts else sum(self._weights(own, sites).values())

    def _weights(self, own: SealedGroup, sites: Sequence[str]) -> dict[str, int]:
        return {site: own.weight(self._samples[site]) for site in sites}

    def _carried(self, own: SealedGroup, sites: Sequence[str]) -> dict[str, Tensor]:
        """Return the whole numbers of the first site, as a mean in clear takes them; those of the beginning where sites
        keep theirs."""
        first = min(sites)
        if own.hides_counts:
            given = self.mixers[own.name].current(first)
            return {name: tensor for name, tensor in given.items() if not tensor.is_floating_point()}
        return self._open[own.name][first]

    def _hand_over(self, own: SealedGroup, mean: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        """Give the mean that the server may read to the group's mixer."""
        tensors = {**mean, **self._carried(own, sites)}
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
