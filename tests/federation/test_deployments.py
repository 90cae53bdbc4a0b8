"""Deploy a job through NVFlare's job runner and real cells to a hospital that needs time to check the job's code."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import CellChannel
from nvflare.private.fed.server.admin import FedAdminServer
from nvflare.private.fed.server.job_runner import JobRunner

from nvflare_reliability import kit_patches
from tests.federation.test_gate import Cells
from tests.secure.consortium import wait_until
from tests.secure.relay import Line

HOSPITAL, JOB = "hospital-a", "job-1"
CHECKS = 12.0  # seconds in which the hospital checks the job's code; NVFlare's limit is 10
REFUSAL = "this hospital has not approved plan 0123456789ab"


@pytest.fixture
def cells() -> Iterator[Cells]:
    cells = Cells(Line())
    yield cells
    cells.stop()


class Server:
    def __init__(self, cells: Cells, folder: Path) -> None:
        for kept in ("startup", "local"):
            (folder / kept).mkdir()
        self.client = Client(HOSPITAL, "token")
        engine = SimpleNamespace(new_context=lambda: nullcontext(self.context()), fire_event=lambda *event: None)
        self.admin = FedAdminServer(cells.server, engine, [], str(folder), str(folder), enable_hci=False)
        self.admin.client_heartbeat("token", HOSPITAL, HOSPITAL)
        engine.server = SimpleNamespace(admin_server=self.admin)
        engine.get_clients = lambda: [self.client]
        engine.validate_targets = lambda names: ([self.client], [])
        jobs = SimpleNamespace(get_app=lambda *given: b"the job's code")
        engine.get_component = {SystemComponents.JOB_MANAGER: jobs}.get
        self.engine, self.runner = engine, JobRunner(str(folder))

    def context(self) -> FLContext:
        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, self.engine, private=True, sticky=False)
        return context

    def deploy(self) -> list[str]:
        """Deploy a job at the hospital, and return the reasons for a failed start, worded as the lead reads them."""
        context, job = self.context(), Job(JOB, {}, {"app": [HOSPITAL]}, {})
        with pytest.raises(RuntimeError, match="deploy failure"):
            self.runner._deploy_job(job, {HOSPITAL: None}, context)
        return list(context.get_prop(FLContextKey.JOB_DEPLOY_DETAIL))


@pytest.mark.slow
def test_a_refusal_after_twelve_seconds_reaches_the_lead(cells: Cells, tmp_path: Path) -> None:
    """Without medsilo's patch, NVFlare waits only ten seconds for a hospital's reply to a deployment. medsilo's patch
    changes the time limit of deployments only.

    The hospital replies only to the second deployment.
    """
    server, came = Server(cells, tmp_path), list[str]()
    ended = threading.Event()

    def check(request: Message) -> Message:
        came.append(request.payload.topic)
        ended.wait(CHECKS if len(came) == 2 else 600)
        return new_cell_message({}, error_reply(REFUSAL))

    cells.site.register_request_cb(channel=CellChannel.CLIENT_MAIN, topic="*", cb=check)
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(server.deploy)
        wait_until(lambda: len(came) == 1, 30, "the first deployment")
        kit_patches.wait_for_deployment(cells.server)
        patiently = pool.submit(server.deploy)
        assert alone.result()[0] == f"{HOSPITAL}: no reply (deployment timeout)"
        assert patiently.result()[0] == f"{HOSPITAL}: {REFUSAL}"
    began, status = time.monotonic(), AdminMessage("status", "")
    assert server.admin.send_requests_and_get_reply_dict({"token": status}, timeout_secs=1.0) == {"token": None}
    assert time.monotonic() - began < kit_patches.DEPLOYING
    ended.set()
