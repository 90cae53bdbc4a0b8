"""Test without a GPU that training never waits for a GPU, and that a site chooses the right GPU.

torch's meta device stands in for the GPU. A tensor on the meta device has no values, so code that reads a value raises
an error.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.resource_consumers import gpu_resource_consumer
from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from medsilo.core.errors import DataError, MedsiloError
from medsilo.federation.participant import Participant, participant_of
from medsilo.learning import compute, loop
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.learning.class_weights import balanced_softmax, weighted
from medsilo.learning.compute import Compute, know_marks, marks_in, part_of
from medsilo.learning.loop import ForCard, OutputLoss, batches, passed_through, train_epoch, train_step
from medsilo.learning.partial_labels import mark_of, marked
from medsilo.learning.perturbation import PerturbedOptimizer
from medsilo.learning.private import PoissonSample
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.paths import PROVENANCE
from medsilo.runs.reading import read_provenance
from medsilo.tasks.classification import Classification
from medsilo.tasks.segmentation import dice_and_entropy
from tests.conftest import SITES, make_plan
from tests.inprocess import run

META = torch.device("meta")


class Waiting(TorchDispatchMode):
    """Raise an error if code waits for a copy to the meta device, because such code would also wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and given.get("device") == META and args[0].device != META:
            assert given.get("non_blocking"), "the code waits for a copy to the GPU"
        return func(*args, **given)


def on_card(labels: Tensor) -> Tensor:
    return know_marks(labels.to(META), labels)


# ---------------------------------------------------------------------------------------------------- no batch waits
def test_no_loss_asks_a_card_for_its_labels() -> None:
    """No loss for masks or classes reads values of the labels in Python, with or without class weights."""
    masks, classes = torch.randint(2, (3, 8, 8)), torch.randint(2, (3,))
    goal = make_plan("fedavg", "task.name=synthetic-prostate").task.goal
    output = torch.rand(3, 2, 8, 8, device=META)
    partly = torch.stack([marked(own, mark) for own, mark in zip(masks, (0, mark_of([1]), mark_of([1])), strict=True)])
    for loss in (goal.loss, weighted(goal.loss, torch.tensor([1.0, 2.0]), goal.cross_entropy)):
        for labels in map(on_card, (masks, partly)):
            with Waiting():
                assert loss(output, labels).device == META
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            loss(output, masks.to(META))
    scores, labels = output[..., 0, 0], on_card(classes)
    for loss in (Classification(2).loss, balanced_softmax(Classification(2).loss, [1, 2])):
        with Waiting():
            assert loss(scores, labels).device == META
    assert goal.case_losses(output, on_card(masks)).shape == (3,)


def test_labels_on_a_card_know_their_marks() -> None:
    labels = torch.stack([marked(torch.randint(3, (4, 4)), mark) for mark in (0, mark_of([2]))])
    there = on_card(labels)
    assert marks_in(there) == marks_in(labels) == [0, mark_of([2])]
    assert marks_in(part_of(there, slice(1, 2))) == [mark_of([2])]
    assert marks_in(part_of(there, slice(0, 1))) == [0]


@pytest.mark.parametrize("perturbed", [False, True])
def test_no_step_asks_a_card(perturbed: bool) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)).to(META)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = PerturbedOptimizer(optimizer, 0.1, module=model) if perturbed else optimizer
    goal = make_plan("fedavg", "task.name=synthetic-prostate").task.goal
    step = (lambda optimizer, closure: optimizer.step(closure)) if perturbed else loop.plain_step
    learn = train_step(model, OutputLoss(goal.loss), optimizer, Compute(), step)
    batch = torch.rand(2, 1, 8, 8, device=META), on_card(torch.randint(2, (2, 8, 8)))
    assert learn(*batch).device == META


