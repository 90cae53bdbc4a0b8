"""A site's side of a sealed study: it agrees on keys, seals what it sends, and opens what it is given."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medsilo.core.errors import Refused, reading
from medsilo.core.files import load_tensors, save_tensors, write_bytes
from medsilo.core.tensors import Groups, Modules, Tensors
from medsilo.course.group import views
from medsilo.course.phase import Phase
from medsilo.federation.accepting import check_numbers, same_layout
from medsilo.federation.sealed.what import (
    ALIKE,
    COUNT,
    WORDS,
    Among,
    Blocks,
    Current,
    Held,
    KeyAgreement,
    Matrix,
    OwnWeights,
    Published,
    SealedGroup,
    bound_groups,
    given_of,
    mark_of_group,
    terms_of,
)
from medsilo.mixing.forms import Exchanged, Pulled, Rows, Summed
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request
from medsilo.sealing.fixed_point import Flat
from medsilo.sealing.keeping import SumMemory
from medsilo.sealing.letters import (
    Assembly,
    Deal,
    SumClaim,
    Survivors,
    UnmaskingRequest,
)
from medsilo.sealing.member import Member
from medsilo.sealing.signing import Signer
from medsilo.sealing.terms import SERVER as READER
from medsilo.sealing.terms import SealedBlock

SERVER = "the server"
KEPT_ROWS = 4  # rounds whose published rows a site keeps
Letters = dict[str, Any]
Rowed = Mapping[str, Matrix]  # group → the rows of its mixture


@dataclass
class _Seat:
    """This site in one agreement: its keys."""

    agreement: KeyAgreement
    member: Member
    blocks: Blocks

    def content(self) -> bytes:
        """Return what the site must keep of it, all of it secret."""
        kept = {
            "agreement": self.agreement.facts(),
            "study": self.member.terms.study,
            "member": json.loads(self.member.saved()),
        }
        return json.dumps(kept).encode()


class _Memory:
    """The memory of a site of a study, whatever keys it has: a server that begins anew, or counts its agreements in
    another way, finds the same hospital."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept: dict[str, Any] = {"sums": {}, "rows": {}, "compared": {}, "opened": {}, "given": {}}
        if path.exists():
            with reading("this site's memory of sealed sums"):
                kept = json.loads(path.read_bytes())
        with reading("this site's memory of sealed sums"):
            self.sums = SumMemory.read(kept["sums"])
            self.rows: dict[int, Rowed] = {  # by round: those that were published
                int(number): Published.read("this site", {"rows": own}).rows for number, own in kept["rows"].items()
            }
            # by the group whose rows they are: the last that this site computed
            self.compared = {group: OwnWeights.read("this site", own) for group, own in kept["compared"].items()}
            # group → the last round whose result this site has opened
            self.opened = {str(group): int(number) for group, number in kept["opened"].items()}
            # group → the mark of what came of it in clear last
            self.given = {str(group): str(mark) for group, mark in kept["given"].items()}

    def write(self) -> None:
        """Keep it; before anything that rests on it leaves."""
        kept = {
            "sums": self.sums.facts(),
            "rows": {str(number): own for number, own in self.rows.items()},
            "compared": {group: own.facts() for group, own in self.compared.items()},
            "opened": self.opened,
            "given": self.given,
        }
        write_bytes(self.path, json.dumps(kept).encode())


