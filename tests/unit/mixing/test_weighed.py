"""FedDG-GA, FedLWS, FedAWA and FedCE equal separate computations, and medsilo rejects dishonest hospitals and
unsuitable plans.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.learning.compute import Compute
from medsilo.learning.training import Training
from medsilo.mixing.aggregators import aggregator_of
from medsilo.mixing.staleness import StalenessWeightedMean, at_most
from medsilo.schedule.phase import ServerSide
from medsilo.site.settings import SiteSettings
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from medsilo_zoo.fedawa import FedAWA
from medsilo_zoo.fedce import FedCE, without
from medsilo_zoo.feddg_ga import FedDGGA, moved
from medsilo_zoo.fedlws import FedLWS
from tests import inprocess
from tests.conftest import SITES, WEIGHED, make_plan
from tests.mixed import result_of
from tests.sites import sites_of
from tests.unit.methods import test_baselines as baselines
from tests.unit.methods.test_algorithms import SMALL, assert_close

Arrays = dict[str, np.ndarray]
SERVER = ServerSide(
    ["s0", "s1", "s2"], {}, {}, frozenset, make_plan().task, Training(), 0, Compute(), None, lambda: None
)
CPU = SiteSettings(device="cpu", public_data=True)
# without batch norms, sites send only trained weights
NO_BATCH_NORM = ["network.name=activity-cnn", "network.norm=group"]


# ------------------------------------------------------------ means whose weights are computed after all answers
def contributions(seed: int, sites: int = 3) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(seed)

    def model() -> dict[str, Tensor]:
        shapes = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 4, 2)}
        return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}

    return model(), {f"s{place}": model() for place in range(sites)}


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_late_mean_and_its_products_are_those_by_hand_in_any_order(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medsilo.mixing.contributions.MEMORY", memory)
    given, sent = contributions(1)
    seen: list[dict[str, Tensor]] = []

    def weigh(mean: StalenessWeightedMean) -> dict[str, float]:
        seen.append(mean.products(lambda name: name.split(".")[0]))
        return {"s0": 0.2, "s1": 0.0, "s2": 0.5}

    results = []
    for order in (list(sent), list(sent)[::-1]):
        aggregator = StalenessWeightedMean(weigh)
        aggregator.start(sent, given)
        for site in order:
            aggregator.add(site, sent[site], 5)
        assert torch.equal(aggregator.current("s0")["a.bias"], given["a.bias"])
        results.append(result_of(aggregator, "s1"))
        assert aggregator.shares == pytest.approx({"s0": 2 / 7, "s1": 0, "s2": 5 / 7})
    for name, tensor in results[0].items():
        expected = (0.2 * sent["s0"][name].numpy() + 0.5 * sent["s2"][name].numpy()) / 0.7
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(tensor, results[1][name])
    for part in ("a", "b"):
        names = [name for name in given if name.startswith(part)]
        rows = [np.concatenate([given[n].numpy().ravel() for n in names])]
        rows += [np.concatenate([(sent[s][n] - given[n]).numpy().ravel() for n in names]) for s in sent]
        np.testing.assert_allclose(seen[0][part].numpy(), np.array(rows) @ np.array(rows).T, rtol=1e-12)
        assert torch.equal(seen[0][part], seen[1][part])


# ---------------------------------------------------------------------------------------------------- FedDG-GA
def test_feddg_ga_equals_its_algorithm_written_by_hand() -> None:
    plan = make_plan("feddg-ga", *SMALL, *NO_BATCH_NORM, "training.rounds=3", "algorithm.largest_share=1")
    a, calls = dict.fromkeys(SITES, 1 / 3), [0]
    data = baselines.load_data(plan)

    def local(site: baselines.Site, given: dict[str, Tensor]) -> float | None:
        name = next(own for own in SITES if len(data[own].train) == site.cases)
        inputs, targets = data[name].train.tensors

        def loss() -> float:
            with torch.no_grad():
                return float(functional.cross_entropy(site.model.eval()(inputs), targets))

        gap = loss() - site.memory["loss"] if site.memory else None
        site.model.train()
        baselines.plain(site, given)
        site.memory["loss"] = loss()
        return gap

    def server(w: Arrays, sent: dict[str, Arrays], weights: dict[str, float], gaps: dict[str, Any]) -> Arrays:
        calls[0] += 1
        if calls[0] > 1:
            step = 0.2 * (1 - (calls[0] - 2) / 3) / 3
            largest = max(abs(gap) for gap in gaps.values())
            moved = {name: min(1, max(0, a[name] + step * gaps[name] / largest)) for name in a}
            a.update({name: value / sum(moved.values()) for name, value in moved.items()})
        return {key: sum(a[name] * sent[name][key] for name in sent) for key in w}

    expected = baselines.study(plan, local, server)[-1]
    run = inprocess.run(plan, settings=CPU)
    assert_close(run.models[SITES[0]].state_dict(), expected)
    shares = {site: line.share for site, line in run.history[-1].sites.items()}
    assert shares == pytest.approx(a, abs=1e-4) and len(set(shares.values())) == 3


def test_feddg_ga_s_liar_gets_no_more_than_the_largest_share() -> None:
    a = {"a": 1 / 3, "b": 1 / 3, "liar": 1 / 3}
    for number in range(1, 20):
        a = moved(a, {"a": 0.3, "b": -0.1, "liar": 100.0}, 0.2 * (1 - (number - 1) / 20))
    assert a["liar"] > 0.6
    assert at_most(a, FedDGGA().largest_share)["liar"] == pytest.approx(0.5)
    assert moved(a, dict.fromkeys(a, 0.0), 0.2) == a


# ---------------------------------------------------------------------------------------------------- FedLWS
def flat(tensors: dict[str, Tensor], layer: str) -> np.ndarray:
    return np.concatenate([tensor.numpy().ravel() for name, tensor in tensors.items() if name.startswith(layer)])


def shrunk(given: dict[str, Tensor], sent: dict[str, dict[str, Tensor]], p: dict[str, float]) -> Arrays:
    """Compute FedLWS's next model by loops over layers and sites."""
    result = {}
    for layer in ("a.", "b."):
        w = flat(given, layer)
        ways = {site: flat(model, layer) - w for site, model in sent.items()}
        middle = sum(ways.values()) / len(ways)
        apart = sum(np.linalg.norm(way - middle) for way in ways.values()) / len(ways)
        tau = min(0.2, max(0.01, 0.03 * apart))
        norm = np.linalg.norm(w)
        gamma = norm / (norm + tau * np.linalg.norm(sum(p[site] * way for site, way in ways.items())))
        for name in (name for name in given if name.startswith(layer)):
            result[name] = gamma * sum(p[site] * sent[site][name].numpy() for site in sent)
    return result


