"""Define and save the server's state: the aggregators of the current phase, and the best model so far."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import fsum, isfinite
from typing import Any

from torch import Tensor

from medsilo.core.errors import MedsiloError, ParticipationError
from medsilo.core.tensors import Groups, Tensors, packed
from medsilo.exchange.channel import Missing
from medsilo.exchange.checks import check_numbers
from medsilo.learning.seeds import seed_for
from medsilo.mixing.aggregators import Aggregator, aggregator_of
from medsilo.plan import Plan
from medsilo.runs.messages import Joined
from medsilo.schedule.phase import Group, Phase, ServerSide, views
from medsilo.tasks.objective import says_of
from medsilo_server.directions import RoundDirections
from medsilo_server.record import Record


class Store:
    """The state that secure aggregation adds to the server's state. A study without secure aggregation uses this base
    class, which has no state.
    """

    def find(self, group: str) -> Tensors | None:
        """Return the tensors of a group that all sites receive; None means that the sites receive the tensors from the
        group's aggregator.
        """

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the other values of this state, which a checkpoint stores."""
        return {}, {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore this state from a checkpoint."""


class ServerState:
    """The server's state of a study, above all the aggregator of each group of tensors.

    A tensor is never changed in place after the server has sent it or has begun to write it to a checkpoint.
    """

    def __init__(self, plan: Plan, record: Record, server: ServerSide, aggregators: dict[str, Aggregator]) -> None:
        """Create the state of a study.

        Args:
            server: The server's data, which methods may use.
            aggregators: The dictionary of aggregators, which `server` also contains.
        """
        self.plan, self.course, self.record, self.server, self.aggregators = (
            plan,
            plan.course,
            record,
            server,
            aggregators,
        )
        self.sites = server.sites
        self.layout = plan.layout()  # networks on PyTorch's meta device, because only the aggregators need values
        self.trained = frozenset(name for net in self.layout.values() for name, _ in net.named_parameters())
        buffers = frozenset(name for net in self.layout.values() for name, _ in net.named_buffers())
        self.shield = plan.aggregation.shield(buffers - self.trained)
        self.place: int | None = None
        self.once: set[str] = set()  # groups that each site receives only once in the current phase
        # for each site, the groups in `once` that the site has already received
        self.settled: dict[str, list[str]] = {}
        self.details: dict[str, Any] = {}
        self.store = Store()
        self.best: dict[str, Any] | None = None
        self.done = 0
        self.directions = RoundDirections({}, (), 0)
        # the site with the largest outlier in the last round, and the size of the outlier
        self.suspect: tuple[str, float] | None = None
        # this thread writes the checkpoint of a round while the sites train the next round
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    # ------------------------------------------------------------------ a round
    def expected(self, phase: Phase) -> Groups:
        """Return tensors that have the names, shapes and types of the tensors that sites send in a phase."""
        return self._packed(views(phase.sent, self.layout))

    def _packed(self, groups: Groups) -> Groups:
        precision = self.plan.transport.precision
        return {
            group: {name: packed(tensor, precision) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }

    def open(self, number: int) -> None:
        place = self.course.place_of(number)
        phase = self.course.phases[place]
        if place != self.place:
            self.enter(phase)
            self.place = place
        hidden = self.plan.sealed_forms(phase)
        read = [group for group in phase.sent if group.goes_down and group.name not in hidden]
        kept = views(read, self.layout)
        if not self.shield and any(answer.absent for answer in self.server.joined.values()):
            from medsilo.schedule.structures import mix_by_structure

            mix_by_structure(self.aggregators, kept, self.layout["model"], self.server)
        for group in self.expected(phase):
            self.aggregators[group].start(self.sites)
        seed, before = seed_for(self.plan.seed, "sketch", number), self.directions
        begins = number == 1 and self.plan.task.scripted
        self.directions = RoundDirections(self._packed(kept), self.trained, seed, before, begins)
        self.ranges = {group.name: group.ranges(self.layout, self.plan.task) for group in phase.sent}

    def enter(self, phase: Phase, fresh: bool = True) -> None:
        """Create the aggregators of a phase, in the order of the phase's groups.

        The order matters, because an aggregator may depend on the aggregators of earlier groups. A new group starts
        with its initial values. Groups of earlier phases keep their values.

        Args:
            fresh: False if a resumed study has already called the phase's function `before`.
        """
        travelling = views(phase.groups, self.layout).keys()
        initial: Groups = {}
        if not travelling <= set(self.aggregators) or phase.before:
            networks = self.plan.build_networks()
            if fresh and phase.before:
                self.details |= phase.before(self.server, networks)
            initial = self._packed(views(phase.groups, networks))
        for group in phase.groups:
            if group.name in travelling:
                self._make(group, initial.get(group.name))
        for name in self.once - travelling:
            self.aggregators.pop(name, None)
        self.once = {group.name for group in phase.once if group.name in travelling}

    def _make(self, group: Group, initial: Mapping[str, Tensor] | None) -> None:
        aggregator = aggregator_of(group.mix, self.server)
        if self.shield and group.goes_up and not group.personal:
            aggregator.defend(self.shield)
        if group.name in self.aggregators:
            aggregator.load_state(*self.aggregators[group.name].state())
        else:
            aggregator.start(self.sites, initial)
        self.aggregators[group.name] = aggregator

    def payload(self, site: str, phase: Phase) -> Groups:
        """Return the tensors that a site needs in a phase, except for the tensors that the site has already
        received.
        """
        travelling, known = views(phase.given, self.layout), self.settled.get(site, [])
        stays = {group.name for group in phase.given if group.apply_locally and self.plan.sealed}
        given = (group for group in phase.given if group.name in travelling.keys() - stays - set(known))
        return {group.name: self._current(group, site) for group in given}

    def _current(self, group: Group, site: str) -> dict[str, Tensor]:
        """Return the tensors of a group, as one site receives them.

        If `fallback_group` names another group, an evaluation site receives the tensors of this other group in place of
        a personal group.
        """
        if site in self.sites and (mean := self.store.find(group.name)):
            return dict(mean)
        if group.personal and group.fallback_group and site not in self.sites:
            return self.aggregators[group.fallback_group].current(self.sites[0])
        return self.aggregators[group.name].current(site if group.personal else self.sites[0])

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        """Add a site's tensors to the aggregators, or raise Refused if a value is impossible.

        Args:
            groups: The site's tensors, whose names, shapes and types were checked before.
            samples: The weight of the site's update.
        """
        personal = {group.name: group.personal for group in phase.sent}

        def given(group: str) -> dict[str, Tensor]:
            return self.aggregators[group].current(site if personal[group] else self.sites[0])

        directions = self.directions.measure(groups, given)
        finite = {
            group: self.directions.names[group] for group, direction in directions.items() if isfinite(direction.norm)
        }
        check_numbers(groups, phase.sent, self.ranges, finite)
        self.directions.check(directions)
        for group in phase.sent:  # the order of groups is the order in which the method declares the groups
            if group.name in groups:
                self.aggregators[group.name].add(site, groups[group.name], samples)
        self.directions.note(site, directions)

    def shares(self, phase: Phase) -> Mapping[str, float]:
        """Return each site's normalised weight in the last round's mean; if several groups have a mean, the first of
        these groups counts.
        """
        found = (self.aggregators[group.name].shares for group in phase.sent if group.name in self.aggregators)
        return next((shares for shares in found if shares), {})

    def mark_synced(self, site: str) -> None:
        self.settled[site] = sorted(self.once)

    def mark_lost(self, site: str) -> None:
        """Record that a site may lack the groups that each site receives only once, so that the server sends these
        groups to the site again.
        """
        self.settled.pop(site, None)

    def finish(self, number: int) -> None:
        """Aggregate the groups of a round in the order in which the method declares the groups."""
        expected = self.expected(self.course.phase_of(number))
        for group in expected:
            self.aggregators[group].finish()
        self.done, self.suspect = number, self.directions.farthest()

    # ------------------------------------------------------------------ the best model
    def consider_best(self, scores: Mapping[str, float | None], rounds: int) -> None:
        """Keep a model as the best model if its mean validation score is higher than the score of the best model so
        far.

        The mean is over the sites that scored both models, so that the absence of a site favours neither model. All
        structures have the same weight in the mean. If hospitals round their scores, the later of two models with equal
        means is kept, because the earlier model may not have learned yet. A model is not kept if a site could not
        compute the model's score.

        Args:
            scores: The model's validation score at each site, or None if the site could not compute the score.
            rounds: The number of rounds for which the model was trained.
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
            # fsum does not depend on the order of the set, and finds equal means equal
            now, before = (fsum(says[site] * own[site] for site in both) for own in (known, self.best["scores"]))
            rounded = any(joined[site].steps.get("validation") for site in both if site in joined)
            if now < before or (now == before and not rounded):
                return
        self.record.keep_as_best(rounds)
        self.best = {"round": rounds, "scores": known}

    def go_back_to(self, rounds: int) -> None:
        self._take_over(*self.record.load_best(rounds), self.expected(self.course.last))

    def save_common(self, file: str, rounds: int) -> None:
        """Save the global model, which the lead may download."""
        networks, last = self.plan.build_networks(), self.course.last
        given = views(last.given, networks)
        for group, tensors in given.items():
            values = self.aggregators[group].current(self.sites[0])
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        for own in last.given:
            own.arrived(networks, True)
        algorithm = self.plan.algorithm
        assert algorithm.outcome.common is not None
        facts = {"round": rounds, "method": algorithm.name, "plan_hash": self.plan.hash}
        self.record.save_global(file, algorithm.whole(networks, algorithm.outcome.common).state_dict(), facts)

    def summary_details(self) -> dict[str, Any]:
        """Return the details for the study's summary, including each tensor group's details about sites."""
        found = dict(self.details)
        for group in self.course.last.groups:
            if group.name in self.aggregators:
                found |= group.site_details(self.aggregators[group.name], self.sites)
        return found

    # ------------------------------------------------------------------ checkpoints
    def save(self) -> None:
        """Start to write a checkpoint in another thread. The next round may begin before the checkpoint is complete.

        Any step that depends on the checkpoint must call `written` first.
        """
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {
            "plan": self.plan.hash,
            "sites": list(self.sites),
            "best": self.best,
            "settled": self.settled,
            "details": self.details,
            "mixers": {},
        }
        for group, aggregator in self.aggregators.items():
            state, facts["mixers"][group] = aggregator.state()
            tensors |= {f"{group}/{name}": tensor for name, tensor in state.items()}
        hidden, told = self.store.state()
        tensors, facts = {**tensors, **hidden}, {**facts, **told}
        # the checkpoint before the last round is kept, because the last round may be undone later
        before = self.done - 1 if self.suspect else None
        self.writing = self.writer.submit(self.record.save_checkpoint, self.done, tensors, facts, before)

    def written(self) -> None:
        """Wait until the checkpoint is written; raise the error if writing failed."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def restore(self) -> None:
        self.record.sweep()
        self._restore(*self.record.load_checkpoint())

    def take_back(self) -> bool:
        """Undo the last round if an update in this round is an outlier. Return True if the round was undone.

        With secure aggregation, no round is undone, because a round cannot be repeated with fewer sites.
        """
        suspect, self.suspect = self.suspect, None
        if suspect is None or self.plan.sealed:
            return False
        self.written()
        # the best model is always from an earlier round, because the model of the undone round has no score
        best = self.best
        self.aggregators.clear()
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
            raise MedsiloError(
                "the checkpoint belongs to a round that the plan does not have, so it is damaged; start again"
            )
        for number in range(1, max(facts["round"], 1) + 1):
            place = self.course.place_of(number)
            if place != self.place:
                self.enter(self.course.phases[place], fresh=False)
                self.place = place
                # the values are loaded before the next phase, because the aggregators of the next phase may depend on
                # the values
                self._take_over(tensors, facts, facts["mixers"])
        self.store.load(tensors, facts)
        self.details, self.settled = facts["details"], facts["settled"]
        self.done, self.best = facts["round"], facts["best"]

    def _take_over(self, tensors: dict[str, Tensor], facts: dict[str, Any], groups: Iterable[str]) -> None:
        for group in self.aggregators.keys() & set(groups):
            prefix = f"{group}/"
            mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            self.aggregators[group].load_state(mine, facts["mixers"][group])


class RoundAggregation:
    """Aggregates the sites' answers in a round without secure aggregation, by adding each answer when it arrives.

    A subclass for secure aggregation unmasks the sum over sites before the aggregators end the round.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    def agree(self, joined: Mapping[str, Joined]) -> None:
        """Raise ParticipationError if no training site has annotated a label of the plan.

        With secure aggregation, this method also lets the sites agree on keys.
        """
        held = [
            {*answer.absent}
            for site, answer in joined.items()
            if site not in self.state.plan.participation.evaluation_sites
        ]
        if lacking := sorted(set.intersection(*held)) if held else []:
            raise ParticipationError(
                f"no training hospital has annotated {', '.join(lacking)}; remove it from the plan"
            )

    def begin(self, number: int, phase: Phase) -> Mapping[str, Missing]:
        return {}

    def expected(self, phase: Phase) -> Groups:
        return self.state.expected(phase)

    def letters(self, site: str, groups: Groups) -> dict[str, Any]:
        """Return the values that secure aggregation adds to a site's request. Without secure aggregation, nothing is
        added to the request.
        """
        return {}

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        self.state.take(site, groups, samples, phase)

    def finish(self, number: int) -> None:
        """With secure aggregation, unmask the sums, and pass the sums to the aggregators.

        Raise ParticipationError if too few sites help to unmask the sums.
        """
