"""Export as a model folder of nnU-Net's, which nnUNetv2_predict_from_modelfolder takes as it is."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from medsilo.extend import Exporter, MedsiloError
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_nnunet.nnunet_network import DeeplySupervised

CHECKPOINT = "checkpoint_final.pth"
ENDINGS = {"NaturalImage2DIO": ".png", "Tiff3DIO": ".tif"}  # of files that a reader takes; of all others .nii.gz


class NnUNetExporter(Exporter):
    """Writes dataset.json, plans.json and the model's fold. Folds of one study may be in one folder."""

    what = "nnU-Net model"

    def write(self, out: Path) -> dict[str, bytes]:
        task = self.source.plan.task
        if not isinstance(task, NnUNetFolder):
            raise MedsiloError(f"task {task.name} has no plans of nnU-Net's; export it without --to")
        network = self.plain_network()
        same = {
            "trainer_name": task.trainer,  # nnU-Net asks its class how the network is built
            "init_args": {"configuration": task.configuration},
            "inference_allowed_mirroring_axes": list(task.parts.mirrored or ()) if task.mirror else None,
        }
        told = _described(task, same | {"method": self.source.plan.algorithm.name}, out)
        content = BytesIO()
        # nnU-Net reads nothing but PyTorch's own files, which are pickles. Written with tensors, numbers, strings and
        # lists alone, this one is loaded with weights_only=True, too, which runs no code. medsilo never loads one.
        weights = {name: tensor.cpu() for name, tensor in network.network.state_dict().items()}
        torch.save({"network_weights": weights, **same}, content)  # noqa: TID251 - nnU-Net reads no other
        return told | {f"{self.part}/{CHECKPOINT}": content.getvalue()}

    @property
    def part(self) -> str:
        """nnU-Net's name for the part of the data that the model did not learn from. It counts from 0."""
        fold = self.source.plan.task.fold
        return f"fold_{fold.number - 1}" if fold else "fold_all"

    def plain_network(self) -> DeeplySupervised:
        """Return the model's network, which must be one of nnU-Net's with nothing added to it."""
        plan, network = self.source.plan, self.source.network
        with torch.device("meta"):
            plain = plan.network.plain.build(plan.task.channels, plan.task.goal.outputs).state_dict()
        if not isinstance(network, DeeplySupervised) or plain.keys() != network.state_dict().keys():
            raise MedsiloError(
                f"{plan.algorithm.name} with network {plan.network.name} leaves more than a network of nnU-Net's; "
                "predict with medsilo, or choose one model with --site"
            )
        return network


def _described(task: NnUNetFolder, same: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Return what nnU-Net says of all folds beside their weights. Folds that are there must be of the same study."""
    ending = ENDINGS.get(task.plans.image_reader_writer, ".nii.gz")
    told = {
        "dataset.json": task.question.in_nnunet() | {"file_ending": ending},
        "plans.json": task.plans.in_nnunet(),
        "folds.json": same,
    }
    files = {name: json.dumps(values, indent=2).encode() for name, values in told.items()}
    there = {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in files}
    if folder.exists() and there != files:
        raise MedsiloError("the folder has no folds of this study; choose another", private=str(folder))
    return files
