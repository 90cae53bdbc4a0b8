"""Export as a MONAI Bundle, which MONAI's own runner loads and runs.

Reading, preprocessing, inference and writing are MONAI's. Only a network that MONAI hasn't got, as the super model,
comes from medsilo. Weights are safetensors and no model.pt: that would be a pickle.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medsilo import __version__
from medsilo.core.errors import MedsiloError
from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.deploy.card import card
from medsilo.deploy.predict import BATCH
from medsilo.deploy.source import GLOBAL_MODEL, Source, open_source
from medsilo.deploy.supermodel import SuperModel

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
RUNNER = {"pytorch-ignite": "0.4.11", "fire": "0.5.0"}  # what MONAI's runner needs beside MONAI, the least versions
WEIGHTS = "model.safetensors"


def network(folder: str) -> nn.Module:
    """The network in a bundle's models/ folder, for the bundle's configuration."""
    return open_source(Path(folder)).network


def export(source: Source, out: Path) -> Path:
    """Write the bundle into a folder that does not exist yet."""
    if out.exists():
        raise MedsiloError("the bundle's folder exists; choose another", private=str(out))
    task = source.plan.task
    transforms = task.monai_transforms()
    if transforms is None or task.shape is None:
        raise MedsiloError(f"task {task.name} can't be exported: MONAI's transforms can't read its images as it does")
    own = _without_medsilo(source)
    _write_weights(source, out / "models", own is not None)
    write_json(out / "configs" / "inference.json", _inference(task.shape, transforms, own))
    write_json(out / "configs" / "metadata.json", _metadata(source, needs_medsilo=own is None))
    write_text(out / "docs" / "README.md", _readme(source, needs_medsilo=own is None))
    return out


def _without_medsilo(source: Source) -> dict[str, Any] | None:
    """Return the network's definition, where it is one of MONAI's with nothing added to it."""
    shape = source.plan.task.channels, source.plan.task.classes
    with torch.device("meta"):
        plain = source.plan.network.build(*shape).state_dict()
    return source.plan.network.monai(*shape) if plain.keys() == source.network.state_dict().keys() else None


def _write_weights(source: Source, models: Path, alone: bool) -> None:
    if isinstance(source.network, SuperModel):
        source.network.save(models)
    elif alone:
        save_tensors(models / WEIGHTS, source.network.state_dict())
    else:  # as open_source finds it
        save_tensors(models / GLOBAL_MODEL, source.network.state_dict(), {"plan_hash": source.plan.hash})
        write_text(models / "plan.yaml", source.plan.to_yaml())


def _inference(shape: tuple[int, ...], transforms: list[dict[str, Any]], own: dict[str, Any] | None) -> dict[str, Any]:
    """configs/inference.json: every NIfTI file of dataset_dir gets a mask in output_dir."""
    models = "$@bundle_root + '/models'"
    begin = f"$@network_def.load_state_dict(load_file(@bundle_root + '/models/{WEIGHTS}'))"
    return {
        "imports": ["$import glob", *(["$from safetensors.torch import load_file"] if own else [])],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii') + glob.glob(@dataset_dir + '/*.nii.gz'))",
        "network_def": own or {"_target_": "medsilo.deploy.bundle.network", "folder": models},
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
                {"_target_": "EnsureChannelFirstd", "keys": "image"},
                *transforms,
            ],
        },
        "dataset": {"_target_": "Dataset", "data": "$[{'image': i} for i in @datalist]", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": {
            "_target_": "SliceInferer",
            "roi_size": list(shape[1:]),
            "spatial_dim": 2,
            "sw_batch_size": BATCH,
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {
                    "_target_": "Invertd",
                    "keys": "pred",
                    "transform": "@preprocessing",
                    "orig_keys": "image",
                    "nearest_interp": False,
                },
                {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
                {
                    "_target_": "SaveImaged",
                    "keys": "pred",
                    "output_dir": "@output_dir",
                    "output_postfix": "mask",
                    "output_dtype": "$np.uint8",
                    "resample": False,
                    "separate_folder": False,
                    "print_log": False,
                },
            ],
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "amp": False,
        },
        "initialize": [begin] if own else [],
        "run": ["$@evaluator.run()"],
    }


def _metadata(source: Source, needs_medsilo: bool) -> dict[str, Any]:
    plan = source.plan
    task = plan.task
    needed = {name: version(name) for name in ("nibabel", "safetensors")} | RUNNER
    tensor = {
        "type": "image",
        "modality": "n/a",
        "spatial_shape": list((task.shape or ())[1:]),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
    }
    image = {**tensor, "format": "magnitude", "num_channels": task.channels}
    labels = {str(label): f"label {label}" if label else "background" for label in range(task.classes)}
    found = {**tensor, "format": "labels", "num_channels": task.classes, "channel_def": labels}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "changelog": {__version__: f"exported by medsilo {__version__}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": needed | ({"medsilo": __version__} if needs_medsilo else {}),
        "name": f"{source.facts['kind'].replace(' ', '')}-{task.name}",
        "task": task.title,
        "description": f"{source.facts['kind']} trained with {plan.algorithm.title}; plan {plan.hash}",
        "authors": "the hospitals of the study: " + (", ".join(plan.participation.sites) or "see docs/README.md"),
        "copyright": "the hospitals of the study",
        "intended_use": "Research and evaluation; not a medical device",
        "data_type": "SYNTHETIC" if task.synthetic else "nifti",
        "network_data_format": {
            "inputs": {"image": {**image, "channel_def": {str(c): "image" for c in range(task.channels)}}},
            "outputs": {"pred": found},
        },
    }


def _readme(source: Source, needs_medsilo: bool) -> str:
    model = source.network
    about = card(model, model.origin) if isinstance(model, SuperModel) and model.origin else ""
    needs = f"`medsilo=={__version__}` and " if needs_medsilo else ""
    return f"""# MONAI Bundle: {source.plan.task.title}

Needs {needs}the packages in `configs/metadata.json`. In this folder:

    python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
        --dataset_dir IMAGES --output_dir MASKS

Every `.nii` and `.nii.gz` file of IMAGES gets a mask of the same geometry. Weights are safetensors, so that loading
them runs no code; there is no `model.pt`.

{about}"""
