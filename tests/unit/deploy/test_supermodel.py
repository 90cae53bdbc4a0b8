"""A super model chooses the same model for each image as separate computations do; saving and reading do not change a
super model.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.core.errors import MedsiloError
from medsilo.deploy.supermodel import Origin, SuperModel, assemble, tune
from medsilo.models.architectures import SmallCnn
from tests.conftest import make_plan

SITES = ["a.b", "c", "d"]
GLOBAL = "global"


def line(channels: int, classes: int, seed: int) -> nn.Conv2d:
    """Return a 1x1 convolution in double precision, whose output numpy can compute."""
    torch.manual_seed(seed)
    return nn.Conv2d(channels, classes, 1).double()


def selector(outputs: int, scale: float = 1.0) -> nn.Sequential:
    angles = 2 * torch.pi * torch.arange(outputs) / outputs + 0.1
    linear = nn.Linear(2, outputs).double()
    linear.weight.data = scale * torch.stack([angles.cos(), angles.sin()], 1).double()
    linear.bias.data = torch.linspace(-0.1, 0.1, outputs).double()
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


def of_conv(conv: nn.Conv2d, x: np.ndarray) -> np.ndarray:
    weight, bias = conv.weight.detach().numpy()[:, :, 0, 0], conv.bias.detach().numpy()
    return np.einsum("oc,bchw->bohw", weight, x) + bias[:, None, None]


def softmax(values: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(values - values.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def of_selector(network: nn.Sequential, x: np.ndarray) -> np.ndarray:
    linear = network[2]
    return softmax(x.mean((2, 3)) @ linear.weight.detach().numpy().T + linear.bias.detach().numpy(), 1)


def images(count: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    middles = torch.randn(count, 2, 1, 1, generator=generator, dtype=torch.float64)
    return middles + torch.randn(count, 2, 3, 5, generator=generator, dtype=torch.float64)


EXPERTS = {name: line(2, 3, seed) for seed, name in enumerate([GLOBAL, *SITES])}


def super_model(threshold: float | None, agreed: list[str] = SITES, rule: str = "threshold") -> SuperModel:
    chooser = selector(len(SITES) + (rule != "threshold"), 2.0)
    personal = {site: EXPERTS[site] for site in agreed}
    return SuperModel(EXPERTS[GLOBAL], personal, chooser, threshold, sites=SITES, rule=rule)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- choice
@pytest.mark.parametrize("agreed", [SITES, ["c", "d"], []])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8, 0.95, 1.0])
def test_each_image_goes_where_alg_2_says(threshold: float, agreed: list[str]) -> None:
    model, x = super_model(threshold, agreed), images()
    scores = of_selector(model.selector, x.numpy())  # type: ignore[arg-type]
    expected = [
        SITES[row.argmax()] if row.max() > threshold and SITES[row.argmax()] in agreed else GLOBAL for row in scores
    ]
    names, confidence = model.choose(x)
    assert names == expected
    np.testing.assert_allclose(confidence.detach(), scores.max(1), rtol=0, atol=1e-12)
    right = np.stack([of_conv(EXPERTS[name], x.numpy()[[i]])[0] for i, name in enumerate(expected)])
    np.testing.assert_allclose(model(x).detach(), right, rtol=0, atol=1e-12)
    if threshold == 0.5 and agreed == SITES:
        assert set(names) == {GLOBAL, *SITES}


@pytest.mark.parametrize("rule", ["threshold", "argmax", "mixture"])
def test_every_network_runs_at_most_once_a_batch(rule: str) -> None:
    model = super_model(0.5 if rule == "threshold" else None, ["c", "d"], rule)
    calls: list[tuple[str, int]] = []
    networks = {name: model.expert(name) for name in (GLOBAL, "c", "d")} | {"selector": model.selector}
    hooks = [
        network.register_forward_hook(lambda _, inputs, __, name=name: calls.append((name, len(inputs[0]))))
        for name, network in networks.items()
    ]
    x = images()
    model(x)
    for hook in hooks:
        hook.remove()
    counts = dict(calls)
    assert len(calls) == len(counts) >= 3
    assert counts.pop("selector") == len(x)
    assert sum(counts.values()) == (3 if rule == "mixture" else 1) * len(x)


def fixed(*scores: float) -> nn.Module:
    network = selector(len(scores), 0.0)
    network[2].bias = nn.Parameter(torch.tensor(scores, dtype=torch.float32))
    return network.float()


@pytest.mark.parametrize(
    ("scores", "threshold", "chosen"),
    [
        ((0.0, 120.0, 0.0), 1.0, GLOBAL),  # the probability is exactly 1, which is not above the threshold 1
        ((0.0, 120.0, 0.0), 0.99999999, "c"),
        ((0.0, 0.0, 0.0), 0.0, "a.b"),  # the probability 1/3 is above the threshold 0
        ((7.0, 7.0, -1e30), 0.5, GLOBAL),  # the probability is exactly 0.5, which is not above the threshold 0.5
        ((7.0, 7.0, -1e30), 0.4999999, "a.b"),
    ],
)
def test_above_the_threshold_is_strictly_above(scores: tuple[float, ...], threshold: float, chosen: str) -> None:
    experts = {site: line(2, 3, 1).float() for site in SITES}
    model = SuperModel(line(2, 3, 0).float(), experts, fixed(*scores), threshold)
    assert model.choose(images(2).float())[0] == [chosen, chosen]
    if scores[1] == 120.0:
        # the probability is exactly 1, so the code must compare by > and not by >=
        assert torch.tensor(scores).softmax(0)[1] == 1.0


def test_argmax_counts_the_global_model_as_output_0() -> None:
    model, x = super_model(None, ["a.b", "d"], "argmax"), images()
    best = of_selector(model.selector, x.numpy()).argmax(1)  # type: ignore[arg-type]
    assert model.choose(x)[0] == [[GLOBAL, "a.b", GLOBAL, "d"][index] for index in best]
    assert {*best} == {0, 1, 2, 3}


@pytest.mark.parametrize("agreed", [SITES, ["c"]])
def test_the_mixture_mixes_probabilities(agreed: list[str]) -> None:
    model, x = super_model(None, agreed, "mixture"), images()
    weights = of_selector(model.selector, x.numpy())  # type: ignore[arg-type]
    experts = [EXPERTS[name if name in agreed else GLOBAL] for name in [GLOBAL, *SITES]]
    mixed = sum(
        weights[:, [k], None, None] * softmax(of_conv(expert, x.numpy()), 1) for k, expert in enumerate(experts)
    )
    output = model(x)
    np.testing.assert_allclose(output.detach().exp(), mixed, rtol=0, atol=1e-12)
    # Training changes the selector through the mixture of models, as in Section 3.1.1 of the paper.
    output[:, 1].sum().backward()
    assert model.selector[2].weight.grad.abs().max() > 0  # type: ignore[index,union-attr]
    model.selector.zero_grad()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threshold": 1.5}, "threshold (gamma) 1.5 lies outside 0 to 1"),
        ({"threshold": -0.1}, "outside 0 to 1"),
        ({"threshold": float("nan")}, "outside 0 to 1"),
        ({"threshold": None}, "rule 'threshold' needs a threshold"),
        ({"threshold": 0.5, "rule": "argmax"}, "rule 'argmax' has no threshold"),
        ({"threshold": 0.5, "sites": ["c", "d"]}, "lacks 'a.b', which has a personal model"),
        ({"threshold": 0.5, "sites": [*SITES, "global"]}, "a site is named 'global'"),
    ],
)
def test_what_makes_no_super_model_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(MedsiloError) as error:
        SuperModel(EXPERTS[GLOBAL], {site: EXPERTS[site] for site in SITES}, selector(3), **arguments)
    assert words in str(error.value)


def test_a_selector_of_other_sites_or_without_numbers_is_refused() -> None:
    personal = {site: EXPERTS[site] for site in SITES}
    with pytest.raises(MedsiloError, match="4 outputs, and rule 'threshold' with 3 sites needs 3"):
        SuperModel(EXPERTS[GLOBAL], personal, selector(4), 0.5).choose(images())
    with pytest.raises(MedsiloError, match="NaN or infinite"):
        super_model(0.5).choose(images() * float("nan"))


# -------------------------------------------------------------------------------------- the threshold gamma
def test_gamma_is_the_middle_of_the_widest_plateau() -> None:
    tuning = tune({1.0: (8, 5.0), 0.0: (8, 6.0), 0.9: (8, 6.0), 0.5: (8, 5.5)})
    # each plateau contains a single threshold, and the code chooses the higher of two equally good thresholds
    assert (tuning.threshold, tuning.plateau) == (0.9, (0.9, 0.9))
    assert tuning.curve == ((0.0, 8, 0.75), (0.5, 8, 0.6875), (0.9, 8, 0.75), (1.0, 8, 0.625))
    assert tune({0.0: (1, 0.2), 1.0: (1, 0.1)}).threshold == 0.0
    wide = tune({0.0: (8, 5.0), 0.5: (8, 6.0), 0.7: (8, 6.0), 0.9: (8, 6.0), 0.95: (8, 5.0), 1.0: (8, 6.0)})
    assert (wide.threshold, wide.plateau) == (0.7, (0.5, 0.9))
    assert tune(dict.fromkeys((0.0, 0.5, 1.0), (4, 2.0))).threshold == 0.5


# ---------------------------------------------------------------------------------------------------- folder
@pytest.fixture
def saved(tmp_path: Path) -> tuple[SuperModel, Path]:
    plan = make_plan(
        "fedavg", "task.name=synthetic-prostate", "network.name=unet", "network.features=[4,8]", sites=SITES
    )
    section = SmallCnn(width=2, norm="group")
    torch.manual_seed(1)

    def expert() -> dict:
        return plan.network.build(1, 2).state_dict()

    origin = Origin(plan, section)
    personal = {"a.b": expert(), "d": expert()}
    chooser = section.build(1, 3).state_dict()
    model = assemble(origin, expert(), personal, {k: 9 * v for k, v in chooser.items()}, 0.4, sites=SITES)
    model.save(tmp_path / "supermodel")
    return model, tmp_path / "supermodel"


def test_what_was_saved_answers_the_same(saved: tuple[SuperModel, Path]) -> None:
    model, folder = saved
    x = torch.randn(6, 1, 48, 48, generator=torch.Generator().manual_seed(3)) * torch.arange(6)[:, None, None, None]
    random = torch.random.get_rng_state()
    loaded = SuperModel.load(folder)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not loaded.training
    assert torch.equal(loaded(x), model(x))
    assert loaded.choose(x)[0] == model.choose(x)[0]
    assert (loaded.sites, loaded.agreed, loaded.threshold) == (tuple(SITES), ("a.b", "d"), 0.4)
    assert loaded.origin == model.origin
    loaded.save(folder)
    assert torch.equal(SuperModel.load(folder)(x), model(x))


def test_a_hospital_that_no_longer_agrees_leaves_no_file_behind(saved: tuple[SuperModel, Path]) -> None:
    model, folder = saved
    fewer = SuperModel(
        model.global_model, {"d": model.expert("d")}, model.selector, 0.4, sites=SITES, origin=model.origin
    )
    fewer.save(folder)
    assert [path.name for path in (folder / "personal").iterdir()] == ["d.safetensors"]
    assert SuperModel.load(folder).agreed == ("d",)


@pytest.mark.parametrize("name", ["plan.yaml", "global.safetensors", "selector.safetensors", "personal/d.safetensors"])
def test_a_file_that_was_changed_or_lost_is_refused_by_name(saved: tuple[SuperModel, Path], name: str) -> None:
    _, folder = saved
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(MedsiloError, match=f"{name} is not the file .*SHA-256"):
        SuperModel.load(folder)
    (folder / name).unlink()
    with pytest.raises(MedsiloError, match=f"{name} is missing"):
        SuperModel.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threshold": 1.5}, "threshold: 1.5 is too large; give 1.0 or less"),
        ({"agreed": ["../../etc"]}, "odd characters"),
        ({"selector": {"name": "vgg"}}, "no such network"),
        ({"format": 2}, "format: 2 is not known; choose 1"),
        ({"rule": "argmax"}, "the selector has other tensors"),
        ({"sites": SITES[:2]}, "the selector has other tensors"),
    ],
)
def test_a_manifest_with_nonsense_is_refused(saved: tuple[SuperModel, Path], change: dict, words: str) -> None:
    _, folder = saved
    manifest = json.loads((folder / "supermodel.json").read_text())
    (folder / "supermodel.json").write_text(json.dumps(manifest | change))
    with pytest.raises(MedsiloError) as error:
        SuperModel.load(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_of_another_network_are_refused(saved: tuple[SuperModel, Path]) -> None:
    model, _ = saved
    weights = {name: tensor for name, tensor in model.global_model.state_dict().items() if "bias" not in name}
    with pytest.raises(MedsiloError, match="the global model has other tensors"):
        assemble(model.origin, weights, {}, model.selector.state_dict(), 0.4, sites=SITES)  # type: ignore[arg-type]


def test_a_super_model_without_a_plan_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match="has no `origin`"):
        super_model(0.5).save(tmp_path)
