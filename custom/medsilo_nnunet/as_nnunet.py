"""Export as a model folder of nnU-Net's, which nnUNetv2_predict_from_modelfolder takes as it is."""

from io import BytesIO
from pathlib import Path

import torch

from medsilo.extend import Exporter, MedsiloError, Source, write_bytes, write_json
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_nnunet.nnunet_network import DeeplySupervised

CHECKPOINT = "fold_all/checkpoint_final.pth"
TRAINER = "nnUNetTrainer"  # nnU-Net asks its class how the network is built
ENDINGS = {"NaturalImage2DIO": ".png", "Tiff3DIO": ".tif"}  # of files that a reader takes; of all others .nii.gz


def export_to_nnunet(source: Source, out: Path) -> None:
    """Write the folder: dataset.json, plans.json and fold_all."""
    task = source.plan.task
    if not isinstance(task, NnUNetFolder):
        raise MedsiloError(f"task {task.name} has no plans of nnU-Net's; export it without --to")
    network = plain_network(source)
    write_description(task, out)
    content = BytesIO()
    # nnU-Net reads nothing but PyTorch's own files, which are pickles. Written with tensors, numbers, strings and lists
    # alone, this one is loaded with weights_only=True, too, which runs no code. medsilo itself never loads one.
    torch.save(
        {
            "network_weights": {name: tensor.cpu() for name, tensor in network.network.state_dict().items()},
            "trainer_name": TRAINER,
            "init_args": {"configuration": task.configuration},
            "inference_allowed_mirroring_axes": list(task.parts.mirrored or ()) if task.mirror else None,
        },
        content,
    )
    write_bytes(out / CHECKPOINT, content.getvalue())


EXPORTER = Exporter("nnU-Net model", export_to_nnunet)


def plain_network(source: Source) -> DeeplySupervised:
    """Return a model's network, which must be one of nnU-Net's with nothing added to it."""
    task, network = source.plan.task, source.network
    with torch.device("meta"):
        plain = source.plan.network.plain.build(task.channels, task.goal.outputs).state_dict()
    if not isinstance(network, DeeplySupervised) or plain.keys() != network.state_dict().keys():
        raise MedsiloError(
            f"{source.plan.algorithm.name} with network {source.plan.network.name} leaves more than a network of "
            "nnU-Net's; predict with medsilo, or choose one model with --site"
        )
    return network


def write_description(task: NnUNetFolder, folder: Path) -> None:
    """Write what nnU-Net says of a model beside its weights: dataset.json and plans.json."""
    ending = ENDINGS.get(task.plans.image_reader_writer, ".nii.gz")
    write_json(folder / "dataset.json", task.question.in_nnunet() | {"file_ending": ending})
    write_json(folder / "plans.json", task.plans.in_nnunet())
