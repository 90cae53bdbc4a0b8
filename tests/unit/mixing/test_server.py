"""Server optimizers equal equations in numpy, even if sites are absent, answers arrive in a different order, or a saved
state is loaded.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.mixing import layout
from medsilo.mixing.aggregators import WeightedMean
from medsilo.mixing.mean_forms import MeanForm
from medsilo.mixing.server import REACH, FedAdagrad, FedAdam, FedAvgM, FedNova, FedYogi, Scaffold
from medsilo_lab.testing import assert_equal
from tests.mixed import result_of

N = {"a": 10.0, "b": 25.0, "c": 65.0}
SITES = list(N)

Tensors = dict[str, Tensor]
Numbers = dict[str, np.ndarray]


def drawn(seed: int, reach: float | None = None, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "layer.weight": torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype),
        "layer.bias": torch.randn(3, generator=generator, dtype=torch.float64).to(dtype),
        "count": torch.tensor(seed),
    }
    return tensors if reach is None else tensors | {REACH: torch.tensor(reach, dtype=torch.float64)}


REACHES = {"a": 3.0, "b": 7.5, "c": 20.0}


def contributions(number: int, reached: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensors]:
    return {
        site: drawn(100 * number + place, REACHES[site] + number if reached else None, dtype)
        for place, site in enumerate(SITES)
    }


def numbers(tensors: Tensors) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().ravel() for name in ("layer.weight", "layer.bias")])


def play(
    aggregator: WeightedMean, sent: dict[str, Tensors], initial: Tensors | None = None, order: str = "abc"
) -> Tensors:
    aggregator.start(SITES, initial)
    for site in order:
        if site in sent:
            aggregator.add(site, {name: tensor.clone() for name, tensor in sent[site].items()}, N[site])
    return result_of(aggregator, "b")


# ---------------------------------------------------------------------------------------------------- in numpy
Rule = Callable[[np.ndarray, Numbers, dict[str, float]], np.ndarray]


def nova(uniform: bool) -> Rule:
    def step(w: np.ndarray, sent: Numbers, reach: dict[str, float]) -> np.ndarray:
        total = len(sent) if uniform else sum(N[site] for site in sent)
        p = {site: (1.0 if uniform else N[site]) / total for site in sent}
        effective = sum(p[site] * reach[site] for site in sent)
        return w - effective * sum(p[site] * (w - sent[site]) / reach[site] for site in sent)

    return step


def towards(sent: Numbers, w: np.ndarray, uniform: bool = False) -> np.ndarray:
    weights = [1.0 if uniform else N[site] for site in sent]
    return np.average([one - w for one in sent.values()], axis=0, weights=weights)


def adam(lr: float, tau: float, variant: str = "reddi", yogi: bool = False, uniform: bool = False) -> Rule:
    state = {"m": 0.0, "v": tau**2 if variant == "reddi" else 0.0, "t": 0}

    def step(w: np.ndarray, sent: Numbers, reach: dict[str, float]) -> np.ndarray:
        d = towards(sent, w, uniform)
        state["t"] += 1
        state["m"] = 0.9 * state["m"] + 0.1 * d
        if yogi:
            state["v"] = state["v"] - 0.01 * d**2 * np.sign(state["v"] - d**2)
        else:
            state["v"] = 0.99 * state["v"] + 0.01 * d**2
        m, v = state["m"], state["v"]
        if variant == "torch":
            m, v = m / (1 - 0.9 ** state["t"]), v / (1 - 0.99 ** state["t"])
        return w + lr * m / (np.sqrt(v) + tau)

    return step


def momentum(lr: float, beta: float) -> Rule:
    state = {"m": 0.0}

    def step(w: np.ndarray, sent: Numbers, reach: dict[str, float]) -> np.ndarray:
        state["m"] = beta * state["m"] + towards(sent, w)
        return w + lr * state["m"]

    return step


def adagrad(lr: float, beta: float, tau: float) -> Rule:
    state: dict[str, np.ndarray | float] = {"m": 0.0, "v": tau**2}

    def step(w: np.ndarray, sent: Numbers, reach: dict[str, float]) -> np.ndarray:
        d = towards(sent, w)
        state["m"], state["v"] = beta * state["m"] + (1 - beta) * d, state["v"] + d**2
        return w + lr * state["m"] / (np.sqrt(state["v"]) + tau)

    return step


def control(w: np.ndarray, sent: Numbers, reach: dict[str, float]) -> np.ndarray:
    return w + len(sent) / len(SITES) * towards(sent, w, uniform=True)


CASES: dict[str, tuple[Callable[[], WeightedMean], Callable[[], Rule]]] = {
    "fednova": (FedNova, lambda: nova(False)),
    "fednova, uniform": (lambda: FedNova(uniform=True), lambda: nova(True)),
    "fedavgm": (lambda: FedAvgM(0.7, 0.8), lambda: momentum(0.7, 0.8)),
    "fedadam": (lambda: FedAdam(0.1, tau=0.01), lambda: adam(0.1, 0.01)),
    "fedadam, uniform": (lambda: FedAdam(0.1, tau=0.01, uniform=True), lambda: adam(0.1, 0.01, uniform=True)),
    "fedadam, torch": (lambda: FedAdam(0.1, tau=0.01, variant="torch"), lambda: adam(0.1, 0.01, "torch")),
    "fedyogi": (lambda: FedYogi(0.1, tau=0.5), lambda: adam(0.1, 0.5, yogi=True)),
    "fedadagrad": (lambda: FedAdagrad(0.1, 0.9, 0.01), lambda: adagrad(0.1, 0.9, 0.01)),
    "scaffold": (Scaffold, lambda: control),
    # users' scripts may call these classes without arguments
    "fedavgm, by default": (FedAvgM, lambda: momentum(1.0, 0.9)),
    "fedadam, by default": (FedAdam, lambda: adam(0.01, 1e-3)),
    "fedadagrad, by default": (FedAdagrad, lambda: adagrad(0.1, 0.0, 1e-3)),
}
every_step = pytest.mark.parametrize("case", CASES)


@every_step
@pytest.mark.parametrize("block", [layout.BLOCK, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_three_rounds_equal_the_equations(
    case: str, dtype: torch.dtype, tolerance: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site is absent in the second of three rounds, so the weights of the other sites are normalised to the sum 1.

    Small blocks divide a tensor and the optimizer's state as in a large model.
    """
    monkeypatch.setattr(layout, "BLOCK", block)
    make, rule = CASES[case][0], CASES[case][1]()
    reached = case.startswith("fednova")
    given = drawn(1, 1.0 if reached else None, dtype)
    aggregator, w = make(), numbers(given)
    for number in (1, 2, 3):
        sent = contributions(number, reached, dtype)
        if number == 2:
            del sent["b"]
        reach = {site: float(tensors[REACH]) for site, tensors in sent.items() if reached}
        w = rule(w, {site: numbers(tensors) for site, tensors in sent.items()}, reach)
        given = play(aggregator, sent, given if number == 1 else None)
        np.testing.assert_allclose(numbers(given), w, rtol=0, atol=tolerance)
        assert given["count"] == sent["a"]["count"]
        assert given["layer.weight"].dtype == dtype


