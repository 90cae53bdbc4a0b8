"""A network of nnU-Net's as a MONAI Bundle: MONAI's runner starts nnU-Net's own predictor, and needs no medsilo.

Weights are safetensors, and nothing is unpickled. nnU-Net's modules know tensors by several names, each of which is in
the file, so that they load without exception.
"""

from pathlib import Path
from typing import Any

from medsilo.extend import WEIGHTS, Exporter, InMonai, MedsiloError, Source, finish_bundle, save_tensors, write_json
from medsilo_nnunet.as_nnunet import TRAINER, plain_network, write_description
from medsilo_nnunet.nnunet_folder import NnUNetFolder
from medsilo_nnunet.nnunet_postprocessing import FUNCTION

CLEANER, FOLDERS = "nnunetv2.postprocessing.remove_connected_components", "apply_postprocessing_to_folder"
POSTPROCESSING = "@bundle_root + '/models/postprocessing.json'"


def write_nnunet_bundle(source: Source, out: Path) -> str:
    """Write the bundle; return why no ONNX file is in it, if that is so."""
    task = source.plan.task
    assert isinstance(task, NnUNetFolder)
    if task.refines:
        raise MedsiloError(
            "a MONAI Bundle holds one network, and 3d_cascade_fullres refines what another found; use --to nnunet"
        )
    network = plain_network(source)
    save_tensors(out / "models" / WEIGHTS, network.network.state_dict())
    write_description(task, out / "models")
    write_json(out / "configs" / "inference.json", _inference(task))
    channels = task.question.channels
    words = InMonai([], {}, channels=channels, classes=task.goal.label_names)
    place = f"IMAGES as nnU-Net names them (case_0000.nii.gz for {channels[0]}, ...)"
    return finish_bundle(source, out, words, "nnunetv2", place)


EXPORTER = Exporter("bundle", write_nnunet_bundle)


def _inference(task: NnUNetFolder) -> dict[str, Any]:
    """Return configs/inference.json: every case of dataset_dir gets a mask in output_dir."""
    own = task.architecture
    mirrored = tuple(task.parts.mirrored or ()) if task.mirror else None
    words: dict[str, Any] = {
        "imports": ["$import json", "$from pathlib import Path", "$from safetensors.torch import load_file"],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "settings": "$json.loads(Path(@bundle_root + '/models/dataset.json').read_text('utf-8'))",
        "plans": {
            "_target_": "nnunetv2.utilities.plans_handling.plans_handler.PlansManager",
            "plans_file_or_dict": "$@bundle_root + '/models/plans.json'",
        },
        "configuration": f"$@plans.get_configuration('{task.configuration}')",
        "network_def": {
            "_target_": "nnunetv2.utilities.get_network_from_plans.get_network_from_plans",
            "arch_class_name": own.network_class_name,
            "arch_kwargs": own.arch_kwargs.model_dump(mode="json"),
            "arch_kwargs_req_import": list(own.imported),
            "input_channels": task.channels,
            "output_channels": task.goal.outputs,
            "deep_supervision": False,
        },
        "network": "$@network_def.to(@device)",
        "predictor": {
            "_target_": "nnunetv2.inference.predict_from_raw_data.nnUNetPredictor",
            "use_mirroring": mirrored is not None,
            "perform_everything_on_device": "$@device.type == 'cuda'",
            "device": "@device",
            "allow_tqdm": False,
        },
        "initialize": [
            f"$@network.load_state_dict(load_file(@bundle_root + '/models/{WEIGHTS}'))",
            f"$@predictor.manual_initialization(@network, @plans, @configuration, [@network.state_dict()], @settings, "
            f"'{TRAINER}', {mirrored})",
            "$Path(@output_dir).mkdir(parents=True, exist_ok=True)",
        ],
        "run": ["$@predictor.predict_from_files_sequential(str(@dataset_dir), str(@output_dir))"],
    }
    if task.postprocessing_in_nnunet["postprocessing_fns"]:
        words["imports"] += [f"$from {CLEANER} import {name}" for name in (FOLDERS, FUNCTION)]
        words["given"] = f"$json.loads(Path({POSTPROCESSING}).read_text('utf-8'))['postprocessing_kwargs']"
        words["run"].append(
            f"${FOLDERS}(str(@output_dir), str(@output_dir), [{FUNCTION}] * len(@given), @given, "
            "@plans.plans, @settings, 1)"
        )
    return words
