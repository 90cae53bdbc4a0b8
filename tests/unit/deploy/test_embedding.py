"""A frozen network computes the embedding of each image only once; embeddings never leave the hospital."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medsilo.check.disclosure import leaks
from medsilo.cli import main
from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError
from medsilo.core.files import save_tensors
from medsilo.core.yaml_text import load_yaml
from medsilo.models.network import Network
from medsilo.plan import Plan, parse_plan
from medsilo.registry import NETWORKS
from tests import inprocess
from tests.conftest import slow_but
from tests.hospital import photograph, write_photos, write_pixels

FIXTURES = Path(__file__).parents[2] / "fixtures" / "backbones"
SMALL = {"name": "timm-vit", "size": 16, "patch": 8, "width": 8, "depth": 2, "heads": 2, "mean": [0.0], "std": [1.0]}


def begun(path: Path) -> dict[str, Any]:
    model_folders.look_in(path.parent)
    return {"file": path.name, "sha256": weight_cache.hash_of_file(path), "bytes": path.stat().st_size}


def frozen(path: Path, **more: Any) -> Network:
    of = {**SMALL, **more.pop("of", {})}
    return NETWORKS.read({"name": "frozen", "of": of, "from": begun(path), **more})


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("timm", {}),
        ("timm-registers", {"registers": 2, "layer_scale": True}),
        ("timm-mean", {"pool": "mean"}),
        ("hf-vit", {"epsilon": 1e-12}),
        ("hf-classifier", {"epsilon": 1e-12}),
        ("hf-dinov2", {"layer_scale": True}),
        ("hf-registers", {"layer_scale": True, "registers": 2}),
    ],
)
def test_embeddings_are_those_of_timm_and_of_hugging_face(name: str, of: dict[str, Any]) -> None:
    """tests/oracles/backbones.py has stored embeddings by timm and Hugging Face in files."""
    known = load_file(FIXTURES / f"{name}.features.safetensors")
    network = frozen(FIXTURES / f"{name}.safetensors", of=of)
    module = network.build(3, 4)
    torch.testing.assert_close(network.embed(module, known["images"]), known["features"], rtol=2e-5, atol=2e-5)
    assert module(known["images"]).shape == (2, 4)
    assert {key.split(".")[0] for key in module.state_dict()} == {"head"}


# ---------------------------------------------------------------------------------------------------- in a study
VIT = {"name": "timm-vit", "size": 32, "patch": 8, "width": 16, "depth": 2, "heads": 2}
SITES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backbone") / "vit.safetensors"
    torch.manual_seed(7)
    save_tensors(path, NETWORKS.read(VIT).build(3, 2).state_dict())
    return path


def study(backbone: Path, method: str = "fedavg", task: dict[str, Any] | None = None, **network: Any) -> Plan:
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": task or {"name": "synthetic-histology", "patients": 12, "patches": 4, "size": 32},
            "network": {"name": "frozen", "of": VIT, "from": begun(backbone), "hidden": [16]} | network,
            "training": {"rounds": 2, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.9},
            "participation": {"sites": SITES},
        }
    )


@pytest.mark.parametrize("method", slow_but(("fedavg",), ("fedavg", "fedsm", "fedbn", "moon", "adafed", "central")))
def test_a_head_learns_the_same_bits_from_kept_embeddings(method: str, backbone: Path, tmp_path: Path) -> None:
    """A head trained on stored embeddings has the same bits as a head trained with the frozen network in each pass."""
    once, always = (inprocess.run(study(backbone, method, once=own)) for own in (True, False))
    for site, model in once.models.items():
        other = always.models[site].state_dict()
        first = study(backbone, method).build_networks()["model"].state_dict()
        assert model.state_dict().keys() == other.keys()
        assert all(torch.equal(own, other[name]) for name, own in model.state_dict().items()), (method, site)
        assert any(not torch.equal(own, first[name]) for name, own in model.state_dict().items())
    assert [own.test for own in once.summary.sites.values()] == [own.test for own in always.summary.sites.values()]


def test_embeddings_stay_in_the_hospitals_folder(backbone: Path, tmp_path: Path) -> None:
    plan = study(backbone)
    inprocess.run(plan, folder=tmp_path / "run")
    [leak] = leaks(plan)
    assert {name.split(".")[0] for name in leak.tensors} == {"head"}
    kept = sorted(tmp_path.rglob("embeddings-*"))
    assert [path.parent for path in kept] == [tmp_path / "run" / "sites" / site for site in SITES]
    rows = {own.numpy().tobytes() for path in kept for own in load_file(path)["embeddings"]}
    assert len(rows) == 3 * 12 * 4
    for path in set((tmp_path / "run").rglob("*.safetensors")) - {*kept}:
        for name, own in load_file(path).items():
            assert own.shape[-1:] != (16,) or not {one.numpy().tobytes() for one in own.view(-1, 16)} & rows, (
                path,
                name,
            )


def own_study(photos: Path, backbone: Path, cache: Path, run: Path, **more: Any) -> Path:
    (run.parent / "settings").mkdir(exist_ok=True)
    data = {"folder": str(photos), "cache_folder": str(cache)}
    (run.parent / "settings" / "medsilo.yaml").write_text(json.dumps({"data": data}))
    plan = study(backbone).model_dump(mode="json")
    plan["task"] = {"name": "image-folder", "kind": "classification", "labels": ["0", "1"], "size": [32, 32]}
    plan["task"] |= {"partition": {"kind": "iid"}} | more
    plan["network"]["from"] = backbone.name
    plan["participation"] = {"sites": SITES[:2]}
    (backbone.parent / "plan.yaml").write_text(json.dumps(plan))
    changes = ["--plan", str(backbone.parent / "plan.yaml"), "--settings", str(run.parent / "settings")]
    assert main(["run", "fedavg", *changes, "--engine", "inprocess", "--out", str(run.parent), "--name", run.name]) == 0
    return run


def test_an_image_passes_through_the_frozen_part_once_for_all_studies(backbone: Path, tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(24)]
    photos, cache = write_photos(tmp_path / "photos", names), tmp_path / "cache"

    def kept() -> dict[Path, tuple[int, int]]:
        found = cache.glob("embeddings-*")
        return {path: (len(load_file(path)["embeddings"]), path.stat().st_mtime_ns) for path in found}

    first = own_study(photos, backbone, cache, tmp_path / "one")
    before = kept()
    assert sum(rows for rows, _ in before.values()) == len(names)
    own_study(photos, backbone, cache, tmp_path / "two")
    assert kept() == before
    one, two = (load_file(run / "global/best.safetensors") for run in (first, tmp_path / "two"))
    assert all(torch.equal(own, two[name]) for name, own in one.items())
    write_pixels(photos / "images/p3.png", photograph(99)[0])
    own_study(photos, backbone, cache, tmp_path / "three")
    assert sum(rows for rows, _ in kept().values()) == len(names) + 1
    own_study(photos, backbone, cache, tmp_path / "four", intensity={"kind": "z-score"})
    assert sum(rows for rows, _ in kept().values()) == 2 * len(names) + 1
    damaged = min(kept())
    damaged.write_bytes(damaged.read_bytes()[:-9])
    own_study(photos, backbone, cache, tmp_path / "five")
    three, five = (load_file(tmp_path / run / "global/best.safetensors") for run in ("three", "five"))
    assert all(torch.equal(own, five[name]) for name, own in three.items())


def test_the_model_predicts_images(backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For predictions, a trained head is combined with the frozen network, whose weights are in a separate file."""
    names = [f"p{number}" for number in range(24)]
    photos = write_photos(tmp_path / "photos", names)
    run = own_study(photos, backbone, tmp_path / "cache", tmp_path / "run")
    model_folders.FOLDERS.clear()
    assert main(["predict", str(run), str(photos / "images"), "-o", str(tmp_path / "found")]) == 0
    found = (tmp_path / "found").rglob("*.csv")
    rows = [row for path in found for row in csv.DictReader(path.open())]
    assert len(rows) == len(names)


