"""The server drops an update that is much larger than the honest updates, whatever the order in which updates
arrive.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import ParticipationError, Refused
from medsilo.exchange.channel import Missing
from medsilo.runs.messages import StudyMessage
from medsilo.runs.rounds import Round
from medsilo_server.directions import RoundDirections
from tests.conftest import SITES, make_plan
from tests.unit.medsilo_server.test_coordinator import GO_ON, SMALL, Answers, Study, assert_equal

GIVEN = {"w": torch.ones(100)}


def sent(far: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": GIVEN["w"] + far}}


def answered(opened: RoundDirections, lengths: dict[str, float]) -> list[str]:
    taken = []
    for site, far in lengths.items():
        directions = opened.measure(sent(far), lambda group: GIVEN)
        try:
            opened.check(directions)
        except Refused as error:
            assert "its update of model" in str(error) and "beyond any honest one" in str(error)
        else:
            opened.note(site, directions)
            taken.append(site)
    return sorted(taken)


@pytest.mark.parametrize("evil", [2e4, 1e20, 1e37])
def test_in_the_first_round_no_weight_goes_beyond_all(evil: float) -> None:
    lengths = {SITES[0]: 1.0, SITES[1]: evil, SITES[2]: 9e3}
    for order in permutations(lengths):
        opened = RoundDirections({"model": GIVEN}, {"w"}, 0)
        assert answered(opened, {site: lengths[site] for site in order}) == [SITES[0], SITES[2]]


def test_later_rounds_are_held_to_the_last_one() -> None:
    """An attacker cannot increase updates step by step, because the server compares each round with the previous
    round's median.
    """
    first = RoundDirections({"model": GIVEN}, {"w"}, 0)
    lengths = {SITES[0]: 1e-4, SITES[1]: 2e-4, SITES[2]: 9e3}
    assert answered(first, lengths) == SITES
    for order in permutations(lengths):
        second = RoundDirections({"model": GIVEN}, {"w"}, 1, first)
        assert answered(second, {site: lengths[site] for site in order}) == SITES[:2]
        # the update is so large that no site could train from the mixed model
        assert answered(second, {SITES[2]: 0.9}) == [SITES[2]]
        assert not answered(
            second, {SITES[2]: 1.1}
        )  # the update is 11,000 times as long as the median update, and changes each weight by more than 1
    still = RoundDirections({"model": GIVEN}, {"w"}, 0)
    assert answered(still, dict.fromkeys(SITES, 0.0)) == SITES
    # No weights changed in this round, so the server has no median for a comparison.
    third = RoundDirections({"model": GIVEN}, {"w"}, 1, still)
    assert answered(third, dict.fromkeys(SITES, 1.0)) == SITES


# ---------------------------------------------------------------------------------------------------- whole studies
A, B, C = SITES
Times = Callable[[str, int], float]


def lying(group: str, times: Times) -> Callable[[str, StudyMessage, Callable[[], StudyMessage]], Answers]:
    """Let sites multiply their trained weights by the factors of `times`, and leave batch-norm statistics unchanged.

    If a site refuses the server's request, this function sends the refusal unchanged.
    """

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        try:
            reply = work()
        except Refused as error:
            return Missing.refused(error)
        for name, tensor in reply.groups.get(group, {}).items():
            # the server accepts batch-norm statistics only within a fixed range
            if tensor.is_floating_point() and "running" not in name:
                reply.groups[group][name] = tensor * times(site, asked.facts["round"])
        return [(site, reply)]

    return script


def led(folder: Path, method: str, group: str, times: Times, *changes: str) -> tuple[Study, list[Round]]:
    plan = make_plan(method, *SMALL, *GO_ON, "training.rounds=4", *changes)
    study = Study(plan, folder, lying(group, times))
    return study, study.run() and study.rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "group", "begins", "changes"),
    [
        ("fedavg", "model", 1, []),
        pytest.param("fedsm", "global", 1, ["algorithm.selector_sync=server-adam"], marks=pytest.mark.slow),
        ("fedsm", "selector", 1, ["algorithm.selector_sync=adam-moments", "algorithm.selector_learning_rate=1"]),
        pytest.param("harmofl", "model", 1, [], marks=pytest.mark.slow),
        # adafed mixes a separate model for each hospital, so a false update ruins some hospitals' models earlier than
        # others
        ("adafed", "model", 2, []),
        pytest.param("d-adafed", "model", 2, [], marks=pytest.mark.slow),
    ],
)
def test_a_round_after_which_others_diverge_is_taken_back(
    method: str, group: str, begins: int, changes: list[str], tmp_path: Path
) -> None:
    """Site C multiplies its weights by 1000 in the first round of a group of tensors, when the server has no earlier
    round to compare. In a later round of the group, site C multiplies its weights by 1e37.
    """
    lies = {begins: 1000.0, begins + 2: 1e37}
    folder = tmp_path / f"{method} {group}"
    study, rounds = led(folder, method, group, lambda site, n: lies.get(n, 1) if site == C else 1, *changes)
    assert [line.answered for line in rounds[begins - 1 :]] == [[A, B], SITES, [A, B], SITES]
    assert f"round {begins} was taken back" in rounds[begins - 1].refused[C]
    assert f"its update of {group} " in rounds[begins + 1].refused[C]
    assert not any(line.refused.keys() - {C} or line.lost for line in rounds) and study.summary.finished


def test_what_follows_is_the_study_without_that_site(tmp_path: Path) -> None:
    """The study's result equals the result of a study that loses site C's answer."""
    taken, _ = led(tmp_path / "taken", "fedavg", "model", lambda site, n: 1000 if (site, n) == (C, 1) else 1)

    def lost(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        gone = (site, asked.facts["task"], asked.facts["round"]) == (C, "round", 1)
        return Missing("lost", "") if gone else [(site, reply)]

    other = Study(taken.plan, tmp_path / "lost", lost)
    other.run()
    assert_equal(taken.model("global/last"), other.model("global/last"))


def test_who_goes_on_is_asked_no_more_and_a_rate_that_is_too_high_ends_as_before(tmp_path: Path) -> None:
    rate = "training.learning_rate=0.3"
    study, rounds = led(
        tmp_path / "lie", "fedavg", "model", lambda site, n: (1000 if n == 1 else 300) if site == C else 1, rate
    )
    assert [line.answered for line in rounds] == [[A, B]] * 4 and study.summary.finished
    assert "it is asked no more" in rounds[3].refused[C]
    with pytest.raises(ParticipationError, match="training diverged"):
        led(tmp_path / "rate", "fedavg", "model", lambda site, n: 1, "training.learning_rate=1000")


def test_one_hospitals_word_takes_no_round_back(tmp_path: Path) -> None:
    """Site A sends an update near zero, against which the honest updates seem too large. After such an update, site A
    reports that it can no longer train.
    """

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        task, number = asked.facts["task"], asked.facts["round"]
        if task == "round" and site == C:
            return Missing("lost", "")
        if task == "round" and number == 2 and site == A:
            return Missing(
                "refused", "the field train_loss: input should be a finite number; training diverged at this site"
            )
        reply = work()
        for name, tensor in reply.groups.get("model", {}).items() if (task, site) == ("round", A) else ():
            if tensor.is_floating_point():
                given = asked.groups["model"][name]
                reply.groups["model"][name] = given + 1e-6 * (tensor - given)
        return [(site, reply)]

    for sites in ([A, B], SITES):
        least = len(sites) - 1
        plan = make_plan("fedavg", *SMALL, *GO_ON, f"participation.minimum={least}", "training.rounds=3", sites=sites)
        study = Study(plan, tmp_path / str(least), script)
        with (
            nullcontext()
            if least == 1
            else pytest.raises(ParticipationError, match=f"{A} refused: the field train_loss")
        ):
            study.run()
        assert all(B in line.answered for line in study.rounds) and len(study.rounds) == 4 - least
