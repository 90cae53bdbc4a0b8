"""Each method trains nnU-Net's networks with nnU-Net's patches, on volumes in the layout of nifti-folder."""

from pathlib import Path
from typing import Any

import pytest

from medsilo.core.errors import PlanError
from medsilo.registry import METHODS
from medsilo.site.settings import make_settings
from tests import inprocess
from tests.brains import narrow, plans_of, study, write_hospitals

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
pytestmark = pytest.mark.slow

SITES = ("brno", "graz")
OPEN = {
    "device": "cpu",
    "public_data": True,
    "min_patients_per_metric": 1,
}
OTHERWISE: dict[str, dict[str, Any]] = {}
REFUSED = {
    "silobn": "keeps batch norm's statistics",
    "f-adafed": "keeps batch norm at the sites, but this network has none",
    "fedrod": "balances the classes of cases",
}
# methods that are tested after each change of the code; all other methods train nnU-Net's networks in the same way
AT_THE_GATE = ("fedavg", "harmofl", "fedsm", *REFUSED)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("brains")
    write_hospitals(folder, SITES, 4, width=32)
    return folder, narrow(plans_of(folder, SITES, 2000))


@pytest.mark.parametrize(
    "method",
    [name if name in AT_THE_GATE else pytest.param(name, marks=pytest.mark.long) for name in METHODS.ours],
)
def test_each_method_trains_nnunets_networks_or_says_why_not(hospitals: tuple[Path, Any], method: str) -> None:
    folder, plans = hospitals
    training = {"rounds": 2, "batch_size": 2, "momentum": 0.9}
    asked = {"name": method, **OTHERWISE.get(method, {})}
    if method in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[method]):
            study(plans, SITES, asked, training).build_networks()
        return
    run = inprocess.run(
        study(plans, SITES, asked, training), settings=make_settings({**OPEN, "data": str(folder)}, "x")
    )
    assert run.summary.finished
    for model in run.models.values():
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
