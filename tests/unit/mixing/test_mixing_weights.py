"""Means with weights for each site, each pair of sites, each tensor or each element equal numpy's."""

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.mixing import contributions, layout
from medsilo.mixing.aggregators import Aggregator, SimilarityMix
from medsilo.mixing.by_element import MeanByElement

N = {"a": 10.0, "b": 25.0, "c": 65.0}
SITES = list(N)
SHAPES = {"body.weight": (4, 5), "body.bias": (4,), "scale": (), "none": (0, 3)}
Sent = dict[str, dict[str, Tensor]]
Numbers = dict[str, np.ndarray]


@pytest.fixture(autouse=True, params=["usual sizes", "tiny blocks, all on disk"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat each test with tensors in many small blocks and with contributions on the disk."""
    if request.param != "usual sizes":
        monkeypatch.setattr(layout, "BLOCK", 7)
        monkeypatch.setattr(layout, "NARROWEST", 2)
        monkeypatch.setattr(contributions, "MEMORY", 0)


def drawn(seed: int, dtype: torch.dtype = torch.float64, positive: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    make = torch.rand if positive else torch.randn
    return {name: make(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def models(dtype: torch.dtype = torch.float64) -> Sent:
    return {site: {**drawn(place, dtype), "steps": torch.tensor(place)} for place, site in enumerate(SITES, 1)}


def wide(tensors: Mapping[str, Any]) -> Numbers:
    return {name: torch.as_tensor(tensors[name], dtype=torch.float64).numpy() for name in SHAPES}


def play(
    aggregator: Aggregator, sent: Sent, order: str = "abc", initial: dict[str, Tensor] | None = None
) -> Aggregator:
    aggregator.start(SITES, initial)
    for site in order:
        if site in sent:
            aggregator.add(site, {name: tensor.clone() for name, tensor in sent[site].items()}, N[site])
    aggregator.finish()
    return aggregator


def assert_near(mine: Mapping[str, Tensor], expected: Numbers, tolerance: float = 1e-12) -> None:
    for name, value in wide(mine).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)


def assert_any_order(make: Callable[[], Aggregator], sent: Sent, initial: dict[str, Tensor] | None) -> None:
    first = play(make(), sent, initial=initial)
    for order in permutations("abc"):
        other = play(make(), sent, "".join(order), initial)
        for site in SITES:
            one, two = first.current(site), other.current(site)
            assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


START = {**drawn(9), "steps": torch.tensor(0)}


def spread(numbers: Any) -> Numbers:
    values = numbers if isinstance(numbers, Mapping) else dict.fromkeys(SHAPES, numbers)
    return {name: np.broadcast_to(wide({**START, **values})[name], shape) for name, shape in SHAPES.items()}


# ---------------------------------------------------------------------------------------------------- weights
def weighted(sent: Sent, weights: Mapping[str, Numbers], start: Numbers) -> Numbers:
    """Compute Σ w θ / Σ w for each element, or the last value if all weights of the element are zero."""
    expected = {}
    for name in SHAPES:
        total = sum(weights[site][name] for site in sent)
        mixed = sum(weights[site][name] * wide(sent[site])[name] for site in sent)
        expected[name] = np.where(total > 0, mixed / np.where(total > 0, total, 1), start[name])
    return expected


SITE_WEIGHTS: dict[str, Callable[[str, float], Any]] = {
    "per tensor": lambda site, samples: {**dict.fromkeys(SHAPES, samples), "body.bias": float(site == "b"), "scale": 0},
    "per element": lambda site, samples: {
        name: (tensor * samples).round() for name, tensor in drawn(40 + ord(site), positive=True).items()
    },
    "some elements alone": lambda site, samples: {
        name: (tensor > 0.6).float() for name, tensor in drawn(50 + ord(site), positive=True).items()
    },
    "of one tensor, of another element": lambda site, samples: (
        dict.fromkeys(SHAPES, samples) if site == "c" else drawn(60 + ord(site), positive=True)
    ),
}
every_weight = pytest.mark.parametrize("kind", SITE_WEIGHTS)


@every_weight
@pytest.mark.parametrize("present", ["abc", "ac", "b"])
def test_weights_of_a_mean(kind: str, present: str) -> None:
    weigh = SITE_WEIGHTS[kind]
    sent = {site: tensors for site, tensors in models().items() if site in present}
    result = play(MeanByElement(weigh=weigh), sent, "cba", START).current("a")
    weights = {site: spread(weigh(site, N[site])) for site in SITES}
    assert_near(result, weighted(sent, weights, wide(START)), 1e-6)  # the sum of the weights has single precision
    assert_any_order(lambda: MeanByElement(weigh=weigh), sent, START)


def test_an_element_that_nobody_weighs_keeps_its_bits() -> None:
    result = play(MeanByElement(weigh=SITE_WEIGHTS["per tensor"]), models(), initial=START).current("a")
    assert torch.equal(result["scale"], START["scale"])
    torch.testing.assert_close(result["body.bias"], models()["b"]["body.bias"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    """A group of tensors may contain tensors of several types."""
    sent = {site: {**tensors, "body.bias": tensors["body.bias"].to(dtype)} for site, tensors in models().items()}
    start = {**START, "body.bias": START["body.bias"].to(dtype)}
    weigh = SITE_WEIGHTS["per element"]
    result = play(MeanByElement(weigh=weigh), sent, "bca", start).current("a")
    assert result["body.bias"].dtype == dtype
    expected = weighted(models(), {site: spread(weigh(site, N[site])) for site in SITES}, wide(START))
    assert_near(result, expected, 0.02)


# ---------------------------------------------------------------------------------------------------- site pairs
def test_what_a_site_sent_is_there_until_the_round_closes() -> None:
    aggregator = SimilarityMix(torch.eye(3))
    aggregator.start(SITES, START)
    aggregator.add("a", models()["a"], 1.0)
    assert aggregator.sent("a").keys() == models()["a"].keys()
    assert all(torch.equal(tensor, models()["a"][name]) for name, tensor in aggregator.sent("a").items())
    aggregator.finish()
    with pytest.raises(KeyError):
        aggregator.sent("a")


def test_a_saved_mean_goes_on_with_its_weights_and_rate() -> None:
    def make() -> MeanByElement:
        return MeanByElement(SITE_WEIGHTS["per element"], rate=0.7)

    aggregator = play(make(), models(), initial=START)
    other = make()
    other.load_state(*aggregator.state())
    again = {site: {**drawn(70 + place), "steps": torch.tensor(1)} for place, site in enumerate(SITES)}
    one, two = (play(each, again).current("a") for each in (aggregator, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
