"""A site's executor reacts to an abort at once, and does not send the text of another package's error to the server."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from medsilo.core.errors import DataError, MedsiloError, ProcessDied, Refused
from medsilo.federation.limits import Clock
from medsilo.federation.refusals import public_reason
from medsilo.flare.executor import ABORT_POLL, Busy, MedsiloExecutor, SiteEvents
from medsilo.flare.site_settings import settings_of_site
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.plan import Plan, parse_plan
from medsilo.runs import event_reading
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo_server.flare.controller import MedsiloController
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.unit.site.test_approvals import make_kit


class Abort(Signal):
    def __init__(self, after: float) -> None:
        super().__init__()
        self.when = time.monotonic() + after

    @property
    def triggered(self) -> bool:  # type: ignore[override]
        return time.monotonic() > self.when


@pytest.mark.slow
def test_training_that_stands_still_is_given_up_and_slow_training_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses the processor counts as busy, and a stopped process counts as stalled."""
    monkeypatch.setattr("medsilo.flare.executor.LOOK", 0.2)
    monkeypatch.setattr("medsilo.flare.executor.STOOD_STILL", 1.0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            busy, started = Busy(), time.monotonic()
            while time.monotonic() - started < 2.5:
                busy.check()
                time.sleep(0.05)
            spinning.send_signal(signal.SIGSTOP)
            with pytest.raises(ProcessDied, match="stalled"):
                while time.monotonic() - started < 10:
                    busy.check()
                    time.sleep(0.05)
        finally:
            spinning.kill()


def test_an_abort_is_honoured_within_a_second_of_a_long_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ABORT_POLL <= 0.5
    executor, over = MedsiloExecutor(), threading.Event()
    slow = SimpleNamespace(answer=lambda message, stop: over.wait(60))
    monkeypatch.setattr(executor, "_begin", lambda message, fl_ctx, stop: (slow, Clock()))
    started = time.monotonic()
    reply = executor.execute("medsilo", to_shareable(StudyMessage()), FLContext(), Abort(after=0.2))
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED
    assert time.monotonic() - started < 30
    over.set()


def test_work_that_nobody_waits_for_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A site ends its training after participation.timeout, because the server no longer waits for the answer."""
    executor, over = MedsiloExecutor(), threading.Event()
    slow = SimpleNamespace(answer=lambda message, stop: over.wait(60))
    monkeypatch.setattr(executor, "_begin", lambda message, fl_ctx, stop: (slow, Clock()))
    monkeypatch.setattr(executor, "_write_private", lambda error, fl_ctx: None)
    with pytest.raises(Refused, match=r"took longer than participation\.timeout"):
        to_parcel(
            executor.execute("medsilo", to_shareable(StudyMessage(facts={"timeout": 0.5})), FLContext(), Signal())
        )
    over.set()


def test_own_words_leave_the_site_and_those_of_others_do_not() -> None:
    assert public_reason(DataError("the mask is empty", private="/data/MUELLER.nii")) == "the mask is empty"
    assert public_reason(ModuleNotFoundError("No module named 'x'", name="x")).startswith("the Python package 'x'")
    for error in (OSError(2, "No such file", "/data/MUELLER.nii"), KeyError("MUELLER"), RuntimeError("MUELLER")):
        reason = public_reason(error)
        assert "MUELLER" not in reason
        assert reason.startswith(type(error).__name__)


def test_an_error_names_the_place_in_our_code() -> None:
    from medsilo.learning.loop import batches

    try:
        next(batches(None, 1, None))  # type: ignore[arg-type]
    except TypeError as error:
        assert "learning/loop.py:" in public_reason(error)


# ---------------------------------------------------------------------------------------------------- who takes part
NAMELESS = ["participation.sites=[]", "participation.minimum=2"]


def at_site(folder: Path, plan: Plan, site: str = "site-1") -> FLContext:
    for place in ("startup", "local"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    workspace = Workspace(str(folder), site_name=site)
    config = Path(workspace.get_app_config_dir("job"))
    config.mkdir(parents=True, exist_ok=True)
    (config / "plan.yaml").write_text(plan.to_yaml())
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
    context.set_prop(ReservedKey.RUN_NUM, "job")
    context.set_prop(ReservedKey.IDENTITY_NAME, site)
    return context


def test_a_site_completes_a_plan_without_names_by_who_takes_part(tmp_path: Path) -> None:
    plan, four = make_plan("fedsm", *NAMELESS), [f"site-{number}" for number in (1, 2, 3, 4)]
    context = at_site(tmp_path, plan)
    (tmp_path / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\npublic_data: true\n")

    def join(agreed: Plan, sites: list[str]) -> StudyMessage:
        told = {"task": "join", "round": 0, "study": "s", "plan": agreed.hash, "sites": sites, "packages": plan.code}
        return to_parcel(
            MedsiloExecutor().execute("medsilo", to_shareable(StudyMessage(facts=told)), context, Signal())
        )

    assert join(plan.among(four), four).facts["task"] == "join"
    with pytest.raises(Refused, match="plan at this site differs"):
        join(plan.among(four), four[:3])
    with pytest.raises(Refused, match="lacks this site"):
        join(plan.among(four[1:]), four[1:])


def test_a_rejection_is_evidence_in_the_kits_own_log(tmp_path: Path) -> None:
    """The site's log records for each rejection the requester, the study, the job and the hospital's reason."""
    plan, kit = make_plan("fedavg"), tmp_path / SITES[0]
    make_kit(kit, SITES[0])
    context = at_site(kit, plan, SITES[0])
    Path(context.get_prop(FLContextKey.WORKSPACE_OBJECT).get_job_meta_path("job")).write_text(
        '{"submitter_name": "lead@clinic.org"}'
    )
    own = MedsiloExecutor()
    own.events = SiteEvents.of(context, "client")
    told = {"task": "join", "round": 0, "study": "lungs", "plan": plan.hash, "sites": SITES, "packages": plan.code}
    with pytest.raises(Refused, match="has not approved.* --kit KIT$"):
        to_parcel(own.execute("medsilo", to_shareable(StudyMessage(facts=told)), context, Signal()))
    [line] = event_reading.read(kit)
    assert line.split("\t")[1:6] == ["WARNING", "refused", "-", "lungs", "job"]
    assert all(words in line for words in (plan.hash, "of lead@clinic.org", "has not approved", f"--kit {kit}"))


def test_a_study_goes_on_with_those_who_were_there_when_it_began(tmp_path: Path) -> None:
    plan, began = make_plan("fedsm", *NAMELESS), ["a", "b", "c"]
    record = Record(tmp_path / "run")
    record.begin(plan.among(began))
    assert MedsiloController._among(plan, None, ["a", "x"]).participation.sites == ("a", "x")
    assert MedsiloController._among(plan, record, ["a", "x"]) == plan.among(began)
    # with too few sites, the plan stays unchanged, and the coordinator reports the missing sites
    assert MedsiloController._among(plan, None, ["a"]) is plan


def test_a_kit_without_settings_runs_nobodys_data_only(tmp_path: Path) -> None:
    """Without a settings file, as in NVFlare's POC mode, a site accepts only plans with synthetic data."""
    folder = tmp_path / "site-1"
    make_kit(folder, "site-1")
    (folder / "local/medsilo.yaml").unlink()
    assert settings_of_site(at_site(folder, make_plan("fedavg", *NAMELESS))) == SiteSettings()
    images = {"name": "image-folder", "kind": "classification", "labels": ["x", "y"], "size": [64, 64]}
    real = make_plan().resolved() | {"task": images, "network": None}
    with pytest.raises(MedsiloError, match=r"medsilo\.yaml is missing"):
        settings_of_site(at_site(folder, parse_plan(real)))
    (folder / "local/medsilo.yaml").write_text("approval: required\ndevice: cpu\n")
    context = at_site(folder, make_plan("fedavg", *NAMELESS))
    settings_of_site(context)
    (folder / "local/medsilo.yaml").unlink()
    with pytest.raises(Refused, match=r"medsilo\.yaml \(missing\) changed"):
        settings_of_site(context)
    context = at_site(folder, make_plan("fedavg", *NAMELESS))
    (folder / "local/medsilo.yaml").write_text("approval: required\ndata: {folder: /x, columns: {secret: [a, b]}}\n")
    with pytest.raises(MedsiloError, match=r"medsilo\.yaml can't be used") as refused:
        settings_of_site(context)
    assert "secret" not in str(refused.value) and "secret" in refused.value.private
