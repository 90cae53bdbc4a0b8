"""A method of another installed package, which knows the package's rooms and which no room knows, against the same
method written out by hand."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from medsilo.core.errors import Refused
from medsilo.plan import Plan
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.outside import installed_as
from tests.unit.test_algorithms import (
    SMALL,
    State,
    assert_close,
    load_data,
)
from tests.unit.test_baselines import PLAIN_SGD, Local, Server, Site, plain, study
from tests.unit.test_participant import assert_same_run, stop_and_resume

FILES = Path(__file__).parents[1] / "outside"


installed = installed_as("outside-methods", "[medsilo.methods]\nelastic = elastic:Elastic\n")


def planned(*changes: str) -> Plan:
    return make_plan("elastic", *SMALL, *PLAIN_SGD, "training.local_epochs=2", *changes)


def elastic(tau: float, decay: float) -> tuple[Local, Server]:
    data = iter(load_data(planned()).values())

    def local(site: Site, given: State) -> dict[str, np.ndarray]:
        inputs, targets = site.memory.setdefault("data", next(data).train.tensors if "data" not in site.memory else ())
        model = copy.deepcopy(site.model).train()
        omega = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            gradients = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
            for name, gradient in zip(omega, gradients, strict=True):
                omega[name] = decay * omega[name] + (1 - decay) * gradient.abs().double().numpy()
        plain(site, given)
        return omega

    def server(w: dict, sent: dict, weights: dict, said: dict) -> dict:
        def mean(values: dict) -> np.ndarray:
            return sum(weights[name] * values[name] for name in sent) / sum(weights.values())

        omega = {key: mean({name: said[name][key] for name in sent}) for key in w}
        largest = max(value.max() for value in omega.values())
        return {
            key: value + (1 + tau - omega[key] / largest) * mean({name: sent[name][key] - value for name in sent})
            for key, value in w.items()
        }

    return local, server


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [False, True])
def test_elastic_aggregation_is_its_algorithm(uniform: bool) -> None:
    weighting = ["algorithm.weighting=uniform"] if uniform else []
    plan = planned("algorithm.tau=0.4", "algorithm.decay=0.8", *weighting)
    expected = study(plan, *elastic(0.4, 0.8), uniform=uniform)
    run = inprocess.run(plan)
    for site in SITES:
        assert_close(run.models[site].state_dict(), expected)
    average = inprocess.run(make_plan("fedavg", *SMALL, *PLAIN_SGD, "training.local_epochs=2"))
    assert not torch.allclose(average.models[SITES[0]].state_dict()["4.weight"], expected["4.weight"], atol=1e-4)


def test_elastic_aggregation_refuses_a_sensitivity_below_0(tmp_path: Path) -> None:
    plan = planned("training.rounds=1")
    network = plan.build_networks()
    sensitivity = plan.course.last.groups[0]
    values = {name: tensor.clone() for name, tensor in sensitivity.of(network).items()}
    sensitivity.check(values)
    values["4.weight"][0, 0] = -1
    with pytest.raises(Refused, match=r"sensitivity/4\.weight is below 0"):
        sensitivity.check(values)


@pytest.mark.slow
def test_it_comes_through_the_registry_and_resumes(tmp_path: Path) -> None:
    plan = planned("training.rounds=3")
    assert list(plan.packages) == ["outside-methods"]
    inprocess.run(plan, folder=tmp_path / "whole")
    stop_and_resume(plan, tmp_path / "run", 2)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
