"""Tests that the author of a method runs with pytest, in a class derived from MethodTester."""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.check.rehearsal import rehearse
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import load_tensors
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite, training_site
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo.runs.paths import CHECKPOINTS, PLAN, ROUNDS, SUMMARY, site_folder
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_lab.engines import inprocess
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record

State = dict[str, Tensor]
Answer = Callable[[], StudyMessage]
# a function that delivers a site's answer. Its arguments are the site, the request, and a function that calculates the
# answer.
Carry = Callable[[str, StudyMessage, Answer], StudyMessage | Missing]

SITES = ("hospital-a", "hospital-b", "hospital-c")
# a synthetic task in which three hospitals have different numbers of cases
TINY = {"name": "synthetic-activity", "persons": 8, "windows": 10, "steps": 32}
TRAINING = {"rounds": 2, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.01}
GO_ON = ("participation.when_missing=continue", "participation.minimum=2")
CLIP = 1e-5  # maximum norm of each case's gradient in tests with differential privacy
FAR = 1e-6  # tolerance for rounding errors in sums of masked updates, whose values are near 1
LOST = Missing("lost", "no answer")


@dataclass(frozen=True)
class Reference:
    """A study's data and networks, with which a test runs a reference implementation of the method in plain PyTorch."""

    plan: Plan

    @property
    def sites(self) -> Sequence[str]:
        return self.plan.participation.sites

    @cached_property
    def data(self) -> Mapping[str, SiteData]:
        return {site: self.plan.task.load(site, self.sites, self.plan.seed, None) for site in self.sites}

    def model(self, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        model: nn.Module = self.plan.build_networks()["model"]
        if state is not None:
            model.load_state_dict(state)
        return model

    def batches(self, site: str, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return all mini-batches with which a site trains in one round, in the order of training."""
        inputs, targets = self.data[site].train[:]
        training, parts = self.plan.training, []
        for epoch in range(training.local_epochs):
            order = torch.randperm(len(inputs), generator=generator_for(self.plan.seed, site, "shuffle", number, epoch))
            parts += [part for part in order.split(training.batch_size) if len(part) > 1]
        return [(inputs[part], targets[part]) for part in parts]

    def mean(self, states: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Return the mean of the sites' tensors, weighted by the number of training cases at each site.

        Integer counters are copied from the first site.
        """
        cases = {site: len(self.data[site].train) for site in states}  # type: ignore[arg-type]
        total = sum(cases.values())
        return {
            name: torch.stack([states[site][name].double() * (cases[site] / total) for site in states])
            .sum(0)
            .to(first.dtype)
            if first.is_floating_point()
            else first.clone()
            for name, first in states[min(states)].items()
        }


class MethodTester:
    """Tests for a method of medsilo. The author of the method derives a class, and pytest runs all tests in the derived
    class.

    The derived class may define these attributes:
        method: name of the method in plans
        changes: changes KEY=VALUE to the default values, for all plans
        keeps: prefixes "network/tensor" of tensors that a site trains and never sends
        more_looks: number of additional passes over the validation cases in a study of two rounds
        private: changes KEY=VALUE for a plan with privacy, if the method supports it
        unsealed: part of the error message if the method rejects secure aggregation

    >>> class TestFedAvg(MethodTester):
    ...     method = "fedavg"
    >>> TestFedAvg().plan("training.rounds=5").rounds
    5
    """

    method: ClassVar[str]
    changes: ClassVar[Sequence[str]] = ()
    keeps: ClassVar[Sequence[str]] = ()
    more_looks: ClassVar[int] = 0
    private: ClassVar[Sequence[str]] = ()
    unsealed: ClassVar[str] = ""
    settings: ClassVar[SiteSettings] = make_settings({**ALL_MINE, "device": "cpu"}, "the tests' settings")

    def plan(self, *changes: str) -> Plan:
        """Return a plan for a study of three small hospitals. The study takes about a second."""
        values = {
            "algorithm": {"name": self.method},
            "task": TINY,
            "training": TRAINING,
            "participation": {"sites": SITES, "timeout": 120},
        }
        return parse_plan(values, [*self.changes, *changes])

    def reference(self, study: Reference) -> Sequence[Mapping[str, Mapping[str, Tensor]]]:
        """Run three rounds of the method in plain PyTorch. The tests compare these three rounds with medsilo's
        implementation of the method.

        Returns:
            for 0, 1, 2 and 3 rounds, the tensors of the model that each site validates
        """
        raise SkipTest("the method has no reference")

    # ------------------------------------------------------------------ equations
    def test_three_rounds_are_those_of_the_reference(self, tmp_path: Path) -> None:
        plan = self.plan("training.rounds=3", "training.local_epochs=2")
        study = Reference(plan)
        curve = self.reference(study)
        self.run(plan, tmp_path / "run")
        for site in SITES:
            own, _ = load_tensors(site_folder(tmp_path / "run", site) / "last.safetensors")
            assert own.keys() == curve[-1][site].keys(), f"{site} ends with other tensors"
            for name, expected in curve[-1][site].items():
                torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-6, msg=_named(f"{name} at {site}"))
        if plan.task.goal.metric == "accuracy":
            _assert_scored(study, curve, read_summary(tmp_path / "run"))

    # ------------------------------------------------------------------ tensors in messages
    def test_what_stays_at_a_site_is_what_it_keeps(self, tmp_path: Path) -> None:
        """Sites never send tensors that `keeps` names, and send all trained tensors that `keeps` does not name.

        A tensor that `keeps` names never reaches the server's checkpoints or another site.
        """
        plan, folder = self.plan("training.rounds=3"), tmp_path / "run"
        seen = _Travelled(self._sites(plan, folder), plan, folder)
        seen.run()
        stayed = {name for own in seen.own.values() for name in own}
        kept = {name for name in stayed if name.startswith(tuple(self.keeps))}
        assert stayed == kept, f"sites train {_some(stayed - kept)} but never send these tensors: name them in `keeps`"
        unused = [keep for keep in self.keeps if not any(name.startswith(keep) for name in stayed)]
        assert not unused, f"no tensor whose name begins with {_some(unused)} is trained and stays at a site"
        assert not seen.leaked, f"{seen.leaked[0]}"

    def test_the_order_of_answers_does_not_matter(self, tmp_path: Path) -> None:
        plan = self.plan()
        self.run(plan, tmp_path / "one")
        _Turned(self._sites(plan, tmp_path / "other"), plan, tmp_path / "other").run()
        assert_same_run(tmp_path / "one", tmp_path / "other")

    def test_half_precision_on_the_wire_and_at_sites(self, tmp_path: Path) -> None:
        plan = self.plan("training.rounds=1" if self.rounds_before_training == 0 else "training.rounds=2")
        self.run(plan, tmp_path / "exact")
        exact = _ends(tmp_path / "exact")
        half = plan.with_changes(["transport.precision=bfloat16"])
        kinds = set[torch.dtype]()

        def carry(site: str, request: StudyMessage, answer: Answer) -> StudyMessage:
            reply = answer()
            kinds.update(
                own.dtype for message in (request, reply) for g in message.groups.values() for own in g.values()
            )
            return reply

        Carried(self._sites(half, tmp_path / "wire"), half, tmp_path / "wire", carry).run()
        assert torch.float32 not in kinds, "a tensor is sent in single precision, but the plan requires half precision"
        self.run(plan, tmp_path / "sites", self.settings.model_copy(update={"precision": "bfloat16"}))
        for changed in ("wire", "sites"):
            for name, tensor in _ends(tmp_path / changed).items():
                assert tensor.isfinite().all(), f"{name} is not finite with half precision ({changed})"
                far = float((tensor.double() - exact[name].double()).abs().max()) if tensor.numel() else 0.0
                assert far < 0.5, f"{name} is {far:.2g} from that of single precision ({changed})"

    # ------------------------------------------------------------------ missed rounds and restarts
    def test_a_site_that_misses_a_round_does_not_count_in_it(self, tmp_path: Path) -> None:
        """If a site's answer is lost, all other sites continue with the same tensors as if the site had not trained in
        this round.
        """
        first = self.rounds_before_training + 1
        plan = self.plan(f"training.rounds={first + 2}", *GO_ON)
        absent, given = SITES[1], defaultdict[str, dict[str, State]](dict)
        for case in ("lost", "away"):

            def carry(site: str, request: StudyMessage, answer: Answer, case: str = case) -> StudyMessage | Missing:
                task, number = request.facts["task"], request.facts["round"]
                if (task, number) == ("round", first + 1) and site == SITES[0]:
                    given[case] = {group: dict(own) for group, own in request.groups.items()}
                if (task, number, site) != ("round", first, absent):
                    return answer()
                if case == "lost":
                    answer()
                return LOST

            Carried(self._sites(plan, tmp_path / case), plan, tmp_path / case, carry).run()
            lines = read_rounds(tmp_path / case)
            assert [absent in line.answered for line in lines[first - 1 :]] == [False, *[True] * (len(lines) - first)]
            assert all(tensor.isfinite().all() for tensor in _ends(tmp_path / case).values())
        assert given["lost"].keys() == given["away"].keys()
        for group, own in given["lost"].items():
            assert_equal(own, given["away"][group], group)

    def test_a_study_that_stopped_goes_on_as_if_it_had_not(self, tmp_path: Path) -> None:
        plan = self.plan("training.rounds=3")
        self.run(plan, tmp_path / "whole")
        for stop in (1, 2):

            def on_round(line: Round, stop: int = stop) -> None:
                if line.round == stop:
                    raise KeyboardInterrupt

            try:
                self.run(plan, tmp_path / "run", resume=stop > 1, on_round=on_round)
            except KeyboardInterrupt:
                assert read_summary(tmp_path / "run").status == "failed"
            else:
                raise AssertionError(f"the study has no round {stop}")
        self.run(plan, tmp_path / "run", resume=True)
        assert_same_run(tmp_path / "whole", tmp_path / "run")

    def test_a_site_s_state_is_in_its_folder(self, tmp_path: Path) -> None:
        """If the process of a site is restarted, the new process gives the same answer to a repeated request and can
        continue the study.
        """
        plan = self.plan("training.rounds=3")
        self.run(plan, tmp_path / "steady")
        _Rebuilt(lambda site: self._site(plan, tmp_path / "rebuilt", site), plan, tmp_path / "rebuilt").run()
        assert_same_run(tmp_path / "steady", tmp_path / "rebuilt")

    # ------------------------------------------------------------------ use of cases
    def test_test_cases_are_looked_at_once_and_at_the_end(self, tmp_path: Path) -> None:
        plan = self.plan()
        data = {
            site: SiteData(_Counted(own.train), _Counted(own.validation), _Counted(own.test))
            for site, own in Reference(plan).data.items()
        }

        def carry(site: str, request: StudyMessage, answer: Answer) -> StudyMessage:
            looks: list[_Counted] = [data[site].train, data[site].validation]  # type: ignore[list-item]
            before = [int(part.looks.sum()) for part in looks]
            reply = answer()
            at_end = request.facts["task"] == "test"
            assert (data[site].test.looks == int(at_end)).all(), "test cases must be read once, at the end of the study"  # type: ignore[attr-defined]
            assert not at_end or before == [int(part.looks.sum()) for part in looks], (
                "the final test also reads training or validation cases"
            )
            return reply

        Carried(self._sites(plan, tmp_path / "run", data), plan, tmp_path / "run", carry).run()
        for site, own in data.items():
            looks = own.validation.looks  # type: ignore[attr-defined]
            expected = plan.rounds + 1 + self.more_looks
            assert (looks == expected).all(), f"{site}'s validation cases are read {int(looks.max())} times"

    def test_one_case_moves_what_leaves_by_its_bound_under_privacy(self, tmp_path: Path) -> None:
        """If each case's gradient is clipped to almost zero, changing one case hardly changes the site's answer."""
        promise = [f'privacy={{"epsilon": 2.0, "delta": 0.001, "clip": {CLIP}}}', "training.batch_size=4096"]
        if not self.plan().algorithm.declares_account():
            try:
                self.plan(*promise, *self.private)
            except PlanError as error:
                assert "privacy" in str(error), f"the method rejects a plan with privacy for another reason: {error}"
                return
            raise AssertionError("the method accepts a plan with privacy, but does not define `private`")
        plan, sent = self.plan("network.norm=group", *promise, *self.private), list[State]()
        for extreme in (False, True):
            data, own = dict(Reference(plan).data), State()
            if extreme:
                data[SITES[0]] = _with_an_odd_case(data[SITES[0]])

            def carry(site: str, request: StudyMessage, answer: Answer, state: State = own) -> StudyMessage:
                reply = answer()
                if site == SITES[0]:
                    number = request.facts["round"]
                    state |= {f"{number}/{g}/{n}": t.clone() for g, ts in reply.groups.items() for n, t in ts.items()}
                return reply

            folder = tmp_path / str(extreme)
            Carried(self._sites(plan, folder, data), plan, folder, carry).run()
            sent.append(own)
        assert sent[0].keys() == sent[1].keys() and sent[0], "the site sends no tensors"
        steps = plan.rounds * plan.training.local_epochs
        for name, tensor in sent[0].items():
            far = float((tensor.double() - sent[1][name].double()).norm())
            assert far < 100 * steps * CLIP, (
                f"a case changes {name} by {far:.2g}, but its gradient is clipped to {CLIP:g}"
            )

    def test_sums_of_masked_updates_give_the_same_models(self, tmp_path: Path) -> None:
        # with a small learning rate, a wrong sum of gradients visibly changes the result
        changes = ["training.learning_rate=0.001", "training.momentum=0"]
        try:
            plan = self.plan(*changes, "secure_aggregation.mode=pairwise")
        except PlanError as error:
            assert self.unsealed and self.unsealed in str(error), f"the method rejects secure aggregation: {error}"
            return
        assert not self.unsealed, "the method accepts secure aggregation, so remove `unsealed`"
        self.run(self.plan(*changes), tmp_path / "clear")
        self.run(plan, tmp_path / "sealed")
        clear, sealed = _ends(tmp_path / "clear"), _ends(tmp_path / "sealed")
        for name, tensor in clear.items():
            size = max(1.0, float(tensor.double().abs().max())) if tensor.numel() else 1.0
            far = float((tensor.double() - sealed[name].double()).abs().max()) / size if tensor.numel() else 0.0
            assert far <= FAR, f"{name} differs by {far:.2g} from the result without masking"

    # ------------------------------------------------------------------ plans
    def test_its_plan_is_the_same_when_it_was_written(self, tmp_path: Path) -> None:
        plan = self.plan()
        other = assert_read_again(plan, tmp_path)
        assert [phase.name for phase in other.course.phases] == [phase.name for phase in plan.course.phases]
        first, longer = Reference(plan).model(), Reference(self.plan("training.rounds=9")).model()
        assert_equal(first.state_dict(), longer.state_dict(), "the first model")

    def test_it_can_be_rehearsed(self, tmp_path: Path) -> None:
        """The trial training in `medsilo check` runs every phase that trains, and leaves no files."""
        plan, random = self.plan(), torch.get_rng_state()
        data = Reference(plan).data[SITES[0]]
        tried = rehearse(plan, SITES[0], SITES, self.settings, data, tmp_path)
        expected = dict.fromkeys(phase.name for phase in plan.course.phases if phase.trains and phase.rounds)
        assert [one.phase for one in tried] == [*expected]
        assert sum(one.rounds for one in tried) <= plan.rounds
        assert all(one.batch > 0 and one.evaluation > 0 for one in tried)
        assert not list(tmp_path.iterdir()) and torch.equal(random, torch.get_rng_state())

    # ------------------------------------------------------------------ helpers
    def run(self, plan: Plan, folder: Path, settings: SiteSettings | None = None, **how: Any) -> Record:
        return inprocess.run(plan, folder=folder, settings=settings or self.settings, **how)

    @property
    def rounds_before_training(self) -> int:
        """The number of rounds before the first training round. Rounds before training may, for example, measure
        statistics.
        """
        phases = self.plan("training.rounds=3").course.phases
        first = next(place for place, phase in enumerate(phases) if phase.trains)
        return sum(phase.rounds for phase in phases[:first])

    def _sites(self, plan: Plan, folder: Path, data: Mapping[str, SiteData] | None = None) -> dict[str, TrainingSite]:
        return {site: self._site(plan, folder, site, data[site] if data else None) for site in SITES}

    def _site(self, plan: Plan, folder: Path, site: str, data: SiteData | None = None) -> TrainingSite:
        place = SiteContext(plan, site, SITES, self.settings, site_folder(folder, site))
        return training_site(place, partial(participant_of, data=data))


# ---------------------------------------------------------------------------------------------------- comparing runs
def assert_equal(first: Mapping[str, Tensor], other: Mapping[str, Tensor], where: str = "") -> None:
    """Assert that two states have tensors of the same names, types and bits.

    Args:
        where: the beginning of the error message
    """
    assert first.keys() == other.keys(), f"{where}: {_some(first.keys() ^ other.keys())} is in one only"
    for name, tensor in first.items():
        same = tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        assert same, f"{where}/{name} differs"


def assert_read_again(plan: Plan, folder: Path) -> Plan:
    """Write a plan, read the written plan, and assert that both plans are equal. Return the plan that was read."""
    (folder / PLAN).write_text(plan.to_yaml(), "utf-8")
    other = load_plan(folder / PLAN)
    assert other == plan and other.hash == plan.hash and other.to_yaml() == plan.to_yaml()
    return other


def assert_same_run(first: Path, other: Path) -> None:
    """Assert that two run folders have equal tensors, summaries, rounds and metrics; durations may differ."""
    files, others = (
        sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file()) for run in (first, other)
    )
    assert files == others, f"{_some({str(path) for path in {*files} ^ {*others}})} is in one run only"
    assert len(files) > 3 * len(SITES)
    for name in files:
        if name.suffix == ".safetensors":
            (mine, facts), (theirs, other_facts) = load_tensors(first / name), load_tensors(other / name)
            assert facts == other_facts, name
            assert_equal(mine, theirs, str(name))
        if name.suffix == ".csv":
            rows = [[row[:-1] for row in csv.reader((run / name).read_text().splitlines())] for run in (first, other)]
            assert rows[0] == rows[1], name
    for file in (SUMMARY, ROUNDS):
        before, after = (_without_times(_lines(run / file)) for run in (first, other))
        assert before == after, file


