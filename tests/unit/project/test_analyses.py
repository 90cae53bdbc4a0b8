"""Figures of papers equal independent computations, and the command for figures runs on real runs of one round."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from results.analyses import drift, inversion, landscape
from results.analyses.__main__ import main
from results.analyses.analysis import Question
from results.analyses.features import embed, features
from results.analyses.finished import FinishedRun, drawn, read_finished
from tests.conftest import slow_but
from tests.sites import CPU, site_of

SITES = ["hospital-a", "hospital-b"]


def image_plan(method: str, *changes: str) -> Plan:
    values: dict[str, Any] = {
        "algorithm": {"name": method},
        "task": {"name": "synthetic-histology", "size": 32, "patients": 16, "patches": 4},
        "network": {"name": "small-cnn", "width": 4},
        "training": {"rounds": 2, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.9},
        "participation": {"sites": SITES},
    }
    return parse_plan(values, changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root, made = tmp_path_factory.mktemp("runs"), {}

    def make(method: str, *changes: str) -> Path:
        if (method, changes) not in made:
            folder = made[method, changes] = root / f"{method}-{len(made)}"
            inprocess.run(image_plan(method, *changes), folder=folder, settings=CPU)
        return made[method, changes]

    return make


def only(folder: Path) -> FinishedRun:
    (run,) = read_finished([folder])
    return run


# ---------------------------------------------------------------------------------------------------- landscape
class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose2d(3, 2, 2)
        self.head = nn.Linear(5, 4)


def test_every_filter_of_a_direction_has_the_norm_of_the_models() -> None:
    torch.manual_seed(0)
    model = Mixed()
    named = dict(model.named_parameters())
    direction = dict(zip(named, landscape.filter_normalised(model, torch.Generator().manual_seed(1)), strict=True))
    # for each weight tensor: the index of the axis that belongs to the layer's outputs
    outputs = {"down.weight": 0, "head.weight": 0, "up.weight": 1}
    for name, axis in outputs.items():
        own = np.moveaxis(named[name].detach().numpy().astype(np.float64), axis, 0)
        drawn_ = np.moveaxis(direction[name].numpy().astype(np.float64), axis, 0)
        for mine, random in zip(own, drawn_, strict=True):
            assert math.sqrt((random**2).sum()) == pytest.approx(math.sqrt((mine**2).sum()), rel=1e-6)
    still = set(named) - set(outputs)
    assert still == {"down.bias", "norm.weight", "norm.bias", "up.bias", "head.bias"}
    assert all(not direction[name].any() for name in still)
    again = landscape.filter_normalised(model, torch.Generator().manual_seed(1))
    other = landscape.filter_normalised(model, torch.Generator().manual_seed(2))
    assert all(map(torch.equal, again, direction.values())) and not torch.equal(other[0], again[0])


@pytest.mark.long
def test_the_centre_is_the_models_own_loss(finished: Callable[..., Path]) -> None:
    run = only(finished("fedbn"))
    asked = Question(CPU, cases=20, steps=1)
    found = landscape.landscapes([run], asked).data["surfaces"]
    lines = landscape.profiles([run], asked).data["profiles"]
    for one, line in zip(found, lines, strict=True):
        site = one["site"]
        model = run.plan.algorithm.whole(run.plan.build_networks())
        model.load_state_dict(load_tensors(run.folder / "sites" / site / "best.safetensors")[0])
        cases = drawn(run.plan.task.load(site, SITES, run.plan.seed, None).train, 20, 0, site)
        inputs, targets = (torch.stack([cases[place][part] for place in range(20)]) for part in (0, 1))
        with torch.no_grad():
            scores = model.eval()(inputs).double().numpy()
        chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = -np.log(chances[np.arange(20), targets.numpy()]).mean()
        assert one["centre"] == pytest.approx(loss, rel=1e-5)
        assert one["losses"][1][1] == one["centre"] == line["centre"]
        assert all(profile[1] == one["centre"] for profile in line["losses"])
        assert one["lowest"] == min(min(column) for column in one["losses"])
    assert landscape.landscapes([run], asked).data["surfaces"] == found
    assert landscape.landscapes([run], Question(CPU, 1, cases=20, steps=1)).data["surfaces"] != found


# ---------------------------------------------------------------------------------------------------- drift
def test_gamma_is_equation_9(tmp_path: Path) -> None:
    """Two sites make two local steps each, and numpy computes the drift of a linear classifier in float64."""
    plan = image_plan(
        "fedavg", "network.norm=none", "training.rounds=2", "training.momentum=0", "training.batch_size=8"
    )
    watched, _ = drift.replay(plan, SITES, CPU, "model")
    parted: dict[str, list[list[Tensor]]] = {}
    for site in SITES:
        parted[site] = weights_after_each_step(plan, site, tmp_path)
    start = [weight.detach().numpy().astype(np.float64) for weight in plan.build_networks()["model"].parameters()]
    for participant in watched:
        squares = [
            sum(
                ((after.numpy().astype(np.float64) - before) ** 2).sum()
                for after, before in zip(step, start, strict=True)
            )
            for step in parted[participant.context.site]
        ]
        assert participant.trainer.rounds[1]["steps"] == len(squares) > 1
        assert participant.trainer.rounds[1]["gamma"] == pytest.approx(np.mean(squares), rel=1e-5)
        assert set(participant.trainer.rounds) == {1, 2}


def weights_after_each_step(plan: Plan, site: str, folder: Path) -> list[list[Tensor]]:
    participant = site_of(plan, site, SITES, CPU, folder / site)
    model, found = plan.build_networks()["model"], []
    order = drift_order(plan, site)
    with participant.participant.state.compute.reproducible(0):
        for chosen in order:
            cases = [participant.participant.data.train[place] for place in chosen]
            inputs, targets = torch.stack([x for x, _ in cases]), torch.stack([y for _, y in cases])
            gradients = torch.autograd.grad(
                functional.cross_entropy(model.train()(inputs), targets), [*model.parameters()]
            )
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), gradients, strict=True):
                    weight -= 0.05 * gradient
            found.append([weight.detach().clone() for weight in model.parameters()])
    return found


def drift_order(plan: Plan, site: str) -> list[list[int]]:
    cases = len(plan.task.load(site, SITES, plan.seed, None).train)  # type: ignore[arg-type]
    places = list(
        torch.utils.data.RandomSampler(range(cases), generator=generator_for(plan.seed, site, "shuffle", 1, 0))
    )
    assert cases % 8 == 0
    return [places[first : first + 8] for first in range(0, cases, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["harmofl", "fedbn"])
def test_a_replay_is_the_run_and_measures_what_travels(method: str, finished: Callable[..., Path]) -> None:
    run = only(finished(method))
    (found,) = drift.drifts([run], Question(CPU)).data["drifts"]
    assert found["equals_the_run"] and [line["round"] for line in found["rounds"]] == [1, 2]
    lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    for line, own in zip(found["rounds"], lines, strict=True):
        assert line["gamma"] == pytest.approx(np.mean([site["gamma"] for site in line["sites"].values()]), rel=1e-12)
        assert {site: one["train_loss"] for site, one in line["sites"].items()} == {
            site: one["train_loss"] for site, one in own["sites"].items()
        }


def test_features_are_the_input_of_the_last_layer() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    images, targets = torch.randn(5, 1, 4, 4), torch.arange(5)
    values, classes = features(network, iter([(images[:3], targets[:3]), (images[3:], targets[3:])]))
    weight, bias = (network[0].weight[:, 0, 0, 0], network[0].bias)
    expected = images.mean((1, 2, 3))[:, None] * weight + bias
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)
    assert classes.tolist() == [0, 1, 2, 3, 4]
    dense = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 2, 1))
    values, _ = features(dense, iter([(images, images)]))
    expected = images.mean((1, 2, 3))[:, None] * dense[0].weight[:, 0, 0, 0] + dense[0].bias
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)


def test_a_map_depends_on_its_seed_and_keeps_groups_together() -> None:
    values = torch.cat([torch.randn(20, 5, generator=torch.Generator().manual_seed(0)) + 20 * k for k in range(2)])
    points = embed(values, 0)
    assert torch.equal(points, embed(values, 0))
    first, second = points[:20], points[20:]
    spread = max(float((group - group.mean(0)).norm(dim=1).max()) for group in (first, second))
    assert float((first.mean(0) - second.mean(0)).norm()) > spread
    with pytest.raises(MedsiloError, match="too few"):
        embed(values[:3], 0)


# ---------------------------------------------------------------------------------------------------- inversion


def test_the_gradient_of_a_linear_layer_gives_its_input_away() -> None:
    """For a linear layer, ∂ℓ/∂W = g xᵀ and ∂ℓ/∂b = g, so x is a row of ∂ℓ/∂W divided by the same element of ∂ℓ/∂b."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    image, target = torch.rand(1, 3, 4, 4), torch.tensor([1])
    weight, bias = seen = inversion.gradients(network, functional.cross_entropy, image, target)
    closed = weight[0].double().numpy() / float(bias[0])
    np.testing.assert_allclose(closed, image.flatten().numpy(), rtol=1e-4, atol=1e-5)
    mismatch = inversion.gradient_mismatch(network, functional.cross_entropy, target, seen)
    assert float(mismatch(image).detach()) == pytest.approx(0, abs=1e-6)
    start = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    found = inversion.reconstruct(mismatch, start, 0.0, 1.0, 300, 0.0)
    assert inversion.psnr(found, image, 1.0) > 35 > 15 > inversion.psnr(start, image, 1.0)
    assert torch.equal(found, inversion.reconstruct(mismatch, start, 0.0, 1.0, 300, 0.0))


