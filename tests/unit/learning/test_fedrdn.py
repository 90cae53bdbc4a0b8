"""FedRDN's statistics, random choices and rounds equal separate computations, and medsilo rejects unsuitable plans."""

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.core.errors import PlanError, Refused
from medsilo.learning.seeds import generator_for
from medsilo.site.settings import SiteSettings
from medsilo_zoo.fedrdn import FLATTEST, ChannelNorm, of_one_hospital, table_ranges
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.unit.methods import test_baselines as baselines
from tests.unit.methods.test_algorithms import SMALL, assert_close, initial, load_data

PLAN = make_plan("fedrdn", *SMALL)


def measured(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's mean and standard deviation, computed in each image and averaged over the images."""
    flat = images.reshape(*images.shape[:2], -1)
    return flat.mean(2).mean(0), flat.std(2, ddof=1).mean(0)


def test_statistics_and_draws_are_those_of_the_paper_in_double_precision() -> None:
    random = torch.Generator().manual_seed(1)
    hospitals = [torch.randn(n, 3, 4, 5, generator=random, dtype=torch.float64) * (n + 1) + n for n in (2, 3, 4)]
    norms = [ChannelNorm(3, 3).double() for _ in hospitals]
    for place, (norm, images) in enumerate(zip(norms, hospitals, strict=True)):
        norm.take(torch.cat(list(norm.statistics(images.split(2)))).mean(0))
        norm.show(place)
    tables = [{name: getattr(norm, name).clone() for name in ("present", "means", "deviations")} for norm in norms]
    norm = norms[0]
    for name in tables[0]:
        getattr(norm, name).copy_(torch.stack([own[name] for own in tables]).mean(0))
    norm.share_out()
    everyones = [measured(images.numpy()) for images in hospitals]
    with norm.drawing(torch.Generator().manual_seed(7)):
        found = norm.train()(hospitals[0])
    drawn = torch.randint(3, (2,), generator=torch.Generator().manual_seed(7)).tolist()
    for image, own, place in zip(hospitals[0], found, drawn, strict=True):
        mean, deviation = (values[:, None, None] for values in everyones[place])
        np.testing.assert_allclose(own.numpy(), (image.numpy() - mean) / deviation, rtol=1e-9, atol=1e-9)
    mean, deviation = (values[:, None, None] for values in everyones[0])
    expected = (hospitals[0].numpy() - mean) / deviation
    np.testing.assert_allclose(norm.eval()(hospitals[0]).numpy(), expected, rtol=1e-9, atol=1e-9)


SETTINGS = SiteSettings(device="cpu", public_data=True)


def test_two_rounds_equal_those_written_by_hand() -> None:
    data = load_data(PLAN)
    tables = [
        tuple(torch.from_numpy(v).float() for v in measured(data[s].train.inputs.double().numpy())) for s in SITES
    ]
    rounds = dict.fromkeys(SITES, 1)  # sites measure their statistics in round 1

    def local(site: baselines.Site, given: dict[str, Tensor]) -> int:
        name = next(own for own in SITES if len(data[own].train) == site.cases)
        rounds[name] += 1
        draw = generator_for(PLAN.seed, name, "method", rounds[name])
        site.batches = []
        inputs, targets = data[name].train.tensors
        order = torch.randperm(len(inputs), generator=generator_for(PLAN.seed, name, "shuffle", rounds[name], 0))
        for part in (part for part in order.split(PLAN.training.batch_size) if len(part) > 1):
            drawn = torch.randint(len(SITES), (len(part),), generator=draw).tolist()
            images = [
                (inputs[c] - tables[j][0][:, None]) / tables[j][1][:, None] for c, j in zip(part, drawn, strict=True)
            ]
            site.batches.append((torch.stack(images), targets[part]))
        return baselines.plain(site, given)

    def mean(w: dict, sent: dict, weights: dict, said: dict) -> dict:
        total = sum(weights.values())
        return {key: sum(weights[name] / total * sent[name][key] for name in sent) for key in w}

    expected = baselines.study(PLAN, local, mean)[-1]
    run = inprocess.run(PLAN, settings=SETTINGS)
    for place, site in enumerate(SITES):
        state = run.models[site].state_dict()
        own = {name.removeprefix("input."): tensor for name, tensor in state.items() if name.startswith("input.")}
        assert_close({n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}, expected)
        for table, values in (("means", tables[place][0]), ("deviations", tables[place][1])):
            torch.testing.assert_close(own[table][place], values, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own["mean"], tables[place][0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected["4.weight"], initial(PLAN)["4.weight"], atol=1e-3)


def test_a_hospital_that_did_not_train_is_normalised_by_its_own() -> None:
    plan = PLAN.with_changes(["participation.evaluation_sites=[hospital-z]", "training.rounds=1"])
    run = inprocess.run(plan, settings=SETTINGS)
    assert run.summary.evaluation_sites["hospital-z"].test
    state = run.models["hospital-z"].state_dict()
    images = PLAN.task.load("hospital-z", [*SITES, "hospital-z"], PLAN.seed, None).train.inputs
    mean, deviation = (torch.from_numpy(values).float() for values in measured(images.double().numpy()))
    torch.testing.assert_close(state["input.mean"], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["input.deviation"], deviation, rtol=1e-5, atol=1e-6)


def row(place: int, deviation: float = 0.5) -> dict[str, Tensor]:
    norm = ChannelNorm(3, 2)
    norm.take(torch.full((4,), deviation))
    norm.show(place)
    return {name: getattr(norm, name) for name in ("present", "means", "deviations")}


def test_what_a_dishonest_hospital_sends_is_refused() -> None:
    of_one_hospital(row(1))
    for wrong, said in (
        (row(1) | {"present": torch.ones(3)}, "does not name exactly one"),
        (row(1) | {"present": torch.zeros(3)}, "does not name exactly one"),
        (row(1) | {"means": row(2)["means"]}, "rows of other hospitals"),
        (row(1) | {"deviations": row(1)["deviations"] * 1e-6}, f"below {FLATTEST}"),
    ):
        with pytest.raises(Refused, match=said):
            of_one_hospital(wrong)
    ranges = table_ranges({}, PLAN.task)
    assert ranges["means"] == (-1000.0, 1000.0) and ranges["deviations"][0] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algorithm.amplitude={}"], "fedrdn normalises images itself"),
        (["aggregation.robust.name=median"], "fedrdn's statistics"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make_plan("fedrdn", *SMALL, *changes)