def test_what_has_no_embedding_is_refused_in_one_line(backbone: Path) -> None:
    photos = {"name": "image-folder", "kind": "classification", "labels": ["0", "1"], "size": [32, 32]}
    masks = {**photos, "kind": "segmentation", "labels": ["organ"]}
    for method, task, network, told in (
        ("fedavg", {**photos, "augmentation": ["flip-x"]}, {}, "task.augmentation: an embedding is computed once"),
        ("harmofl", None, {}, "network.once: harmofl changes images before"),
        (
            "fedavg",
            masks,
            {},
            "network.name: frozen has one embedding",
        ),
        ("fedavg", None, {"from": None}, "network.from: a frozen network needs the file"),
        ("fedavg", None, {"of": {"name": "unet"}}, "network.of: the network has no embeddings"),
        ("fedavg", None, {"of": {**VIT, "mean": [0.5, 0.5]}}, "network: mean has 2 numbers"),
        ("fedavg", None, {"of": {**VIT, "patch": 5}}, "size 32 is not a multiple of patch 5"),
    ):
        with pytest.raises(MedsiloError) as found:
            study(backbone, method, task, **network)
        assert told in str(found.value) and "\n" not in str(found.value)
    study(backbone, "fedavg", {**photos, "augmentation": ["flip-x"]}, once=False)


@pytest.mark.slow
def test_the_simulator_gives_the_same_numbers(backbone: Path, tmp_path: Path) -> None:
    plan = study(backbone)
    inner = inprocess.run(plan)
    path = backbone.parent / "same.yaml"
    path.write_text(json.dumps(plan.model_dump(mode="json")))
    assert main(["run", "fedavg", "--plan", str(path), "--out", str(tmp_path), "--name", "run"]) == 0
    found = load_file(tmp_path / "run/sites/a/last.safetensors")
    assert all(torch.equal(own, found[name]) for name, own in inner.models["a"].state_dict().items())


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/research/methods.md").read_text("utf-8").partition("embeddings once")[2]
    network = load_yaml(page.partition("```yaml\n")[2].partition("```")[0])["network"]
    save_tensors(tmp_path / "model/model.safetensors", NETWORKS.read(network["of"]).build(3, 2).state_dict())
    plan = study(tmp_path / "model/model.safetensors").model_dump(mode="json")
    plan["network"] = {**network, "from": "model"}
    plan["task"] = {"name": "image-folder", "kind": "classification", "labels": ["0", "1"], "size": [224, 224]}
    plan["task"] |= {"partition": {"kind": "iid"}}
    plan["participation"], plan["training"]["rounds"] = {"sites": ["a"]}, 1
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    photos = write_photos(tmp_path / "photos", [f"p{number}" for number in range(8)])
    own = ["--plan", str(tmp_path / "plan.yaml"), "--data", str(photos), "--engine", "inprocess"]
    assert main(["run", "fedavg", *own, "--out", str(tmp_path), "--name", "run"]) == 0
    assert load_file(tmp_path / "run/global/best.safetensors")["head.0.weight"].shape == (64, 384)