def test_what_an_amplitude_tells_by_itself() -> None:
    """The inverse transform of an amplitude spectrum is the image only if all phases are 0."""
    image = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    amplitude = inversion.amplitude(image, (2, 8, 5))
    np.testing.assert_allclose(amplitude.numpy(), np.abs(np.fft.rfft2(image.double().numpy())), rtol=1e-5, atol=1e-5)
    even = inversion.without_phase(amplitude, (2, 8, 8))
    np.testing.assert_allclose(even.numpy(), np.fft.irfft2(amplitude.double().numpy()), atol=1e-5)
    torch.testing.assert_close(inversion.amplitude(even, (2, 8, 5)), amplitude, atol=1e-4, rtol=1e-4)
    assert float(inversion.amplitude_mismatch(amplitude)(even[None])) < 1e-8
    mean = inversion.amplitude(image, (2, 1, 1))
    flat = inversion.without_phase(mean, (2, 8, 8))
    torch.testing.assert_close(flat, image.mean((1, 2), keepdim=True).expand(2, 8, 8))


@pytest.mark.long
def test_real_images_are_drawn_only_where_the_site_allows(
    finished: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = only(finished("fedavg"))
    asked = Question(CPU, cases=1, iterations=1)
    assert set(inversion.inversions([run], asked).figures) == {"inversion", "inversion-images"}
    monkeypatch.setattr(type(run.plan.task), "synthetic", False)
    assert set(inversion.inversions([run], asked).figures) == {"inversion"}
    allowed = Question(SiteSettings(device="cpu", pictures=True), cases=1, iterations=1)
    assert set(inversion.inversions([run], allowed).figures) == {"inversion", "inversion-images"}


# ---------------------------------------------------------------------------------------------------- runs


# ---------------------------------------------------------------------------------------------------- the command
FIGURES = {
    "landscape": ["landscape"],
    "profile": ["profile"],
    "drift": ["drift"],
    "tsne": ["tsne"],
    "inversion": ["inversion", "inversion-images"],
    "convergence": ["convergence"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_but(["profile"], FIGURES, ()))
def test_the_command_writes_figures_and_their_numbers(
    kind: str, finished: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs = [str(finished("harmofl"))] + ([] if kind == "inversion" else [str(finished("fedavg"))])
    cases = 1 if kind == "inversion" else 6
    small = ["--cases", str(cases), "--steps", "1", "--iterations", "2", "--device", "cpu"]
    for out in ("first", "second"):
        assert main([kind, *runs, "-o", str(tmp_path / out), *small]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "first" / f"{kind}.json") in said
    data = json.loads((tmp_path / "first" / f"{kind}.json").read_text())
    assert data["kind"] == kind and data["asked"]["cases"] == cases
    assert [run["label"] for run in data["runs"]] == ["HarmoFL", "FedAvg"][: len(runs)]
    written = {path.name for path in (tmp_path / "first").iterdir()}
    assert written == {f"{kind}.json", *(f"{name}.png" for name in FIGURES[kind])}
    for name in written:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name in FIGURES[kind]:
        pixels = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / "first" / f"{name}.png")))
        assert all(200 <= length <= 3000 for length in pixels.shape[:2])
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20
