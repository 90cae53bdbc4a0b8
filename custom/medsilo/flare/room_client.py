"""Provide NVFlare's Client API to a script in an airlock, an isolated process whose only connection is a socket."""

import json
import logging
import os
from socket import socket
from threading import RLock
from typing import Any

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.client.api_spec import CLIENT_API_KEY
from nvflare.client.in_process.api import InProcessClientAPI
from nvflare.fuel.data_event.data_bus import DataBus

from medsilo.airlock.kept import KeptFiles
from medsilo.airlock.room import INSIDE, OUTPUT
from medsilo.airlock.wire import MAY_KEEP, End
from medsilo.core.errors import MedsiloError, Refused
from medsilo.flare.script_wire import flat
from medsilo.flare.wire import LACKS, TRAIN, unflat
from medsilo.runs import paths
from medsilo.runs.messages import StudyMessage

LOG = logging.getLogger(__name__)


def is_inside() -> bool:
    """True if this process runs in an airlock."""
    return INSIDE in os.environ


def told() -> dict[str, Any]:
    """Return the facts that the site's process passed to the sandbox: the names of the site, the study and the job, and
    a seed.
    """
    return json.loads(os.environ[INSIDE])


def enter(rank: str = "0") -> None:
    """Replace NVFlare's Client API in this process by `RoomAPI`.

    Args:
        rank: The rank of this process in distributed training. Only rank 0 uses the socket, which is the process's
            standard input.
    """
    bus = DataBus()
    if isinstance(bus.get_data(CLIENT_API_KEY), RoomAPI):
        return
    if rank != "0":
        bus.put_data(CLIENT_API_KEY, RoomAPI(None, rank))
        return
    exit_ = socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    bus.put_data(CLIENT_API_KEY, RoomAPI(End(exit_)))


class RoomAPI(InProcessClientAPI):
    """NVFlare's Client API for a script in an isolated process."""

    def __init__(self, end: End | None, rank: str = "0") -> None:
        """Create the Client API for one process of the script.

        Args:
            end: The process's end of the socket. None: the rank is not 0, so the process neither receives nor sends.
        """
        self.lock, self.rank = RLock(), rank
        self.model: FLModel | None = None
        self.ended = False
        own = told()
        self.site, self.job = own["site"], own["job"]
        self.folder = paths.site_folder(OUTPUT / own["study"], self.site)
        if end:
            self.end, self.kept = end, KeptFiles(end, self.folder, MAY_KEEP)

    def init(self, rank: str | None = None, config: dict[str, Any] | None = None) -> None:
        """Do nothing, because `enter` has initialised the API."""

    def is_running(self) -> bool:
        """Wait for the next request, and return True if a request has arrived, or False if the study is over."""
        with self.lock:
            if self.ended or self.rank != "0":
                return False
            if self.model is None:
                try:
                    head = self.end.receive()
                    self.ended = head.kind != "ask"
                    groups = {} if self.ended else self.end.tensors(head.tensors)
                except (EOFError, OSError):
                    self.ended = True
                if not self.ended:
                    tensors, meta = flat(StudyMessage(groups, head.facts))
                    self.model = FLModel(params=tensors, params_type=ParamsType.FULL, meta=meta)
            return not self.ended

    def receive(self, timeout: float | None = None) -> FLModel | None:
        if not self.is_running():
            return None
        return self.model

    def send(self, model: FLModel, clear_cache: bool = True) -> None:
        with self.lock:
            self.model = None
            if LACKS in (model.meta or {}):
                self.end.send("lacks")
                return
            try:
                answer = unflat(model.params or {}, model.meta or {})
            except Refused:
                raise MedsiloError("send: this script has not joined; call medsilo.client.join first") from None
            self.kept.hand_out()
            self.end.send("answer", answer.groups, facts=answer.facts)

    def log(self, key: str, value: Any, data_type: AnalyticsDataType, **more: Any) -> bool:
        """Send a logged number to the site's process; values that are not numbers are ignored."""
        if self.rank != "0":
            return False
        several = value if isinstance(value, dict) else {key: value}
        for name, own in several.items():
            if isinstance(own, int | float) and not isinstance(own, bool):
                with self.lock:
                    self.end.send("log", name=str(name)[:300], value=float(own))
        return True

    # ------------------------------------------------------------------ methods that send no message
    def system_info(self) -> dict[str, Any]:
        return {"identity": self.site, "site_name": self.site, "job_id": self.job}

    def get_config(self) -> dict[str, Any]:
        return {}

    def get_job_id(self) -> str:
        return self.job

    def get_site_name(self) -> str:
        return self.site

    def get_task_name(self) -> str:
        return TRAIN

    def is_train(self) -> bool:
        return True

    def is_evaluate(self) -> bool:
        return False

    def is_submit_model(self) -> bool:
        return False

    def clear(self) -> None:
        self.model = None

    def shutdown(self) -> None:
        self.ended = True
