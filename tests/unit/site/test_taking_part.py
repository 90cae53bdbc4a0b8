"""A hospital's setting allows the hospital to observe, to test models, or to train, and no plan can allow more."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.signal import Signal

from medsilo.check.disclosure import describe
from medsilo.check.site_check import Visit, check
from medsilo.cli import main
from medsilo.core.errors import Refused
from medsilo.flare.executor import MedsiloExecutor, SiteEvents
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.plan import Plan
from medsilo.runs import event_reading
from medsilo.runs.messages import StudyMessage
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.settings import EachSites, SiteSettings, make_settings
from medsilo_lab.engines import inprocess
from medsilo_lab.release.release_folder import write_release
from medsilo_server.record import Record
from tests.commands import lead_of
from tests.conftest import SITES, SMALL, make_plan
from tests.unit.federation.test_unseen_folders import plan_of, write_hospital
from tests.unit.flare.test_executor import at_site
from tests.unit.medsilo_lab.test_released import own_key
from tests.unit.site.test_approvals import make_kit
from tests.unit.site.test_code_approval import Hospital, hospital  # noqa: F401

A, B, C = SITES
TRAINS, TESTS = make_plan("fedavg", *SMALL, "training.rounds=1"), ["participation.evaluation_sites=[hospital-c]"]
UNSEEN = make_plan("fedavg", *SMALL, "training.rounds=1", *TESTS, sites=[A, B])
NO_PART = [("observe", TRAINS, "only observes"), ("observe", UNSEEN, "only observes"), ("test", TRAINS, "trains none")]


def hospitals(takes_part: str) -> SiteSettings:
    return EachSites(device="cpu", sites={C: SiteSettings(device="cpu", takes_part=takes_part)})


def joined(kit: Path, plan: Plan) -> StudyMessage:
    context = at_site(kit, plan, C)
    meta = Path(context.get_prop(FLContextKey.WORKSPACE_OBJECT).get_job_meta_path("job"))
    meta.write_text('{"submitter_name": "lead@clinic.example"}')
    own = MedsiloExecutor()
    own.events = SiteEvents.of(context, "client")
    told = {"task": "join", "round": 0, "study": "lungs", "plan": plan.hash, "sites": SITES, "packages": plan.code}
    return to_parcel(own.execute("medsilo", to_shareable(StudyMessage(facts=told)), context, Signal()))


@pytest.mark.parametrize(("takes_part", "plan", "why"), NO_PART)
def test_on_one_machine_a_study_names_the_hospital_that_takes_no_such_part(
    takes_part: str, plan: Plan, why: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=f"^{C}: this hospital .*{why}.*takes_part: {takes_part}") as refused:
        inprocess.run(plan, folder=tmp_path / "run", settings=hospitals(takes_part))
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run/sites" / C).exists()


def test_who_tests_is_tested_and_stays_out_of_the_training(tmp_path: Path) -> None:
    for takes_part in ("test", "train"):
        inprocess.run(UNSEEN, folder=tmp_path / takes_part, settings=hospitals(takes_part))
    own, usual = (Record(tmp_path / name).summary() for name in ("test", "train"))
    assert own and usual and own.evaluation_sites[C].test and own.evaluation_sites[C].contributed == 0
    assert own.evaluation_sites[C].test == usual.evaluation_sites[C].test


@pytest.mark.parametrize(("takes_part", "plan", "why"), NO_PART)
def test_at_a_kit_it_is_one_line_before_data_are_read_and_is_kept_as_a_refusal(
    takes_part: str, plan: Plan, why: str, tmp_path: Path
) -> None:
    kit = tmp_path / C
    make_kit(kit, C)
    own = f"device: cpu\nmemory_limit: 0\ntakes_part: {takes_part}\napproval: none\ndata: {tmp_path / 'gone'}\n"
    (kit / "local/medsilo.yaml").write_text(own)
    with pytest.raises(Refused, match=why):
        joined(kit, plan)
    (line,) = event_reading.read(kit)
    assert line.split("\t")[1:5] == ["WARNING", "refused", "-", "lungs"]
    assert why in line and "lead@clinic.example" in line
    assert not (kit / "medsilo/_hospital").exists()  # the hospital made no key, and its query budget counted no answer


@pytest.mark.parametrize("takes_part", ["observe", "test"])
def test_a_plans_own_word_changes_nothing(takes_part: str, tmp_path: Path) -> None:
    """The plan declares the images public, but the hospital still does not read its folder of images."""
    folder = write_hospital(tmp_path / "data", 9, "classification")
    settings = make_settings(
        {"device": "cpu", "data": str(folder), "public_data": True, "takes_part": takes_part}, "medsilo.yaml"
    )
    shutil.rmtree(folder)
    plan = plan_of("fedavg", "classification").with_changes(["participation.evaluation_sites=[]"])
    with pytest.raises(Refused, match="takes_part"):
        inprocess.run(plan, folder=tmp_path / "run", settings=settings)


@pytest.mark.parametrize("takes_part", ["observe", "test"])
@pytest.mark.parametrize("approval", ["none", "required"])
def test_a_jobs_own_code_is_not_started(
    takes_part: str,
    approval: str,
    hospital: Hospital,  # noqa: F811
) -> None:
    settings = f"device: cpu\napproval: {approval}\ntakes_part: {takes_part}\n"
    (hospital.folder / "local/medsilo.yaml").write_text(settings)
    assert f"takes_part: {takes_part}" in hospital.launch()
    (hospital.app / "config/plan.yaml").unlink()
    assert f"takes_part: {takes_part}" in hospital.launch()


def test_the_kit_notices_that_somebody_takes_the_setting_away(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "kit", A)
    file = tmp_path / "kit/local/medsilo.yaml"
    file.write_text("approval: none\ntakes_part: test\n")
    AcceptedSettings(kit).begin(SiteSettings.read(file.parent))
    file.write_text("approval: none\n")
    with pytest.raises(Refused, match=r"medsilo\.yaml changed since"):
        AcceptedSettings(kit).begin(SiteSettings.read(file.parent))


def test_a_release_is_tested_by_who_tests_and_not_by_who_observes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    inprocess.run(TRAINS.with_changes(["model_selection.keep=last"]), folder=tmp_path / "run")
    write_release([tmp_path / "run"], "", tmp_path / "release", own_key(tmp_path / "lead.pem"))
    (tmp_path / "local").mkdir()
    ends: dict[str, Any] = {}
    for takes_part in ("observe", "test", "train"):
        (tmp_path / "local/medsilo.yaml").write_text(f"device: cpu\ntakes_part: {takes_part}\n")
        words = ["release", "test", "release", "--as", "clinic", "--settings", "local", "--lead", lead_of("release")]
        ends[takes_part] = main([*words, "-o", takes_part])
        assert (tmp_path / takes_part / "validation.html").exists() == (takes_part != "observe")
    assert ends == {"observe": 1, "test": 0, "train": 0}
    assert "only observes" in capsys.readouterr().err


def test_check_and_disclosure_say_it_beforehand(tmp_path: Path) -> None:
    def stopped(takes_part: str, plan: Plan, **visit: Any) -> list[str]:
        (tmp_path / "medsilo.yaml").write_text(f"device: cpu\ntakes_part: {takes_part}\n")
        findings = check(Visit(C, plan, local=tmp_path, **visit)).findings
        return [one.what for one in findings if one.severity == "stops" and "takes_part" in one.what]

    assert not stopped("train", TRAINS) and not stopped("test", UNSEEN)
    for takes_part, plan, why in NO_PART:
        (told,) = stopped(takes_part, plan)
        assert why in told
        first = describe(plan, SiteSettings(takes_part=takes_part))[0]
        assert "takes_part" in first and "rejects" in first
    assert "takes_part" not in describe(TRAINS, SiteSettings())[0]
