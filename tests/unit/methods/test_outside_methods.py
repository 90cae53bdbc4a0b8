"""A method of another installed package, which medsilo does not know, equals an independent implementation."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional

from medsilo.cli import main
from medsilo.core.errors import Refused
from medsilo.plan import Plan
from medsilo.registry import METHODS
from medsilo_lab.testing import MethodTester, Reference
from tests.conftest import SITES, make_plan
from tests.outside import installed_as
from tests.unit.methods.test_algorithms import SMALL, State, load_data
from tests.unit.methods.test_baselines import PLAIN_SGD, Local, Server, Site, plain, study

installed = installed_as("outside-methods", "[medsilo.methods]\nelastic = elastic:Elastic\n")


def planned(*changes: str) -> Plan:
    return make_plan("elastic", *SMALL, *PLAIN_SGD, "training.local_epochs=2", *changes)


def elastic(plan: Plan, tau: float, decay: float) -> tuple[Local, Server]:
    data = iter(load_data(plan).values())

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
class TestElastic(MethodTester):
    method = "elastic"
    changes = ("algorithm.tau=0.4", "algorithm.decay=0.8", "training.momentum=0")
    uniform = False

    def reference(self, by_hand: Reference) -> Sequence[Mapping[str, State]]:
        curve = study(by_hand.plan, *elastic(by_hand.plan, 0.4, 0.8), uniform=self.uniform)
        return [dict.fromkeys(SITES, state) for state in curve]


@pytest.mark.slow
class TestElasticOfUniformMeans(TestElastic):
    changes = (*TestElastic.changes, "algorithm.weighting=uniform")
    uniform = True


def test_the_list_describes_a_method_only_with_the_texts_of_its_own_class(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(method: str) -> list[str]:
        assert main(["list", method]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith(("worth", "leaves", "stays", "bytes", "extra"))]

    assert told("elastic") == ["leaves a hospital: how sensitive weights are, model, running statistics"]
    monkeypatch.setattr(METHODS["elastic"], "suits", "weights that differ in sensitivity", raising=False)
    assert told("elastic")[0] == "worth a try: weights that differ in sensitivity"
    assert told("elastic")[2:] == [
        "stays at a hospital: the state of the optimizer",
        "bytes a round: 1 (FedAvg: 1)",
        "extra work: none",
    ]
    assert main(["list"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("elastic ")]
    assert line.split() == ["elastic", "of", "package", "outside-methods"]


def test_elastic_aggregation_refuses_a_sensitivity_below_0() -> None:
    plan = planned("training.rounds=1")
    assert list(plan.packages) == ["outside-methods"]
    network = plan.build_networks()
    sensitivity = plan.course.last.groups[0]
    values = {name: tensor.clone() for name, tensor in sensitivity.of(network).items()}
    sensitivity.check(values)
    values["4.weight"][0, 0] = -1
    with pytest.raises(Refused, match=r"sensitivity/4\.weight is below 0"):
        sensitivity.check(values)
