"""Commands that read the models of a sealed study: they work with what hospitals opened, or say in one line why not."""

import shutil
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import MedsiloError
from medsilo.deploy.source import open_source
from medsilo.federation import inprocess
from medsilo.study.cross import cross
from medsilo_papers.analysis import read_finished
from tests.conftest import SITES
from tests.unit.test_sealed_studies import SETTINGS, plan_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose common model only the hospitals could open."""
    folder = tmp_path_factory.mktemp("sealed") / "study"
    inprocess.run(plan_of("fedavg", "group"), settings=SETTINGS, folder=folder)
    return folder


@pytest.fixture
def at_the_server(opened: Path, tmp_path: Path) -> Path:
    """Return the server's part of the run."""
    return Path(shutil.copytree(opened, tmp_path / "server", ignore=shutil.ignore_patterns("sites")))


def test_every_hospitals_copy_is_the_same_model(opened: Path) -> None:
    networks = [open_source(opened, site).network.state_dict() for site in SITES]
    assert all(torch.equal(tensor, other[name]) for name, tensor in networks[0].items() for other in networks[1:])
    run = read_finished([opened])[0]
    analysed = run.model(SITES[0], CPU).state_dict()
    assert all(torch.equal(tensor, analysed[name]) for name, tensor in networks[0].items())


def test_cross_works_with_what_hospitals_opened(opened: Path) -> None:
    scores = cross(opened, SETTINGS)
    assert all(scores[owner] == scores[SITES[0]] for owner in SITES)


def test_predict_and_export_ask_whose_copy(opened: Path, tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match=r"could not read this run's model .*choose with --site whose copy: hosp"):
        open_source(opened)
    assert open_source(opened / "sites" / SITES[0]).facts["kind"] == "model"  # a hospital's own folder


def test_at_the_server_there_is_nothing_to_read(at_the_server: Path) -> None:
    with pytest.raises(MedsiloError, match="transport.sealing=group.; use it at a hospital"):
        open_source(at_the_server)
    with pytest.raises(MedsiloError, match="no model of hospital-a is here: where hospitals seal, they alone have it"):
        read_finished([at_the_server])[0].model(SITES[0], CPU)
    with pytest.raises(MedsiloError, match="its sites keep their models and data"):
        cross(at_the_server, SETTINGS)


def test_a_pairwise_study_leaves_the_common_model_for_the_lead(tmp_path: Path) -> None:
    inprocess.run(plan_of("fedavg", "pairwise"), settings=SETTINGS, folder=tmp_path / "study")
    assert open_source(tmp_path / "study").facts["file"] == "global/best.safetensors"
