"""A frozen part of a network is stored only once, can be read from a checkpoint, and works with every method."""

import copy
import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from monai.networks import nets
from safetensors.torch import load_file
from torch import Tensor, nn

from medsilo.check.disclosure import leaks
from medsilo.cli import main
from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import load_tensors, save_tensors
from medsilo.exchange.channel import Missing
from medsilo.federation.file_supply import SuppliedSite
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_state import SiteState
from medsilo.learning.compute import Compute
from medsilo.learning.private import ClippedSum, gradients_of_cases
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import TABLES
from medsilo.runs.messages import StudyMessage
from medsilo.schedule.phase import views
from medsilo_lab.deploy.source import Source
from medsilo_pretrained.checkpoint import match, read_checkpoint
from medsilo_pretrained.frozen import freeze, values_of
from medsilo_server.file_supply import FileSupply
from tests import inprocess
from tests.conftest import over_all, slow_but
from tests.hospital import NAMES, write_photos
from tests.unit.site.test_account import PRIVATE, standing
from tests.unit.site.test_account import run as run_with_ledger

SITES = ["a", "b", "c"]
TASK = {"name": "synthetic-histology", "patients": 12, "patches": 4, "size": 32}
VIT = {"name": "vit", "size": 32, "patch": 8, "width": 32, "depth": 2}


def tuned_plan(method: str = "fedavg", of: Mapping[str, Any] = VIT, **more: Any) -> Plan:
    network = {"name": "tuned", "of": of, "train": ["*.attn.out_proj.*", "head"]} | more.pop("network", {})
    return parse_plan(
        {
            "algorithm": {"name": method} | more.pop("algorithm", {}),
            "task": TASK,
            "network": network,
            "training": {"rounds": 2, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.9},
            "participation": {"sites": SITES},
            **more,
        }
    )


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("backbone")
    drawn = tuned_plan(network={"train": "all"}, seed=7).build_networks()["model"]
    save_tensors(folder / "vit.safetensors", drawn.state_dict())
    model_folders.look_in(folder)
    file = folder / "vit.safetensors"
    return {"file": file.name, "sha256": weight_cache.hash_of_file(file), "bytes": file.stat().st_size}


