"""A site's side of a sealed study: it agrees on keys, seals what it sends, and opens what it is given."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from medsilo.core.errors import Refused, reading
from medsilo.core.files import load_tensors, save_tensors, write_bytes
from medsilo.core.tensors import Groups, Modules, Tensors, hash_of
from medsilo.course.phase import Phase, views
from medsilo.course.secure_aggregation import forms_of
from medsilo.federation.accepting import check_forms, check_numbers, same_layout
from medsilo.federation.sealed.what import (
    ALIKE,
    WORDS,
    Blocks,
    Held,
    KeyAgreement,
    Matrix,
    OwnWeights,
    Row,
    SealedGroup,
    ServerLetter,
    SiteLetter,
    bound_groups,
    given_of,
    mark_of,
    terms_of,
    words_for,
)
from medsilo.federation.seams import Envelope
from medsilo.mixing.forms import Exchanged, Form, Pulled, Rows, Summed
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request
from medsilo.sealing.fixed_point import Flat
from medsilo.sealing.keeping import SumMemory
from medsilo.sealing.letters import Deal, needed
from medsilo.sealing.member import Member
from medsilo.sealing.signing import Signer
from medsilo.sealing.streams import digest
from medsilo.sealing.terms import SealedBlock, check_hidden

SERVER = "the server"
KEPT_ROWS = 4  # rounds whose published rows a site keeps
JoinSum = Callable[[str, Collection[str], int | None], None]  # first weights, sites, round; raises Refused


@dataclass
class _Seat:
    """This site in one agreement: its keys."""

    agreement: KeyAgreement
    member: Member
    blocks: Blocks


class _Memory(SumMemory):
    """The memory of a site of a study, whatever keys it has: a server that starts again, or counts its agreements in
    another way, finds the same hospital."""

    agreement: int = 0  # the number of the last
    rows: dict[int, dict[str, dict[str, Row]]] = {}  # by round: those that were published
    compared: dict[str, OwnWeights] = {}  # by the group whose rows they are: the last that this site computed
    opened: dict[str, int] = {}  # group → the last round whose result this site has opened
    given: dict[str, str] = {}  # group → the mark of what came of it in clear last

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return what is kept there."""
        if not path.exists():
            return cls()
        with reading("this site's memory of sealed sums"):
            return cls.model_validate_json(path.read_bytes())


