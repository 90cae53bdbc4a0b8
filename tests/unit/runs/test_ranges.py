"""The server rejects an answer with impossible statistics, and the study continues with the other hospitals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo.registry import TASKS
from medsilo.runs.messages import StudyMessage
from medsilo.schedule.phase import FURTHEST
from tests.conftest import SITES, make_plan
from tests.unit.medsilo_server.test_coordinator import GO_ON, SMALL, Answers, Study, task_and_round

A, B, C = SITES
IMAGES = [
    *("task.name=synthetic-histology", "task.patients=8", "task.patches=4", "task.size=32"),
    *("training.batch_size=16", "training.rounds=2"),
]


def poisoned(folder: Path, plan: Any, group: str, ending: str, change: Callable[[Tensor], Any]) -> Study:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        if site == C and task_and_round(asked) == ("round", 1):
            own = {name: tensor.clone() for name, tensor in reply.groups[group].items()}
            hit = [name for name in own if name.endswith(ending)]
            assert hit
            change(own[hit[0]])
            reply.groups[group] = own
        return [(site, reply)]

    study = Study(plan, folder, script)
    study.run()
    return study


def assert_blamed(study: Study, told: str) -> None:
    first, second = study.rounds
    assert (first.answered, second.answered) == ([A, B], [A, B, C])
    assert told in first.refused[C]
    summary = study.summary
    assert summary.status == "finished"
    assert [summary.sites[site].contributed for site in SITES] == [2, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "group", "ending", "value", "told"),
    [
        ("fedavg", "model", "running_var", -1.0, "running_var holds -1; only 0 to 1e+12"),
        ("fedavg", "model", "running_var", 1e30, "running_var holds 1e+30; only 0 to 1e+12"),
        ("fedavg", "model", "running_mean", -1e30, "running_mean holds -1e+30; only -1e+06 to 1e+06"),
        ("fedadam", "buffers", "running_var", 1e30, "buffers/"),
        ("fedsm", "personal", "running_var", 1e30, "personal/"),
        ("f-adafed", "statistics", "0_variance", 1e30, "statistics/layer0_variance holds 1e+30; only 0 to 1e+12"),
        ("f-adafed", "statistics", "0_mean", 1e30, "statistics/layer0_mean holds 1e+30"),
    ],
)
def test_impossible_statistics_cost_their_sender_the_round(
    method: str, group: str, ending: str, value: float, told: str, tmp_path: Path
) -> None:
    plan = make_plan(method, *SMALL, *GO_ON)
    study = poisoned(tmp_path / "run", plan, group, ending, lambda tensor: tensor.view(-1)[0].fill_(value))
    assert_blamed(study, told)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e30, -1.0, 32 * 32 * 10 * 1.01])
def test_an_amplitude_that_no_images_have_blames_who_sent_it(value: float, tmp_path: Path) -> None:
    plan = make_plan("harmofl", *IMAGES, *GO_ON)
    study = poisoned(tmp_path / "run", plan, "amplitude", "amplitude", lambda tensor: tensor.view(-1)[3].fill_(value))
    first, second = study.rounds
    assert first.answered == [A, B]
    assert f"amplitude/amplitude holds {value:g}; only 0 to 10240 is possible there" in first.refused[C]
    assert {A, B} <= {*second.answered}
    assert study.summary.status == "finished"


def test_adams_memory_has_ranges_too(tmp_path: Path) -> None:
    plan = make_plan("fedsm", *SMALL, *GO_ON, "algorithm.selector_sync=adam-moments")
    study = poisoned(tmp_path / "run", plan, "moments", "second_0", lambda tensor: tensor.fill_(-1.0))
    assert_blamed(study, "moments/second_0 holds -1; only 0 to 1e+12")


@pytest.mark.parametrize("name", sorted(name for name in TASKS if name.startswith("synthetic")))
def test_inputs_of_the_tasks_stay_far_from_the_bound(name: str) -> None:
    task = TASKS[name]()
    data = task.load("hospital-a", SITES, 0, None)
    largest = max(float(data.train[case][0].abs().max()) for case in range(len(data.train)))  # type: ignore[arg-type]
    assert largest <= task.largest_input
    assert FURTHEST >= 1e4


def test_bfloat16_statistics_are_checked_as_they_travel(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, *GO_ON, "transport.precision=bfloat16")
    study = poisoned(tmp_path / "run", plan, "model", "running_var", lambda tensor: tensor.fill_(torch.tensor(-2.0)))
    assert_blamed(study, "running_var holds -2")