@every_step
def test_the_mean_alone_makes_the_same_step(case: str) -> None:
    """From the mean alone, as in secure aggregation, the server computes the same step as from all models."""
    reached = case.startswith("fednova")
    given, sent = drawn(1, 1.0 if reached else None), contributions(1, reached)
    for own in (given, *sent.values()):
        del own["count"]
    del sent["b"]
    aggregator = CASES[case][0]()
    aggregator.start(SITES, given)
    form = aggregator.sealed
    assert isinstance(form, MeanForm)
    weights = {site: N[site] if form.weighted else 1.0 for site in sent}
    entered = {site: form.enter(own, given) if form.enter else own for site, own in sent.items()}
    mean = {name: sum(weights[s] * entered[s][name] for s in sent) / sum(weights.values()) for name in given}
    aggregator.take_mean(mean, weights)
    result, clear = result_of(aggregator, "b"), play(CASES[case][0](), sent, given)
    assert aggregator.shares == pytest.approx(
        {site: weight / sum(weights.values()) for site, weight in weights.items()}
    )
    for name in given:
        torch.testing.assert_close(result[name], clear[name], rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- special cases


def test_fednova_gives_back_the_effective_reach() -> None:
    sent = contributions(1, reached=True)
    assert float(play(FedNova(), sent, drawn(1, 1.0))[REACH]) == pytest.approx(
        sum(N[site] * (REACHES[site] + 1) for site in SITES) / 100
    )


def test_fednova_of_one_local_step_is_fedavg() -> None:
    """FedNova equals FedAvg if each site makes one local step, because each ‖a_i‖₁ is then 1."""
    given = drawn(1, 1.0)
    sent = {site: drawn(place, 1.0) for place, site in enumerate(SITES)}
    one, other = play(FedNova(), sent, given), play(WeightedMean(), sent, given)
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=0, atol=1e-12)
    assert float(one[REACH]) == 1.0


# ---------------------------------------------------------------------------------------------------- promises


def read(state: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(one: list[Tensors], other: list[Tensors]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert_equal(mine, theirs)


@every_step
def test_a_saved_state_does_not_change_with_the_next_round(case: str) -> None:
    """The next round must not change a saved state, because the server may still be writing the checkpoint."""
    aggregator, reached = CASES[case][0](), case.startswith("fednova")
    play(aggregator, contributions(1, reached), drawn(1, 1.0 if reached else None))
    tensors, _ = aggregator.state()
    before = read(tensors)
    play(aggregator, contributions(2, reached))
    assert_same([read(tensors)], [before])


@pytest.mark.usefixtures("tiny_disk", "fresh_spills")
def test_a_full_disk_ends_the_step_and_leaves_the_last_model(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has space for the optimizer's vectors of one step, but not for the vectors of two steps."""
    monkeypatch.setattr(tempfile, "tempdir", str(tiny_disk))
    aggregator, large = FedAdam(0.1), {"w": torch.ones(80_000)}
    assert "w" in play(aggregator, dict.fromkeys(SITES, large), large)
    aggregator.start(SITES)
    for site in SITES:
        aggregator.add(site, {"w": torch.zeros(80_000)}, 1.0)
    before = aggregator.current("a")
    with pytest.raises(MedsiloError, match="No space left.*room for temporary files"):
        aggregator.finish()
    assert_same([aggregator.current("a")], [before])


@pytest.mark.parametrize("reach", [0.0, -1.0, 1e10, float("nan"), float("inf"), None])
def test_fednova_refuses_an_impossible_reach_and_takes_the_site_s_next_answer(reach: float | None) -> None:
    aggregator, sent = FedNova(), contributions(1, reached=True)
    aggregator.start(SITES, drawn(1, 1.0))
    with pytest.raises(Refused, match="reach is"):
        aggregator.add("a", drawn(100, reach), N["a"])
    for site in SITES:
        aggregator.add(site, sent[site], N[site])
    assert_same([result_of(aggregator, "b")], [play(FedNova(), sent, drawn(1, 1.0))])
