"""Run a site's side of secure aggregation: agree on keys, mask numbers, and move tensors towards received means."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medsilo.core.errors import Refused, reading
from medsilo.core.files import load_tensors, save_tensors, write_bytes
from medsilo.core.tensors import Groups, Modules, Tensors
from medsilo.exchange.checks import check_forms, check_numbers
from medsilo.federation.site_context import UpdateCodec
from medsilo.mixing.mean_forms import MeanForm, PullForm
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Request
from medsilo.schedule.phase import Phase, views
from medsilo_secagg.identity import Signer
from medsilo_secagg.letters import KeyShares, needed
from medsilo_secagg.member import SERVER_SAYS, Member
from medsilo_secagg.sealed_rounds import (
    WORDS,
    Blocks,
    KeyAgreement,
    MaskedMessage,
    SealedGroup,
    ServerMessage,
    SiteMessage,
    terms_of,
)
from medsilo_secagg.terms import SealedBlock


@dataclass
class _Seat:
    """A site's keys under one key agreement, and the blocks that the site masks."""

    agreement: KeyAgreement
    member: Member
    blocks: Blocks


class SealedSite(UpdateCodec):
    """A site in a study with secure aggregation.

    An answer leaves the site only after the state on which it depends was written to the disk.
    """

    keeps_at_home = True

    def __init__(self, plan: Plan, site: str, folder: Path, signer: Signer) -> None:
        self.plan, self.site, self.folder, self.signer = plan, site, folder, signer
        self._sitting: _Seat | None = None
        # received groups of tensors are stored, because the site may send only the difference from a received group
        self._arrived: Groups = {}
        self._layout = plan.layout()
        self._ranges = {
            group.name: group.ranges(self._layout, plan.task) for phase in plan.course.phases for group in phase.sent
        }

    # ------------------------------------------------------------------ messages
    def letter(self, request: Request) -> dict[str, Any]:
        told = ServerMessage.read(SERVER_SAYS, request.secagg)
        if request.task == "agree":
            seat = self._agreeing(needed(SERVER_SAYS, told.agreement), request.study)
            if told.assembly:
                seat.member.meet(told.assembly)
                answer = SiteMessage()
            else:
                answer = SiteMessage(introduction=seat.member.introduction())
        else:
            seat = self._current(told)
            if request.task == "offer":
                opened = seat.member.opened.get(request.round, ())
                answer = SiteMessage(offer=seat.member.offer(request.round), opened=opened)
            else:
                answer = SiteMessage(reveal=seat.member.unmask(needed(SERVER_SAYS, told.request)))
        self._keep(seat)
        return answer.facts()

    def _agreeing(self, agreement: KeyAgreement, study: str) -> _Seat:
        """Return this site's keys for a key agreement; create new keys for a new agreement."""
        seat = self._seat()
        if seat and seat.agreement == agreement:
            return seat
        terms = terms_of(self.plan, study, agreement.sites)
        member = Member.begin(terms, self.site, self.signer, seat.member.opened if seat else None)
        return _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))

    # ------------------------------------------------------------------ a round
    def check(self, request: Request, phase: Phase, modules: Modules) -> None:
        """Raise Refused if a number that the site would send is out of range. The numbers are checked before any state
        is saved.
        """
        groups = views(phase.sent, modules)
        check_numbers(groups, phase.sent, self._ranges, {})
        seat = self._current(ServerMessage.read(SERVER_SAYS, request.secagg))
        for name, own in seat.blocks.of(phase, self._layout).items():
            for tensor in groups[name].keys() & set(own.block.flat.names):
                own.block.fixed.check(f"{name}/{tensor}", groups[name][tensor])

    def seal(self, request: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Mask the groups of tensors that the site sends, except for groups without secure aggregation."""
        told = ServerMessage.read(SERVER_SAYS, request.secagg)
        seat = self._current(told)
        sealed = seat.blocks.of(phase, self._layout)
        if not sealed:
            return groups
        blocks = [own.block for own in sealed.values()]
        entered = {name: self._entered(own, groups[name]) for name, own in sealed.items()}
        weights = {name: own.weight(samples) for name, own in sealed.items()}
        words = self._sealed_once(seat, needed(SERVER_SAYS, told.deal), blocks, entered, weights)
        sent = {
            name: {**{key: groups[name][key] for key in own.beside}, WORDS: words[name]} for name, own in sealed.items()
        }
        return {**groups, **sent}

    def _sealed_once(
        self, seat: _Seat, key_shares: KeyShares, blocks: list[SealedBlock], groups: Groups, weights: dict[str, int]
    ) -> Tensors:
        """Mask this site's numbers in a round. If the numbers were already masked, return the saved message.

        Two messages with the same masks would disclose the difference between the numbers in the messages.
        """
        path = self.folder / paths.SEALED
        if seat.member.has_sealed(key_shares) and path.exists():
            with reading("what this site sealed"):
                return load_tensors(path)[0]
        words = seat.member.seal(key_shares, blocks, groups, weights)
        save_tensors(path, words, {})
        self._keep(seat)
        return words

    def _entered(self, group: SealedGroup, tensors: Tensors) -> dict[str, torch.Tensor]:
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if isinstance(group.form, MeanForm) and group.form.enter:
            floats = dict(group.form.enter(floats, self._arrived[group.name]))
        return floats

    # ------------------------------------------------------------------ received groups
    def open(self, request: Request, groups: Groups, modules: Modules) -> Groups:
        """Replace each received mean of a group by this site's own tensors, which are first moved towards the mean."""
        means = ServerMessage.read(SERVER_SAYS, request.secagg).means
        if not means.keys() <= groups.keys() or any(mean.round > request.round for mean in means.values()):
            raise Refused("the server: it names means that it does not send, or that belong to a later round")
        self._arrived = {
            name: self._pulled(name, means[name], group, modules) if name in means else group
            for name, group in groups.items()
        }
        return self._arrived

    @torch.no_grad()
    def _pulled(self, name: str, masked: MaskedMessage, mean: Tensors, modules: Modules) -> Tensors:
        """Return θ + (1 - λ) K/(K - 1) (m - θ), where θ are this site's tensors and m is the mean of all K sites."""
        phase = self.plan.course.phase_of(masked.round)
        form = self.plan.sealed_forms(phase).get(name)
        if not isinstance(form, PullForm):
            raise Refused("the server: it sends a mean that this site does not use")
        mine = views(phase.sent, modules)[name]
        floats = {other: tensor for other, tensor in mine.items() if tensor.is_floating_point()}
        check_forms({name: mean}, {name: floats})
        step = (1 - form.pull) * masked.sites / (masked.sites - 1)
        pulled = {
            other: torch.lerp(tensor.double().cpu(), mean[other].double(), step).to(tensor.dtype)
            for other, tensor in floats.items()
        }
        return {**mine, **pulled}

    # ------------------------------------------------------------------ saved state
    def _current(self, message: ServerMessage) -> _Seat:
        seat = self._seat()
        if seat is None or seat.agreement.mark != message.current:
            raise Refused("this site lacks the keys of the server's round; stop the study and resume it")
        return seat

    def _seat(self) -> _Seat | None:
        path = self.folder / paths.SEALING
        if self._sitting is None and path.exists():
            with reading("this site's secrets of the study"):
                kept: Mapping[str, Any] = json.loads(path.read_bytes())
                agreement = KeyAgreement.read("this site", kept["agreement"])
                terms = terms_of(self.plan, kept["study"], agreement.sites)
                member = Member.load(terms, self.signer, json.dumps(kept["member"]).encode())
            self._sitting = _Seat(agreement, member, Blocks(self.plan, terms, agreement.heaviest))
        return self._sitting

    def _keep(self, seat: _Seat) -> None:
        """Save the site's secret state, before an answer that depends on this state leaves the site."""
        self._sitting, member = seat, seat.member
        kept = {
            "agreement": seat.agreement.facts(),
            "study": member.terms.study,
            "member": json.loads(member.saved()),
        }
        write_bytes(self.folder / paths.SEALING, json.dumps(kept).encode())
