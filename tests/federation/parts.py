"""Print the patches in nvflare_reliability that work with the installed NVFlare, and the patches that leave NVFlare
unchanged.

    python -m tests.federation.parts     # test_patches.py, with NVFlare as it is, and with its patches merged

The program applies each patch for which NVFlare's code is found, and checks the patch's effect.
"""

import gc
import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import nvflare
from nvflare.apis.controller_spec import Task
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager
from nvflare.fuel.f3.streaming.blob_streamer import BlobStream
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.defs import TrainingTopic

from nvflare_reliability import kit_patches, patches


def context(**engine: Any) -> Any:
    return SimpleNamespace(get_engine=lambda: SimpleNamespace(**engine))


def collects(use: Any) -> bool:
    seen = MagicMock(return_value=0)
    with patch.object(gc, "collect", seen):
        use()
    return seen.called


def of_audit() -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        auditor = AuditService.initialize(f"{folder}/audit.log")
        own = auditor.audit_file
        patches.audit_without_fail()
        loses, auditor.audit_file = auditor.audit_file is not own, own
        kit_patches.bound_audit()
        rolls = auditor.audit_file is not own
        AuditService.close()
    return {"audit_without_fail": loses, "RollingFile": rolls}


def of_server() -> dict[str, bool]:
    ended, own, of_agent = [], object(), object()
    server = SimpleNamespace(sign_auth_token=own, my_own_token_signature=None, my_own_auth_client_name="server")
    runner = SimpleNamespace(update_abnormal_finished_jobs=lambda *given: ended.append(given))
    kit_patches.sign_when_ready(context(server=server))
    kit_patches.end_forgotten_jobs(context(job_runner=runner))
    patches.deliver_once(task := Task("task", Shareable()))
    job = SimpleNamespace(command_agent=SimpleNamespace(cell=of_agent))
    cell = patches.cell_of_job(context(server=job, get_job_cell=lambda: own))
    return {
        "sign_when_ready": server.sign_auth_token is not own,
        "end_forgotten_jobs": bool(ended),
        "deliver_once": type(task.client_tasks) is not list,
        "cell_of_job": cell is of_agent,
    }


def of_cell() -> dict[str, bool]:
    cell, made = Cell("parts", "tcp://127.0.0.1:1", secure=False, credentials={}), list[int]()
    usual, send, bounded = cell.byte_streamer.chunk_size, cell.send_blob, list[int]()
    asked = list[float]()
    cell.broadcast_multi_requests = lambda targets, timeout, **_: asked.append(timeout)
    kit_patches.wait_for_deployment(cell)
    deployment = SimpleNamespace(message=Message({}, AdminMessage(TrainingTopic.DEPLOY, b"")))
    cell.broadcast_multi_requests({"hospital-a": deployment}, 10.0)
    TxTask.start_task_thread = lambda task, _: made.append(task.chunk_size)
    patches.hold_less(cell)
    cell.byte_streamer.send("c", "t", "x", {}, BlobStream(bytes(10), {}))
    patches.reply_once(cell, ("c", "t"))
    cell.set_max_blob_size = bounded.append
    patches.limit_blobs(cell, 1000)
    StatsPoolManager.pools.clear()
    return {
        "hold_less": made != [usual],
        "reply_once": cell.send_blob != send,
        "limit_blobs": not bounded,
        "wait_for_deployment": asked != [10.0],
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    works = {
        "close_lost_connections": collects(kit_patches.close_lost_connections),
        "GarbageBudget": collects(lambda: patches.GarbageBudget().sent(patches.MOST_LEFT)),
        **of_audit(),
        **of_server(),
        **of_cell(),
    }
    print(json.dumps({"nvflare": [str(Path(place)) for place in nvflare.__path__], "works": works}))


if __name__ == "__main__":
    main()
