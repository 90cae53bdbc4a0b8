"""Hospitals measured by a job: what it collects is what they would have sent as files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError, Refused
from medsilo.federation.inprocess import Loop
from medsilo.federation.inquiry import SiteOfInquiry, inquiry_of
from medsilo.flare.inquiry_job import read_answers, write_inquiry_job
from medsilo.flare.jobs import check_components
from medsilo.flare.simulator import prepare_workspace
from medsilo.sealing.signing import Unsigned
from medsilo.site.settings import EachSites, SiteSettings, make_settings
from medsilo_nnunet.collecting import MeasuringSite, collect
from medsilo_nnunet.fingerprint_message import MeasuredSite
from medsilo_nnunet.measuring_cases import measured
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.question import SegmentationQuestion
from tests.federations import write_volumes

QUESTION = SegmentationQuestion(name="Dataset007_Volumes", channels=("CT",), labels={"background": 0, "lesion": 1})
HOSPITALS = {"north": 2, "west": 3}  # cases
NAME = "nnunet-collect"
LEAST, CASES = 2, 4  # of each number; of both together, without the one that is left over


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the volumes of each hospital."""
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    folder = tmp_path_factory.mktemp("data")
    for site, cases in HOSPITALS.items():
        write_volumes(folder / site, QUESTION, [f"{site}{case}" for case in range(cases)], 1, (1, 1, 2))
    return folder


def settings_of(place: Path, site: str, **more: object) -> SiteSettings:
    """Return a hospital's settings."""
    return make_settings({"data": str(place / site), "smallest_metric": LEAST, "device": "cpu", **more}, site)


def asked_site(place: Path, site: str, folder: Path, **more: object) -> SiteOfInquiry:
    """Return what a hospital knows of itself."""
    return SiteOfInquiry(site, settings_of(place, site, **more), folder / "study" / "sites" / site, Unsigned)


def loop_over(place: Path, folder: Path, **more: object) -> Loop:
    """Return the hospitals, in this process."""
    return Loop(
        {
            site: MeasuringSite(QUESTION, asked_site(place, site, folder, **more))  # type: ignore[misc]
            for site in HOSPITALS
        }
    )


def as_files(data: Path) -> dict[str, MeasuredSite]:
    """Return what hospitals would have sent as files."""
    places = {site: RawData.of(data / site, QUESTION) for site in HOSPITALS}
    return {site: measured(own, QUESTION, CASES, LEAST, None) for site, own in places.items()}


def test_a_job_without_cases_is_whole(tmp_path: Path) -> None:
    write_inquiry_job(tmp_path / "job", NAME, QUESTION.in_yaml(), 2)
    check_components(tmp_path / "job")
    with pytest.raises(MedsiloError, match="left no answers"):
        read_answers(tmp_path, NAME, tmp_path)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_hospital_that_allows_sealed_classes_answers_nothing_in_clear(sealed: bool) -> None:
    name = "statistics-sealed" if sealed else NAME
    assert inquiry_of(name, sealed, ()).sealed is sealed
    with pytest.raises(Refused, match="its classes say otherwise"):
        inquiry_of(name, not sealed, ())
    with pytest.raises(Refused, match="the inquiry '../x' is not known here"):
        inquiry_of("../x", sealed, ())


@pytest.mark.long  # nnU-Net draws 25 million intensities of each of so few cases
def test_a_job_collects_what_hospitals_would_send(data: Path, tmp_path: Path) -> None:
    told = collect(QUESTION, loop_over(data, tmp_path), list(HOSPITALS), 60)
    assert told == as_files(data)
    assert sum(own.holding.cases for own in told.values()) == CASES
    assert collect(QUESTION, loop_over(data, tmp_path), list(HOSPITALS), 60) == told  # the same cases: nothing is new
    write_volumes(data / "west", QUESTION, ["west-later"], 1, (1, 1, 2))
    try:
        with pytest.raises(MedsiloError, match="west refused: another answer was about all of these cases but fewer"):
            collect(QUESTION, loop_over(data, tmp_path), list(HOSPITALS), 60)
    finally:
        for path in data.glob("west/*/west-later*"):
            path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"approval": "required"}, "ask its engineer for the file of medsilo nnunet measure"),
        ({"privacy": {"epsilon": 1.0, "delta": 1e-5}}, "answers only with noise"),
        ({"data": None}, "does not say where its data are"),
        ({"smallest_metric": 4}, "fewer than 4 cases does not leave"),
    ],
)
def test_a_hospital_may_refuse(data: Path, tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(MedsiloError, match=reason):
        collect(QUESTION, loop_over(data, tmp_path, **settings), list(HOSPITALS), 60)


@pytest.mark.long
def test_nvflare_collects_the_same(data: Path, tmp_path: Path) -> None:
    files = collected_by_nvflare(data, tmp_path, list(HOSPITALS))
    assert {path.stem: MeasuredSite.model_validate_json(path.read_text()) for path in files} == as_files(data)


def collected_by_nvflare(data: Path, folder: Path, sites: list[str]) -> list[Path]:
    """Return the files that the job leaves in NVFlare's simulator."""
    job, workspace = folder / "job", folder / "workspace"
    write_inquiry_job(job, NAME, QUESTION.in_yaml(), len(sites))
    settings = EachSites(smallest_metric=LEAST, sites={site: settings_of(data, site) for site in sites})
    prepare_workspace(workspace, settings, folder / "output", sites)
    simulator = [sys.executable, "-m", "medsilo.flare.simulator", str(job), str(workspace)]
    subprocess.run([*simulator, ",".join(sites), str(len(sites)), str(os.getpid())], check=True, timeout=1200)
    (left,) = (path.parent for path in workspace.glob(f"**/medsilo/{NAME}"))
    return read_answers(left.parent, NAME, folder / "collected")
