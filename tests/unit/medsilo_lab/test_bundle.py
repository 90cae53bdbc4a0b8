"""From an exported bundle, MONAI's bundle runner predicts the same masks as `medsilo predict`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.bundle.properties import MetaProperties

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo_lab.deploy.bundle import network
from tests.conftest import make_plan
from tests.hospital import Volume, write_volume
from tests.unit.deploy.test_predict import GRIDS, drawn, make_super_model, oblique, small_plan, write_run


def make_images(folder: Path) -> None:
    folder.mkdir()
    for number, (shape, spacing, stored_as) in enumerate(GRIDS):
        suffix = ".nii" if number % 2 else ".nii.gz"
        write_volume(folder / f"scan{number}{suffix}", Volume(drawn(shape, number), oblique(spacing)), stored_as)


# Import MONAI's runner once, which takes five seconds, and run each bundle in a forked process.
RUNNER = """
import json, os, runpy, sys, traceback
import monai.bundle, monai.data, monai.inferers, monai.transforms
for line in sys.stdin:
    child = os.fork()
    if not child:
        told, code = json.loads(line), 1
        log = os.open(told["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        try:
            os.chdir(told["bundle"])
            sys.argv = ["monai.bundle", *told["command"]]
            runpy.run_module("monai.bundle", run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
RunBundle = Callable[[Path, Path, Path, bool], None]
in_monai = pytest.mark.xdist_group("bundle")


@pytest.fixture(scope="session")
def run_bundle() -> Iterator[RunBundle]:
    with ExitStack() as stack:

        @cache
        def runner(without_medsilo: bool) -> subprocess.Popen[str]:
            code = "import sys; sys.modules['medsilo'] = None" if without_medsilo else ""
            package = "" if without_medsilo else str(Path(__file__).parents[3] / "custom")
            command = [sys.executable, "-c", code + RUNNER]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return stack.enter_context(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": package}, **pipes))

        def run(bundle: Path, images: Path, masks: Path, without_medsilo: bool) -> None:
            command = ["run", "--config_file", "configs/inference.json", "--meta_file", "configs/metadata.json"]
            command += ["--dataset_dir", str(images), "--output_dir", str(masks)]
            log = bundle.with_name("runner.txt")
            process = runner(without_medsilo)
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps({"bundle": str(bundle), "command": command, "log": str(log)}) + "\n")
            process.stdin.flush()
            ended, said = process.stdout.readline(), log.read_text()
            assert ended == "0\n", said
            assert "scan1" not in said

        yield run


@pytest.mark.long
@in_monai
@pytest.mark.parametrize("kind", ["super model", "of monai alone", "with an input layer"])
def test_monais_runner_finds_the_same_voxels(kind: str, tmp_path: Path, run_bundle: RunBundle) -> None:
    if kind == "super model":
        make_super_model().save(tmp_path / "model")
    else:
        method = "fedavg" if kind == "of monai alone" else "harmofl"
        write_run(tmp_path / "model", small_plan(method), "global/best.safetensors")
    make_images(tmp_path / "images")
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "images"), "-o", str(tmp_path / "ours")]) == 0
    assert main(["release", "export", str(tmp_path / "model"), "-o", str(tmp_path / "bundle")]) == 0
    run_bundle(tmp_path / "bundle", tmp_path / "images", tmp_path / "theirs", kind == "of monai alone")

    for number in range(len(GRIDS)):
        ours, theirs = (
            SimpleITK.ReadImage(str(*(tmp_path / whose).glob(f"scan{number}_mask.*"))) for whose in ("ours", "theirs")
        )
        first, second = SimpleITK.GetArrayFromImage(ours), SimpleITK.GetArrayFromImage(theirs)
        assert np.array_equal(first, second)
        assert 0.02 < first.mean() < 0.98
        for name in ("GetSpacing", "GetOrigin", "GetDirection"):
            np.testing.assert_allclose(getattr(ours, name)(), getattr(theirs, name)(), rtol=0, atol=1e-4)

    needed = json.loads((tmp_path / "bundle" / "configs" / "metadata.json").read_text())["required_packages_version"]
    assert ("medsilo" in needed) == (kind != "of monai alone")
    assert not [path for path in (tmp_path / "bundle").rglob("*") if path.suffix in (".pt", ".ts", ".pkl")]


def test_the_bundle_has_what_monai_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_super_model().save(tmp_path / "model")
    assert main(["release", "export", str(tmp_path / "model"), "-o", str(tmp_path / "bundle")]) == 0
    monkeypatch.syspath_prepend(str(tmp_path / "bundle"))
    (tmp_path / "bundle/images").mkdir()
    configs = tmp_path / "bundle" / "configs"
    workflow = ConfigWorkflow(
        config_file=str(configs / "inference.json"),
        meta_file=str(configs / "metadata.json"),
        logging_file=False,
        workflow_type="infer",
        bundle_root=str(tmp_path / "bundle"),
    )
    workflow.initialize()
    assert not workflow.check_properties()
    parser = ConfigParser(json.loads((configs / "inference.json").read_text()))
    parser.read_meta(str(configs / "metadata.json"))
    assert all(parser.get(entry["id"]) is not None for entry in MetaProperties.values())

    # the keys that MONAI's specification requires
    metadata = json.loads((configs / "metadata.json").read_text())
    assert {
        "version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task",
        "description", "authors", "copyright", "network_data_format",
    } <= metadata.keys()  # fmt: skip
    formats = metadata["network_data_format"]
    for tensor in (formats["inputs"]["image"], formats["outputs"]["pred"]):
        assert {
            "type", "format", "modality", "num_channels", "spatial_shape", "dtype", "value_range", "is_patch_data",
            "channel_def",
        } == tensor.keys()  # fmt: skip
        assert len(tensor["channel_def"]) == tensor["num_channels"]
    assert formats["inputs"]["image"]["spatial_shape"] == [32, 32]
    assert "gamma = 0.5" in (tmp_path / "bundle" / "MODEL_CARD.md").read_text()


def test_a_bundle_whose_weights_were_changed_is_not_loaded(tmp_path: Path) -> None:
    make_super_model().save(tmp_path / "model")
    assert main(["release", "export", str(tmp_path / "model"), "-o", str(tmp_path / "bundle")]) == 0
    weights = tmp_path / "bundle" / "models" / "global.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(MedsiloError, match=r"global\.safetensors is not the file"):
        network(str(tmp_path / "bundle" / "models"))


def test_what_monai_can_not_read_alike_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path / "run", make_plan("fedavg", "task.name=nuclei", "task.size=32"), "global/best.safetensors")
    assert main(["release", "export", str(tmp_path / "run"), "-o", str(tmp_path / "bundle")]) == 1
    assert "task nuclei can't be exported" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_an_export_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_super_model().save(tmp_path / "model")
    assert main(["release", "export", str(tmp_path / "model"), "-o", str(tmp_path)]) == 1
    assert "folder exists" in capsys.readouterr().err