# values for which τ is at its lower bound, between its bounds, and at its upper bound
@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_fedlws_equals_its_equations_written_by_hand(spread: float) -> None:
    aggregator, samples = FedLWS().step(SERVER), {"s0": 5.0, "s1": 7.0, "s2": 3.0}
    given = contributions(1)[0]
    aggregator.start(samples, given)
    for number in (2, 3):
        sent = {s: {n: given[n] + spread * t for n, t in m.items()} for s, m in contributions(number)[1].items()}
        expected = shrunk(given, sent, {site: count / 15 for site, count in samples.items()})
        aggregator.start(samples)
        for site in samples:
            aggregator.add(site, sent[site], samples[site])
        given = result_of(aggregator, "s0")
        for name, tensor in given.items():
            np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-9, atol=1e-12)


def test_fedlws_trains_a_layer_that_begins_with_zeros() -> None:
    """FedLWS's equation would give such a layer the factor 0, so it would stay zero in all rounds."""
    given, sent = contributions(1)
    given["b.weight"].zero_()
    mixer, samples = FedLWS().step(SERVER), dict.fromkeys(sent, 5.0)
    mixer.start(samples, given)
    for site in samples:
        mixer.add(site, sent[site], samples[site])
    mean = torch.stack([own["b.weight"] for own in sent.values()]).mean(0)
    torch.testing.assert_close(result_of(mixer, "s0")["b.weight"], mean)


