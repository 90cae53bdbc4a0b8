"""The papers' figures: their mathematics by hand, and the command on real runs of one round."""

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
from medsilo.core.files import load_tensors, save_tensors
from medsilo.deploy.supermodel import SuperModel
from medsilo.federation import inprocess
from medsilo.federation.centralised import POOL
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request
from medsilo.runs.reading import read_summary
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases
from results.analyses import drift, inversion, landscape
from results.analyses.__main__ import main
from results.analyses.analysis import Question, mean_loss
from results.analyses.features import embed, features, maps
from results.analyses.finished import FinishedRun, drawn, read_finished
from tests.conftest import make_plan, slow_but
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
    """The folder of a finished run; each is run once."""
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
    outputs = {"down.weight": 0, "head.weight": 0, "up.weight": 1}  # the axis of the outputs
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


def test_a_surface_is_the_loss_at_each_place_and_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -1.0]]))
    directions = [[torch.tensor([[1.0, 0.0]])], [torch.tensor([[0.0, 2.0]])]]
    places = landscape.ladder(0.5, 2)
    assert places == [-0.5, -0.25, 0.0, 0.25, 0.5]
    losses = landscape.surface(model, directions, places, lambda: float(model.weight.square().sum()))
    expected = [[(3 + a) ** 2 + (-1 + 2 * b) ** 2 for b in places] for a in places]
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6)
    assert model.weight.tolist() == [[3.0, -1.0]]


def test_the_centre_is_the_models_own_loss(finished: Callable[..., Path]) -> None:
    run = only(finished("fedbn"))  # each site has a model of its own
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


def test_a_batch_norm_without_statistics_sees_mixed_batches(finished: Callable[..., Path]) -> None:
    """As in a round: the same order every time, so the loss is a fact and not chance."""
    run = only(finished("fedavg", "network.norm=batch-statistics"))
    model, data = run.model(SITES[0], torch.device("cpu")), run.data(SITES[0], CPU)
    assert mean_loss(run, model, data.train, CPU.compute()) == mean_loss(run, model, data.train, CPU.compute())


# ---------------------------------------------------------------------------------------------------- drift
def test_gamma_is_equation_9(tmp_path: Path) -> None:
    """Two sites, two steps each, in float64 numpy: a linear classifier without batch norm, from the data themselves."""
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
            for step in parted[participant.place.site]
        ]
        assert participant.trainer.rounds[1]["steps"] == len(squares) > 1
        assert participant.trainer.rounds[1]["gamma"] == pytest.approx(np.mean(squares), rel=1e-5)
        assert set(participant.trainer.rounds) == {1, 2}


def weights_after_each_step(plan: Plan, site: str, folder: Path) -> list[list[Tensor]]:
    """Round 1 of plain SGD, written out."""
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


def first_round(plan: Plan) -> Request:
    return Request(task="round", round=1, study="x", plan=plan.hash, sites=tuple(SITES))


def test_batch_norm_that_stays_is_no_drift(tmp_path: Path) -> None:
    plan = image_plan("fedbn")
    site = TrainingSite(drift.WatchedParticipant("model", SiteContext(plan, SITES[0], SITES, CPU, tmp_path)))
    groups = views(plan.course.phase_of(1).sent, plan.build_networks())
    before = {name: tensor.clone() for name, tensor in site.participant.state.modules["model"].state_dict().items()}
    site.answer(first_round(plan).parcel(groups))
    after = site.participant.state.modules["model"].state_dict()
    sent = [name for name, _ in site.participant.state.modules["model"].named_parameters() if name in groups["model"]]
    last = sum(float((after[name] - before[name]).double().square().sum()) for name in sent)
    assert site.participant.trainer.squares[-1] == pytest.approx(last, rel=1e-5)
    assert len(sent) < len(list(site.participant.state.modules["model"].parameters()))


def test_what_sends_nothing_has_no_drift(finished: Callable[..., Path]) -> None:
    says = {"local": "sends no trained weights", "central": "nothing drifts", "pfedme": "no optimizer moves"}
    for method, why in says.items():
        with pytest.raises(MedsiloError, match=why):
            drift.drifts([only(finished(method))], Question(CPU))
    with pytest.raises(MedsiloError, match="no trained weights of selector"):
        drift.drifts([only(finished("fedavg"))], Question(CPU, network="selector"))


# ---------------------------------------------------------------------------------------------------- features
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