class SealedSite:
    """One site of a sealed study. What it keeps is on its disk before anything that rests on it leaves."""

    def __init__(self, plan: Plan, site: str, folder: Path, signer: Signer) -> None:
        self.plan, self.site, self.folder, self.signer = plan, site, folder, signer
        self._seats: dict[int, _Seat] = {}
        self.memory = _Memory(folder / paths.SUMS)
        self._arrived: Groups = {}  # of groups that are sent as the way from them
        with torch.device("meta"):
            self._layout = plan.build_networks()
        self._ranges = {
            group.name: group.ranges(self._layout, plan.task) for phase in plan.course.phases for group in phase.sent
        }

    # ------------------------------------------------------------------ letters
    def answer(self, asked: Request, groups: Groups) -> Letters:
        """Do what a letter asks; returns the answer's."""
        if asked.task == "compare":
            return self._compare(asked, groups)
        work = {"agree": self._agree, "offer": self._offer, "confirm": self._confirm, "unmask": self._unmask}
        return work[asked.task](asked)

    def _agree(self, asked: Request) -> Letters:
        agreement = KeyAgreement.read(SERVER, asked.sealing.get("agreement"))
        letters = asked.sealing
        if "assembly" in letters:
            seat = self._seat(agreement.number)
            if seat.agreement != agreement:
                raise Refused("the server: it agrees on other sites than a moment before")
            seat.member.meet(Assembly.read(SERVER, letters["assembly"]))
            answer: Letters = {}
        else:
            seat = self._waiting(agreement) or self._begin(agreement, asked.study)
            answer = {"introduction": seat.member.introduction().facts(), "unmasked": seat.member.unmasked().facts()}
        self._keep(seat)
        return answer

    def _waiting(self, agreement: KeyAgreement) -> _Seat | None:
        """Return this site's seat if it is asked again for keys that have not met others yet."""
        if not self._path(agreement.number).exists():
            return None
        seat = self._seat(agreement.number)
        return seat if seat.agreement == agreement and not seat.member.has_met else None

    def _begin(self, agreement: KeyAgreement, study: str) -> _Seat:
        if self.site not in agreement.sites or not set(agreement.sites) <= set(self.plan.participation.sites):
            raise Refused("the server: it names other sites than the plan does")
        terms = terms_of(self.plan, study, agreement.sites)
        member = Member.begin(terms, self.site, self.signer, self.memory.sums)
        seat = self._seats[agreement.number] = _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))
        return seat

    def _offer(self, asked: Request) -> Letters:
        seat = self._newest(asked)
        self._publish(asked)
        offer = seat.member.offer(asked.round)
        self._keep(seat)
        return {"offer": offer.facts()}

    def _confirm(self, asked: Request) -> Letters:
        seat = self._newest(asked)
        survivors = Survivors.read(SERVER, asked.sealing.get("survivors"))
        confirmation = seat.member.confirm(survivors, self._blocks(seat, asked.round))
        self._keep(seat)
        return {"confirmation": confirmation.facts()}

    def _unmask(self, asked: Request) -> Letters:
        seat = self._newest(asked)
        request = UnmaskingRequest.read(SERVER, asked.sealing.get("request"))
        reveal = seat.member.unmask(request, self._blocks(seat, asked.round))
        self._keep(seat)
        return {"reveal": reveal.facts()}

    def _compare(self, asked: Request, groups: Groups) -> Letters:
        """Open what the hospitals told each other, and make of it what all of them do."""
        seat = self._newest(asked)
        sealed = self._sealed(seat, self.plan.course.phase_of(asked.round), asked.round)
        among = Among.read(SERVER, {"among": asked.sealing.get("among")}).among
        named = self.plan.participation.sites
        if sorted(named) != list(among):
            raise Refused("the server: it names other sites than the plan does")
        name = next(iter(groups), "")
        own = sealed.get(name)
        if own is None or not isinstance(own.form, Exchanged):
            raise Refused("the server: it hands out what hospitals do not tell each other")
        rows = own.form.compare(among, self._told(seat, asked.round, own, groups[name]))
        comparison = OwnWeights(round=asked.round, sites=among, weights=tuple(map(tuple, rows.tolist())))
        self.memory.compared[own.form.rows] = comparison
        self._keep(seat)
        return {"comparison": comparison.facts()}

    def _told(self, seat: _Seat, number: int, own: SealedGroup, boxes: Tensors) -> dict[str, Tensors]:
        """Return what each hospital told, checked as the server checks it in clear."""
        if self.site not in boxes or len(boxes) < seat.member.terms.least:
            raise Refused(
                f"the server: it hands out what {len(boxes)} hospitals told; it takes {seat.member.terms.least}, and "
                "this one among them"
            )
        flat, found = Flat.like(own.like), {}
        for site, box in boxes.items():
            tensors = seat.member.told(site, number, own.name, flat, box)
            try:
                check_numbers({own.name: tensors}, [own.group], self._ranges, {})
            except Refused as error:
                raise Refused(f"{site}: {error}") from error
            found[site] = tensors
        return found

    # ------------------------------------------------------------------ a round
    def check(self, asked: Request, phase: Phase, modules: Modules) -> None:
        """Raise Refused, before anything is kept or sealed, where numbers that would be sent can't be."""
        groups = views(phase.sent, modules)
        check_numbers(groups, phase.sent, self._ranges, {})
        for name, own in self._sealed(self._newest(asked), phase, None).items():
            for block in list(own.blocks.values())[:1]:  # all of a group hold the same numbers
                for tensor in groups[name].keys() & set(block.flat.names):
                    block.fixed.check(f"{name}/{tensor}", groups[name][tensor])

    def seal(self, asked: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Return what is sent; `groups` in clear where they are not sealed."""
        seat = self._newest(asked)
        self._publish(asked)
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
            deal, given = Deal.read(SERVER, asked.sealing.get("deal")), given_of(self.plan, phase, self.memory.given)
            words = self._sealed_once(seat, deal, blocks, tensors, weights, given)
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
        return floats | ({COUNT: torch.ones((), dtype=torch.float64)} if own.counts else {})

    # ------------------------------------------------------------------ what is given
    def open(self, asked: Request, groups: Groups, modules: Modules) -> Groups:
        """Return what came with its sealed groups opened."""
        held = {name: Held.read(SERVER, told) for name, told in asked.sealing.get("held", {}).items()}
        if not held.keys() <= groups.keys():
            raise Refused("the server: it tells of sealed groups that it does not send")
        if asked.task == "round":
            self._note_given(asked.round, {name: own for name, own in groups.items() if name not in held})
        if held:
            self._note_opened(asked, held)
        opened = {
            name: self._opened(name, held[name], own, modules) if name in held else self._counted(name, own, modules)
            for name, own in groups.items()
        }
        self._arrived = opened
        return opened

    def _counted(self, name: str, given: Tensors, modules: Modules) -> Tensors:
        """Return what came in clear, with this site's own counters where they would tell of its cases."""
        group = next((group for phase in self.plan.course.phases for group in phase.sent if group.name == name), None)
        if group is None or not self.plan.transport.sealing_counts:
            return given
        mine = group.of(modules)
        return {key: given[key] if given[key].is_floating_point() else mine.get(key, given[key]) for key in given}

    def _note_given(self, number: int, groups: Groups) -> None:
        """Remember what came in clear, which this site's masks depend on; raises Refused where it must be the plan's
        own networks and is not."""
        phase = self.plan.course.phase_of(number)
        begins = [name for name in groups if self._begins(name, number)]
        own = views(phase.given, self.plan.build_networks()) if begins else {}
        for name in begins:
            if mark_of_group(groups[name]) != mark_of_group(own[name]):
                raise Refused(
                    f"the server: in round {number} it sends other weights of {name} than the plan begins with"
                )
        self.memory.given |= {
            name: mark_of_group(groups[name]) for name in bound_groups(self.plan, phase) if name in groups
        }
        self.memory.write()

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
            if told.round < (least := min(self.memory.opened.get(name, 0), before)):
                raise Refused(
                    f"the server: it replays {name} of round {told.round} in round {asked.round}, and that of round "
                    f"{least} must be there"
                )
        self.memory.opened |= {name: told.round for name, told in held.items()}
        self.memory.write()

    def _opened(self, name: str, held: Held, given: Tensors, modules: Modules) -> Tensors:
        seat = self._seat(held.agreement)
        own = self._sealed(seat, self.plan.course.phase_of(held.round), held.round).get(name)
        if own is None or not own.blocks:
            raise Refused("the server: it sends a sealed group that is none of the plan's")
        key = next((key for key, block in own.blocks.items() if block.reader in (self.site, READER)), WORDS)
        block = own.blocks[key]
        beside = {other: tensor for other, tensor in given.items() if other != WORDS}
        same_layout({name: beside}, {name: own.beside})
        mine = views([own.group], modules)[name]
        words = {block.name: given[WORDS]} if WORDS in given else {}
        values, count = self._open_sum(seat, held, block, words)
        values = own.divided(values)
        if isinstance(own.form, Pulled):
            values = self._pulled(own.form, mine, values, count)
        return {other: values.get(other, beside.get(other, mine[other])) for other in own.like}

    def _open_sum(self, seat: _Seat, held: Held, block: SealedBlock, words: Tensors) -> tuple[Tensors, int]:
        claim = SumClaim.read(SERVER, held.claim)
        if claim.round != held.round:
            raise Refused(f"the server: it sends the sum of round {claim.round} as that of round {held.round}")
        divisors = {} if block.weights else {block.name: held.divisor}
        opened = seat.member.open_sums(claim, [block], words, divisors)
        return opened[block.name], len(claim.sites)

    @torch.no_grad()
    def _pulled(self, form: Pulled, mine: Tensors, mean: Tensors, count: int) -> Tensors:
        """Return θ + (1 - λ) K/(K - 1) (m - θ) of this site's own θ, m being the mean of all K."""
        step = (1 - form.pull) * count / (count - 1)
        return {
            name: torch.lerp(mine[name].double().cpu(), value.double(), step).to(mine[name].dtype)
            for name, value in mean.items()
        }

    # ------------------------------------------------------------------ what is known
    def _sealed(self, seat: _Seat, phase: Phase, number: int | None) -> dict[str, SealedGroup]:
        return seat.blocks.of(phase, self._layout, self.memory.rows.get(number or 0, {}))

    def _blocks(self, seat: _Seat, number: int) -> list[SealedBlock]:
        sealed = self._sealed(seat, self.plan.course.phase_of(number), number)
        return [block for own in sealed.values() for block in own.blocks.values()]

    def _publish(self, asked: Request) -> None:
        """Remember the rows that the server publishes for a round, before anything of it is sealed."""
        if "rows" not in asked.sealing:
            return
        rows = Published.read(SERVER, {"rows": asked.sealing["rows"]}).rows
        sites = self.plan.participation.sites
        for own in rows.values():
            if set(own) != set(sites) or any(len(row) != len(sites) or sum(row) <= 0 for row in own.values()):
                raise Refused("the server: the rows of weights that it tells are not one for each site")
        kept = self.memory.rows
        if kept.get(asked.round, rows) != rows:
            raise Refused(f"the server: it changes the weights of round {asked.round}")
        for group, matrix in rows.items():
            self._check_compared(asked.round, group, matrix)
        self.memory.rows = dict(sorted({**kept, asked.round: rows}.items())[-KEPT_ROWS:])

    def _check_compared(self, number: int, group: str, matrix: Matrix) -> None:
        """Raise Refused where the server tells other weights than this site made of what all told each other last."""
        own = self.memory.compared.get(group)
        if own is None or any(self._compares(between) for between in range(own.round + 1, number)):
            return
        for site, row in zip(own.sites, own.weights, strict=True):
            if max(abs(a - b) for a, b in zip(row, matrix[site], strict=True)) > ALIKE:
                raise Refused(
                    f"the server: the weights of {group} that it tells for round {number} are not those that this site "
                    f"made of what the hospitals told each other in round {own.round}"
                )

    def _compares(self, number: int) -> bool:
        """Return whether hospitals tell each other something in a round."""
        forms = self.plan.sealed_forms(self.plan.course.phase_of(number))
        return any(isinstance(form, Exchanged) for form in forms.values())

    # ------------------------------------------------------------------ what is kept
    def _newest(self, asked: Request) -> _Seat:
        return self._seat(Current.read(SERVER, {"agreement": asked.sealing.get("current")}).agreement)

    def _seat(self, number: int) -> _Seat:
        if number not in self._seats:
            self._seats[number] = self._read(number)
        return self._seats[number]

    def _path(self, number: int) -> Path:
        return self.folder / paths.SEALING_FILES.replace("*", str(number))

    def _read(self, number: int) -> _Seat:
        path = self._path(number)
        if not path.exists():
            raise Refused("this site has lost its keys of this study; begin it anew, with fresh keys")
        with reading("this site's secrets of the study"):
            kept = json.loads(path.read_bytes())
            agreement = KeyAgreement.read("this site", kept["agreement"])
            terms = terms_of(self.plan, kept["study"], agreement.sites)
            member = Member.load(terms, self.signer, json.dumps(kept["member"]).encode(), self.memory.sums)
        return _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))

    def _keep(self, seat: _Seat) -> None:
        """Write what the site must keep; before anything that rests on it leaves."""
        self.memory.write()
        write_bytes(self._path(seat.agreement.number), seat.content())