# ------------------------------------------------------------------------------------------------------------- networks
class FirstOf(nn.Sequential):
    """A network that returns a tuple of its scores and of its layers' outputs."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)[0]


@pytest.mark.slow
def test_what_does_not_fit_is_one_line(backbone: dict[str, Any], tmp_path: Path) -> None:
    for wrong, told in (
        ({"train": "haed"}, "network.train: 'haed' names no parameter"),
        ({"train": "head", "of": {"name": "tuned", "of": VIT, "train": "head"}}, "a tuned network in a tuned one"),
        ({"train": ["all"], "of": {"name": "vitt"}}, "network.of.name: 'vitt' is not known; did you mean 'vit'?"),
        (
            {"of": {"name": "densenet121"}, "train": "head", "from": backbone},
            "the file does not fit this network: 1 tens",
        ),
        ({"train": "norms", "from": {**backbone, "sha256": "0" * 64}}, "(SHA-256 000000000000..., "),
    ):
        with pytest.raises(MedsiloError) as found:
            tuned_plan(network=wrong).build_networks()
        assert told in str(found.value) and "\n" not in str(found.value)


# -------------------------------------------------------------------------------------------------------- frozen layers
def test_a_frozen_part_lies_once_in_memory_and_stays(backbone: dict[str, Any]) -> None:
    """All networks of a method and all sites in a process share one copy of the frozen weights."""
    # fedsm: a personal, a global and three expert networks; ditto: a personal and a shared network
    for method, each in (("fedsm", 2 + 3), ("ditto", 2)):
        plan = tuned_plan(method, network={"from": backbone})
        networks = [*plan.build_networks().values(), *plan.build_networks().values()]
        frozen = [own for net in networks for name, own in values_of(net) if name.endswith("blocks.0.attn.qkv.weight")]
        assert len(frozen) == 2 * each and len({own.data_ptr() for own in frozen}) == 1, method
    plan = tuned_plan("fedsm", network={"from": backbone})
    networks = [*plan.build_networks().values(), *plan.build_networks().values()]
    selector, model = networks[3], networks[0]
    assert all(own.requires_grad for own in model.parameters()) and list(selector.parameters())
    numbers = sum(own.numel() for own in model.state_dict().values())
    assert numbers == sum(own.numel() for own in model.parameters()) < 0.2 * sum(o.numel() for _, o in values_of(model))
    moved = model.to("meta"), copy.deepcopy(networks[1]).to("meta")
    one, other = (net.get_submodule("blocks.0.attn.qkv").weight for net in moved)
    assert one.is_meta and one is other


def test_a_site_in_bfloat16_keeps_half_the_bytes_and_the_same_numbers(backbone: dict[str, Any], tmp_path: Path) -> None:
    """After a training step, the test adds up the sizes of FedSM's tensors, counting memory that the five networks
    share once.
    """
    plan = tuned_plan("fedsm", network={"from": backbone})
    images, kept = torch.randn(4, 3, 32, 32), {}
    for precision in ("float32", "bfloat16"):
        compute = Compute(precision=precision)  # type: ignore[arg-type]
        state = SiteState(plan, "a", tmp_path, compute)
        storages = {}
        networks = {name: state.modules[name] for name in ("model", "global")}
        for name, model in {**networks, **dict(state.modules["experts"].named_children())}.items():
            if name in networks:
                with compute.cast():
                    output = model.train()(images)
                output.float().square().sum().backward()
                state.optimizers[name].step()
                assert state.optimizers[name].state.keys() <= set(model.parameters())
            own = [tensor for _, tensor in values_of(model)]
            own += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            storages |= {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in own}
        kept[precision] = sum(storages.values()), networks
    model, whole = (kept[precision][1]["model"].eval() for precision in ("bfloat16", "float32"))
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        other.data.copy_(one)
    layers = [
        layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d) and "weight" in layer._buffers
    ]
    matrices = sum(own.numel() for layer in layers for own in layer._buffers.values() if own is not None)
    assert matrices > 20_000 and kept["float32"][0] - kept["bfloat16"][0] == 2 * matrices
    # mixed precision rounds the full weights to the values in which the frozen weights are stored
    with compute.cast():
        assert torch.equal(whole(images), model(images))
    assert torch.allclose(model(images), whole(images), atol=0.1)


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    network = nets.DenseNet(2, 1, 2, init_features=8, growth_rate=4, block_config=(2,)).train()
    trained = {name for name, _ in network.named_parameters() if "class_layers" in name}
    before = {name: own.clone() for name, own in values_of(network) if "running" in name}
    freeze(network, trained, {})
    for _ in range(2):
        network.train()(torch.randn(4, 1, 32, 32))
    assert before and all(torch.equal(own, before[name]) for name, own in values_of(network) if name in before)
    assert network.state_dict().keys() == trained
    # this plain dictionary lacks torch's metadata on versions, as a file of weights does
    network.load_state_dict(dict(network.state_dict()))


TWO = {"sites": SITES[:2]}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsm": {},
    "harmofl": {},
    "fedbn": {},
    "adafed": {"pretraining": {"epochs": 1}},
    "ditto": {},
}


@pytest.mark.long
@over_all("method", METHODS)
def test_every_method_works_over_what_trains(method: str, backbone: dict[str, Any], tmp_path: Path) -> None:
    train = ["bias", "head", "norms"]
    # adafed measures batch norms, which a ViT lacks
    here = {"from": backbone} if method != "adafed" else {"of": {"name": "small-cnn"}}
    plan = tuned_plan(method, network={**here, "train": train}, algorithm=METHODS[method], participation=TWO)
    first = plan.build_networks()["model"]
    frozen = {name: own.clone() for name, own in values_of(first) if name not in first.state_dict()}
    groups = [own for phase in plan.course.phases for own in views(phase.groups, plan.build_networks()).values()]
    assert frozen and groups and not {name for own in groups for name in own} & frozen.keys()
    run = inprocess.run(plan, folder=tmp_path / method)
    for site in TWO["sites"]:
        last = run.models[site]
        last = last.model if method == "harmofl" else last
        values = dict(values_of(last))
        assert all(torch.equal(values[name], own) for name, own in frozen.items())
        assert any(not torch.equal(values[name], own) for name, own in first.state_dict().items() if "bias" in name)


def test_a_round_has_the_bytes_of_what_trains(backbone: dict[str, Any], tmp_path: Path) -> None:
    plan = tuned_plan(network={"from": backbone})
    result = inprocess.run(plan, folder=tmp_path / "run")
    trained = sum(own.nbytes for own in plan.build_networks()["model"].parameters())
    assert {site: own.bytes_up for site, own in result.summary.sites.items()} == dict.fromkeys(SITES, 2 * trained)
    states = [load_tensors(path)[0] for path in (tmp_path / "run").rglob("state-*.safetensors")]
    assert states and all("qkv.weight" not in name for own in states for name in own)


@pytest.mark.slow
def test_privacy_clips_and_noises_what_trains_alone(backbone: dict[str, Any], tmp_path: Path) -> None:
    promise = {"epsilon": 3.0, "delta": 0.001}
    plan = tuned_plan(network={"from": backbone}, privacy=promise)
    model = plan.build_networks()["model"].train()
    inputs, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 1, 0])
    weights = list(model.parameters())
    _, found = gradients_of_cases(model, nn.functional.cross_entropy, inputs, labels)
    for case in range(4):
        alone = nn.functional.cross_entropy(model(inputs[case : case + 1]), labels[case : case + 1])
        for own, exact in zip(found, torch.autograd.grad(alone, weights), strict=True):
            assert torch.allclose(own[case], exact, rtol=1e-4, atol=1e-6)
    clipped = ClippedSum(weights, 1.0)
    clipped.add(found, torch.arange(4))
    assert sum(own.numel() for own in clipped.total) == plan.parameters == sum(own.numel() for own in weights)
    noisy = inprocess.run(plan, folder=tmp_path / "run").models["a"].state_dict()
    assert all(not torch.equal(noisy[name], own) for name, own in plan.build_networks()["model"].state_dict().items())


@pytest.mark.slow
def test_sealed_sums_hold_what_trains_alone(backbone: dict[str, Any], tmp_path: Path) -> None:
    open_, sealed = (
        inprocess.run(tuned_plan(network={"from": backbone}, secure_aggregation=how), folder=tmp_path / str(number))
        for number, how in enumerate(({}, {"mode": "pairwise"}))
    )
    for name, own in open_.models["a"].state_dict().items():
        assert torch.allclose(own, sealed.models["a"].state_dict()[name], atol=1e-3), name
    # each sent weight of 32 bits has an index of 64 bits
    assert sealed.summary.sites["a"].bytes_up < 2.5 * open_.summary.sites["a"].bytes_up  # type: ignore[operator]


def test_the_disclosure_and_a_robust_mean_see_what_trains_alone(backbone: dict[str, Any], tmp_path: Path) -> None:
    plan = tuned_plan(network={"from": backbone}, aggregation={"robust": {"name": "median"}})
    trained = plan.build_networks()["model"].state_dict()
    [leak] = leaks(plan)
    assert {*leak.tensors} == trained.keys() and leak.bytes == sum(own.nbytes for own in trained.values())
    run = inprocess.run(plan, folder=tmp_path / "run")
    one, other = (dict(values_of(run.models[site])) for site in SITES[:2])
    assert all(torch.equal(own, other[name]) for name, own in one.items())
    assert {name for name, own in values_of(plan.build_networks()["model"]) if not torch.equal(own, one[name])} == {
        *trained
    }


@pytest.mark.slow
@pytest.mark.usefixtures("known_key")
def test_the_ledger_charges_a_part_what_it_charges_a_whole_network(tmp_path: Path) -> None:
    """The privacy cost of a step depends on noise and sampling, but not on the number of trained weights."""
    photos = write_photos(tmp_path / "photos", NAMES)
    spent = []
    for name, more in (
        ("whole", {}),
        ("partly", {"name": "tuned", "of": PRIVATE["network"], "train": "head"}),
    ):
        run_with_ledger(tmp_path / name / "study", photos, plan={**PRIVATE, "network": more or PRIVATE["network"]})
        found = standing(tmp_path / name)
        spent.append(([entry.what for entry in found.entries if entry.kind == "charged"], found.epsilon(1e-3)))
    assert spent[0] == spent[1] and 1.9 < spent[0][1] <= 2.0


# ---------------------------------------------------------------------------------------------------------- checkpoints
def test_checkpoints_of_others_are_read_without_code(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = network.state_dict()
    under = {f"module.encoder.{name}": own for name, own in state.items()}
    plans = {"plans": {"configurations": ["2d"]}, "spacing": (1.0, 1.0)}
    save_tensors(tmp_path / "a.safetensors", state)
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": under, "epoch": 3}, tmp_path / "wrapped.pt")
    torch.save(  # checkpoints of nnU-Net and nnssl also contain numpy scalars
        {
            "network_weights": state,
            "init_args": plans,
            "_best_ema": np.float64(0.5),
            "logging": {"ema": [np.float32(1)]},
        },
        tmp_path / "checkpoint_final.pth",
    )
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.write(tmp_path / "plain.pt", "spleen/models/model.pt")
        bundle.writestr("spleen/configs/inference.json", "{}")
    for path in sorted(tmp_path.iterdir()):
        found = match(state, read_checkpoint(path))
        assert not (found.missing or found.surplus or found.other_shape) and found.share == 1, path
        assert all(torch.equal(found.matched[name], own) for name, own in state.items()), path

    with zipfile.ZipFile(tmp_path / "bundle.zip") as bundle:
        bundle.extractall(tmp_path)
    whole = tuned_plan().model_dump(mode="json")
    whole["network"]["from"] = "spleen"
    (tmp_path / "plan.yaml").write_text(json.dumps(whole))
    begun = getattr(load_plan(tmp_path / "plan.yaml").network, "from")
    assert begun.sha256 == weight_cache.hash_of_file(tmp_path / "plain.pt") and begun.file == "model.pt"

    other = {**under, "module.encoder.2.weight": torch.ones(5, 4), "module.decoder.weight": torch.ones(1)}
    del other["module.encoder.1.bias"]
    found = match(state, other)
    assert found.missing == ("1.bias",) and found.other_shape == ("2.weight",)
    assert found.surplus == ("module.decoder.weight",) and "1 other shape (2.weight)" in str(found)

    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": state, "more": Harm()}, tmp_path / "code.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "plain.pt").read_bytes()[:700])
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:90])
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("models/model.pt", bytes(20_000_000))
    for name in ("bomb.zip", "code.pt", "empty.pt", "text.safetensors", "cut.pt", "cut.safetensors"):
        with pytest.raises(MedsiloError, match="holds no tensors.*without running code") as told:
            read_checkpoint(tmp_path / name)
        assert str(tmp_path) not in str(told.value)
    assert not (tmp_path / "ran").exists()


def test_what_a_file_lacks_has_to_train(tmp_path: Path) -> None:
    drawn = tuned_plan(network={"train": "all"}, seed=7).build_networks()["model"].state_dict()
    save_tensors(tmp_path / "body.safetensors", {name: own for name, own in drawn.items() if "head" not in name})
    model_folders.look_in(tmp_path)
    file = tmp_path / "body.safetensors"
    start = {"file": file.name, "sha256": weight_cache.hash_of_file(file), "bytes": file.stat().st_size}
    with pytest.raises(MedsiloError, match=r"lacks classification_head.weight, .* network.train"):
        tuned_plan(network={"from": start, "train": "norms"}).build_networks()
    model = tuned_plan(network={"from": start}).build_networks()["model"]
    assert torch.equal(dict(values_of(model))["blocks.1.norm1.weight"], drawn["blocks.1.norm1.weight"])


OTHERS = ("DenseNet121", "SwinUNETR", "ViT")


def begun(own: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path, **start: Any) -> nn.Module:
    save_tensors(folder / "given.safetensors", state)
    model_folders.look_in(folder)
    file = folder / "given.safetensors"
    begins = {"file": file.name, "sha256": weight_cache.hash_of_file(file), "bytes": file.stat().st_size, **start}
    network = TABLES["network"].read({"name": "tuned", "of": own, "from": begins, "train": "head"})
    return network.build(1, 2)


def monai_defaults() -> dict[str, tuple[nn.Module, Tensor, list[dict[str, Any]]]]:
    flat, small = torch.randn(2, 1, 32, 32), {"features": [4, 8, 8]}
    norms = ["batch", "batch-statistics", "instance", "instance-statistics", "none"]
    ways = [(norm, own) for norm in norms for own in ("relu", "leaky-relu", "prelu")]
    basic = [(norm, own) for norm, own in ways if norm not in ("instance-statistics", "none")]
    levels = (4, 4, 8, 8, 8, 4)
    return {
        "UNet": (
            nets.UNet(2, 1, 2, (4, 8, 8), (2, 2)),
            flat,
            [{"name": "unet", **small, "norm": norm, "activation": own} for norm, own in ways],
        ),
        "UNet with residual units": (
            nets.UNet(2, 1, 2, (4, 8, 8), (2, 2), num_res_units=2),
            flat,
            [{"name": "unet", **small, "residual_units": 2, "norm": norm, "activation": own} for norm, own in ways],
        ),
        "BasicUNet": (
            nets.BasicUNet(2, 1, 2, levels),
            flat,
            [{"name": "basic-unet", "features": levels[:5], "norm": norm, "activation": own} for norm, own in basic],
        ),
        "DenseNet121": (nets.DenseNet121(2, 1, 2), flat, [{"name": "densenet121"}]),
        "SwinUNETR": (
            nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2),
            torch.randn(1, 1, 64, 64),
            [{"name": "swin-unetr", "features": 12, "dimensions": 2}],
        ),
        "ViT": (
            FirstOf(nets.ViT(1, (32, 32), (8, 8), 32, 128, 2, 4, classification=True, spatial_dims=2)),
            flat,
            [VIT],
        ),
    }


@pytest.mark.parametrize("name", slow_but(["BasicUNet"], ["UNet", "UNet with residual units", "BasicUNet", *OTHERS]))
def test_a_foreign_checkpoint_never_becomes_another_network(name: str, tmp_path: Path) -> None:
    """A checkpoint from MONAI gives the same scores as in MONAI, or medsilo rejects the checkpoint in one line.

    The weights in a checkpoint do not reveal whether the network has a ReLU or a norm without weights.
    """
    torch.manual_seed(0)
    network, inputs, ways = monai_defaults()[name]
    wanted, loaded = network.eval()(inputs), []
    for number, own in enumerate(ways):
        (folder := tmp_path / str(number)).mkdir()
        try:
            found = begun(own, network.state_dict(), folder).eval()(inputs)
        except MedsiloError as error:
            assert str(error).startswith("network.from: the file ") and "\n" not in str(error), own
            continue
        assert torch.allclose(found, wanted, atol=1e-5), own
        loaded.append(own)
    assert len(loaded) == (name != "ViT"), loaded  # medsilo's ViT has biases for queries, keys and values


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    own = {"name": "small-cnn", "width": 2}
    state = TABLES["network"].read(own).build(1, 2).state_dict()
    strange = {**state, "other.slope": torch.ones(1)}
    with pytest.raises(MedsiloError, match=r"1 surplus \(other\.slope\).*network\.from\.ignore"):
        begun(own, strange, tmp_path)
    begun(own, strange, tmp_path, ignore="other.*")
    lacking = {name: tensor for name, tensor in state.items() if name != "1.1.running_mean"}
    with pytest.raises(MedsiloError, match=r"1 missing \(1\.1\.running_mean\).*network\.from\.initial"):
        begun(own, lacking, tmp_path)
    begun(own, lacking, tmp_path, initial=["head", "*.running_mean"])
    unet = {"name": "unet", "features": [4, 8], "norm": "none"}
    state = TABLES["network"].read({**unet, "activation": "prelu"}).build(1, 2).state_dict()
    with pytest.raises(MedsiloError, match=r"UNet with its own norm INSTANCE.*confirmed=true"):
        begun({**unet, "activation": "prelu"}, state, tmp_path)
    begun({**unet, "activation": "prelu"}, state, tmp_path, confirmed=True)


ODD = {
    "sparse": lambda own: own.to_sparse(),
    "quantised": lambda own: torch.quantize_per_tensor(own, 0.1, 0, torch.qint8),
    "without values": lambda own: own.to("meta"),
    "complex": lambda own: own + 1j,
    "whole": lambda own: (own * 127).to(torch.int8),
    "not finite": lambda own: own.masked_fill(own == own.max(), torch.nan),
    "too large": lambda own: own.double() * 1e300,
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_are_no_plain_numbers_never_become_weights(kind: str, tmp_path: Path) -> None:
    own = {"name": "small-cnn", "width": 2}
    state = TABLES["network"].read(own).build(1, 2).state_dict()
    name = next(name for name, tensor in state.items() if tensor.dim() == 4)
    model_folders.look_in(tmp_path)
    torch.save({**state, name: ODD[kind](state[name])}, file := tmp_path / "given.pt")
    begins = {"file": file.name, "sha256": weight_cache.hash_of_file(file), "bytes": file.stat().st_size}
    with pytest.raises(MedsiloError) as told:
        TABLES["network"].read({"name": "tuned", "of": own, "from": begins, "train": "head"}).build(1, 2)
    assert str(told.value).startswith("network.from: ") and name in str(told.value) and "\n" not in str(told.value)


def test_an_activation_that_is_not_named_changes_no_plan() -> None:
    """A plan of an earlier version, which names no activation, keeps its hash."""
    unet = TABLES["network"].read({"name": "unet"})
    assert "activation" not in unet.model_dump() and unet.activation == "relu"
    assert TABLES["network"].read({"name": "unet", "activation": "prelu"}).model_dump()["activation"] == "prelu"


# -------------------------------------------------------------------------------------------------------- after a study
@pytest.mark.slow
def test_a_model_is_exported_as_one_plain_network(tmp_path: Path) -> None:
    """The export of a network that starts from a file of weights is a MONAI network that does not need this file."""
    unet = {"name": "basic-unet", "features": [4, 4, 8, 8, 8]}
    task = {"name": "synthetic-prostate", "size": 32, "patients": 4, "slices": 4}
    sections = {"task": task, "participation": {"sites": SITES[:2]}}
    drawn = parse_plan({"algorithm": {"name": "local"}, **sections, "network": unet}).build_networks()["model"]
    (tmp_path / "plans").mkdir()
    (tmp_path / "weights").mkdir()
    save_tensors(tmp_path / "weights" / "unet.safetensors", drawn.state_dict())
    plan = tmp_path / "plans" / "plan.yaml"
    plan.write_text(
        "algorithm: {name: fedavg}\nparticipation: {sites: [a, b]}\n"
        "task: {name: synthetic-prostate, size: 32, patients: 4, slices: 4}\n"
        "network:\n  name: tuned\n  from: {file: ../weights/unet.safetensors, confirmed: true}\n"
        "  of: {name: basic-unet, features: [4, 4, 8, 8, 8]}\n"
        "training: {rounds: 1, batch_size: 16, learning_rate: 0.05}\nmodel_selection: {keep: last}\n",
        "utf-8",
    )
    read = load_plan(plan)
    result = inprocess.run(read, folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "plans")
    shutil.rmtree(tmp_path / "weights")
    trained = result.models["a"].eval()
    source = Source.open(tmp_path / "run")
    assert source.network.state_dict().keys() == drawn.state_dict().keys()
    inputs = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.allclose(source.network(inputs), trained(inputs), rtol=0, atol=1e-6)
        assert (source.network(inputs) - drawn.eval()(inputs)).abs().max() > 1e-4
    assert main(["release", "export", str(tmp_path / "run"), "-o", str(tmp_path / "bundle")]) == 0
    weights = tmp_path / "bundle" / "models" / "model.safetensors"
    # torch can open the exported file without importing medsilo
    assert load_file(weights).keys() == drawn.state_dict().keys()


# ------------------------------------------------------------------------------------------------------------ sent once
def test_a_file_that_a_site_lacks_is_sent_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"weights" * 1000
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "any name").write_bytes(content)
    name = weight_cache.hash_of_file(tmp_path / "server" / "any name")
    files = {name: len(content)}
    plan = SimpleNamespace(network=SimpleNamespace(files=files))
    folders: dict[str, dict[Path, None]] = {"server": {tmp_path / "server": None}, "a": {}}

    def at(who: str) -> None:
        monkeypatch.setattr(model_folders, "FOLDERS", folders[who])

    class Line:
        def __init__(self) -> None:
            at("a")
            settings = SimpleNamespace(models=())
            place = SiteContext(plan, "a", ["a"], settings, tmp_path / "hospital" / "study" / "sites" / "a")  # type: ignore[arg-type]
            self.site, self.bytes = SuppliedSite(place, lambda: Inner()), 0
            at("server")

        def ask(self, sites: Any, outgoing: Any, receive: Any, timeout: float) -> dict[str, Missing]:
            order = outgoing("a")
            self.bytes += order.size()
            at("a")
            try:
                receive("a", self.site.answer(order, lambda: None))
            except MedsiloError as error:
                return {"a": Missing.refused(error)}
            finally:
                at("server")
            return {}

    class Inner:
        def answer(self, message: StudyMessage, stop: Any) -> StudyMessage:
            return StudyMessage({}, {"groups": sorted(message.groups)})

    def asked(line: Line) -> list[StudyMessage]:
        answers: list[StudyMessage] = []
        supply = FileSupply(line, files)  # type: ignore[arg-type]
        assert supply.ask(["a"], lambda site: StudyMessage(), lambda site, reply: answers.append(reply), 1.0) == {}
        return answers

    line = Line()
    assert [own.facts for own in asked(line)] == [{"groups": []}] and line.bytes == len(content)
    kept = tmp_path / "hospital" / "_models" / name
    assert kept.read_bytes() == content and kept.stat().st_mode & 0o077 == 0
    asked(line)
    again = Line()
    asked(again)
    assert line.bytes == len(content) and again.bytes == 0
    kept.write_bytes(b"damaged")
    asked(again)
    assert again.bytes == len(content) and kept.read_bytes() == content

    with pytest.raises(Refused, match="its hash differs"):
        weight_cache.keep(name, memoryview(b"other"), kept.parent, 1 << 20)
    with pytest.raises(Refused, match="100 at most"):
        weight_cache.keep(name, memoryview(content), kept.parent, 100)
    later = b"other weights" * 400
    weight_cache.keep(hashlib.sha256(later).hexdigest(), memoryview(later), kept.parent, 8000)
    assert [path.read_bytes() for path in kept.parent.iterdir()] == [later]
    line.site.inner = None
    for odd in ("0" * 64, f"{'0' * 64}.0", f"{name}.x", name):
        with pytest.raises(Refused, match="does not name"):
            line.site.answer(StudyMessage({"files": {odd: torch.zeros(3, dtype=torch.uint8)}}), lambda: None)
