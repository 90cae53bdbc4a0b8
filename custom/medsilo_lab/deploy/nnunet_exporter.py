"""Export a model as a model folder of nnU-Net, which nnUNetv2_predict_from_modelfolder can read."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from medsilo.core.errors import MedsiloError
from medsilo_lab.deploy.exporter import Exporter
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_nnunet.nnunet_network import DeeplySupervised

CHECKPOINT = "checkpoint_final.pth"
# readers of nnU-Net that do not read .nii.gz, with the file extension that each reader reads
ENDINGS = {"NaturalImage2DIO": ".png", "Tiff3DIO": ".tif"}


class NnUNetExporter(Exporter):
    """Writes dataset.json, plans.json and the model's weights. Models of the same study that were trained on different
    folds may share a folder.
    """

    what = "nnU-Net model"

    def write(self, out: Path) -> dict[str, bytes]:
        task = self.source.plan.task
        if not isinstance(task, NnUNetFolder):
            raise MedsiloError(f"task {task.name} has no nnU-Net plans; export it without --to")
        network = self.plain_network()
        same = {
            "trainer_name": task.trainer,  # when nnU-Net loads the model, this trainer class builds the network
            "init_args": {"configuration": task.configuration},
            "inference_allowed_mirroring_axes": list(task.parts.mirrored or ()) if task.mirror else None,
        }
        told = _described(task, same | {"method": self.source.plan.algorithm.name}, out)
        content = BytesIO()
        # nnU-Net only reads PyTorch's own file format, which is a pickle. The written checkpoint contains only tensors,
        # numbers, strings and lists, so it can also be loaded with weights_only=True, which runs no code. medsilo
        # itself never loads a checkpoint in PyTorch's own file format.
        weights = {name: tensor.cpu() for name, tensor in network.network.state_dict().items()}
        torch.save({"network_weights": weights, **same}, content)  # noqa: TID251 - nnU-Net reads no other
        return told | {f"{self.part}/{CHECKPOINT}": content.getvalue()}

    @property
    def part(self) -> str:
        """The index of the fold (from 0, as in nnU-Net) that was left out in training."""
        fold = self.source.plan.task.fold
        return f"fold_{fold.number - 1}" if fold else "fold_all"

    def plain_network(self) -> DeeplySupervised:
        """Return the model's network; raise MedsiloError if the network has tensors that nnU-Net's network lacks."""
        plan, network = self.source.plan, self.source.network
        with torch.device("meta"):
            plain = plan.network.plain.build(plan.task.channels, plan.task.goal.outputs).state_dict()
        if not isinstance(network, DeeplySupervised) or plain.keys() != network.state_dict().keys():
            raise MedsiloError(
                f"{plan.algorithm.name} with network {plan.network.name} has layers that nnU-Net's network lacks; "
                "predict with medsilo, or choose one model with --site"
            )
        return network


def _described(task: NnUNetFolder, same: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """For a model folder, return the contents of dataset.json and plans.json; raise MedsiloError if the folder belongs
    to another study.
    """
    ending = ENDINGS.get(task.plans.image_reader_writer, ".nii.gz")
    told = {
        "dataset.json": task.question.in_nnunet() | {"file_ending": ending},
        "plans.json": task.plans.in_nnunet(),
        "folds.json": same,
    }
    files = {name: json.dumps(values, indent=2).encode() for name, values in told.items()}
    there = {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in files}
    if folder.exists() and there != files:
        raise MedsiloError("the folder has no folds of this study; choose another folder", private=str(folder))
    return files