def _lines(path: Path) -> list[Any]:
    text = path.read_text("utf-8")
    return [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        times = ("seconds", "memory", "started", "ended", "study")
        return {key: _without_times(inner) for key, inner in value.items() if key not in times}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def _ends(run: Path) -> State:
    ends = {path.parent.name: load_tensors(path)[0] for path in run.glob("sites/*/last.safetensors")}
    return {f"{site}/{name}": tensor for site, end in ends.items() for name, tensor in end.items()}


def _assert_scored(study: Reference, curve: Sequence[Mapping[str, Mapping[str, Tensor]]], summary: Summary) -> None:
    def accuracy(state: Mapping[str, Tensor], part: Dataset) -> float:
        inputs, targets = part[:]
        with torch.no_grad():
            return float((study.model(state).eval()(inputs).argmax(1) == targets).double().mean())

    scores = [{site: accuracy(states[site], study.data[site].validation) for site in study.sites} for states in curve]
    for site in study.sites:
        told = summary.sites[site].validation
        assert told and all(
            mine is not None and abs(mine - score[site]) < 1e-6 for mine, score in zip(told, scores, strict=True)
        )
    if study.plan.algorithm.outcome.personal:
        chosen = {site: _first_of_best([score[site] for score in scores]) for site in study.sites}
    else:
        chosen = dict.fromkeys(study.sites, _first_of_best([fmean(score.values()) for score in scores]))
    assert summary.selected and summary.selected.rounds == chosen
    for site in study.sites:
        tested = accuracy(curve[chosen[site]][site], study.data[site].test)
        found = (summary.sites[site].test or {}).get("accuracy")
        assert found is not None and abs(found - tested) < 1e-6, f"{site}'s test score"


def _first_of_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda number: (scores[number], -number))


