"""A site takes the device that it asks for, and its numbers repeat. A CPU runs the same; the rest waits for CUDA."""

import pytest
import torch

from medsilo.core.errors import MedsiloError
from medsilo.federation.inprocess import run
from medsilo.learning.loop import Compute
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine shows none")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
NEAR = {"float32": 1e-3, "bfloat16": 0.1}  # of weights, against those of a CPU, after two rounds


def weights_of(method: str = "fedavg", **settings: str) -> torch.Tensor:
    """All numbers of a site's model after a short study."""
    models = run(make_plan(method), settings=SiteSettings(**settings)).models
    return torch.cat([tensor.float().cpu().ravel() for tensor in models[SITES[0]].state_dict().values()])


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_that_is_asked_for_is_taken(device: str) -> None:
    assert Compute.choose(device).device.type == device
    assert Compute.choose("auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(MedsiloError, match="this machine shows"):
        Compute.choose(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_study_repeats_to_the_bit_and_ends_near_a_cpus(device: str, precision: str) -> None:
    first = weights_of(device=device, precision=precision)
    assert torch.equal(first, weights_of(device=device, precision=precision))
    assert (first - weights_of(device="cpu")).abs().max() < NEAR[precision]


@CUDA
def test_the_networks_of_fedsm_leave_nothing_on_the_card() -> None:
    before = torch.cuda.memory_allocated()
    weights_of("fedsm", device="cuda")
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["compiled", "channels last"])
@pytest.mark.parametrize("device", DEVICES)
def test_networks_answer_alike_when_torch_changes_how_they_run(device: str, changed: str) -> None:
    network = next(iter(make_plan().build_networks().values())).to(device).eval()
    inputs = torch.randn(4, *make_plan().task.shape, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        expected = network(inputs)
        if changed == "compiled":
            answer = torch.compile(network)(inputs)
        elif inputs.ndim == 4:
            memory = torch.channels_last
            answer = network.to(memory_format=memory)(inputs.to(memory_format=memory))
        else:
            pytest.skip("the network reads no images")
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)
