"""Sums at one site of a group: the server asks for them, and that site makes them of what the others hold ready."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.tensors import Groups
from medsilo.core.text import plain
from medsilo.course.group import views
from medsilo.course.phase import Phase
from medsilo.federation.accepting import check_forms, check_numbers, check_package, check_packages
from medsilo.federation.asking import Asking, Exchange, Missing
from medsilo.federation.server_state import ServerState
from medsilo.mixing.folding import PartMean
from medsilo.plan import Plan
from medsilo.runs.messages import LONGEST_WARNING, Added, HeldTensors, Parcel, Request, ToAdd, check_values

# Brings a site's tensors, of which the form is known; raises Refused, or another MedsiloError.
Fetch = Callable[[str, HeldTensors, Groups], Groups]
# Leaves the tensors that these sites answer with where they are, from now on.
Leave = Callable[[Collection[str]], None]


def weights_of(plan: Plan, phase: Phase, samples: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return the weight of each site in the mean of every group that sites send in a phase."""
    return {
        group: {site: float(count) if form.weighted else 1.0 for site, count in samples.items()}
        for group, form in plan.means_of(phase).items()
        if form
    }


class GroupAdder:
    """A site's side: it adds up what the sites of its group send."""

    def __init__(self, plan: Plan, site: str, study: str) -> None:
        self.plan, self.site, self.study = plan, site, study
        self.members = {own for own in plan.participation.sites if plan.participation.adder_of(own) == site}
        with torch.device("meta"):
            self.layout = plan.build_networks()

    def answer(self, asked: Request, fetch: Fetch, stop: Callable[[], None]) -> Parcel:
        """Fetch one site's tensors after the other, check them as the server does, and return their mean."""
        if not asked.adding or not asked.adding.keys() <= self.members:
            raise Refused("it is asked to add up what sites of another group send")
        if asked.study != self.study or not 1 <= asked.round <= self.plan.rounds:
            raise Refused("it is asked to add up what is sent in another study, or in a round that this one lacks")
        phase = self.plan.course.phase_of(asked.round)
        pack = self.plan.transport.packed
        expected = {
            group: {name: pack(tensor) for name, tensor in tensors.items()}
            for group, tensors in views(phase.sent, self.layout).items()
        }
        ranges = {group.name: group.ranges(self.layout, self.plan.task) for group in phase.sent}
        weights = weights_of(self.plan, phase, {site: own.samples for site, own in asked.adding.items()})
        means = {group: PartMean(like) for group, like in expected.items()}
        sites, refused, lost = list[str](), dict[str, str](), dict[str, str]()
        for site, own in sorted(asked.adding.items()):
            stop()
            try:
                own.held.check(expected)
                groups = fetch(site, own.held, expected)
                check_forms(groups, expected)
                check_numbers(groups, phase.sent, ranges, {})
            except Refused as error:
                refused[site] = plain(str(error), LONGEST_WARNING)
                continue
            except MedsiloError as error:
                lost[site] = plain(str(error), LONGEST_WARNING)
                continue
            for group, mean in means.items():
                mean.add(groups[group], weights[group][site])
            sites.append(site)
        if not sites:
            raise Refused(f"it could add up nothing: {'; '.join([*refused.values(), *lost.values()][:3])}")
        told = Added(
            task="sum",
            round=asked.round,
            study=self.study,
            package=self.plan.code,
            sites=sites,
            samples=sum(asked.adding[site].samples for site in sites),
            refused=refused,
            lost=lost,
        )
        return Parcel({group: mean.result() for group, mean in means.items()}, told.model_dump(mode="json"))


class GroupSums:
    """The server's side: who adds up what, and what has been left at the sites in a round."""

    def __init__(
        self,
        plan: Plan,
        study: str,
        state: ServerState,
        asking: Asking,
        request: Callable[..., Request],
        leave: Leave,
    ) -> None:
        """request: makes one from the task, the round and what is its own."""
        self.plan, self.study, self.state, self.asking = plan, study, state, asking
        self.request, self.leave = request, leave
        self.grouped = [site for site in state.sites if plan.participation.adder_of(site)]
        self.adding: dict[str, dict[str, ToAdd]] = {}  # by the site that adds up, and by site

    def begin(self, training: bool) -> None:
        """Begin to ask all sites, for a round in which they train or for something else."""
        self.adding = {}
        self.leave(self.grouped if training else [])

    def hold(self, site: str, held: HeldTensors, samples: int, expected: Groups) -> int:
        """Note what a site holds ready; returns its bytes, as its names say. Raises Refused."""
        held.check(expected)
        adder = self.plan.participation.adder_of(site)
        assert adder
        self.adding.setdefault(adder, {})[site] = ToAdd(samples=samples, held=held)
        return sum(tensor.nbytes for layout in expected.values() for tensor in layout.values())

    def collect(self, exchange: Exchange, number: int, phase: Phase) -> None:
        """Ask for the sums of a round; whoever is in none of them becomes missing in the round's exchange."""
        self.leave([])
        lost = {site: gone for site, gone in exchange.missing.items() if site in self.adding and gone.kind == "lost"}
        sums = Exchange(sorted(self.adding.keys() - lost))  # who is silent is not waited for a second time
        if sums.asked:
            self._ask(sums, exchange, number, phase)
        for adder, gone in {**lost, **sums.missing}.items():
            for site in self.adding[adder]:
                reason = plain(f"{adder}, which adds up its group, gave no mean: {gone.reason}")
                _without(exchange, site, Missing(gone.kind, reason))

    def _ask(self, sums: Exchange, exchange: Exchange, number: int, phase: Phase) -> None:
        like = self.state.expected(phase)
        expected = {group: PartMean.layout_of(tensors) for group, tensors in like.items()}
        came: set[str] = set()

        def outgoing(adder: str) -> Parcel:
            return self.request("sum", number, adding=self.adding[adder]).parcel({})

        def receive(adder: str, reply: Parcel) -> None:
            told = self._read(adder, reply, number, came)
            check_forms(reply.groups, expected)
            weights = weights_of(self.plan, phase, {site: self.adding[adder][site].samples for site in told.sites})
            self.state.take_part(self.plan.participation.group_of[adder], reply.groups, weights, phase, like)
            came.add(adder)
            for site, reason in {**told.refused, **told.lost}.items():
                words = plain(f"{adder}, which adds up its group, says: {reason}")
                _without(exchange, site, Missing("refused" if site in told.refused else "lost", words))

        self.asking.turns.begin("sum", number, sums.asked)
        self.asking.ask(sums, outgoing, receive, lambda adder, gone: None)

    def _read(self, adder: str, reply: Parcel, number: int, came: Collection[str]) -> Added:
        if adder in came:
            raise Refused(f"{adder} answered twice; the first answer counts")
        facts: dict[str, Any] = reply.facts
        check_values(
            {"facts": facts, "metrics": reply.metrics, "samples": reply.samples}, 2 * len(self.state.sites) + 10_000
        )
        if facts.get("study") != self.study or facts.get("task") != "sum" or facts.get("round") != number:
            raise Refused(f"answers something else, not the sum {number} of this study")
        check_package(facts.get("package"), self.plan.code)
        check_packages(facts.get("package"), self.plan.code)
        told = Added.read(facts)
        told.check(self.adding[adder])
        return told


def _without(exchange: Exchange, site: str, missing: Missing) -> None:
    """Turn a site that answered into one that is missing."""
    exchange.replies.pop(site, None)
    exchange.missing[site] = missing
