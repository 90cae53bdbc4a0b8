"""Sealed studies through the engine: a server that lies is refused by every site, and answers that are lost are asked
for again, or end the study with the reason."""

import copy
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError, Refused
from medsilo.core.files import load_tensors
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.seams import Missing
from medsilo.runs.messages import Parcel
from medsilo.runs.record import Record
from tests.conftest import make_plan, slow_but
from tests.sites import site_of
from tests.unit.test_coordinator import LOST, Answers, Script, Scripted, honest
from tests.unit.test_sealed_engine import CPU, GO_ON, HOSPITALS, RULES, furthest, lead, participants_of, plan_of

Letters = dict[str, Any]
SHAKES, SMALL_FACTOR, HOWS = 3, 3, ("none", "pairwise")
DIED = Missing("refused", "the training process died", passing=True)


# ------------------------------------------------------------------------------------------------ a server that lies
class Liar:
    """Changes what the server asks of every site, and notes what each of them says to it."""

    def __init__(self, task: str, number: int, lie: Callable[[Parcel, dict[str, Parcel]], None]) -> None:
        self.task, self.number, self.lie = task, number, lie
        self.earlier: dict[str, dict[str, Parcel]] = {}  # site → task and round → what it was asked before
        self.said: dict[str, str] = {}

    def __call__(self, site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        before = self.earlier.setdefault(site, {})
        before[f"{asked.facts['task']} {asked.facts['round']}"] = copy.deepcopy(asked)
        if (asked.facts["task"], asked.facts["round"]) == (self.task, self.number):
            self.lie(asked, before)
        try:
            return honest(site, asked, work)
        except MedsiloError as error:
            self.said.setdefault(site, str(error))
            return Missing.refused(error)


def swap_mask(asked: Parcel, before: dict[str, Parcel]) -> None:
    for own in asked.facts["sealing"]["deal"]["offers"]:
        own["mask"] = "11" * 32


def swap_keys(asked: Parcel, before: dict[str, Parcel]) -> None:
    for own in asked.facts["sealing"].get("assembly", {"introductions": ()})["introductions"]:
        own["channel"] = "11" * 32


def replay_deal(asked: Parcel, before: dict[str, Parcel]) -> None:
    asked.facts["sealing"]["deal"] = before["round 1"].facts["sealing"]["deal"]


def replay_result(asked: Parcel, before: dict[str, Parcel]) -> None:
    asked.facts["sealing"]["held"] = before["round 3"].facts["sealing"]["held"]
    asked.groups = before["round 3"].groups


def unmask_without_one(asked: Parcel, before: dict[str, Parcel]) -> None:
    request = asked.facts["sealing"]["request"]
    gone = HOSPITALS[-1] if HOSPITALS[-1] in request["sites"] else HOSPITALS[0]
    request["sites"] = [site for site in request["sites"] if site != gone]
    request["confirmations"].pop(gone, None)


def other_rows(asked: Parcel, before: dict[str, Parcel]) -> None:
    rows = asked.facts["sealing"]["rows"]["model"]
    asked.facts["sealing"]["rows"]["model"] = {site: list(reversed(row)) for site, row in rows.items()}


LIES = [
    ("fedavg", "agree", 0, swap_keys, "it relays other keys of this site than it sent"),
    ("fedavg", "round", 2, swap_mask, "without the keys that this site offered for it last"),
    ("fedavg", "round", 2, replay_deal, "it replays a round, or swaps keys"),
    ("adafed", "deliver", 4, replay_result, "it replays model of round 2 in round 4"),
    ("fedavg", "unmask", 2, unmask_without_one, "second, different unmasking|a sum of round 2 that it is"),
    ("adafed", "round", 2, other_rows, "it changes the weights of round 2"),
    ("adafed", "offer", 3, other_rows, "are not those that this site made of what the hospitals told"),
]


@pytest.mark.parametrize("method, task, number, lie, reason", LIES)
def test_every_site_refuses_a_server_that_lies(
    method: str, task: str, number: int, lie: Callable[..., None], reason: str, tmp_path: Path
) -> None:
    plan, liar = plan_of(method, "pairwise", "transport.sealing_clear=[]", *GO_ON), Liar(task, number, lie)
    transport = Scripted(participants_of(plan, tmp_path / "run"), liar)
    coordinator = Coordinator(plan, HOSPITALS, transport, Record(tmp_path / "run"), "scripted", settings=CPU)
    with pytest.raises(ParticipationError):
        coordinator.run()
    assert sorted(liar.said) == HOSPITALS
    for said in liar.said.values():
        assert said.startswith("the server: ")
        assert any(part in said for part in reason.split("|")), said


def test_a_site_that_is_asked_to_unmask_a_round_twice(tmp_path: Path) -> None:
    """It answers the same again to the same, and refuses anything else, also in a new process."""
    plan, said = plan_of("fedavg", "pairwise"), []
    folder = tmp_path / "run"

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        first = work()
        if asked.facts["task"] == "unmask":
            assert work().facts["sealing"] == first.facts["sealing"]
            lie = copy.deepcopy(asked)
            unmask_without_one(lie, {})
            for again in (
                transport.participants[site],
                site_of(plan, site, HOSPITALS, CPU, folder / "sites" / site),
            ):
                with pytest.raises(MedsiloError, match="^the server: ") as refused:
                    again.answer(lie)
                said.append((site, asked.facts["round"], str(refused.value)))
        return [(site, first)]

    transport = Scripted(participants_of(plan, folder), script)
    Coordinator(plan, HOSPITALS, transport, Record(folder), "scripted", settings=CPU).run()
    assert {(site, number) for site, number, _ in said} == {
        (s, n) for s in HOSPITALS for n in range(1, plan.rounds + 1)
    }


# ----------------------------------------------------------------------------------------------- hospitals that compare
def test_the_server_reads_no_statistics(tmp_path: Path) -> None:
    """And mixes by the same weights as one that does."""
    plans = {how: plan_of("adafed", how) for how in ("none", "pairwise")}
    plans["sealed"] = plan_of("adafed", "pairwise", "transport.sealing_clear=[]")
    weights, read = {}, {}
    for how, plan in plans.items():
        coordinator = lead(plan, tmp_path / how)
        weights[how] = coordinator.state.found()["similarity"]["weights"]
        kept = list((tmp_path / how / "checkpoints").glob("*.safetensors"))
        statistics = [t for path in kept for name, t in load_tensors(path)[0].items() if name.startswith("statistics/")]
        read[how] = any(bool(tensor.any()) for tensor in statistics)
    assert weights["none"] == weights["pairwise"] == weights["sealed"]
    assert read == {"none": True, "pairwise": True, "sealed": False}
    assert furthest(tmp_path / "sealed", tmp_path / "pairwise") == 0.0


def other_weights(*liars: str) -> Script:
    """A script in which these hospitals tell weights that they have not computed."""

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        answer = work()
        if site in liars and asked.facts["task"] == "compare":
            weights = [[0.25] * 4] * 4 if site == "d" else [[0.1, 0.2, 0.3, 0.4]] * 4
            answer.facts["sealing"]["comparison"]["weights"] = weights
        return [(site, answer)]

    return script


COMPARED = ("adafed", "pairwise", "transport.sealing_clear=[]")


def test_who_computes_other_weights_is_named_and_loses_its_say(tmp_path: Path) -> None:
    with pytest.raises(ParticipationError, match="3 of 4 .* d refused: made other weights of what the hospitals told"):
        lead(plan_of(*COMPARED), tmp_path / "stop", other_weights("d"))
    honest = lead(plan_of(*COMPARED, *GO_ON), tmp_path / "honest")
    coordinator = lead(plan_of(*COMPARED, *GO_ON), tmp_path / "run", other_weights("d"))
    assert coordinator.state.found()["similarity"] == honest.state.found()["similarity"]
    assert any(line.startswith("round 1: d made other weights") for line in coordinator.state.details["cautions"])


def test_without_a_majority_for_the_same_weights_the_study_ends(tmp_path: Path) -> None:
    with pytest.raises(ParticipationError, match="no more than 2 of 4 hospitals .a, b. made the same weights"):
        lead(plan_of(*COMPARED, *GO_ON), tmp_path / "run", other_weights("c", "d"))


# ------------------------------------------------------------------------------------------------ answers that are lost
def first_time(task: str, number: int, gone: Missing, works: bool) -> Script:
    """A script that loses d's first answer to one task, made or not."""
    lost: list[str] = []

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if site == "d" and not lost and (asked.facts["task"], asked.facts["round"]) == (task, number):
            lost.append(task)
            if works:
                work()
            return gone
        return honest(site, asked, work)

    return script


LETTERS = [
    ("agree", 0),
    ("offer", 2),
    ("round", 2),
    ("confirm", 2),
    ("unmask", 2),
    ("compare", 1),
]


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AdaFed in clear."""
    folder = tmp_path_factory.mktemp("clear") / "run"
    lead(plan_of("adafed", "none"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("works", [False, True], ids=["not made", "lost on its way"])
@pytest.mark.parametrize("task, number", slow_but([("round", 2), ("agree", 0)], LETTERS))
def test_a_lost_answer_is_asked_for_again_where_the_plan_waits(
    task: str, number: int, works: bool, clear: Path, tmp_path: Path
) -> None:
    plan = plan_of("adafed", "pairwise", "transport.sealing_clear=[]", "participation.when_missing=wait")
    coordinator = lead(plan, tmp_path / "run", first_time(task, number, LOST, works))
    assert furthest(tmp_path / "run", clear) <= 1e-6
    assert coordinator.rounds[-1].answered == HOSPITALS


def test_a_process_that_died_is_asked_once_more_where_the_plan_stops(clear: Path, tmp_path: Path) -> None:
    plan = plan_of("adafed", "pairwise", "transport.sealing_clear=[]")
    lead(plan, tmp_path / "run", first_time("round", 2, DIED, True))
    assert furthest(tmp_path / "run", clear) <= 1e-6


STOPPED = [letters for letters in LETTERS if letters[0] not in ("confirm", "unmask")]  # for those three are enough


@pytest.mark.parametrize("task, number", slow_but([("round", 2)], STOPPED))
def test_a_lost_answer_ends_a_study_that_stops_and_it_goes_on_from_there(
    task: str, number: int, clear: Path, tmp_path: Path
) -> None:
    plan = plan_of("adafed", "pairwise", "transport.sealing_clear=[]")
    with pytest.raises(ParticipationError, match="3 of 4 sites answered, the plan needs 4: d lost: no answer"):
        lead(plan, tmp_path / "run", first_time(task, number, LOST, True))
    lead(plan, tmp_path / "run", resume=True)
    assert furthest(tmp_path / "run", clear) <= 1e-6


def stopped_while_unmasking(folder: Path) -> None:
    """Leave a study whose server ends when two of three sites have helped to open the sum of round 2, without d."""

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == ("d", "round", 2):
            return LOST
        if (site, asked.facts["task"], asked.facts["round"]) == ("c", "unmask", 2):
            raise Aborted("the server was stopped")
        return honest(site, asked, work)

    with pytest.raises(Aborted):
        lead(plan_of("fedavg", "pairwise", *GO_ON), folder, script)


def test_a_round_whose_sum_was_opened_is_repeated_with_the_same_hospitals(tmp_path: Path) -> None:
    """d, who was not in it, is back: it must wait for the next round, or the two sums would tell its model."""
    stopped_while_unmasking(tmp_path / "run")
    coordinator = lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", resume=True)
    assert [line.answered for line in coordinator.rounds] == [HOSPITALS, ["a", "b", "c"], HOSPITALS]
    assert "is repeated with the hospitals whose sum was opened before" in coordinator.rounds[1].refused["d"]


def test_a_round_whose_sum_was_opened_is_not_opened_over_others(tmp_path: Path) -> None:
    stopped_while_unmasking(tmp_path / "run")

    def without_a(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        try:
            return LOST if site == "a" else honest(site, asked, work)
        except Refused as error:
            return Missing.refused(error)

    with pytest.raises(ParticipationError, match="only 1 sites have confirmed the sum in round 2; it takes 3"):
        lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", without_a, resume=True)


# ------------------------------------------------------------------------------------------------ the last digit
def shaken(seed: int) -> Script:
    """A script that moves what sites send by the last digit of a number in single precision, up or down.

    Fixed point is far finer than that; what it changes is how a mean is rounded to single precision.
    """
    drawn = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        ways = torch.randint(0, 2, tensor.shape, generator=drawn) * 2 - 1
        return torch.nextafter(tensor, ways * torch.finfo(tensor.dtype).max)

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        answer = work()
        for group in answer.groups.values():
            group.update({name: moved(tensor) for name, tensor in group.items()})
        return [(site, answer)]

    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.long) for name in ("fedadam", "f-adafed"))]
)
def test_a_fast_learner_makes_as_much_of_a_last_digit_in_clear(method: str, tmp_path: Path) -> None:
    """At a learning rate of 0.05 training makes more than 1e-5 of a last digit with some methods, sealed or not."""
    clear = ("transport.sealing_clear=[statistics]",) if method == "f-adafed" else ()
    plans = {
        how: make_plan(method, "training.rounds=4", f"transport.sealing={how}", *clear, sites=HOSPITALS) for how in HOWS
    }
    lead(plans["none"], tmp_path / "clear")
    lead(plans["pairwise"], tmp_path / "sealed")
    for seed in range(SHAKES):
        lead(plans["none"], tmp_path / str(seed), shaken(seed))
    usual = max(furthest(tmp_path / str(seed), tmp_path / "clear") for seed in range(SHAKES))
    found = furthest(tmp_path / "sealed", tmp_path / "clear")
    assert found <= SMALL_FACTOR * usual


# ------------------------------------------------------------------------------------------------ dropouts
MOMENTS = ("before", "after keys", "after the upload", "during unmasking")
Schedule = dict[int, tuple[str, tuple[str, ...]]]  # round → when, and who


def killed(schedule: Schedule, sealed: bool) -> Script:
    """A script of sites that drop out, in clear as far as it can be seen there."""
    at = dict(zip(MOMENTS, (["offer"], ["round"], ["round"], ["confirm", "unmask"]), strict=True))

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        moment, gone = schedule.get(asked.facts["round"], ("", ()))
        tasks = at.get(moment, []) if sealed else ["round"] * (moment != MOMENTS[3])
        if site not in gone or asked.facts["task"] not in tasks:
            return honest(site, asked, work)
        if moment == MOMENTS[2]:
            work()
        return LOST

    return script


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_any_sites_that_drop_out_at_any_moment_cost_nothing_but_themselves(count: int, tmp_path: Path) -> None:
    """The most sites that may be missing, in every choice and at every moment, each in a round of its own.

    All are back in the next round.
    """
    sites = [f"site-{place}" for place in range(count)]
    most = count - (count // 2 + 1)
    groups = combinations(sites, most)
    schedule = {place + 1: each for place, each in enumerate((m, some) for some in groups for m in MOMENTS)}
    rules = [*RULES, f"training.rounds={len(schedule)}", "training.learning_rate=0.0001", *GO_ON]
    for how in ("none", "pairwise"):
        few = [f"transport.sealing_threshold={count - most}"] * (how == "pairwise")
        plan = make_plan("fedavg", *rules, f"transport.sealing={how}", *few, sites=sites)
        folder = tmp_path / how
        members = {site: site_of(plan, site, sites, CPU, folder / "sites" / site) for site in sites}
        transport = Scripted(members, killed(schedule, how != "none"))
        coordinator = Coordinator(plan, sites, transport, Record(folder), "scripted", settings=CPU)
        coordinator.run()
        for line in coordinator.rounds:
            moment, gone = schedule[line.round]
            assert line.answered == sorted(set(sites) - (set() if moment == MOMENTS[3] else set(gone)))
    for site in sites:
        mine, theirs = (
            load_tensors(tmp_path / how / "sites" / site / "last.safetensors")[0] for how in ("none", "pairwise")
        )
        assert max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine) <= 1e-5