# ---------------------------------------------------------------------------------------------------- FedAWA
def loss_of(t: np.ndarray, w: np.ndarray, sent: list[np.ndarray]) -> float:
    """Compute the loss of FedAWA for the logits t from the flattened models."""
    weights = np.exp(t) / np.exp(t).sum()
    mixed = sum(weight * (own - w) for weight, own in zip(weights, sent, strict=True))
    turned = [1 - own @ w / np.linalg.norm(own) / np.linalg.norm(w) for own in sent]
    apart = [np.linalg.norm(own - w - mixed) for own in sent]
    return float(weights @ (np.array(turned) + np.array(apart)))


@pytest.mark.parametrize("steps", [1, 3])
def test_fedawa_equals_its_algorithm_written_by_hand(steps: int) -> None:
    aggregator = aggregator_of(FedAWA(server_steps=steps, server_lr=0.05, largest_share=1.0).groups()[0].mix, SERVER)
    samples = {"s0": 5.0, "s1": 7.0, "s2": 3.0}
    given, t = contributions(1)[0], np.array([5.0, 7.0, 3.0]) / 15
    aggregator.start(samples, given)
    for number in (2, 3):
        sent = contributions(number)[1]
        w, vectors = flat(given, ""), [flat(sent[site], "") for site in samples]
        first, second = np.zeros(3), np.zeros(3)
        for step in range(1, steps + 1):
            nudges = 1e-5 * np.eye(3)
            slope = np.array([(loss_of(t + e, w, vectors) - loss_of(t - e, w, vectors)) / 2e-5 for e in nudges])
            first, second = 0.5 * first + 0.5 * slope, 0.999 * second + 0.001 * slope**2
            rates = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            t = t - 0.05 * first / (1 - 0.5**step) / rates
        aggregator.start(samples)
        for site in samples:
            aggregator.add(site, sent[site], samples[site])
        given = result_of(aggregator, "s0")
        weights = np.exp(t) / np.exp(t).sum()
        assert list(aggregator.shares.values()) == pytest.approx(weights, abs=1e-7)
        expected = sum(weight * own for weight, own in zip(weights, vectors, strict=True))
        np.testing.assert_allclose(flat(given, ""), expected, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- FedCE
def fedce_server() -> Mapping[str, Any]:
    mixers: dict[str, Any] = {}
    server = replace(SERVER, aggregators=mixers)
    model, _, contribution = FedCE(largest_share=1.0).phases(2)[0].groups
    mixers |= {own.name: aggregator_of(own.mix, server) for own in (model, contribution)}
    return mixers


def test_fedce_s_server_equals_its_equations_written_by_hand() -> None:
    mixers, samples = fedce_server(), {"s0": 5.0, "s1": 7.0, "s2": 3.0}
    given, a = contributions(1)[0], np.full(3, 1 / 3)
    mixers["model"].start(samples, given)
    mixers["contribution"].start(samples, {"missed": torch.ones(()).double(), "share": torch.zeros(()).double()})
    cosines: list[list[float]] = []
    for number, missed in ((2, [1.0, 1.0, 1.0]), (3, [0.4, 0.7, 0.2])):
        sent = contributions(number)[1]
        g = [flat(sent[site], "") - flat(given, "") for site in samples]
        others = [sum(a[j] * g[j] for j in range(3) if j != k) for k in range(3)]
        cosines.append([g[k] @ others[k] / np.linalg.norm(g[k]) / np.linalg.norm(others[k]) for k in range(3)])
        gradient, data = 1 - np.mean(cosines, axis=0), np.array(missed)
        gradient, data = gradient / gradient.sum(), data / data.sum()
        a = (gradient + data) / 2
        for aggregator in mixers.values():
            aggregator.start(samples)
        for site, own in zip(samples, missed, strict=True):
            mixers["model"].add(site, sent[site], samples[site])
            numbers = {"missed": torch.tensor(own, dtype=torch.float64), "share": torch.zeros(()).double()}
            mixers["contribution"].add(site, numbers, samples[site])
        for aggregator in mixers.values():
            aggregator.finish()
        given = mixers["model"].current("s0")
        expected = sum(share * flat(sent[site], "") for share, site in zip(a, samples, strict=True))
        np.testing.assert_allclose(flat(given, ""), expected, rtol=1e-9, atol=1e-12)
        told = [float(mixers["contribution"].current(site)["share"]) for site in samples]
        assert told == pytest.approx(a, abs=1e-12)
    assert float(mixers["contribution"].current("elsewhere")["share"]) == 0.0


def test_fedce_s_model_without_a_site_is_the_mixture_of_the_others() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double() for _ in range(3)]
    shares, mixed = [0.2, 0.5, 0.3], deepcopy(models[0])
    states = [model.state_dict() for model in models]
    for name, tensor in mixed.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(sum(a * state[name] for a, state in zip(shares, states, strict=True)))
    rest = without(mixed, models[1], 0.5).state_dict()
    for name in ("0.weight", "0.bias", "1.running_var"):
        expected = (0.2 * states[0][name] + 0.3 * states[2][name]) / 0.5
        torch.testing.assert_close(rest[name], expected, rtol=1e-9, atol=1e-12)