@pytest.mark.parametrize("private", [False, True])
def test_batches_for_a_card_are_the_same_cases(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies batches from pinned memory while it computes, but copies from unpinned memory only after the running
    computation.
    """
    empty, pinned = torch.empty, []

    def plain(*shape: Any, pin_memory: bool, **how: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **how)

    cases = TensorDataset(torch.rand(9, 2, 3), torch.arange(9))

    def drawn() -> list[tuple[Tensor, Tensor]]:
        if private:
            return list(PoissonSample(None, 9, 4.0, NoiseSource.from_seed(0)).batches(cases, 2, Compute()))
        return list(batches(cases, 4, Compute(), torch.Generator().manual_seed(0)))

    ours = drawn()
    monkeypatch.setattr(Compute, "on_card", True)
    monkeypatch.setattr(loop.torch, "empty", lambda *a, **k: plain(*a, **k) if "pin_memory" in k else empty(*a, **k))
    there = drawn()
    assert [one.tolist() for _, one in there] == [one.tolist() for _, one in ours] and pinned == [True] * 4
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(ours, there, strict=True))
    assert len(ForCard(cases)[[3, 1]][1]) == 2


def test_a_card_adds_the_same_loss_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss adds a mask's pixels in a fixed order.

    On a GPU, the order of additions in torch's own mean would vary.
    """
    output, labels = torch.rand(3, 2, 8, 8), torch.randint(2, (3, 8, 8))
    expected, seen = dice_and_entropy(output, labels), []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.nll_loss2d_forward.default:
                seen.append(args[3])
            return func(*args, **(kwargs or {}))

    with Sums():
        dice_and_entropy(output.to(META), labels.to(META))
    assert seen == [0]  # torch's own mean over the pixels is never called
    card = type("Output", (Tensor,), {"device": property(lambda _: META)})
    assert torch.isclose(dice_and_entropy(output.as_subclass(card), labels).as_subclass(Tensor), expected)


def test_a_study_that_ended_holds_no_networks() -> None:
    ended = []

    def watched(*given: Any, **named: Any) -> Participant:
        ended.append(participant_of(*given, **named))
        return ended[-1]

    run(make_plan("fedsm"), kind=watched)
    assert len(ended) == len(SITES) and not any(own.state.modules or own.state.optimizers for own in ended)


def test_what_a_card_found_wrong_is_told_when_the_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU counts invalid pixels during a pass over the data, and medsilo raises the error at the end of the pass."""
    norm, passed = AmplitudeNorm((1, 4, 4)), []
    images = torch.rand(2, 1, 4, 4)
    data = iter([(images, torch.zeros(2))] * 2)
    found = torch.tensor([3, 1, 4])

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        passed.append(len(inputs))
        norm._wrong = found
        return inputs.mean()

    with pytest.raises(DataError, match="3 pixels in 1 of 4 images"):
        train_epoch(passed_through(norm, data), [learn], Compute())
    assert passed == [2, 2]
    norm.end_pass()


# --------------------------------------------------------------------------------------------- choice of the GPU
class Card:
    """Stand in for torch's CUDA functions, and record the GPUs that the code uses."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.touched: list[Any] = []
        self.emptied = 0
        patch.setattr(torch.random, "fork_rng", self.fork)
        patch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("the code seeded all GPUs"))
        patch.setattr(torch.cuda, "manual_seed", lambda _: None)
        patch.setattr(torch.cuda, "device", self.device)
        patch.setattr(torch.cuda, "empty_cache", self.empty)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "get_device_name", lambda _: "A card")

    @contextmanager
    def fork(self, devices: list[torch.device]) -> Iterator[None]:
        self.touched += devices
        yield

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.touched.append(device)
        yield

    def empty(self) -> None:
        self.emptied += 1


def test_a_site_touches_its_own_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with Compute.choose("cpu").reproducible(0):
        assert torch.get_deterministic_debug_mode() == 0
    assert not card.touched and not card.emptied
    monkeypatch.delenv(compute.ONE_WORKSPACE[0], raising=False)
    own = Compute.choose("cuda:2")
    with own.reproducible(0):
        assert torch.get_deterministic_debug_mode() == 1  # torch warns about operations that add in a varying order
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert set(card.touched) == {own.device} and card.emptied == 1
    assert torch.get_deterministic_debug_mode() == 0 and torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[compute.ONE_WORKSPACE[0]] == ":4096:8"


@pytest.mark.parametrize(("memory", "given"), [(48, ["0", "1", None]), (24, ["0", "0", "1"]), (0, ["0", "0", "0"])])
def test_studies_take_a_card_each_where_they_ask_for_its_memory(
    memory: int, given: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare assigns two GPUs of a hospital to jobs by the memory that each job requests.

    The test simulates only the output of nvidia-smi.
    """
    monkeypatch.setattr(gpu_resource_consumer, "get_host_gpu_ids", lambda: [0, 1])
    monkeypatch.setattr(gpu_resource_consumer, "get_host_gpu_memory_free", lambda unit: [49152, 49152])
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    manager = GPUResourceManager(num_of_gpus=2, mem_per_gpu_in_GiB=48, ignore_host=True)
    asked = {"num_of_gpus": 1} | ({"mem_per_gpu_in_GiB": memory} if memory else {})
    seen: list[str | None] = []
    for _ in given:
        enough, token = manager.check_resources(asked, FLContext())
        if enough:
            gpu_resource_consumer.GPUResourceConsumer().consume(manager.allocate_resources(asked, token, FLContext()))
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"] if enough else None)
    assert seen == given
    Card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # torch finds only the GPU that NVFlare assigned to the job
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Compute.choose("auto").device == torch.device("cuda")
    with pytest.raises(MedsiloError, match=r"cuda:1.* 1 CUDA devices.* cpu or auto"):
        Compute.choose("cuda:1")


def test_a_card_is_told_with_what_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    assert "TF32" in Compute.choose("cuda").description and "A card" in Compute.choose("cuda").description
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert "TF32" not in Compute.choose("cuda", precision="bfloat16").description
    assert Compute().description == "cpu, float32"


def test_a_site_keeps_what_it_trained_on(tmp_path: Any) -> None:
    run(make_plan(), folder=tmp_path / "run")
    own = read_provenance(tmp_path / "run" / "sites" / SITES[0])
    assert own.device and own.device.endswith("float32") and own.plan_hash == make_plan().hash
    assert read_provenance(tmp_path / "run").device is None and PROVENANCE == "provenance.json"