def test_models_of_different_sites_have_no_map(finished: Callable[..., Path]) -> None:
    with pytest.raises(MedsiloError, match="models of their own"):
        maps([only(finished("fedbn", "model_selection.keep=last"))], Question(CPU))


def test_a_network_of_a_super_model_has_a_map(finished: Callable[..., Path], tmp_path: Path) -> None:
    run = only(finished("local"))
    with pytest.raises(MedsiloError, match=r"selector.*has model; give one of these"):
        maps([run], Question(CPU, network="selector"))
    (tmp_path / "copy").mkdir()
    copy = FinishedRun(tmp_path / "copy", run.label, run.plan, run.summary)
    save_tensors(copy.folder / "supermodel" / "model.safetensors", run.plan.build_networks()["model"].state_dict())
    (one,) = maps([copy], Question(CPU, cases=5, network="model")).data["maps"]
    assert [point["site"] for point in one["points"]] == [site for site in SITES for _ in range(5)]


def test_the_command_maps_a_super_model_s_selector(finished: Callable[..., Path], tmp_path: Path) -> None:
    folder = finished("fedsm", "training.rounds=1")
    asked = ["--network", "selector", "--cases", "6", "--device", "cpu"]
    assert main(["tsne", str(folder), "-o", str(tmp_path), *asked]) == 0
    (one,) = json.loads((tmp_path / "tsne.json").read_text())["maps"]
    run, values = only(folder), []
    selector = SuperModel.load(folder / "supermodel").selector
    for site in SITES:
        cases = drawn(run.data(site, CPU).validation, 6, 0, site)
        inputs = torch.stack([image for image, _ in cases])
        with torch.no_grad():
            values.append(selector[:-1](inputs))  # all but the last layer
    found = [point["at"] for point in one["points"]]
    np.testing.assert_allclose(found, embed(torch.cat(values), 0).tolist(), rtol=1e-4, atol=1e-3)
    assert (one["network"], one["features"]) == ("selector", values[0].shape[1])
    assert [point["site"] for point in one["points"]] == [site for site in SITES for _ in range(6)]


# ---------------------------------------------------------------------------------------------------- inversion
def test_scores_of_what_is_known() -> None:
    truth = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert inversion.psnr(truth, truth, 1.0) == math.inf
    assert inversion.psnr(truth + 0.1, truth, 1.0) == pytest.approx(20, abs=1e-4)
    assert inversion.psnr(truth + 0.1, truth, 2.0) == pytest.approx(20 + 20 * math.log10(2), abs=1e-4)
    assert inversion.ssim(truth, truth, 1.0) == pytest.approx(1, abs=1e-6)
    moved = torch.roll(truth, (3, -5), (-2, -1))
    for image in (moved, moved.flip(-1, -2)):
        assert torch.equal(inversion.aligned(image, truth), truth)
        assert inversion.score(image, truth, 1.0) == {"psnr": math.inf, "ssim": pytest.approx(1, abs=1e-6)}
    noise = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(1))
    assert inversion.score(noise, truth, 1.0)["psnr"] < 12


def test_the_gradient_of_a_linear_layer_gives_its_input_away() -> None:
    """Closed form: ∂ℓ/∂W = g xᵀ and ∂ℓ/∂b = g, so x is any row of the one over the other. The attack must find it."""
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
    """An image whose phases are all 0 is its amplitude's direct inverse; any other is not."""
    image = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    amplitude = inversion.amplitude(image, (2, 8, 5))
    np.testing.assert_allclose(amplitude.numpy(), np.abs(np.fft.rfft2(image.double().numpy())), rtol=1e-5, atol=1e-5)
    even = inversion.without_phase(amplitude, (2, 8, 8))
    np.testing.assert_allclose(even.numpy(), np.fft.irfft2(amplitude.double().numpy()), atol=1e-5)
    torch.testing.assert_close(inversion.amplitude(even, (2, 8, 5)), amplitude, atol=1e-4, rtol=1e-4)
    assert float(inversion.amplitude_mismatch(amplitude)(even[None])) < 1e-8
    mean = inversion.amplitude(image, (2, 1, 1))  # the released code's band: nothing but each channel's mean
    flat = inversion.without_phase(mean, (2, 8, 8))
    torch.testing.assert_close(flat, image.mean((1, 2), keepdim=True).expand(2, 8, 8))


