"""medsilo finds batch norms and heads by the type of a layer, even if names mislead, or if layers are nested, shared or
wrapped.
"""

import pytest
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn

from medsilo.learning.layers import batch_norm_buffer_names, batch_norm_names, head_names
from medsilo.learning.steps import called_with

PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def full(*layers: str, parts: tuple[str, ...] = PARTS) -> list[str]:
    return [f"{layer}.{part}" for layer in layers for part in parts]


class Misleading(nn.Module):
    """A network whose layers have misleading names."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.Conv1d(2, 4, 3)
        self.classifier = nn.BatchNorm1d(4)
        self.batch_norm_fc = nn.Linear(4, 4)
        self.weight = nn.GroupNorm(2, 4)
        self.head = nn.ModuleDict({"out": nn.Sequential(nn.Linear(4, 3), nn.ReLU())})
        self.fc = nn.LayerNorm(3)
        self.last = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)


def test_types_decide_and_not_names() -> None:
    model = Misleading()
    assert batch_norm_names(model) == full("classifier")
    assert batch_norm_buffer_names(model) == full("classifier", parts=PARTS[2:])
    assert head_names(model) == ["head.out.0.weight", "head.out.0.bias"]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_batch_norm_is_one(norm: type[nn.Module]) -> None:
    assert batch_norm_names(nn.Sequential(nn.ReLU(), norm(3))) == full("1")


def test_batch_norm_without_some_of_its_tensors() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, track_running_stats=False))
    assert batch_norm_names(model) == [*full("0", parts=PARTS[2:]), "1.weight", "1.bias"]
    assert batch_norm_buffer_names(model) == full("0", parts=PARTS[2:])


def test_the_module_may_itself_be_the_layer() -> None:
    assert batch_norm_names(nn.BatchNorm1d(2)) == list(PARTS)
    assert head_names(nn.Linear(2, 1)) == ["weight", "bias"]
    assert head_names(nn.Linear(2, 1, bias=False)) == ["weight"]


def test_a_network_without_the_layers() -> None:
    model = nn.Sequential(nn.GroupNorm(1, 2), nn.ReLU())
    assert batch_norm_names(model) == batch_norm_buffer_names(model) == head_names(model) == []


class Shared(nn.Module):
    """A network whose batch norm and linear layer each have two names in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.encode = nn.Linear(2, 2)
        self.second = self.first
        self.decode = nn.Linear(2, 2)
        self.again = self.decode


def test_shared_layers_are_found_under_all_their_names() -> None:
    model = Shared()
    assert batch_norm_names(model) == full("first", "second")
    assert head_names(model) == ["decode.weight", "decode.bias", "again.weight", "again.bias"]


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_a_convolution_may_be_the_head(layer: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer(2, 1, 1), nn.BatchNorm1d(1), nn.Softmax(1))
    assert head_names(model) == ["1.weight", "1.bias"]


def by_hand(model: nn.Module) -> set[str]:
    held = set()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            held |= {id(tensor) for tensor in [*layer.parameters(), *layer.buffers()]}
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in held}


@pytest.mark.parametrize("residual", [0, 2])
def test_monai_unet(residual: int) -> None:
    model = UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=residual, norm="BATCH")
    names = batch_norm_names(model)
    assert set(names) == by_hand(model)
    assert names == [name for name in model.state_dict() if name in names]
    assert len([name for name in names if name.endswith("running_var")]) >= 4
    head = head_names(model)
    assert len(head) == 2
    assert model.state_dict()[head[-1]].shape == (2,)
    assert not set(head) & set(names)
    probe = torch.rand(1, 1, 16, 16)
    model.eval()
    before = model(probe)
    with torch.no_grad():
        model.state_dict()[head[-1]].add_(1.0)
    torch.testing.assert_close(model(probe), before + 1.0)


def test_other_weights_are_gone_afterwards_also_where_a_layer_has_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.again = nn.Sequential(self.layer)
            self.tied = nn.Linear(2, 2)
            self.tied.weight = self.layer.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.tied(self.again(inputs))

    model, inputs = Twice(), torch.randn(3, 2)
    own, before = dict(model.named_parameters()), model(inputs)
    other = {name: torch.zeros_like(weight) if "weight" in name else weight for name, weight in own.items()}
    assert torch.equal(called_with(model, other, inputs), own["tied.bias"].expand(3, 2))
    assert all(weight is own[name] for name, weight in model.named_parameters())
    assert torch.equal(model(inputs), before)
