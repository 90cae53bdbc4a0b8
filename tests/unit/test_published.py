"""The lead's download of a real study holds no personal model of a hospital that did not agree."""

from pathlib import Path

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from torch import Tensor

from medsilo.core.files import load_tensors
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare.workspace import publish
from tests.conftest import SITES, SMALL, make_plan
from tests.sites import with_settings
from tests.unit.test_coordinator import Study

A, B, C = SITES


def published(study: Study, root: Path) -> Path:
    """Publish a study in NVFlare's run folder, which a lead downloads whole, and return the folder."""
    for name in ("startup", "local"):
        (root / name).mkdir(parents=True)
    workspace = Workspace(str(root), "server")
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job")
    publish(study.folder, fl_ctx)
    return Path(workspace.get_run_dir("job"))


def trained_weights(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Those that training moves for sure (no bias before a batch norm): nobody else has the same by chance."""
    return [tensor for tensor in tensors.values() if tensor.dim() > 1]


def holds(folder: Path, model: dict[str, Tensor]) -> bool:
    """Return whether a file of this folder has any of the model's trained tensors."""
    stored = [tensor for path in folder.rglob("*.safetensors") for tensor in load_tensors(path)[0].values()]
    return any(
        mine.shape == theirs.shape and torch.equal(mine, theirs) for mine in stored for theirs in trained_weights(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "fedsm-extra", "fedsm-ensemble"])
def test_the_download_has_the_models_of_those_that_agreed_and_no_others(method: str, tmp_path: Path) -> None:
    study = Study(make_plan(method, *SMALL), tmp_path / "run")
    with_settings(study.participants[C], share_personal_model=False)
    study.run()
    personal = {site: study.coordinator.state.mixers["personal"].current(site) for site in SITES}
    download = published(study, tmp_path / "server")
    assert SuperModel.load(download / "medsilo/run/supermodel").agreed == (A, B)
    assert [holds(download, personal[site]) for site in SITES] == [True, True, False]
    assert holds(study.folder / "checkpoints", personal[C])  # which stay behind


@pytest.mark.parametrize("method", ["ditto", "fedbn", "apfl", "adafed"])
def test_a_personal_model_stays_with_its_hospital(method: str, tmp_path: Path) -> None:
    study = Study(make_plan(method, *SMALL), tmp_path / "run")
    study.run()
    download = published(study, tmp_path / "server")
    assert (download / "medsilo/run/summary.json").exists()
    for site in SITES:
        own = load_tensors(study.folder / "sites" / site / "best.safetensors")[0]
        assert not holds(download, own) and holds(study.folder / "sites" / site, own)