def test_fedce_s_sites_score_the_model_without_them(tmp_path: Path) -> None:
    """In each round of FedCE, each site scores the mean of the other sites' models on its own validation cases."""
    plan = make_plan(
        "fedce", *SMALL, *NO_BATCH_NORM, "training.rounds=2", "participation.evaluation_sites=[hospital-z]"
    )
    everyone = [*SITES, "hospital-z"]
    sites = sites_of(plan, tmp_path, everyone, CPU)
    sent: dict[str, dict[str, Tensor]] = {}

    def listen(line: Any) -> None:
        for site in SITES:
            if line.round == 1:
                sent[site] = {
                    n: t.clone() for n, t in sites[site].participant.state.modules["sent"].state_dict().items()
                }

    coordinator = Coordinator(plan, SITES, inprocess.Loop(sites), Record(tmp_path), "in-process", listen)
    summary = coordinator.run()
    assert summary.evaluation_sites["hospital-z"].test
    first = coordinator.rounds[0].sites
    for site in SITES:
        others = {other: first[other].share for other in SITES if other != site}
        model = plan.build_networks()["model"]
        model.load_state_dict(
            {n: sum(a * sent[other][n] for other, a in others.items()) / sum(others.values()) for n in sent[site]}
        )
        score = sites[site].participant.evaluation.evaluate(
            sites[site].participant.data.validation, lambda: None, model
        )[1]
        told = sites[site].participant.state.modules["contribution"]
        assert (float(told.scores), float(told.rounds)) == (pytest.approx(score, abs=0.02), 2.0)


# ---------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("method", [*WEIGHED, "fedlws"])
def test_what_cannot_be_is_refused(method: str) -> None:
    for change, said in (
        (
            "aggregation.robust.name=median",
            f"{method} computes the weight of each hospital|by how far single hospitals are",
        ),
        (
            "secure_aggregation.mode=pairwise",
            "counts follows from what|takes each site's values as they are",
        ),
        ('privacy={"epsilon": 2.0, "delta": 0.001}', f"{method} sends numbers without noise"),
    ):
        with pytest.raises(PlanError, match=said):
            make_plan(method, *SMALL, *NO_BATCH_NORM, change)
