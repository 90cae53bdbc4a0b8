"""The server's state: the mixers of the phase, the best model so far, and checkpoints of both."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import isfinite
from typing import Any

from torch import Tensor

from medsilo.core import optional
from medsilo.core.errors import MedsiloError, ParticipationError
from medsilo.core.tensors import Groups, Tensors
from medsilo.federation.channel import Missing
from medsilo.federation.checks import check_numbers
from medsilo.federation.directions import RoundDirections
from medsilo.learning.seeds import seed_for
from medsilo.mixing.mixers import Aggregator, mixer_of
from medsilo.plan import Plan
from medsilo.runs.messages import Joined
from medsilo.runs.record import Record
from medsilo.schedule.phase import Group, Phase, ServerSide, views
from medsilo.tasks.objective import says_of


class Store:
    """What the aggregation keeps of groups beside their mixers: in clear nothing."""

    def find(self, group: str) -> Tensors | None:
        """Return what all sites are given of a group in place of what its mixer has; None: that."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what must outlive the process: tensors, and facts beside them."""
        return {}, {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


class ServerState:
    """Mixers by group, from phase to phase. Tensors that were given out or are being written are never changed."""

    def __init__(self, plan: Plan, record: Record, server: ServerSide, mixers: dict[str, Aggregator]) -> None:
        """mixers: those that `server` shows."""
        self.plan, self.course, self.record, self.server, self.mixers = plan, plan.course, record, server, mixers
        self.sites = server.sites
        self.layout = plan.layout()  # the server holds no model beside its mixers
        self.trained = frozenset(name for net in self.layout.values() for name, _ in net.named_parameters())
        buffers = frozenset(name for net in self.layout.values() for name, _ in net.named_buffers())
        self.shield = plan.aggregation.shield(buffers - self.trained)
        self.place: int | None = None  # of the phase that the mixers are of
        self.once: set[str] = set()  # groups of that phase that sites don't send back
        self.settled: dict[str, list[str]] = {}  # of those, the ones that each site has
        self.details: dict[str, Any] = {}
        self.store = Store()
        self.best: dict[str, Any] | None = None  # the best model's round, and its validation score at each site
        self.done = 0
        self.directions = RoundDirections({}, (), 0)
        self.suspect: tuple[str, float] | None = None  # whose update stood out most in the last round that was mixed
        self.writer = ThreadPoolExecutor(1)  # writes a round's checkpoint while the sites are at the next
        self.writing: Future[None] | None = None

    # ------------------------------------------------------------------ a round
    def expected(self, phase: Phase) -> Groups:
        """Return the layout of what sites send in a phase, as it travels."""
        return self._packed(views(phase.sent, self.layout))

    def _packed(self, groups: Groups) -> Groups:
        pack = self.plan.transport.packed
        return {group: {name: pack(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()}

    def open(self, number: int) -> None:
        """Begin a round."""
        place = self.course.place_of(number)
        phase = self.course.phases[place]
        if place != self.place:
            self.enter(phase)
            self.place = place
        hidden = self.plan.sealed_forms(phase)
        read = [group for group in phase.sent if group.goes_down and group.name not in hidden]
        kept = views(read, self.layout)
        if not self.shield and any(answer.absent for answer in self.server.joined.values()):
            optional.mix_by_structure(self.mixers, kept, self.layout["model"], self.server)
        for group in self.expected(phase):
            self.mixers[group].start(self.sites)
        seed, before = seed_for(self.plan.seed, "sketch", number), self.directions
        self.directions = RoundDirections(self._packed(kept), self.trained, seed, before)
        self.ranges = {group.name: group.ranges(self.layout, self.plan.task) for group in phase.sent}

    def enter(self, phase: Phase, fresh: bool = True) -> None:
        """Make the mixers of a phase that begins, in the order of its groups: they may depend on what came before.

        A group that travels for the first time gets its initial values, any other goes on with what it has.
        """
        travelling = views(phase.groups, self.layout).keys()
        initial: Groups = {}
        if not travelling <= set(self.mixers) or phase.before:
            networks = self.plan.build_networks()
            if fresh and phase.before:
                self.details |= phase.before(self.server, networks)
            initial = self._packed(views(phase.groups, networks))
        for group in phase.groups:
            if group.name in travelling:
                self._make(group, initial.get(group.name))
        for name in self.once - travelling:  # nobody will ask for these again
            self.mixers.pop(name, None)
        self.once = {group.name for group in phase.once if group.name in travelling}

    def _make(self, group: Group, initial: Mapping[str, Tensor] | None) -> None:
        mixer = mixer_of(group.mix, self.server)
        if self.shield and group.goes_up and not group.personal:
            mixer.defend(self.shield)
        if group.name in self.mixers:
            mixer.load_state(*self.mixers[group.name].state())
        else:
            mixer.start(self.sites, initial)
        self.mixers[group.name] = mixer

    def payload(self, site: str, phase: Phase) -> Groups:
        """Return what a site is given in a phase, without what it has already."""
        travelling, known = views(phase.given, self.layout), self.settled.get(site, [])
        stays = {group.name for group in phase.given if group.apply_locally and self.plan.sealed}
        given = (group for group in phase.given if group.name in travelling.keys() - stays - set(known))
        return {group.name: self._current(group, site) for group in given}

    def _current(self, group: Group, site: str) -> dict[str, Tensor]:
        """Return what a site gets of a group; one that does not train gets what all have in common."""
        if site in self.sites and (mean := self.store.find(group.name)):
            return dict(mean)
        if group.personal and group.fallback_group and site not in self.sites:
            return self.mixers[group.fallback_group].current(self.sites[0])
        return self.mixers[group.name].current(site if group.personal else self.sites[0])

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        """Take what a site sends, whose form was checked; raises Refused where its numbers can't be."""
        personal = {group.name: group.personal for group in phase.sent}

        def given(group: str) -> dict[str, Tensor]:
            return self.mixers[group].current(site if personal[group] else self.sites[0])

        directions = self.directions.measure(groups, given)
        finite = {group: self.directions.names[group] for group, own in directions.items() if isfinite(own.norm)}
        check_numbers(groups, phase.sent, self.ranges, finite)
        self.directions.check(directions)
        for group in phase.sent:  # in the order in which they are declared
            if group.name in groups:
                self.mixers[group.name].add(site, groups[group.name], samples)
        self.directions.note(site, directions)

    def shares(self, phase: Phase) -> Mapping[str, float]:
        """Return how much each site counted in the round that ended, in the first group that is a mean."""
        found = (self.mixers[group.name].shares for group in phase.sent if group.name in self.mixers)
        return next((shares for shares in found if shares), {})

    def mark_synced(self, site: str) -> None:
        """Remember that a site has what is given once."""
        self.settled[site] = sorted(self.once)

    def mark_lost(self, site: str) -> None:
        """Give a site everything again that is given once."""
        self.settled.pop(site, None)

    def finish(self, number: int) -> None:
        """End a round: groups are merged in the order in which they are declared."""
        expected = self.expected(self.course.phase_of(number))
        for group in expected:
            self.mixers[group].finish()
        self.done, self.suspect = number, self.directions.farthest()

    # ------------------------------------------------------------------ the best model
    def consider_best(self, scores: Mapping[str, float | None], rounds: int) -> None:
        """Keep the model after so many rounds when its mean validation score is strictly greater than the best so far.

        Of equal scores that hospitals rounded the later is kept: the first may be of a model that had not learned.
        The mean is over the sites that scored both, so that a site's absence makes no model look better. All structures
        count alike in it. With a score that could not be computed, the model is not considered.
        """
        known = {site: score for site, score in scores.items() if score is not None}
        if not known or len(known) < len(scores) or not self.course.used_as_scored(rounds):
            return
        if not self.course.has_travelled(rounds):
            return
        if self.best is not None:
            both = known.keys() & self.best["scores"].keys()
            joined = self.server.joined
            says = says_of(self.plan.task.goal, {site: joined[site].absent if site in joined else () for site in both})
            now, before = (sum(says[site] * own[site] for site in both) for own in (known, self.best["scores"]))
            rounded = any(joined[site].steps.get("validation") for site in both if site in joined)
            if now < before or (now == before and not rounded):
                return
        self.record.keep_as_best(rounds)
        self.best = {"round": rounds, "scores": known}

    def go_back_to(self, rounds: int) -> None:
        """Hold the model of the round that was kept as the best."""
        self._take_over(*self.record.load_best(rounds), self.expected(self.course.last))

    def save_common(self, file: str, rounds: int) -> None:
        """Write the model that all sites share for the lead."""
        networks, last = self.plan.build_networks(), self.course.last
        given = views(last.given, networks)
        for group, tensors in given.items():
            values = self.mixers[group].current(self.sites[0])
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        for own in last.given:
            own.arrived(networks, True)
        algorithm = self.plan.algorithm
        assert algorithm.outcome.common is not None
        facts = {"round": rounds, "method": algorithm.name, "plan_hash": self.plan.hash}
        self.record.save_global(file, algorithm.whole(networks, algorithm.outcome.common).state_dict(), facts)

    def summary_details(self) -> dict[str, Any]:
        """Return the details for the summary, with what was found out about the sites."""
        found = dict(self.details)
        for group in self.course.last.groups:
            if group.name in self.mixers:
                found |= group.site_details(self.mixers[group.name], self.sites)
        return found

    # ------------------------------------------------------------------ checkpoints
    def save(self) -> None:
        """Begin to write a checkpoint; the next round begins meanwhile. `written` comes before what depends on it."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "plan": self.plan.hash,
            "sites": list(self.sites),
            "best": self.best,
            "settled": self.settled,
            "details": self.details,
            "mixers": {},
        }
        for group, mixer in self.mixers.items():
            state, facts["mixers"][group] = mixer.state()
            tensors |= {f"{group}/{name}": tensor for name, tensor in state.items()}
        hidden, told = self.store.state()
        tensors, facts = {**tensors, **hidden}, {**facts, **told}
        before = self.done - 1 if self.suspect else None  # it may have to be taken back
        self.writing = self.writer.submit(self.record.save_checkpoint, self.done, tensors, facts, before)

    def written(self) -> None:
        """Wait for the checkpoint that is being written; raises what went wrong with it."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def restore(self) -> None:
        """Go on from the newest checkpoint."""
        self.record.sweep()
        self._restore(*self.record.load_checkpoint())

    def take_back(self) -> bool:
        """Undo the last round that was mixed, where an update stood out in it; return whether that was done.

        Called when others diverge after it. Sealed rounds can't be repeated over fewer sites.
        """
        suspect, self.suspect = self.suspect, None
        if suspect is None or self.plan.sealed:
            return False
        self.written()
        best = self.best  # of an earlier round: the one that is undone was not scored
        self.mixers.clear()
        self.place, self.directions = None, RoundDirections({}, (), 0)
        self._restore(*self.record.load_checkpoint(self.done - 1))
        self.best = best
        return True

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if facts["plan"] != self.plan.hash:
            raise MedsiloError("the checkpoint belongs to another plan; resume with the plan.yaml of its run folder")
        if facts["sites"] != list(self.sites):
            raise MedsiloError(f"the checkpoint's sites were {', '.join(facts['sites'])}; resume with the same sites")
        if facts["round"] > self.plan.rounds:
            raise MedsiloError("the checkpoint is of a round that the plan does not have; it is damaged, start again")
        for number in range(1, max(facts["round"], 1) + 1):  # the mixers of every phase so far, in their order
            place = self.course.place_of(number)
            if place != self.place:
                self.enter(self.course.phases[place], fresh=False)
                self.place = place
                self._take_over(tensors, facts, facts["mixers"])  # at once: the next phase's mixers may depend on it
        self.store.load(tensors, facts)
        self.details, self.settled = facts["details"], facts["settled"]
        self.done, self.best = facts["round"], facts["best"]

    def _take_over(self, tensors: dict[str, Tensor], facts: dict[str, Any], groups: Iterable[str]) -> None:
        """Put a checkpoint's values of these groups into their mixers; those of phases to come have none yet."""
        for group in self.mixers.keys() & set(groups):
            prefix = f"{group}/"
            mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            self.mixers[group].load_state(mine, facts["mixers"][group])


class RoundAggregation:
    """From answers to the next round's tensors, in clear: the mixers take each answer as it comes.

    It is the server's inner seam, where secure aggregation is: a sum is opened when enough sites have answered, before
    the mixers end the round.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    def agree(self, joined: Mapping[str, Joined]) -> None:
        """Let those that have joined agree on what they need beside the plan, and somebody have all that it names."""
        held = [
            {*answer.absent}
            for site, answer in joined.items()
            if site not in self.state.plan.participation.evaluation_sites
        ]
        if lacking := sorted(set.intersection(*held)) if held else []:
            raise ParticipationError(f"no hospital that trains has {', '.join(lacking)}; take it out of the plan")

    def begin(self, number: int, phase: Phase) -> Mapping[str, Missing]:
        """Begin a round whose mixers are open; returns the sites that are not in it, and why."""
        return {}

    def expected(self, phase: Phase) -> Groups:
        """Return the layout of what sites send in a phase, as it travels."""
        return self.state.expected(phase)

    def letters(self, site: str, groups: Groups) -> dict[str, Any]:
        """Return what a site is told beside the tensors that it is sent after it has joined."""
        return {}

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        """Take what a site sends, whose form was checked; raises Refused where its numbers can't be."""
        self.state.take(site, groups, samples, phase)

    def finish(self, number: int) -> None:
        """Give the mixers what they lack; raises ParticipationError where too few sites help."""