class SealedSite(Envelope):
    """One site of a sealed study. What it keeps is on its disk before anything that rests on it leaves."""

    keeps_at_home = True

    def __init__(self, plan: Plan, site: str, folder: Path, signer: Signer, join_sum: JoinSum | None = None) -> None:
        """join_sum: what the hospital remembers of other studies' sums."""
        self.plan, self.site, self.folder, self.signer = plan, site, folder, signer
        self._join_sum = join_sum
        self._seats: dict[int, _Seat] = {}
        self.memory = _Memory.of(folder / paths.SUMS)
        self._arrived: Groups = {}  # of groups that are sent as the way from them
        self._layout = plan.layout()
        self._ranges = {
            group.name: group.ranges(self._layout, plan.task) for phase in plan.course.phases for group in phase.sent
        }

    # ------------------------------------------------------------------ letters
    def letter(self, asked: Request, groups: Groups) -> dict[str, Any]:
        """Do what a letter asks; returns the answer's."""
        told = ServerLetter.read(SERVER, asked.sealing)
        if asked.task == "compare":
            return self._compare(asked, told, groups).facts()
        work = {"agree": self._agree, "offer": self._offer, "deal": self._deal, "defend": self._defend}
        return (work | {"confirm": self._confirm, "unmask": self._unmask})[asked.task](asked, told).facts()

    def _agree(self, asked: Request, told: ServerLetter) -> SiteLetter:
        agreement = needed(SERVER, told.agreement)
        if told.assembly:
            seat = self._seat(agreement.number)
            if seat.agreement != agreement:
                raise Refused("the server: it agrees on other sites than a moment before")
            seat.member.meet(told.assembly)
            answer = SiteLetter()
        else:
            waiting = self._waiting(agreement)
            if waiting is None and agreement.number <= self.memory.agreement:  # no number has two agreements
                return SiteLetter(last=self.memory.agreement)
            seat = waiting or self._begin(agreement, asked.study)
            answer = SiteLetter(introduction=seat.member.introduction(), unmasked=seat.member.unmasked())
        self._keep(seat)
        return answer

    def _waiting(self, agreement: KeyAgreement) -> _Seat | None:
        """Return this site's seat if it is asked again for keys that have not met others yet."""
        if not self._path(agreement.number).exists():
            return None
        seat = self._seat(agreement.number)
        return seat if seat.agreement == agreement and not seat.member.has_met else None

    def _begin(self, agreement: KeyAgreement, study: str) -> _Seat:
        terms = terms_of(self.plan, study, agreement.sites)
        self._join(agreement.sites, None)
        member = Member.begin(terms, self.site, self.signer, self.memory)
        self.memory.agreement = agreement.number
        seat = self._seats[agreement.number] = _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))
        return seat

    def _offer(self, asked: Request, told: ServerLetter) -> SiteLetter:
        seat = self._newest(told)
        self._publish(asked.round, told)
        for block in self._blocks(seat, asked.round):
            check_hidden(seat.member.terms, block, range(len(seat.agreement.sites)))
        offer = seat.member.offer(asked.round)
        self._keep(seat)
        return SiteLetter(offer=offer)

    def _deal(self, asked: Request, told: ServerLetter) -> SiteLetter:
        """Look into the boxes of a round before anybody trains."""
        return SiteLetter(complaints=self._newest(told).member.check_deal(needed(SERVER, told.deal)))

    def _defend(self, asked: Request, told: ServerLetter) -> SiteLetter:
        return SiteLetter(keys=self._newest(told).member.defend(told.accusations))

    def _confirm(self, asked: Request, told: ServerLetter) -> SiteLetter:
        seat, survivors = self._newest(told), needed(SERVER, told.survivors)
        confirmation = seat.member.confirm(survivors, self._blocks(seat, asked.round))
        self._join(survivors.sites, asked.round)
        self._keep(seat)
        return SiteLetter(confirmation=confirmation)

    def _unmask(self, asked: Request, told: ServerLetter) -> SiteLetter:
        seat, request = self._newest(told), needed(SERVER, told.request)
        reveal = seat.member.unmask(request, self._blocks(seat, asked.round))
        self._join(request.sites, asked.round)
        self._keep(seat)
        return SiteLetter(reveal=reveal)

    def _join(self, sites: Collection[str], number: int | None) -> None:
        """Let the hospital remember a sum that it is about to help with; raises Refused."""
        if self._join_sum:
            self._join_sum(self._first, sites, number)

    @cached_property
    def _first(self) -> str:
        """A mark of the weights that the study begins with, and of what else is drawn."""
        networks = self.plan.build_networks().items()
        return digest("first", self.plan.seed, *(hash_of(own.state_dict()) for _, own in sorted(networks))).hex()

    def _compare(self, asked: Request, told: ServerLetter, groups: Groups) -> SiteLetter:
        """Open what the hospitals told each other, and make of it what all of them do."""
        seat = self._newest(told)
        sealed = self._sealed(seat, self.plan.course.phase_of(asked.round), asked.round)
        if sorted(self.plan.participation.sites) != list(told.among):
            raise Refused("the server: it names other sites than the plan does")
        name = next(iter(groups), "")
        own = sealed.get(name)
        if own is None or not isinstance(own.form, Exchanged):
            raise Refused("the server: it hands out what hospitals do not tell each other")
        found, against = self._told(seat, asked.round, own, groups[name])
        if against:
            return SiteLetter(complaints=against)
        rows = own.form.compare(told.among, found)
        comparison = OwnWeights(round=asked.round, sites=told.among, weights=tuple(map(tuple, rows.tolist())))
        self.memory.compared[own.form.rows] = comparison
        self._keep(seat)
        return SiteLetter(comparison=comparison)

    def _told(
        self, seat: _Seat, number: int, own: SealedGroup, boxes: Tensors
    ) -> tuple[dict[str, Tensors], dict[str, bytes]]:
        """Return what each hospital told, checked as the server checks it in clear, and complaints of what is of no
        use."""
        if self.site not in boxes or len(boxes) < seat.member.terms.least:
            raise Refused(
                f"the server: it hands out what {len(boxes)} hospitals told; it takes {seat.member.terms.least}, and "
                "this one among them"
            )
        flat, found, against = Flat.like(own.like), {}, {}
        for site, box in boxes.items():
            try:
                found[site] = seat.member.told(site, number, own.name, flat, box)
                check_numbers({own.name: found[site]}, [own.group], self._ranges, {})
            except Refused:
                against[site] = seat.member.complain_of_told(site, number, own.name, box)
        return found, against

    # ------------------------------------------------------------------ a round
    def check(self, asked: Request, phase: Phase, modules: Modules) -> None:
        """Raise Refused, before anything is kept or sealed, where numbers that would be sent can't be."""
        groups = views(phase.sent, modules)
        check_numbers(groups, phase.sent, self._ranges, {})
        seat = self._newest(ServerLetter.read(SERVER, asked.sealing))
        for name, own in self._sealed(seat, phase, None).items():
            for block in list(own.blocks.values())[:1]:  # all of a group hold the same numbers
                for tensor in groups[name].keys() & set(block.flat.names):
                    block.fixed.check(f"{name}/{tensor}", groups[name][tensor])

    def seal(self, asked: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Return what is sent; `groups` in clear where they are not sealed."""
        told = ServerLetter.read(SERVER, asked.sealing)
        seat = self._newest(told)
        self._publish(asked.round, told)
        sealed = self._sealed(seat, phase, asked.round)
        if not sealed:
            return groups
        tensors, weights, blocks, boxes = {}, {}, [], {}
        for name, own in sealed.items():
            if isinstance(own.form, Exchanged):
                boxes[name] = {WORDS: seat.member.tell(asked.round, name, groups[name])}
                continue
            entered = self._entered(own, groups[name])
            for block in own.blocks.values():
                tensors[block.name], weights[block.name] = entered, own.weight(samples)
                blocks.append(block)
        words: Tensors = {}
        if blocks:
            given = given_of(self.plan, phase, self.memory.given)
            words = self._sealed_once(seat, needed(SERVER, told.deal), blocks, tensors, weights, given)
        self._keep(seat)
        sent = {**groups, **boxes}
        for name in sealed.keys() - boxes.keys():
            own = sealed[name]
            beside = {key: groups[name][key] for key in own.beside}
            sent[name] = beside | {key: words[block.name] for key, block in own.blocks.items()}
        return sent

    def _sealed_once(
        self,
        seat: _Seat,
        deal: Deal,
        blocks: list[SealedBlock],
        tensors: dict[str, Tensors],
        weights: dict[str, int],
        given: bytes,
    ) -> Tensors:
        """Return what this site seals in a round; what it has sealed when its answer was lost, to the last bit.

        Numbers that differ under the same masks would tell their difference.
        """
        path = self.folder / paths.SEALED
        if seat.member.has_sealed(deal) and path.exists():
            with reading("what this site sealed"):
                return load_tensors(path)[0]
        words = seat.member.seal(deal, blocks, tensors, weights, given)
        save_tensors(path, words, {})
        return words

    def _entered(self, own: SealedGroup, tensors: Tensors) -> Tensors:
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if isinstance(own.form, Summed) and own.form.enter:
            floats = dict(own.form.enter(floats, self._arrived[own.name]))
        return floats

    # ------------------------------------------------------------------ what is given
    def open(self, asked: Request, groups: Groups, modules: Modules) -> Groups:
        """Return what came with its sealed groups opened."""
        held = ServerLetter.read(SERVER, asked.sealing).held
        if not held.keys() <= groups.keys():
            raise Refused("the server: it tells of sealed groups that it does not send")
        if asked.task == "round":
            self._note_given(asked.round, groups, held)
        if held:
            self._note_opened(asked, held)
        opened = {
            name: self._opened(name, held[name], own, modules) if name in held else own for name, own in groups.items()
        }
        self._arrived = opened
        return opened

    def _note_given(self, number: int, groups: Groups, held: Mapping[str, Held]) -> None:
        """Remember what all are given, which this site's masks depend on; raises Refused where it must be the plan's
        own networks and is not."""
        phase = self.plan.course.phase_of(number)
        begins = [name for name in groups if name not in held and self._begins(name, number)]
        own = views(phase.given, self.plan.build_networks()) if begins else {}
        for name in begins:
            if hash_of(groups[name]) != hash_of(own[name]):
                raise Refused(
                    f"the server: in round {number} it sends other weights of {name} than the plan begins with"
                )
        forms = self.plan.sealed_forms(phase)
        for name in groups.keys() & set(bound_groups(self.plan, phase)):
            if name not in held or isinstance(forms.get(name), Pulled):
                self.memory.given[name] = mark_of(groups[name], held.get(name))
        self._remember()

    def _begins(self, name: str, number: int) -> bool:
        """Return whether a group that comes in clear is as the plan's networks have it: in the first round in which it
        travels; later, too, where sites get mixtures of their own of it and this one has none yet."""
        course = self.plan.course
        place = course.place_of(number)
        first = next(i for i, phase in enumerate(course.phases) if name in {group.name for group in phase.groups})
        starts = place == first and (number == 1 or course.place_of(number - 1) != place)
        mixed_for_each = isinstance(self.plan.sealed_forms(course.phases[place]).get(name), Rows | Pulled)
        return course.phases[first].before is None and (starts or mixed_for_each)

    def _note_opened(self, asked: Request, held: Mapping[str, Held]) -> None:
        """Remember the rounds whose results come; raises Refused where the server replays one before the last that this
        site has had, but for a server that does rounds again."""
        before = asked.round - (asked.task == "round")
        for name, told in held.items():
            if told.claim.round < (least := min(self.memory.opened.get(name, 0), before)):
                raise Refused(
                    f"the server: it replays {name} of round {told.claim.round} in round {asked.round}, and that of "
                    f"round {least} must be there"
                )
        self.memory.opened |= {name: told.claim.round for name, told in held.items()}
        self._remember()

    def _opened(self, name: str, held: Held, given: Tensors, modules: Modules) -> Tensors:
        claim = held.claim
        phase = self.plan.course.phase_of(claim.round)
        form = self.plan.sealed_forms(phase).get(name)
        if isinstance(form, Pulled):
            if len(claim.sites) < max(2, self.plan.participation.required):
                raise Refused(f"the server: it tells a mean of {name} over {len(claim.sites)} hospitals")
            self.memory.check_claim(claim)
            mine = views(phase.sent, modules)[name]
            return self._pulled(form, name, mine, given, len(claim.sites))
        if not isinstance(form, Rows):  # a mean comes in clear, and is noted
            raise Refused("the server: it sends a sealed group that is none of the plan's")
        seat = self._seat(held.agreement)
        own = self._sealed(seat, phase, claim.round)[name]
        mine = views([own.group], modules)[name]
        same_layout({name: given}, {name: {WORDS: own.expected()[words_for(self.site)]}})
        block = own.blocks[words_for(self.site)]
        values = seat.member.open_sums(claim, [block], {block.name: given[WORDS]})[block.name]
        return {other: values.get(other, mine[other]) for other in own.like}

    @torch.no_grad()
    def _pulled(self, form: Pulled, name: str, mine: Tensors, mean: Tensors, count: int) -> Tensors:
        """Return θ + (1 - λ) K/(K - 1) (m - θ) of this site's own θ, m being the mean of all K."""
        floats = {other: tensor for other, tensor in mine.items() if tensor.is_floating_point()}
        check_forms({name: mean}, {name: floats})
        step = (1 - form.pull) * count / (count - 1)
        pulled = {
            other: torch.lerp(tensor.double().cpu(), mean[other].double(), step).to(tensor.dtype)
            for other, tensor in floats.items()
        }
        return {**mine, **pulled}

    # ------------------------------------------------------------------ what is known
    def _sealed(self, seat: _Seat, phase: Phase, number: int | None) -> dict[str, SealedGroup]:
        return seat.blocks.of(phase, self._layout, self.memory.rows.get(number or 0, {}))

    def _blocks(self, seat: _Seat, number: int) -> list[SealedBlock]:
        sealed = self._sealed(seat, self.plan.course.phase_of(number), number)
        return [block for own in sealed.values() for block in own.blocks.values()]

    def _publish(self, number: int, told: ServerLetter) -> None:
        """Remember the rows that the server publishes for a round, before anything of it is sealed."""
        rows, sites = told.rows, self.plan.participation.sites
        forms = self.plan.sealed_forms(self.plan.course.phase_of(number))
        if rows.keys() != {name for name, form in forms.items() if isinstance(form, Rows)}:
            raise Refused("the server: the rows of weights that it tells are not those of the groups that are mixed")
        for own in rows.values():
            if set(own) != set(sites) or any(len(row) != len(sites) or sum(row) <= 0 for row in own.values()):
                raise Refused("the server: the rows of weights that it tells are not one for each site")
        kept = self.memory.rows
        if kept.get(number, rows) != rows:
            raise Refused(f"the server: it changes the weights of round {number}")
        for group, matrix in rows.items():
            self._check_rows(number, group, forms[group], matrix)
        self.memory.rows = dict(sorted({**kept, number: rows}.items())[-KEPT_ROWS:])

    def _check_rows(self, number: int, group: str, form: Form, matrix: Matrix) -> None:
        """Raise Refused where the server tells other weights than this site made of what all told each other last; one
        that made none sends nothing that counts for another."""
        course, named = self.plan.course, self.plan.participation.sites
        told = ((before, self._told_in[course.place_of(before)].get(group)) for before in range(number - 1, 0, -1))
        last, name = next(((before, name) for before, name in told if name), (0, ""))
        if name in self.plan.transport.sealing_clear:
            return  # the server alone makes weights of it
        own = self.memory.compared.get(group)
        if last and (own is None or own.round < last):
            place = named.index(self.site)
            if any(row[place] for site, row in matrix.items() if site != self.site):
                raise Refused(
                    f"this hospital made no weights of {group} of its own in round {last}, so it sends nothing that "
                    "counts for others until all compare again"
                )
            return
        assert isinstance(form, Rows)
        known = own.weights if own and last else form.weights
        for site, row in zip(named, known, strict=True):
            if max(abs(a - b) for a, b in zip(row, matrix[site], strict=True)) > ALIKE:
                raise Refused(
                    f"the server: the weights of {group} that it tells for round {number} are not those that this site "
                    f"made of {f'what the hospitals told each other in round {last}' if last else 'the plan'}"
                )

    @cached_property
    def _told_in(self) -> list[dict[str, str]]:
        """By phase: the group whose rows follow from what sites tell in it, and the name of what they tell."""
        plan, sites = self.plan, self.plan.participation.sites
        every = [forms_of(phase, sites, plan.task, plan.training, plan.seed) for phase in plan.course.phases]
        return [{form.rows: name for name, form in own.items() if isinstance(form, Exchanged)} for own in every]

    # ------------------------------------------------------------------ what is kept
    def _newest(self, told: ServerLetter) -> _Seat:
        current = needed(SERVER, told.current)
        if current != self.memory.agreement:
            raise Refused(f"the server: it goes back to agreement {current}; the last is {self.memory.agreement}")
        return self._seat(current)

    def _seat(self, number: int) -> _Seat:
        if number not in self._seats:
            self._seats[number] = self._read(number)
        return self._seats[number]

    def _path(self, number: int) -> Path:
        return self.folder / paths.SEALING_FILES.replace("*", str(number))

    def _read(self, number: int) -> _Seat:
        path = self._path(number)
        if not path.exists():
            raise Refused("this site has lost its keys of this study; start it again, with fresh keys")
        with reading("this site's secrets of the study"):
            kept = json.loads(path.read_bytes())
            agreement = KeyAgreement.read("this site", kept["agreement"])
            terms = terms_of(self.plan, kept["study"], agreement.sites)
            member = Member.load(terms, self.signer, json.dumps(kept["member"]).encode(), self.memory)
        return _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))

    def _remember(self) -> None:
        write_bytes(self.folder / paths.SUMS, self.memory.model_dump_json().encode())

    def _keep(self, seat: _Seat) -> None:
        """Write what the site must keep, all of it secret; before anything that rests on it leaves."""
        self._remember()
        agreement, member = seat.agreement, seat.member
        kept = {"agreement": agreement.facts(), "study": member.terms.study, "member": json.loads(member.saved())}
        write_bytes(self._path(agreement.number), json.dumps(kept).encode())
