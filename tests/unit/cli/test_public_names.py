"""The classes, functions and arguments that users' scripts use keep their names in later versions."""

import inspect
from importlib import import_module

import pytest
import torch

NAMES = {
    "medsilo.learning.amplitude:AmplitudeNorm": ["shape", "decay", "band", "start"],
    "medsilo.learning.perturbation:PerturbedOptimizer": ["base", "alpha", "eps"],
    "medsilo.learning.layers:batch_norm_names": ["module"],
    "medsilo.learning.layers:head_names": ["module"],
    "medsilo.learning.statistics:batch_norm_input_statistics": ["model", "loader", "device", "layers"],
    "medsilo.mixing.server:FedAdam": [],
    "medsilo.mixing.server:FedNova": [],
    "medsilo.mixing.server:Scaffold": [],
    "medsilo.methods.adafed:wasserstein_distances": ["statistics"],
    "medsilo.methods.adafed:mixing_weights": ["distances", "self_weight"],
    "medsilo.flare.executor:MedsiloExecutor": [],
}
MIXED = {  # the expected means of three sites with the values 0, 1 and 2 and the weights 1, 2 and 3
    "WeightedMean": ((), [4 / 3] * 3),
    "UniformMean": ((), [1.0] * 3),
    "SoftPull": ((0.7,), [0.45, 1.0, 1.55]),
    "SimilarityMix": ((torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]),), [0.5, 1.0, 1.25]),
    "Identity": ((), [0.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("place", NAMES)
def test_they_are_where_scripts_import_them(place: str) -> None:
    module, _, name = place.partition(":")
    taken = list(inspect.signature(getattr(import_module(module), name)).parameters)
    assert taken[: len(NAMES[place])] == NAMES[place]


@pytest.mark.parametrize("name", MIXED)
def test_mixers_take_and_give_by_site(name: str) -> None:
    given, expected = MIXED[name]
    aggregator = getattr(import_module("medsilo.mixing.aggregators"), name)(*given)
    aggregator.start(["a", "b", "c"])
    for site, number in {"c": 2, "a": 0, "b": 1}.items():
        aggregator.add(site, {"w": torch.full((2,), float(number))}, number + 1.0)
    aggregator.finish()
    torch.testing.assert_close(
        torch.stack([aggregator.current(site)["w"] for site in "abc"]), torch.tensor(expected)[:, None].expand(3, 2)
    )
