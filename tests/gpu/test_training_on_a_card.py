"""Test training on a GPU: no batch waits for the GPU, results repeat to the bit, memory limits hold, and several sites
share GPUs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.federation import trainer
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.site_context import SiteContext
from medsilo.learning.amplitude import AmplitudeNorm
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.augmentation import augmented
from medsilo.tasks.own.folder import Augmentation
from tests.conftest import SITES, make_plan
from tests.inprocess import run
from tests.sites import site_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and this machine shows none"
)
MASKS = ["task.name=synthetic-prostate", "task.patients=4", "task.slices=6", "task.size=32", "training.batch_size=4"]
MASKS += ["network.features=[4, 8, 16]", "training.learning_rate=0.001"]
ADAM = ["training.optimizer=adam", "training.momentum=0"]
PICTURES = ["task.name=synthetic-histology", "network.name=small-cnn"]
KINDS = {
    "masks": MASKS,
    "masks, Adam, clipped": [*MASKS, *ADAM, "training.clip=1"],
    "masks, weighted": [*MASKS, "training.class_weights=balanced"],
    "pictures": PICTURES,
    "tables": [],
    "private": [*PICTURES, "privacy.epsilon=50", "privacy.delta=0.001", "network.norm=group"],
}
CARD = SiteSettings(device="cuda", public_data=True)
KINDS_OF_CHANGE = list(get_args(Augmentation))
METHODS = ["fedavg", "fedprox", "scaffold", "harmofl", "fedsm", "ditto", "moon", "fedrdn", "feddyn", "condistfl"]


def watching(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make torch raise an error if code waits for the GPU after a pass's first batch."""
    seen: list[int] = []
    whole, ending = trainer.train_epoch, AmplitudeNorm.end_pass

    def freely(work: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return work

    def watched(data: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            for number, batch in enumerate(data):
                if number:
                    torch.cuda.set_sync_debug_mode("error")
                    seen.append(number)
                yield batch
        finally:
            freely(None)

    monkeypatch.setattr(trainer, "train_epoch", lambda data, *others: whole(watched(data), *others))
    monkeypatch.setattr(AmplitudeNorm, "end_pass", lambda norm: ending(freely(norm)))
    return seen


@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "masks") for method in METHODS), *(("fedavg", kind) for kind in KINDS)]
)
def test_no_batch_waits_for_the_card(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watching(monkeypatch)
    run(make_plan(method, *KINDS[kind]), settings=CARD)
    assert seen


@pytest.mark.parametrize("slices", [False, True])
def test_no_augmented_batch_waits_for_the_card(
    slices: bool, volumes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = volumes_study(volumes, tmp_path / "data", patients=12, slices=slices)
    seen = watching(monkeypatch)
    trained(plan, tmp_path / "run", tmp_path / "data", device="cuda")
    assert len(seen) >= 2


@pytest.mark.parametrize("shape", [(8, 1, 40, 40), (8, 1, 12, 40, 40)])
def test_augmentation_on_a_card_is_a_cpus_but_for_its_noise(shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    masks, seeds = (images[:, 0] > 0.5).long(), list(range(len(images)))

    def changed(device: str, kinds: Sequence[Any], cases: slice = slice(None)) -> tuple[Tensor, Tensor]:
        batch = images[cases].to(device, copy=True), masks[cases].to(device, copy=True)
        inputs, targets = augmented(batch, kinds, True, seeds[cases])
        return inputs.cpu(), targets.cpu()

    ours, theirs = changed("cuda", KINDS_OF_CHANGE[:-1]), changed("cpu", KINDS_OF_CHANGE[:-1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    # A coordinate halfway between two pixels may be rounded to either pixel.
    assert (ours[1] != theirs[1]).double().mean() < 1e-3
    noisy, alone = changed("cuda", KINDS_OF_CHANGE), changed("cuda", KINDS_OF_CHANGE, slice(3, 4))
    assert torch.equal(noisy[0][3:4], alone[0]) and not torch.equal(noisy[0], ours[0])


def test_images_that_are_no_numbers_are_told_at_the_end_of_the_pass() -> None:
    norm = AmplitudeNorm((1, 8, 8)).cuda()
    images = torch.rand(4, 1, 8, 8).cuda()
    norm(images)
    before = norm.amplitude.clone()
    images[1, 0, 2, 3] = images[3, 0, 0, 0] = torch.nan
    norm(images)
    assert torch.equal(norm.amplitude, before)
    assert norm.batches.device.type == norm.frozen.device.type == "cpu" != norm.amplitude.device.type
    with pytest.raises(DataError, match="2 pixels in 2 of 8 images"):
        norm.end_pass()
    norm.end_pass()


# ---------------------------------------------------------------------------------------------------- repeatable
@pytest.fixture
def volumes(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return import_module("volumes")


def volumes_study(volumes: ModuleType, folder: Path, patients: int = 5, slices: bool = False) -> Plan:
    size = volumes.Size(patients=patients, grid=(20, 24, 24), piece=(16, 16, 16))
    for seed, (site, spacing) in enumerate(volumes.SPACINGS.items()):
        volumes.write_hospital(folder / site, seed, spacing, size)
    values = volumes.plan_of(size).model_dump(mode="json", exclude_unset=True)
    values["training"]["rounds"] = 1
    values["task"]["augmentation"] = [kind for kind in KINDS_OF_CHANGE if not (slices and kind == "flip-z")]
    values["network"] = {"name": "unet", "dimensions": 3, "features": [4, 8, 16]}
    if slices:
        values["task"] |= {"dimensions": 2, "size": [24, 24]}
        del values["task"]["target_spacing"], values["network"]["dimensions"]
    return parse_plan(values)


def trained(plan: Plan, folder: Path, data: Path | None = None, **settings: Any) -> Tensor:
    source = {"data": data / plan.participation.everyone[0], "public_data": True} if data else {}
    own = SiteSettings(**source, **settings)
    site = site_of(plan, plan.participation.everyone[0], plan.participation.everyone, own, folder)
    with site.participant.state.compute.reproducible(0):
        loss = site.participant.trainer.work(1, plan.course.phase_of(1), lambda: None)
    tensors = [*site.participant.state.model.state_dict().values(), torch.tensor(loss, dtype=torch.float64)]
    return torch.cat([tensor.double().cpu().ravel() for tensor in tensors])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["slices", "volumes"])
def test_segmentation_repeats_to_the_bit_and_ends_near_a_cpus(
    kind: str, precision: str, tmp_path: Path, volumes: ModuleType
) -> None:
    data = tmp_path / "data" if kind == "volumes" else None
    plan = volumes_study(volumes, data) if data else make_plan("fedavg", *MASKS, *ADAM)
    where = (tmp_path / str(number) for number in range(3))
    first = trained(plan, next(where), data, device="cuda", precision=precision)
    assert torch.equal(first, trained(plan, next(where), data, device="cuda", precision=precision))
    near = (first - trained(plan, next(where), data, device="cpu")).abs().mean()
    print(f"{kind}, {precision}: mean difference of weights from a CPU's {float(near):.2e}")
    assert near < (2e-3 if precision == "float32" else 2e-2)


@pytest.mark.parametrize("method", METHODS)
def test_methods_repeat_to_the_bit(method: str) -> None:
    def weights() -> Tensor:
        models = run(make_plan(method, *MASKS), settings=CARD).models
        return torch.cat([tensor.float().cpu().ravel() for tensor in models[SITES[0]].state_dict().values()])

    assert torch.equal(weights(), weights())


# ---------------------------------------------------------------------------------------------------- the machine
@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 8192])
def test_a_process_of_its_own_with_a_memory_limit_finds_the_card(limit: int | None, tmp_path: Path) -> None:
    plan = make_plan("fedavg", *MASKS)
    settings = SiteSettings(device="cuda", memory_limit=limit)
    site = IsolatedParticipant(SiteContext(plan, SITES[0], plan.participation.sites, settings, tmp_path / SITES[0]))
    given = views(plan.course.phase_of(1).given, plan.build_networks())
    groups = {name: {key: tensor.clone() for key, tensor in own.items()} for name, own in given.items()}
    asked = Request(task="round", round=1, study="s", plan=plan.hash, sites=tuple(SITES), last=0)
    try:
        answer = site.answer(asked.message(groups))
    finally:
        site.close()
    assert answer.facts["train_loss"] > 0


def test_only_the_own_card_is_touched() -> None:
    """A study on the CPU uses no GPU. A job sees only the GPUs that NVFlare assigns to it."""
    code = (
        "import torch\nfrom medsilo.learning.compute import Compute\n"
        "with Compute.choose('cpu').reproducible(0): torch.rand(3)\n"
        "print(torch.cuda.is_initialized())\n"
        "with Compute.choose('cuda').reproducible(0): torch.rand(3, device='cuda')\n"
        "print(torch.cuda.is_initialized(), torch.cuda.device_count())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["False", "True", "1"]


def test_several_workers_and_pinned_memory_change_nothing(tmp_path: Path, volumes: ModuleType) -> None:
    plan = volumes_study(volumes, tmp_path / "data")
    found = [trained(plan, tmp_path / str(n), tmp_path / "data", device="cuda", threads=n) for n in (1, 2)]
    assert torch.equal(*found)
