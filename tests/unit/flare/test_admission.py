"""The server rejects a job for unknown hospitals, and `status` names the hospitals for which a job waits."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from medsilo.core.errors import MedsiloError
from medsilo.runs import event_reading, paths
from medsilo.runs.events import SILENCE
from medsilo_lab.consortium import lead
from medsilo_server.flare import admission
from medsilo_server.flare.admission import KnownHospitals
from tests.unit.medsilo_lab.test_provision import kits_of


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("admission")
    kits_of(folder)
    return folder / "kits/localhost"


def refused(kit: Path, monkeypatch: pytest.MonkeyPatch, *deployments: Any) -> str | None:
    monkeypatch.setattr(admission, "kit_folder", lambda fl_ctx: kit)
    monkeypatch.setattr(admission, "settings_folder", lambda fl_ctx: kit / "local")
    newcomer: Any = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name="newcomer")])
    said = FLContext()
    monkeypatch.setattr(said, "get_engine", lambda: newcomer)
    meta = {"deploy_map": {"app": list(deployments)}, "submitter_name": "lead@clinic.org"}
    said.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=False)
    KnownHospitals().handle_event(EventType.SUBMIT_JOB, said)
    return said.get_prop(FLContextKey.JOB_BLOCK_REASON)


def test_the_server_takes_jobs_for_hospitals_that_exist(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = json.loads((kit / "local/resources.json").read_text())["components"]
    assert "medsilo_server.flare.admission.KnownHospitals" in [component.get("path") for component in own]
    assert refused(kit, monkeypatch, "server", "north", "st-anna", "newcomer") is None
    assert refused(kit, monkeypatch, "@ALL") is None
    assert refused(kit, monkeypatch, {"sites": ["server", "north"]}, {"targets": ["elsewhere"]})
    told = refused(kit, monkeypatch, "server", "north", "nowhere")
    assert told and "'nowhere'" in told and "known: newcomer, north, st-anna" in told
    lines = [line.split("\t") for line in event_reading.read(kit)]
    assert [(line[2], "lead@clinic.org" in line[6]) for line in lines] == [("refused", True)] * 2


def test_status_says_for_whom_a_job_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"job_id": "job-1", "status": "SUBMITTED", "deploy_map": {"app": ["server", "north", "nowhere"]}}
    job["schedule_history"] = ["12:00:00: connected sites (1) < min_sites (2)"]
    listed = [{key: job[key] for key in ("job_id", "status")}, {"job_id": "job-2", "status": "FINISHED:COMPLETED"}]
    client = SimpleNamespace(name="north", last_connect_time=0.0)
    session = SimpleNamespace(
        get_system_info=lambda: SimpleNamespace(client_info=[client], server_info=SimpleNamespace(start_time=0.0)),
        list_jobs=lambda **_: listed,
        get_job_meta=lambda job_id: job,
        get_client_job_status=lambda names: [],
    )

    @contextmanager
    def connected(kit: Path, answer: float | None = None) -> Any:
        yield session

    monkeypatch.setattr(lead, "connected", connected)
    for found in (lead.status(Path("kit")), lead.status(Path("kit"), "job-1")):
        text = "\n".join(found.lines())
        assert "not connected: nowhere" in text and "min_sites" in text and text.count("not connected: nowhere") == 1


def test_a_hospital_whose_heartbeats_end_is_not_connected() -> None:
    """A hospital whose last heartbeat was long ago counts as not connected, even if NVFlare's server lists the
    hospital.

    The server's clock measures the age of a heartbeat, because the lead's clock may be wrong.
    """
    clients = [SimpleNamespace(name=name, last_connect_time=at) for name, at in (("a", 9e9), ("b", 9e9 - SILENCE + 1))]
    clients.append(SimpleNamespace(name="c", last_connect_time=9e9 - SILENCE))
    assert lead.heard_lately(SimpleNamespace(client_info=clients)) == {"a", "b"}  # type: ignore[arg-type]
    assert lead.heard_lately(SimpleNamespace(client_info=[])) == set()  # type: ignore[arg-type]


def test_a_run_whose_list_of_jobs_is_empty_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / paths.JOBS).touch()
    asked = list[str]()

    @contextmanager
    def connected(kit: Path, answer: float | None = None) -> Any:
        yield SimpleNamespace(get_job_meta=lambda job: asked.append(job) or {"status": lead.COMPLETED})

    monkeypatch.setattr(lead, "connected", connected)
    with pytest.raises(MedsiloError, match="nothing to resume"):
        lead.resume(str(tmp_path), Path("kit"), print)
    assert asked == [str(tmp_path)]
