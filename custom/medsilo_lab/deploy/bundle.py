"""Export a model as a MONAI Bundle, which MONAI's own runner loads and runs.

MONAI reads and preprocesses images, predicts, and writes the results. Only networks that MONAI lacks, such as the super
model, are built with medsilo's code. The weights are in safetensors files, because a model.pt would be a pickle, which
can run code.
"""

import json
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medsilo.core.errors import MedsiloError
from medsilo.core.files import save_tensors, write_json, write_text
from medsilo.core.version import __version__
from medsilo.tasks.inference import IN_MONAI, InMonai
from medsilo_lab.deploy.exporter import Exporter
from medsilo_lab.deploy.model_card import INTENDED_USE, template
from medsilo_lab.deploy.predict import BATCH
from medsilo_lab.deploy.source import Source

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
# packages that MONAI's runner needs besides MONAI, with their minimum versions
RUNNER = {"pytorch-ignite": "0.4.11", "fire": "0.5.0"}
WEIGHTS = "model.safetensors"
# file formats of volumes and of 2-D images that MONAI's runner reads
VOLUMES, FLAT = (".nii.gz", ".nii"), (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")


def network(folder: str) -> nn.Module:
    """Return the network from a bundle's folder models/. The configuration of each bundle names this function."""
    return Source.open(Path(folder)).network


class BundleExporter(Exporter):
    what = "bundle"

    def write(self, out: Path) -> None:
        source, task = self.source, self.source.plan.task
        words = task.use.in_monai
        if words is None or task.shape is None:
            why = "MONAI has no transforms that read its cases as it does; medsilo release make hands the model on"
            raise MedsiloError(f"task {task.name} can't be exported: {why}")
        own = _without_medsilo(source)
        if own:
            save_tensors(out / "models" / WEIGHTS, source.network.state_dict())
        else:
            source.save(out / "models")
        _write_scripts(out / "scripts")
        write_json(out / "configs" / "inference.json", _inference(words, own))
        packages = ["pillow" if words.flat else "nibabel", "safetensors", *(["medsilo"] if own is None else [])]
        write_json(out / "configs" / "metadata.json", _metadata(source, words, packages))
        write_text(out / "docs" / "README.md", _readme(source, words, own is None))


def _without_medsilo(source: Source) -> dict[str, Any] | None:
    """Return MONAI's definition of the network, or None if MONAI alone cannot build the network."""
    shape = source.plan.task.channels, source.plan.task.goal.outputs
    with torch.device("meta"):
        plain = source.plan.network.plain.build(*shape).state_dict()
    return source.plan.network.plain.monai(*shape) if plain.keys() == source.network.state_dict().keys() else None


def _write_scripts(scripts: Path) -> None:
    write_text(scripts / "__init__.py", "")
    for package, name in (("medsilo_lab.deploy", "in_monai"), ("medsilo.tasks.own", "image_patches")):
        code = resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
        write_text(scripts / f"{name}.py", code.replace("from medsilo.tasks.own.", "from scripts."))


def _inference(words: InMonai, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Return the contents of configs/inference.json, with which MONAI's runner predicts every image in dataset_dir. The
    runner writes masks or a table of classes to output_dir.
    """
    facts = {"in_monai": IN_MONAI, "weights": WEIGHTS, "inferer": {**words.inferer, "batch": BATCH}}
    return json.loads(template("inference").render(facts, words=words, own=settings, suffixes=_suffixes(words)))


def _metadata(source: Source, words: InMonai, packages: Sequence[str]) -> dict[str, Any]:
    plan = source.plan
    task = plan.task
    needed = {name: __version__ if name == "medsilo" else version(name) for name in packages} | RUNNER
    tensor = {
        "type": "image",
        "modality": "n/a",
        "spatial_shape": list((task.shape or ())[1:]),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
    }
    image = {**tensor, "format": "magnitude", "num_channels": task.channels}
    names = words.classes or ("background", *(f"label {label}" for label in range(1, task.goal.classes)))
    labels = {str(label): name for label, name in enumerate(names)}
    kind = "probabilities" if words.classifies else "labels"
    found = {**tensor, "format": kind, "num_channels": task.goal.outputs, "channel_def": labels}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "changelog": {__version__: f"exported by medsilo {__version__}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": needed,
        "name": f"{source.facts['kind'].replace(' ', '')}-{task.name}",
        "task": task.title,
        "description": f"{source.facts['kind']} trained with {plan.algorithm.title}; plan {plan.hash}",
        "authors": "the hospitals of the study: " + (", ".join(plan.participation.sites) or "see docs/README.md"),
        "copyright": "the hospitals of the study",
        "intended_use": INTENDED_USE,
        "data_type": "SYNTHETIC" if task.synthetic else "png" if words.flat else "nifti",
        "network_data_format": {
            "inputs": {"image": {**image, "channel_def": {str(c): "image" for c in range(task.channels)}}},
            "outputs": {"pred": found},
        },
    }


def _readme(source: Source, words: InMonai, needs_medsilo: bool) -> str:
    gets = "a mask of the same geometry"
    if words.classifies:
        gets = f"a line in `predictions.csv`, with the probabilities of {', '.join(words.classes)}"
    elif words.classes:
        gets += f" ({', '.join(f'{label} {name}' for label, name in enumerate(words.classes))})"
    told = {"title": source.plan.task.title, "version": __version__ if needs_medsilo else "", "gets": gets}
    return template("bundle").render(told, words=words, suffixes=_suffixes(words))


def _suffixes(words: InMonai) -> Sequence[str]:
    return FLAT if words.flat else VOLUMES
