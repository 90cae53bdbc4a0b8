import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from medsilo.core.errors import PlanError
from medsilo.registry import TASKS
from tests.conftest import slow_but

SMALL = {
    "synthetic-activity": {"persons": 6, "windows": 5},
    "synthetic-histology": {"patients": 5, "patches": 4},
    "synthetic-prostate": {"patients": 4},
}
PARTS = ("train", "validation", "test")
NAMES = [name for name, task in TASKS.items() if task.synthetic]


def small(name, **numbers):
    return TASKS[name](**{**SMALL[name], **numbers})


def hospitals(count):
    return [f"hospital-{number}" for number in range(1, count + 1)]


def tensors(data):
    return [tensor for part in PARTS for tensor in getattr(data, part).tensors]


def same(first, second):
    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def test_registry_is_sorted_and_named_as_the_classes():
    known = {name: task for name, task in TASKS.items() if not name.startswith("own-data-")}
    assert list(known) == sorted(known)
    for name, task in known.items():
        assert task.model_fields["name"].default == name
        said = "SYNTHETIC" in task.title, "SYNTHETIC" in task.__doc__, name.startswith("synthetic-")
        assert said == (task.synthetic,) * 3


@pytest.mark.parametrize("name", NAMES)
def test_data_depend_on_the_seed_and_on_no_global_generator(name):
    task, sites = small(name), hospitals(3)
    np.random.seed(1)
    torch.manual_seed(1)
    first = task.load(sites[1], sites, 7, None)
    np.random.seed(2)
    state = torch.get_rng_state()
    again = task.load(sites[1], sites, 7, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert first.train.patients == again.train.patients
    assert not same(first, task.load(sites[1], sites, 8, None))
    assert not same(first, task.load(sites[2], sites, 7, None))


@pytest.mark.parametrize("name", NAMES)
def test_data_depend_on_the_site_s_position_only(name):
    task = small(name)
    expected = task.load("hospital-2", hospitals(3), 7, None)
    assert same(expected, task.load("b", ["a", "b", "c"], 7, None))
    assert same(expected, task.load("b", ["c", "b", "a"], 7, None))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_no_part_is_empty_and_no_patient_is_in_two(name, count):
    task, sites = small(name), hospitals(count)
    for site in sites:
        data = task.load(site, sites, 1, None)
        patients = [set(getattr(data, part).patients) for part in PARTS]
        assert all(patients)
        assert sum(map(len, patients)) == len(set.union(*patients))
        for part in PARTS:
            cases = getattr(data, part)
            assert len(cases) == len(cases.inputs) == len(cases.patients) > 0
            assert cases.inputs.dtype == torch.float32 and cases.targets.dtype == torch.int64
            assert cases.inputs.shape[1] == task.channels
            assert cases.inputs.isfinite().all() and 0 <= cases.targets.min() <= cases.targets.max() < task.goal.classes


@pytest.mark.parametrize("name", NAMES)
def test_unknown_sites_are_plan_errors(name):
    with pytest.raises(PlanError, match=r"participation\.sites: 'd' is not"):
        small(name).load("d", ["a", "b"], 0, None)


@pytest.mark.parametrize("name", ["synthetic-histology", "synthetic-prostate"])
def test_more_sites_than_there_are_looks_are_plan_errors(name):
    with pytest.raises(PlanError, match=r"participation\.sites: 9 sites, but .* 8"):
        small(name).load("hospital-1", hospitals(9), 0, None)


LEARNING = [
    # task, parameters, batch size, learning rate, epochs, score of random guessing, and lowest allowed score
    ("synthetic-activity", {"shift": "none"}, 16, 0.002, 3, 1 / 6, 0.8),
    ("synthetic-activity", {"shift": "both"}, 16, 0.002, 3, 0.5, 0.8),
    ("synthetic-histology", {"coding": "phase", "patients": 40}, 16, 0.003, 5, 0.5, 0.85),
    ("synthetic-histology", {"coding": "amplitude", "patients": 40}, 16, 0.003, 6, 0.5, 0.75),
    ("synthetic-prostate", {"similarity": "low"}, 4, 0.003, 6, 0.2, 0.6),
    ("synthetic-prostate", {"similarity": "high"}, 4, 0.003, 5, 0.2, 0.75),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "numbers", "batch", "rate", "epochs", "chance", "wanted"), slow_but(LEARNING[1::2], LEARNING, ())
)
def test_default_network_learns_the_pooled_data(name, numbers, batch, rate, epochs, chance, wanted):
    task, sites = TASKS[name](**numbers), hospitals(2)
    data = [task.load(site, sites, 0, None) for site in sites]
    train, test = ConcatDataset([d.train for d in data]), ConcatDataset([d.test for d in data])
    torch.manual_seed(0)
    network = task.default_network().build(task.channels, task.goal.classes)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    batches = DataLoader(train, batch, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, epochs * len(batches))
    network.train()
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            task.goal.loss(network(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    network.eval()
    inputs, targets = next(iter(DataLoader(test, len(test))))
    with torch.no_grad():
        score = task.goal.case_scores(network(inputs), targets).mean().item()
    assert score > wanted > chance