def _named(subject: str) -> Callable[[str], str]:
    return lambda text: f"{subject}: {text}"


def _some(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


# ---------------------------------------------------------------------------------------------------- transports
class Carried(Loop):
    """A channel between server and sites that lets a test change or record messages.

    Args:
        sites: the sites by name
        plan: the plan of the study
        folder: the folder of the run
        carry: a function that delivers each answer; by default, answers are not changed
    """

    def __init__(self, sites: Mapping[str, TrainingSite], plan: Plan, folder: Path, carry: Carry | None = None) -> None:
        super().__init__(sites)
        self.carry = carry
        self.coordinator = Coordinator(plan, plan.participation.sites, self, Record(folder), "in-process")

    def run(self) -> None:
        self.coordinator.run()

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing = dict[str, Missing]()
        for site in sites:
            asked = outgoing(site)
            reply = self.carried(site, asked)
            if isinstance(reply, Missing):
                missing[site] = reply
            else:
                receive(site, reply)
        return missing

    def carried(self, site: str, request: StudyMessage) -> StudyMessage | Missing:
        if self.carry is None:
            return self.answer(site, request)
        return self.carry(site, request, lambda: self.answer(site, request))


class _Turned(Carried):
    """A channel that changes the order in which the sites' answers to a request arrive."""

    asked = 0

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        orders = [*permutations(sites)][1:] or [tuple(sites)]
        self.asked += 1
        return super().ask(orders[self.asked % len(orders)], outgoing, receive, timeout)


class _Rebuilt(Carried):
    """A channel that sends each request three times: twice to the site's process, and a third time to a new process of
    the site.
    """

    def __init__(self, make: Callable[[str], TrainingSite], plan: Plan, folder: Path) -> None:
        super().__init__({site: make(site) for site in SITES}, plan, folder)
        self.make = make

    def carried(self, site: str, request: StudyMessage) -> StudyMessage:
        answers = []
        for how in ("first", "again", "of a new process"):
            if how == "of a new process":
                self.participants = {**self.participants, site: self.make(site)}
            answers.append(self.answer(site, request))
            first, last = answers[0], answers[-1]
            said, again = (_without_times(own.facts) for own in (first, last))
            assert said == again, f"{site} answers {request.facts['task']} differently when it is asked {how}"
            assert first.groups.keys() == last.groups.keys()
            for group, own in first.groups.items():
                assert_equal(own, last.groups[group], f"{site}'s {group}, asked {how}")
        return last


class _Travelled(Carried):
    """A channel that searches all messages for tensors that must stay at a site."""

    def __init__(self, sites: Mapping[str, TrainingSite], plan: Plan, folder: Path) -> None:
        super().__init__(sites, plan, folder)
        self.first = {
            f"{network}/{name}": tensor.clone()
            for network, module in plan.build_networks().items()
            for name, tensor in module.state_dict().items()
        }
        # for each site and each tensor: the values that the tensor had after the site last sent the tensor
        self.own: dict[str, dict[str, set[bytes]]] = {site: defaultdict(set) for site in SITES}
        # for each site: all tensor values that the site has received or sent
        self.known: dict[str, set[bytes]] = {site: set() for site in SITES}
        # the tensor values that have reached each site, and the tensor values that have reached the server
        self.reached: dict[str, set[bytes]] = {site: set() for site in [*SITES, "server"]}
        self.folder = folder

    @property
    def leaked(self) -> list[str]:
        return [
            f"{site} never sends {name}, but {other} has a copy of this tensor"
            for site, own in self.own.items()
            for name, contents in own.items()
            for other, found in self.reached.items()
            if other != site and found & contents
        ]

    def carried(self, site: str, request: StudyMessage) -> StudyMessage:
        reply = self.answer(site, request)
        self.reached[site] |= {_content(tensor) for group in request.groups.values() for tensor in group.values()}
        sent = {_content(tensor) for own in reply.groups.values() for tensor in own.values()}
        self.known[site] |= self.reached[site] | sent
        for path in (self.folder / CHECKPOINTS).glob("*.safetensors"):
            try:
                self.reached["server"] |= {_content(tensor) for tensor in load_tensors(path)[0].values()}
            except MedsiloError:  # the server may have deleted the file after writing a newer checkpoint
                assert not path.exists()
        if request.facts["task"] == "round":
            for network, module in self.participants[site].participant.state.modules.items():
                for name, tensor in module.state_dict().items():
                    key, content = f"{network}/{name}", _content(tensor)
                    if content in sent:
                        self.own[site].pop(key, None)
                    elif tensor.is_floating_point() and content not in self.known[site] and self._moved(key, tensor):
                        self.own[site][key].add(content)
        return reply

    def _moved(self, key: str, tensor: Tensor) -> bool:
        """Return True if a tensor differs from its initial value by more than rounding errors.

        The biases of layers before batch norm change only by rounding errors.
        """
        return not torch.allclose(tensor, self.first[key].to(tensor.dtype), rtol=0, atol=1e-7)


def _content(tensor: Tensor) -> bytes:
    own = tensor.detach().cpu().contiguous()
    return f"{own.dtype}{tuple(own.shape)}".encode() + own.reshape(-1).view(torch.uint8).numpy().tobytes()


class _Counted(Dataset):
    def __init__(self, cases: Dataset) -> None:
        self.cases = cases
        self.looks = torch.zeros(len(cases), dtype=torch.long)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.looks)

    def __getitem__(self, index: int) -> Any:
        self.looks[index] += 1
        return self.cases[index]


def _with_an_odd_case(data: SiteData) -> SiteData:
    """Return the data with one extreme training case: the input of the first case is multiplied by -10, and its label
    is changed.
    """
    assert isinstance(data.train, Cases)
    inputs, targets = data.train.inputs.clone(), data.train.targets.clone()
    inputs[0], targets[0] = -10 * inputs[0], targets[-1] if targets[-1] != targets[0] else targets.max() - targets[0]
    return replace(data, train=Cases(inputs, targets, data.train.patients))
