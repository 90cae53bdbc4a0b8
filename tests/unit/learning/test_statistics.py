"""Compare statistics of layers' inputs with statistics that numpy computes from all activations in double precision."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.learning.statistics import ChannelMoments, batch_norm_input_statistics, running_statistics
from medsilo.registry import NETWORKS


class Mixed(nn.Module):
    """A network with batch norms for one, two and three dimensions; the network calls one of the batch norms twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm1d(5)
        self.norm3 = nn.BatchNorm3d(2)
        self.norm2 = nn.BatchNorm2d(3)
        self.volume = nn.Conv3d(1, 2, 3)
        self.image = nn.Conv2d(2, 3, 1)
        self.features = nn.Linear(3, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm3(self.volume(x)).mean(-1)
        x = self.norm2(self.norm2(self.image(x))).mean((-1, -2))
        return self.head(torch.relu(self.norm1(self.features(x))))


def mixed_data(samples: int = 37) -> tuple[Mixed, Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    for layer in (model.norm1, model.norm2, model.norm3):
        nn.init.normal_(layer.weight)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    scale = torch.rand(samples, 1, 1, 1, 1) * 3
    return model, 5 + scale * torch.randn(samples, 1, 6, 6, 6)


def by_numpy(model: nn.Module, layers: list[nn.Module], inputs: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    seen: dict[nn.Module, list[np.ndarray]] = {layer: [] for layer in layers}
    model = model.double().eval()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: seen[layer].append(np.moveaxis(given[0].numpy(), 1, -1)))
        for layer in layers
    ]
    with torch.no_grad():
        model(inputs.double())
    for hook in hooks:
        hook.remove()
    model.float()
    rows = [np.concatenate([part.reshape(-1, part.shape[-1]) for part in seen[layer]]) for layer in layers]
    return [(row.mean(0), row.var(0)) for row in rows]


@pytest.mark.parametrize("batch", [1, 7, 36, 37, 64])
def test_statistics_are_exact_whatever_the_batch_size(batch: int) -> None:
    model, inputs = mixed_data()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = DataLoader(TensorDataset(inputs, torch.zeros(len(inputs))), batch_size=batch)
    mine = batch_norm_input_statistics(model, loader, "cpu")
    assert all(part.training for part in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = by_numpy(model, [model.norm1, model.norm3, model.norm2], inputs)
    assert [len(mean) for mean, _ in mine] == [5, 2, 3]
    for (mean, variance), (expected_mean, expected_variance) in zip(mine, expected, strict=True):
        assert mean.dtype == variance.dtype == torch.float64
        np.testing.assert_allclose(mean, expected_mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(variance, expected_variance, rtol=1e-6, atol=1e-6)


def test_last_measures_what_enters_the_classification_layer() -> None:
    model, inputs = mixed_data()
    (mine,) = batch_norm_input_statistics(model, inputs.split(10), "cpu", layers="last")
    (expected,) = by_numpy(model, [model.head], inputs)
    np.testing.assert_allclose(mine[0], expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(mine[1], expected[1], rtol=1e-6, atol=1e-6)


def test_last_of_a_segmentation_network_is_its_last_convolution() -> None:
    torch.manual_seed(0)
    model = NETWORKS["unet"]().build(1, 2)
    (mean, variance), *none = batch_norm_input_statistics(model, [torch.rand(3, 1, 16, 16)], "cpu", layers="last")
    assert len(mean) == len(variance) == 32 and not none


def test_a_linear_layer_over_positions_has_its_channels_last() -> None:
    values = torch.randn(6, 3, 4, dtype=torch.float64)
    own = ChannelMoments(channels_last=True)
    for part in values.split(4):
        own.add(part)
    np.testing.assert_allclose(own.mean, values.numpy().mean((0, 1)))
    np.testing.assert_allclose(own.variance, values.numpy().var((0, 1)))


@pytest.mark.parametrize("spread", [1.0, 0.01])
def test_values_far_from_zero_and_sorted_keep_their_variance(spread: float) -> None:
    torch.manual_seed(1)
    values = (1000 + spread * torch.randn(4096, 2)).sort(0).values
    own = ChannelMoments()
    for part in values.split(64):
        own.add(part)
    np.testing.assert_allclose(own.mean, values.double().numpy().mean(0), rtol=1e-9)
    np.testing.assert_allclose(own.variance, values.double().numpy().var(0), rtol=1e-5)


def test_one_sample_and_constant_features_have_variance_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for inputs in (torch.randn(1, 3), torch.full((9, 3), 0.3)):
        ((mean, variance),) = batch_norm_input_statistics(model, inputs.split(2), "cpu")
        assert mean.isfinite().all()
        assert variance.min() >= 0 and variance.max() < 1e-13


@pytest.mark.parametrize("layers", ["all", "last"])
def test_a_network_without_the_layer_is_refused(layers: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    with pytest.raises(MedsiloError, match="the network has no "):
        batch_norm_input_statistics(model, [torch.rand(2, 3)], "cpu", layers=layers)


def test_no_samples_and_unused_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(MedsiloError, match="no statistics: there are no samples"):
        batch_norm_input_statistics(model, [], "cpu")
    model.unused = nn.BatchNorm1d(2)  # type: ignore[assignment]
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    with pytest.raises(MedsiloError, match="never used"):
        batch_norm_input_statistics(model, [torch.rand(2, 3)], "cpu")


def test_nothing_of_a_batch_is_kept() -> None:
    """The size of the stored statistics depends on the number of channels, but not on the number of cases."""
    own = ChannelMoments()
    for _ in range(3):
        own.add(torch.randn(50, 4, 7))
    held = [value for value in vars(own).values() if isinstance(value, Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 4 * (4 + 8 + 8)


def test_running_statistics_are_those_of_the_layers() -> None:
    model, _ = mixed_data()
    found = running_statistics(model)
    assert torch.equal(found[2][1], model.norm2.running_var.double())
