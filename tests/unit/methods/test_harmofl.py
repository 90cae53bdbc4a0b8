"""HarmoFL equals an independent implementation of Algorithm 1; the file also tests messages, resuming, and errors."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import DataError, MedsiloError, PlanError
from medsilo.core.files import load_tensors
from medsilo.federation.site_stack import TrainingSite
from medsilo.methods.fedper import FedPer
from medsilo.plan import Plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases
from medsilo_lab.testing import assert_equal
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import FEDSM, METHODS, SITES, make_plan, slow_but
from tests.sites import CPU, site_of, sites_of
from tests.unit.methods.test_algorithms import (
    SMALL,
    Listening,
    State,
    assert_close,
    batches_by_hand,
    initial,
    listen,
    load_data,
    merge_by_hand,
    plan_sgd,
    with_state,
)

ALPHA, DECAY = 0.05, 0.1
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]


def harmofl(*changes: str) -> Plan:
    return make_plan("harmofl", *SMALL, *changes)


# ------------------------------------------------------------------------------------------------------- Alg. 1 by hand
def normalise_by_hand(batch: Tensor, amplitude: np.ndarray | None) -> Tensor:
    """Compute Equation 4 of the HarmoFL paper for signals [B, C, T]."""
    if amplitude is None:
        return batch
    spectrum = np.fft.fft(batch.double().numpy())
    return torch.from_numpy(np.fft.ifft(amplitude * np.exp(1j * np.angle(spectrum))).real).float()


def harmofl_by_hand(plan: Plan, amplitude: bool, perturbation: bool, server_lr: float = 1.0) -> dict[str, State]:
    data = load_data(plan)
    models = {site: with_state(plan, initial(plan)) for site in SITES}
    optimizers = {site: plan_sgd(plan, model) for site, model in models.items()}
    average: dict[str, np.ndarray | None] = dict.fromkeys(SITES)
    given = initial(plan)
    for number in range(1, plan.training.rounds + 1):
        sent = {}
        for site, model in models.items():
            model.load_state_dict(given)
            model.train()
            for images, targets in batches_by_hand(plan, site, data[site].train.tensors, number):
                if amplitude and number == 1:
                    own, mean = average[site], np.abs(np.fft.fft(images.double().numpy())).mean(0)
                    average[site] = mean if own is None else (1 - DECAY) * own + DECAY * mean
                images = normalise_by_hand(images, average[site])
                step_by_hand(model, optimizers[site], images, targets, perturbation)
            sent[site] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        merged = merge_by_hand(sent, dict.fromkeys(SITES, 1.0))
        given = {
            name: given[name] + server_lr * (mean - given[name])
            if mean.is_floating_point() and "running" not in name
            else mean
            for name, mean in merged.items()
        }
        if amplitude and number == 1:
            shared = np.mean([average[site] for site in SITES], axis=0)
            average = dict.fromkeys(SITES, shared)
    if amplitude:
        given["amplitude"] = torch.from_numpy(shared[:, : shared.shape[1] // 2 + 1]).float()
    return given


def step_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor, perturbation: bool
) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(functional.cross_entropy(model(images), targets), parameters)
    if perturbation:
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += ALPHA * gradient / (norm + 1e-12)
        gradients = torch.autograd.grad(functional.cross_entropy(model(images), targets), parameters)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
            for name, buffer in model.named_buffers():
                buffer.copy_(statistics[name])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize(("amplitude", "perturbation"), SWITCHES)
def test_three_rounds_equal_algorithm_1_written_by_hand(amplitude: bool, perturbation: bool) -> None:
    plan = harmofl(
        "training.rounds=3",
        *([] if amplitude else ["algorithm.amplitude=null"]),
        *([] if perturbation else ["algorithm.perturbation=null"]),
    )
    expected = harmofl_by_hand(plan, amplitude, perturbation)
    shared = expected.pop("amplitude", None)
    for model in inprocess.run(plan).models.values():
        network = model
        if amplitude:
            torch.testing.assert_close(model.input.amplitude, shared, rtol=1e-6, atol=1e-5)
            assert model.input.frozen
            network = model.model
        # Over three rounds, medsilo computes the transform in float32 and the reference in float64.
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4 if amplitude else 2e-6)


def test_the_servers_step() -> None:
    plan = harmofl("training.rounds=3", "algorithm.amplitude=null", "algorithm.server_lr=0.5")
    expected = harmofl_by_hand(plan, False, True, server_lr=0.5)
    assert_close(inprocess.run(plan).models["hospital-b"].state_dict(), expected)


# ---------------------------------------------------------------------------------------------------------- composition
HALVES = ["algorithm.amplitude={}", "algorithm.perturbation={}"]
# FedRDN is left out because of its input layer, and Cyclic because not all sites train in the measuring round
# (test_cyclic.py).
OTHERS = [method for method in METHODS if method not in ("harmofl", "fedrdn", "cyclic", *FEDSM)]


def assert_same_models(one: inprocess.StudyResult, other: inprocess.StudyResult) -> None:
    for site in SITES:
        assert_equal(one.models[site].state_dict(), other.models[site].state_dict(), site)


def test_averaging_with_both_halves_is_harmofl_bit_for_bit() -> None:
    composed = inprocess.run(make_plan("fedavg", *SMALL, *HALVES, "algorithm.weighting=uniform"))
    assert_same_models(composed, inprocess.run(harmofl()))


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["fedbn", "scaffold", "ditto"], OTHERS, ()))
def test_every_method_takes_both_halves(method: str, tmp_path: Path) -> None:
    """Sites harmonise the images in the first training round and in all later rounds.

    If either the harmonised images or the perturbation is left out, the model is different.
    """
    plan = make_plan(method, *SMALL, f"training.rounds={3 if method == 'f-adafed' else 2}")
    allowed = HALVES[: 1 if plan.algorithm.own_step else 2]
    first = next(place for place, phase in enumerate(plan.algorithm.phases(plan.training.rounds)) if phase.trains)
    transport, _ = listen(plan.with_changes(allowed), tmp_path / "both")
    for site in SITES:
        groups = {p.facts["round"]: p.groups.keys() for who, p in transport.received if who == site and p.groups}
        assert [number for number, names in groups.items() if "amplitude" in names] == [first + 1]
        down = [p.facts["round"] for who, p in transport.sent if who == site and "amplitude" in p.groups]
        assert down == [first + 2]
    assert all(one.participant.state.modules["amplitude"].frozen for one in transport.participants.values())
    both = transport.participants["hospital-b"].participant.state.model.model.state_dict()
    for left_out in allowed:
        fewer = plan.with_changes([half for half in allowed if half != left_out])
        model = inprocess.run(fewer).models["hospital-b"]
        assert not torch.equal(both["4.weight"], getattr(model, "model", model).state_dict()["4.weight"])


@pytest.mark.parametrize("method", FEDSM)
def test_a_super_model_takes_the_step_and_not_the_layer(method: str) -> None:
    with pytest.raises(PlanError, match="super model has no input layer"):
        make_plan(method, *SMALL, HALVES[0])
    assert make_plan(method, *SMALL, HALVES[1]).algorithm.perturbation


@pytest.mark.slow
def test_a_super_model_s_experts_learn_with_the_step() -> None:
    weights = [
        inprocess.run(make_plan("fedsm", *SMALL, "training.rounds=2", *half))
        .models["hospital-b"]
        .state_dict()["4.weight"]
        for half in ([], HALVES[1:])
    ]
    assert not torch.equal(*weights)


def test_statistics_are_measured_on_images_as_the_network_will_see_them(tmp_path: Path) -> None:
    """AdaFed measures its statistics in the round before images are harmonised, and therefore on unchanged images."""
    transport, coordinator = listen(make_plan("adafed", *SMALL, "training.rounds=2", *HALVES[:1]), tmp_path / "run")
    assert [line.phase for line in coordinator.rounds] == ["measure", "harmonise", "train"]
    plain, _ = listen(make_plan("adafed", *SMALL, "training.rounds=2"), tmp_path / "plain")

    def measured(of: Listening, number: int) -> Tensor:
        parcels = {site: p.groups for site, p in of.received if p.facts["round"] == number and "statistics" in p.groups}
        return next(t for name, t in parcels["hospital-b"]["statistics"].items() if name.endswith("mean"))

    assert torch.equal(measured(transport, 1), measured(plain, 1))


def test_a_method_whose_step_is_its_own_refuses_a_perturbed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedPer, "own_step", True)
    with pytest.raises(PlanError, match=r"algorithm\.perturbation:.*set the key to null"):
        make_plan("fedper", HALVES[1])
    assert make_plan("fedper", HALVES[0])


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(("band", "numbers"), [("null", 9 * 17), ("0.2", 9 * 17), ("0.0", 9)])
def test_amplitudes_go_up_in_round_1_and_come_down_once(band: str, numbers: int, tmp_path: Path) -> None:
    transport, _ = listen(harmofl("training.rounds=3", f"algorithm.amplitude.band={band}"), tmp_path / "run")
    for site in SITES:
        up = {p.facts["round"]: p.groups for who, p in transport.received if who == site and p.groups}
        assert [number for number, groups in up.items() if "amplitude" in groups] == [1]
        assert up[1]["amplitude"]["amplitude"].numel() == numbers
        down = [p.facts["round"] for who, p in transport.sent if who == site and "amplitude" in p.groups]
        assert down == [2]  # no amplitude is known in round 1, and the server sends the mean amplitude in round 2
    saved, _ = load_tensors(tmp_path / "run/global/best.safetensors")
    assert saved["input.frozen"]
    mean = torch.stack([p.groups["amplitude"]["amplitude"] for _, p in transport.received if "amplitude" in p.groups])
    torch.testing.assert_close(
        saved["input.amplitude"].flatten()[saved["input.amplitude"].flatten() != 0].sum(), mean.mean(0).sum()
    )


def test_a_site_that_was_away_gets_the_amplitude_when_it_comes_back(tmp_path: Path) -> None:
    plan = harmofl("training.rounds=4", "participation.minimum=2", "participation.when_missing=continue")
    participants = sites_of(plan, tmp_path / "run")
    absent = participants["hospital-c"]
    answer = absent.answer

    def sometimes(message: StudyMessage, *more: Any) -> StudyMessage:
        if message.facts["task"] == "round" and message.facts["round"] in (1, 2):
            raise MedsiloError("away")
        return answer(message, *more)

    absent.answer = sometimes  # type: ignore[method-assign]
    transport, coordinator = listen(plan, tmp_path / "run", participants)
    down = [p.facts["round"] for site, p in transport.sent if site == "hospital-c" and "amplitude" in p.groups]
    assert down == [2, 3]
    assert [sorted(line.sites) for line in coordinator.rounds] == [SITES[:2], SITES[:2], SITES, SITES]
    assert torch.equal(
        absent.participant.state.modules["amplitude"].amplitude,
        participants["hospital-a"].participant.state.modules["amplitude"].amplitude,
    )


def test_a_site_that_lost_its_disk_says_so_and_is_given_the_amplitude_again(tmp_path: Path) -> None:
    plan = harmofl("training.rounds=4", "participation.minimum=2", "participation.when_missing=continue")
    participants = sites_of(plan, tmp_path / "run")
    loser = participants["hospital-c"]
    answer = loser.answer

    def after_a_fire(message: StudyMessage, *more: Any) -> StudyMessage:
        if message.facts["task"] == "round" and message.facts["round"] == 3:
            for path in loser.folder.glob("state-*"):
                path.unlink()
            loser.participant.state.done = -1
        return answer(message, *more)

    loser.answer = after_a_fire  # type: ignore[method-assign]
    _, coordinator = listen(plan, tmp_path / "run", participants)
    assert "lost the amplitude" in coordinator.rounds[2].refused["hospital-c"]
    assert sorted(coordinator.rounds[3].sites) == SITES


# ----------------------------------------------------------------------------------------------------------- evaluation
def test_sites_are_scored_with_their_own_average_first_and_the_frozen_one_after(tmp_path: Path) -> None:
    plan = harmofl("training.rounds=2", "model_selection.keep=last")
    run = inprocess.run(plan, folder=tmp_path / "run")
    for site, data in load_data(plan).items():
        model = run.models[site].eval()
        inputs, targets = data.test.tensors
        with torch.no_grad():
            harmonised = model.model(normalise_by_hand(inputs, full_spectrum(model.input.amplitude, inputs.shape[-1])))
            assert torch.allclose(model(inputs), harmonised, atol=1e-4)
            score = float((model(inputs).argmax(1) == targets).double().mean())
        assert run.summary.sites[site].test["accuracy"] == pytest.approx(score)


def full_spectrum(amplitude: Tensor, length: int) -> np.ndarray:
    half = amplitude.double().numpy()
    return np.concatenate([half, half[:, 1 : (length + 1) // 2][:, ::-1]], 1)


# ------------------------------------------------------------------------------------------------------------ bad input
def participant(plan: Plan, folder: Path, settings: SiteSettings = CPU, **parts: Any) -> TrainingSite:
    data = plan.task.load("hospital-a", SITES, plan.seed, None)
    changed = {name: change(getattr(data, name)) for name, change in parts.items()}
    return site_of(plan, "hospital-a", SITES, settings, folder, replace(data, **changed))


def first_round(plan: Plan, **asked: Any) -> Request:
    return Request(task="round", round=1, study="s", plan=plan.hash, sites=tuple(SITES), **asked)


def test_nan_is_refused_without_counts_and_names(tmp_path: Path) -> None:
    def spoil(cases: Cases) -> Cases:
        inputs = cases.inputs.clone()
        inputs[0, 0, :3] = inputs[5, 1, 2] = torch.nan
        return Cases(inputs, cases.targets, cases.patients)

    for part in ("train", "validation", "test"):
        with pytest.raises(DataError) as caught:
            participant(harmofl(), tmp_path, **{part: spoil})
        assert f"the {part} part are NaN" in str(caught.value) and not re.search(r"\d", str(caught.value))
        assert "synthetic" not in str(caught.value) and "4 values in 2 of" in caught.value.private


@pytest.mark.parametrize(("shape", "hint"), [((9, 40), "task.size"), ((1, 32), "9 channels")])
def test_other_sizes_and_channels_are_refused_before_training(
    shape: tuple[int, int], hint: str, tmp_path: Path
) -> None:
    def other(cases: Cases) -> Cases:
        return Cases(torch.rand(len(cases), *shape), cases.targets, cases.patients)

    with pytest.raises(DataError) as caught:
        participant(harmofl(), tmp_path, train=other)
    for word in (str(list(shape)), "[9, 32]", hint):
        assert word in str(caught.value)


def test_sizes_that_change_between_batches_are_refused(tmp_path: Path) -> None:
    class Mixed(torch.utils.data.Dataset):
        def __init__(self, cases: Cases) -> None:
            self.cases = cases

        def __len__(self) -> int:
            return 32

        def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
            inputs, target = self.cases[place]
            return (inputs if place == 0 else inputs[:, :30]), target

    any_average = SiteSettings(device="cpu", public_data=True)
    site = participant(harmofl("training.batch_size=1"), tmp_path, any_average, train=Mixed)
    groups = views(site.participant.context.plan.course.phase_of(1).given, site.participant.state.modules)
    with pytest.raises(DataError, match=r"\[9, 30\].*\[9, 32\].*task.size"):
        site.answer(first_round(site.participant.context.plan).message(groups))


def test_a_site_refuses_an_average_of_too_few_images(tmp_path: Path) -> None:
    plan = harmofl("algorithm.amplitude.decay=0.0", "training.batch_size=4")
    with pytest.raises(DataError, match=r"averages too few images.*demands 8"):
        participant(plan, tmp_path)
    participant(plan, tmp_path, SiteSettings(device="cpu", public_data=True))
    participant(plan.with_changes(["algorithm.amplitude=null"]), tmp_path)
    with pytest.raises(DataError, match="demands 1000"):
        participant(harmofl(), tmp_path, SiteSettings(device="cpu", min_patients_per_metric=1000))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm.amplitude.band=0.6", "0.5 or less"),
        ("algorithm.perturbation.alpha=0", "more than 0.0"),
        ("algorithm.amplitudes=true", "amplitude"),
        (
            "algorithm.amplitude=true",
            "algorithm.amplitude: True is not a section",
        ),
        ("protocol=paper", "algorithm.amplitude.start: 'batch', but protocol 'paper'"),
        ("protocol=released-code", "algorithm.amplitude.band: None, but"),
    ],
)
def test_wrong_plans_are_refused_in_one_line(change: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        harmofl(change)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_task_without_one_shape_cannot_be_harmonised(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = harmofl()
    monkeypatch.setattr(type(plan.task), "shape", None)
    with pytest.raises(PlanError, match="images of one size"):
        harmofl()
    assert harmofl("algorithm.amplitude=null").algorithm.name == "harmofl"


# ----------------------------------------------------------------------------------------------------------- truncation
def test_sites_train_on_as_many_cases_as_the_smallest(tmp_path: Path) -> None:
    plan = harmofl("training.truncate=true")
    transport, coordinator = listen(plan, tmp_path / "run")
    smallest = min(len(data.train) for data in load_data(plan).values())
    assert {line.sites[site].samples for line in coordinator.rounds for site in SITES} == {smallest}
    sizes = {facts.cases["train"] for facts in Record(tmp_path / "run").summary().sites.values()}
    assert len(sizes) == 3  # each site still reports its own number of training cases
    cut = next(p for p in transport.participants.values() if p.participant.disclosure.cases["train"] > smallest)
    chosen = list(cut.participant.trainer.train.indices)
    cut.participant.trainer.truncate(None)
    assert cut.participant.trainer.train is cut.participant.data.train
    cut.participant.trainer.truncate(smallest)
    assert list(cut.participant.trainer.train.indices) == chosen == sorted(set(chosen))


def test_truncation_is_refused_when_too_few_images_are_left(tmp_path: Path) -> None:
    site = participant(harmofl("training.truncate=true"), tmp_path)
    with pytest.raises(DataError, match="averages too few images"):
        site.answer(first_round(site.participant.context.plan, train_cases=4).message({}))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["harmofl", "pfedme"])
def test_running_statistics_are_not_stepped_beyond_their_mean(method: str) -> None:
    """In earlier versions, a server step of size 3 gave negative variances, so all outputs became NaN."""
    changes = ["task.size=32", "task.patients=5", "task.patches=4", "training.batch_size=8", "training.rounds=3"]
    changes = ["task.name=synthetic-histology", *changes, "algorithm.server_lr=3", "training.learning_rate=0.001"]
    run = inprocess.run(make_plan(method, *changes))
    variances = [
        tensor for model in run.models.values() for name, tensor in model.state_dict().items() if "running_var" in name
    ]
    assert variances and all((variance > 0).all() for variance in variances)
