"""A site uses the device in its settings, and training twice gives the same result."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.learning.compute import Compute
from medsilo.runs.paths import GLOBAL, LAST
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan
from tests.federation.test_scripts import gains, simulated
from tests.inprocess import run

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine shows none")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
# tolerance of weights from a GPU relative to weights from a CPU, after two rounds
NEAR = {"float32": 1e-3, "bfloat16": 0.1}


def weights_of(method: str = "fedavg", **settings: str) -> torch.Tensor:
    models = run(make_plan(method), settings=SiteSettings(**settings)).models
    return torch.cat([tensor.float().cpu().ravel() for tensor in models[SITES[0]].state_dict().values()])


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_that_is_asked_for_is_taken(device: str) -> None:
    assert Compute.choose(device).device.type == device
    assert Compute.choose("auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(MedsiloError, match="this machine has"):
        Compute.choose(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_study_repeats_to_the_bit_and_ends_near_a_cpus(device: str, precision: str) -> None:
    first = weights_of(device=device, precision=precision)
    assert torch.equal(first, weights_of(device=device, precision=precision))
    assert (first - weights_of(device="cpu")).abs().max() < NEAR[precision]


@CUDA
def test_the_networks_of_fedsm_leave_nothing_on_the_card() -> None:
    # bytes of GPU memory, without cuBLAS's workspaces, which remain allocated for each of torch's threads
    def held() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    gc.collect()  # frees objects of earlier tests
    before = held()
    weights_of("fedsm", device="cuda")
    assert held() - before < 1 << 20
    weights_of("fedsm", device="cuda")
    with_workspaces = torch.cuda.memory_allocated()
    weights_of("fedsm", device="cuda")
    assert torch.cuda.memory_allocated() <= with_workspaces


@pytest.mark.slow
@pytest.mark.parametrize("changed", [pytest.param("compiled", marks=pytest.mark.long), "channels last"])
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


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_several_processes_share_a_device_and_end_with_the_same_bits(device: str, root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "medsilo", "run", str(root / "jobs/fedavg"), "--engine", "inprocess"]
    command += ["--device", device, "--set", "training.rounds=2", "--set", "task.patients=6", "-o", str(tmp_path)]
    runs = [subprocess.Popen([*command, "--name", str(number)], stdout=subprocess.DEVNULL) for number in range(2)]
    assert [run.wait(300) for run in runs] == [0, 0]
    one, other = (load_tensors(tmp_path / str(number) / GLOBAL / LAST)[0] for number in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "harmofl", "fedsm"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), DEVICES[1]])
def test_nvflares_simulator_ends_with_the_bits_of_one_process(
    device: str, method: str, root: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "medsilo", "run", str(root / "jobs" / method), "--device", device]
    command += ["--set", "training.rounds=2", "--set", "task.patients=6", "-o", str(tmp_path)]
    for engine in ("inprocess", "simulator"):
        subprocess.run([*command, "--name", engine, "--engine", engine], check=True, timeout=300)
    one, other = (load_tensors(tmp_path / engine / GLOBAL / LAST)[0] for engine in ("inprocess", "simulator"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@CUDA
@pytest.mark.slow
@pytest.mark.parametrize("method", ["HarmoFL", "FedSM"])
def test_a_script_with_mixed_precision_and_scaled_gradients_learns_on_a_card(
    method: str, root: Path, tmp_path: Path
) -> None:
    changes = {
        "unet(), DiceCELoss": "unet().cuda(), DiceCELoss",
        'net(batch["image"]).argmax': 'net(batch["image"].cuda()).argmax',
        'one_hot(batch["label"], 2)': 'one_hot(batch["label"].cuda(), 2)',
        'loss(net(batch["image"]), batch["label"]).backward()': (
            'with torch.autocast("cuda", torch.float16):\n'
            '                value = loss(net(batch["image"].cuda()), batch["label"].cuda())\n'
            "            scaler.scale(value).backward()\n"
            "            scaler.unscale_(step)\n"
            "            nn.utils.clip_grad_norm_(net.parameters(), 5.0)"
        ),
        "            step.step()": "            scaler.step(step)\n            scaler.update()",
        "    flare.init()": '    flare.init()\n    scaler = torch.amp.GradScaler("cuda")',
    }
    _, summary = simulated(root, tmp_path, "monai-segmentation", "--method", method, changes=changes)
    assert min(gains(summary)) > 0


@CUDA
def test_an_epoch_of_nnunet_beside_its_own_trainer_on_the_same_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the benchmark benchmarks/nnunet.py on a GPU; tests/unit/project/test_benchmarks.py runs the benchmark on a
    CPU. `python -m benchmarks.nnunet --device cuda` also measures times.
    """
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    from benchmarks import nnunet

    monkeypatch.setenv("nnUNet_compile", "f")  # compiling nnU-Net's network would take a minute
    size = nnunet.Size(cases=2, width=32.0, batch=2, epochs=3, steps=1, features=4, device="cuda")
    one = nnunet.compared(tmp_path, nnunet.write_data(tmp_path, size), size, 0, asks=False)
    assert all(0 <= dice <= 1 for dice in one.dice) and one.ratio > 0