@pytest.mark.parametrize("changes", [[], ["algorithm.amplitude.band=0.0", "training.local_epochs=2"]])
def test_the_amplitude_under_attack_is_the_one_that_leaves(changes: list[str], tmp_path: Path) -> None:
    plan = image_plan("harmofl", *changes)
    site = site_of(plan, SITES[1], SITES, CPU, tmp_path)
    groups = views(plan.course.phase_of(1).given, plan.build_networks())
    left = site.answer(first_round(plan).parcel(groups)).groups["amplitude"]
    run = FinishedRun(tmp_path, "HarmoFL", plan, {"agreed": {"sites": SITES}})
    attacked = inversion.site_amplitude(run, SITES[1], site.participant.data.train, Question(CPU))
    assert torch.equal(attacked, left["amplitude"])


def test_methods_without_amplitudes_are_attacked_by_gradient_only(finished: Callable[..., Path]) -> None:
    found = inversion.inversions([only(finished("fedavg"))], Question(CPU, cases=1, iterations=2))
    assert [row for row in found.data["mean"] if not row.startswith("chance")] == ["its gradient"]
    assert [one["site"] for one in found.data["images"]] == SITES


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


def test_signals_are_no_images(tmp_path: Path) -> None:
    run = FinishedRun(tmp_path, "FedAvg", make_plan(), {"agreed": {"sites": SITES}})
    with pytest.raises(MedsiloError, match="flat images"):
        inversion.inversions([run], Question(CPU))


# ---------------------------------------------------------------------------------------------------- runs
def test_models_are_those_that_sites_tested(finished: Callable[..., Path], tmp_path: Path) -> None:
    central = only(finished("central"))
    assert central.sites == SITES
    pooled = load_tensors(central.folder / "sites" / POOL / "best.safetensors")[0]
    state = central.model(SITES[0], torch.device("cpu")).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in pooled.items())
    local = only(finished("local", "model_selection.keep=last"))
    first, second = (local.model(site, torch.device("cpu")).state_dict() for site in SITES)
    assert not all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(MedsiloError, match="no finished run"):
        read_finished([tmp_path])
    with pytest.raises(MedsiloError, match="twice"):
        read_finished([local.folder, local.folder])


def test_drawn_cases_are_the_same_and_in_order() -> None:
    data = Cases(torch.arange(50.0)[:, None], torch.zeros(50), ["p"] * 50)
    values = [float(drawn(data, 10, 3, "a")[place][0]) for place in range(10)]
    assert values == sorted(set(values)) == [float(drawn(data, 10, 3, "a")[place][0]) for place in range(10)]
    assert values != [float(drawn(data, 10, 3, "b")[place][0]) for place in range(10)]
    assert len(drawn(data, 99, 3)) == 50


# ---------------------------------------------------------------------------------------------------- the command
FIGURES = {
    "landscape": ["landscape"],
    "profile": ["profile"],
    "drift": ["drift"],
    "tsne": ["tsne"],
    "inversion": ["inversion", "inversion-images"],
    "convergence": ["convergence"],
}


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
    for name in written:  # the same seed, the same files
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name in FIGURES[kind]:
        pixels = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / "first" / f"{name}.png")))
        assert all(200 <= length <= 3000 for length in pixels.shape[:2])
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def test_convergence_counts_bytes_and_scores(finished: Callable[..., Path], tmp_path: Path) -> None:
    runs = [finished("fedavg"), finished("local"), finished("central")]
    assert main(["convergence", *map(str, runs), "-o", str(tmp_path)]) == 0
    fedavg, local, central = json.loads((tmp_path / "convergence.json").read_text())["curves"]
    summary = read_summary(runs[0])
    size = sum(t.nbytes for t in image_plan("fedavg").build_networks()["model"].state_dict().values())
    assert fedavg["bytes"] == [0, 4 * size, 8 * size]  # two sites, up and down
    assert local["bytes"] == central["bytes"] == [0, 0, 0]
    curves = [site.validation for site in summary.sites.values()]
    np.testing.assert_allclose(fedavg["score"], np.mean(curves, 0))


def test_errors_are_one_line(tmp_path: Path, finished: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    assert main(["drift", str(tmp_path / "none"), "-o", str(tmp_path)]) == 1
    assert "no finished run" in capsys.readouterr().err
    assert main(["inversion", str(finished("fedavg")), str(finished("local")), "-o", str(tmp_path)]) == 1
    assert "give one run" in capsys.readouterr().err
    for wrong in ("0", "-1", "nan", "inf", "far"):
        with pytest.raises(SystemExit, match="2"):
            main(["profile", str(finished("local")), "-o", str(tmp_path), "--reach", wrong])
        assert "is not a number above 0" in capsys.readouterr().err
