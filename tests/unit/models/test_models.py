"""Networks have the right output shapes, numbers of weights and norms, and the same initial weights each time."""

from typing import Any, Literal, get_args

import pytest
import torch
from torch import nn

from medsilo.core.errors import MedsiloError
from medsilo.extend import Network
from medsilo.learning.layers import batch_norm_names, judges_by_batch
from medsilo.learning.seeds import seed_for
from medsilo.registry import NETWORKS
from tests.unit.models.test_every_network import TESTERS


class Residual(Network):
    name: Literal["residual"] = "residual"

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {"_target_": "monai.networks.nets.SegResNet", "in_channels": channels, "out_channels": classes}


class Neither(Network):
    name: Literal["neither"] = "neither"


class Wrong(Network):
    name: Literal["wrong"] = "wrong"

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {"_target_": "os.system", "command": "true"}


# the shape of one input, for networks without a tester
INPUTS = {"linear": (12,), "mlp": (12,), "vgg11": (3, 64, 64)}
OWN = [*TESTERS, *INPUTS]
NORMED = [name for name in OWN if "norm" in NETWORKS[name].model_fields]
NORMS = {
    "batch": nn.modules.batchnorm._BatchNorm,
    "group": nn.GroupNorm,
    "instance": nn.modules.instancenorm._InstanceNorm,
}
VARIANTS = [
    (name, norm)
    for name in NORMED
    for norm in get_args(NETWORKS[name].model_fields["norm"].annotation)
    if not norm.endswith("-statistics")
]


def network_of(name: str, **changes: Any) -> Network:
    """Return a network with the settings of the network's tester, and with changes to these settings."""
    return NETWORKS.read({**(TESTERS[name].network if name in TESTERS else {"name": name}), **changes})


def shapes_of(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of an input, and the shape of an output after the axis of classes: () or that of a map."""
    if name in INPUTS:
        return INPUTS[name], ()
    task = TESTERS[name]().plan().task
    return task.shape, tuple(task.goal.output_of(task.shape)[1:])


@pytest.mark.parametrize(("name", "norm"), VARIANTS)
def test_output_shape_and_norm(name, norm):
    shape, grid = shapes_of(name)
    module = network_of(name, norm=norm).build(channels=shape[0], classes=5)
    output = module(torch.randn(4, *shape))
    assert output.shape == (4, 5, *grid)
    kinds = {kind for kind, cls in NORMS.items() if any(isinstance(part, cls) for part in module.modules())}
    assert kinds == ({norm} - {"none"})
    output.mean().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_weights_come_from_the_global_generator_alone(name):
    def weights(seed):
        torch.manual_seed(seed_for(seed, "weights"))
        return network_of(name).build(INPUTS[name][0], 3).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_builds_without_memory_and_with_the_same_tensors(name):
    network, channels = network_of(name), shapes_of(name)[0][0]
    with torch.device("meta"):
        empty = network.build(channels, 3).state_dict()
    real = network.build(channels, 3).state_dict()
    assert {key: (value.shape, value.dtype) for key, value in empty.items()} == {
        key: (value.shape, value.dtype) for key, value in real.items()
    }
    assert all(value.is_meta for value in empty.values())


def test_activity_cnn_has_the_papers_layers():
    module = NETWORKS["activity-cnn"]().build(27, 10)
    shapes = [tuple(p.shape) for part, p in module.named_parameters() if p.ndim > 1 and part.endswith("weight")]
    assert shapes == [(16, 27, 9), (32, 16, 9), (64, 32), (10, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMED)
def test_batch_statistics_are_used_at_all_times_and_nothing_of_them_is_kept(name):
    shape, _ = shapes_of(name)
    module = network_of(name, norm="batch-statistics").build(shape[0], 3)
    assert judges_by_batch(module) and not judges_by_batch(network_of(name).build(shape[0], 3))
    assert batch_norm_names(module) == []
    layers = [layer for layer in module.modules() if isinstance(layer, NORMS["batch"])]
    assert layers and all(not layer.affine and not layer.track_running_stats for layer in layers)
    torch.manual_seed(0)
    images = torch.randn(8, *shape)
    module.eval()
    with torch.no_grad():
        alone, among = module(images[:4])[:2], module(images)[:2]
    assert not torch.allclose(alone, among)


def test_densenet_has_121_layers_and_the_basic_unet_the_papers_levels():
    densenet = NETWORKS["densenet121"]().build(3, 2)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in densenet.modules()) == 121
    unet = NETWORKS["basic-unet"]().build(3, 2)
    ups = [layer for layer in unet.modules() if isinstance(layer, nn.ConvTranspose2d)]
    assert [layer.in_channels for layer in ups] == [512, 256, 128, 64]
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in unet.modules()) == 18


@pytest.mark.parametrize("name", [name for name in NORMED if "dimensions" in NETWORKS[name].model_fields])
def test_volumes_as_well_as_slices(name):
    """In networks for volumes and for slices, medsilo finds batch norms by their type, and finds the head."""
    flat, deep = (network_of(name, dimensions=axes).build(channels=2, classes=3) for axes in (2, 3))
    output = deep.eval()(torch.randn(1, 2, 32, 32, 32))
    assert output.shape == ((1, 3, 32, 32, 32) if shapes_of(name)[1] else (1, 3))
    assert batch_norm_names(flat) == batch_norm_names(deep) != []
    assert flat.state_dict().keys() == deep.state_dict().keys()


def test_a_network_of_monais_is_told_and_not_built() -> None:
    with torch.no_grad():
        assert Residual().build(2, 3)(torch.zeros(1, 2, 16, 16, 16)).shape == (1, 3, 16, 16, 16)
    for other in (Neither(), Wrong()):
        with pytest.raises(MedsiloError, match=f"network {other.name} has no build"):
            other.build(2, 3)
