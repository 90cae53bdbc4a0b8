"""Cyclic weight transfer equals a loop in plain torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import PlanError
from medsilo.runs.messages import StudyMessage
from medsilo.runs.reading import read_rounds
from medsilo_zoo.cyclic import Cyclic
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.unit.medsilo_server.test_coordinator import (
    GO_ON,
    LOST,
    A,
    Answers,
    B,
    C,
    Study,
    assert_equal,
    task_and_round,
)
from tests.unit.methods.test_algorithms import (
    SMALL,
    assert_close,
    initial,
    load_data,
    plan_sgd,
    train_by_hand,
    with_state,
)

ROUNDS = 5


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fixed", "drawn"])
def test_a_model_goes_from_hospital_to_hospital(order: str, tmp_path: Path) -> None:
    plan = make_plan("cyclic", *SMALL, f"training.rounds={ROUNDS}", f"algorithm.order={order}")
    run = inprocess.run(plan, folder=tmp_path / "run")
    lines = read_rounds(tmp_path / "run")
    turns = [next(site for site, own in line.sites.items() if own.train_loss is not None) for line in lines]
    data, state = load_data(plan), initial(plan)
    models = {site: with_state(plan, state) for site in SITES}
    # each site keeps the momentum of its optimizer
    optimizers = {site: plan_sgd(plan, model) for site, model in models.items()}
    for number, site in enumerate(turns, 1):
        models[site].load_state_dict(state)
        train_by_hand(plan, models[site], optimizers[site], data[site], site, number)
        state = {name: tensor.clone() for name, tensor in models[site].state_dict().items()}
    assert_close(run.models[SITES[0]].state_dict(), state)
    assert sorted(turns[:3]) == SITES and (turns == [*SITES, *SITES[:2]]) == (order == "fixed")
    for line, turn in zip(lines, turns, strict=True):
        assert line.asked == line.answered == SITES and None not in {own.validation for own in line.sites.values()}
        sent = {site for site, own in line.sites.items() if own.bytes_up > 10_000}
        assert sent == {turn} and line.sites[turn].share == 1.0


def test_every_cycle_has_each_hospital_once_in_an_order_of_its_own() -> None:
    def cycles(method: Cyclic, seed: int) -> list[Sequence[str]]:
        turns = [method.turn(number, SITES, seed) for number in range(1, 61)]
        return [turns[first : first + 3] for first in range(0, 60, 3)]

    drawn = cycles(Cyclic(order="drawn"), 0)
    assert all(sorted(cycle) == SITES for cycle in drawn) and len({tuple(cycle) for cycle in drawn}) == 6
    assert drawn == cycles(Cyclic(order="drawn"), 0) != cycles(Cyclic(order="drawn"), 1)


def test_a_model_out_of_turn_is_refused_and_a_missed_turn_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    given: dict[tuple[str, int], StudyMessage] = {}

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        task, number = task_and_round(asked)
        if task == "round":
            given[site, number] = asked
        if (site, task, number) == (B, "round", 2):
            return LOST
        reply = work()
        if (site, task, number) == (C, "round", 1):
            reply.groups = asked.groups
        return [(site, reply)]

    study = Study(make_plan("cyclic", *SMALL, *GO_ON, "training.rounds=3"), tmp_path / "run", script)
    assert study.run().status == "finished"
    first, second, _ = study.rounds
    assert first.answered == [A, B] and "model" in first.refused[C]
    assert second.answered == [A, C] and B in second.lost and not any(own.share for own in second.sites.values())
    assert_equal(given[A, 3].groups["model"], given[A, 2].groups["model"])
    assert not torch.equal(given[A, 2].groups["model"]["6.weight"], given[A, 1].groups["model"]["6.weight"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("secure_aggregation.mode=pairwise", "which no sum hides"),
        ("aggregation.robust.name=median", "a single hospital's model"),
        ('privacy={"epsilon": 3, "delta": 1e-5}', "leave privacy out"),
        ('algorithm.amplitude={"band": 0.1}', "algorithm.amplitude.measured=before"),
    ],
)
def test_what_one_hospitals_model_cannot_have_is_refused(change: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        make_plan("cyclic", "task.name=synthetic-histology" if "amplitude" in change else "seed=0", change)
