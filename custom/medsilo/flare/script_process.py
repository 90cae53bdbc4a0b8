"""Guard the process that receives NVFlare's messages for a user's training script.

The module limits the size of received messages and the set of logged numbers, and logs why the script ended. With the
option launch_external_process, the guarded process is the script's process; otherwise it is the site's process.
"""

import logging
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType, LogWriterName, TrackConst
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.fuel.f3.cellnet.cell import Cell

from medsilo.core.errors import MedsiloError
from medsilo.core.files import free_disk
from medsilo.core.text import plain
from medsilo.exchange.bounds import Bounds, request_bounds
from medsilo.federation.permission import Permission
from medsilo.federation.script_bits import MOST_LOGGED, STEP, logged_names
from medsilo.federation.site_context import SiteContext
from medsilo.flare.code_gate import place_of_job
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import let_tensors_travel
from medsilo.flare.workspace import file_of_job, kit_in, kit_of
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from nvflare_reliability.chunking import RetryingRequests
from nvflare_reliability.message_limits import Gate
from nvflare_reliability.patches import audit_without_fail, hear_of_killed_script

NUMBERS = {  # the kinds of logged values that consist of numbers
    *(AnalyticsDataType.SCALAR, AnalyticsDataType.SCALARS, AnalyticsDataType.METRIC, AnalyticsDataType.METRICS)
}
TRACKERS = (*LogWriterName, *(own.value for own in LogWriterName))
TOO_MANY = f"no more of what the script logs leaves in this round: {MOST_LOGGED:,} numbers have; log fewer"
MOST_SILENT = 50
LOG = logging.getLogger(__name__)
ENDED = (
    "the training script ended within a round; where no line above says why, let it loop while is_running(), and call "
    "send() in each round"
)
KILLED = "the training script's process was killed, so this one ends, too; both are started again"
FULL = "the training script ended on a full disk, so this process ends; both are started again once there is room"
LEAST_ROOM = 1 << 20  # the disk counts as full if it can't hold two models and this number of bytes
WAITS = "the disk is full, so this process waits until the disk has room for two models before it starts the script"
LONGEST = 600.0  # seconds for which a process waits for room on the disk
UNANSWERED = (ReturnCode.EXECUTION_EXCEPTION, ReturnCode.TASK_ABORTED)  # NVFlare's codes if a script sent no answer
# objects that limit the messages of this process; the list is empty until `guard` is called
_gates: list[Gate] = []


class ScriptProcess(ConvertToFedEvent):
    """Sends a script's logged numbers to the server's tracker, if the plan permits these numbers.

    A recipe adds this component to the configuration of each site in the recipe's job.
    """

    def __init__(self) -> None:
        super().__init__([ANALYTIC_EVENT_TYPE])
        self._names: set[str] | None = None  # names of the logged numbers that the site may send
        self._silent: set[str] = set()  # names of rejected numbers about which a warning was already logged
        self._logged = 0  # number of logged numbers that were sent in this round
        self._told = False  # whether the end of the script was reported
        self._killed = 0  # the signal that killed the script's process, or 0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before the script starts, limit the script's messages; while it runs, filter its logged numbers; when it
        ends, report the end.
        """
        if event_type == EventType.ABOUT_TO_START_RUN:
            threading.excepthook = write_error
            # NVFlare prints a script's lines by its loggers. If a log file can't be written, logging would print the
            # error, which NVFlare would log again, until the recursion ended the script.
            logging.raiseExceptions = False
            audit_without_fail()
            hear_of_killed_script(partial(setattr, self, "_killed"))
            guard(fl_ctx.get_engine().get_cell(), written := file_of_job(fl_ctx, paths.PLAN))
            if kit_of(fl_ctx):
                await_room(written)
        elif event_type == ANALYTIC_EVENT_TYPE:
            told = self._named(from_shareable(fl_ctx.get_prop(FLContextKey.EVENT_DATA)), fl_ctx)
            if told is None:
                return
            fl_ctx.set_prop(FLContextKey.EVENT_DATA, told.to_shareable(), private=True, sticky=False)
        elif event_type == EventType.BEFORE_TASK_EXECUTION:
            self._logged = 0
        elif event_type == EventType.AFTER_TASK_EXECUTION and not self._told:
            answer: Shareable = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if answer.get_return_code() in UNANSWERED:
                self._end_with_script(fl_ctx)
            self._told = answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
            if self._told:
                LOG.error("SystemExit: %s", ENDED)
        # NVFlare fires FATAL_SYSTEM_ERROR if the script ended without sending its answer
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._end_with_script(fl_ctx)
        super().handle_event(event_type, fl_ctx)

    def _end_with_script(self, fl_ctx: FLContext) -> None:
        """If the script's process was killed, or ended on a full disk, kill the process that called this function, so
        that the server restarts both.

        In a simulation, this function kills no process.
        """
        if not kit_of(fl_ctx):
            return
        why = f"{KILLED} (signal {self._killed})" if self._killed else ""
        if not has_room(file_of_job(fl_ctx, paths.PLAN)):
            why = FULL
        if why:
            LOG.error(why)
            os.kill(os.getpid(), signal.SIGKILL)

    def _named(self, logged: DXO, fl_ctx: FLContext) -> DXO | None:
        """Return the logged numbers that the plan permits a site to send, or None if the plan permits none of the
        numbers.
        """
        if self._names is None:
            self._names = logged_names(load_plan(file_of_job(fl_ctx, paths.PLAN)))
        # MONAI's tag is an enum, and the server can't decode an enum
        tag = str.__str__(logged.data[TrackConst.TRACK_KEY])
        value, kind = logged.data[TrackConst.TRACK_VALUE], logged.get_meta_prop(TrackConst.DATA_TYPE_KEY)
        several = value if isinstance(value, dict) else {tag: value}
        numbers = {name: float(own) for name, own in several.items() if isinstance(own, int | float)}
        told = {name: number for name, number in numbers.items() if name in self._names}
        if tag not in self._names or not told or kind not in NUMBERS:
            if tag not in self._silent and len(self._silent) < MOST_SILENT:
                self._silent.add(tag)
                LOG.warning("%s stays here: the recipe's logs= does not name it, or it is no number", plain(tag, 60))
            return None
        self._logged += len(told)
        if self._logged > MOST_LOGGED:
            if TOO_MANY not in self._silent:
                self._silent.add(TOO_MANY)
                LOG.warning(TOO_MANY)
            return None
        data = {TrackConst.TRACK_KEY: tag, TrackConst.TRACK_VALUE: told if isinstance(value, dict) else told[tag]}
        step = logged.data.get(TrackConst.GLOBAL_STEP_KEY)
        if isinstance(step, int) and 0 <= step < 1 << STEP:
            data[TrackConst.GLOBAL_STEP_KEY] = step
        meta = {TrackConst.DATA_TYPE_KEY: kind}
        if (tracker := logged.get_meta_prop(TrackConst.TRACKER_KEY)) in TRACKERS:
            meta[TrackConst.TRACKER_KEY] = tracker
        return DXO(DataKind.ANALYTIC, data, meta)


def hospital_of(app: Path, site: str, plan: Plan) -> SiteContext | None:
    """Return the site's context for a script's job, or None in a simulation, which has no startup kit.

    Raises Refused if the hospital approves plans, but has not approved the plan together with the job's code.
    """
    kit = app.parents[1]
    if kit_in(kit / "startup") is None:
        return None
    place = place_of_job(app, kit, plan, site, SiteSettings.read(kit / "local"), has_run=True)
    Permission(place).check()
    return place


def guard(cell: Cell, plan: Path) -> None:
    """Make this process reject messages that are larger than the plan allows, and make the process repeat lost
    requests.

    This function ignores invalid plans, because the site's answer to the request "join" reports what is invalid.
    """
    let_tensors_travel(plainly=True)
    gate = Gate(cell, Bounds())
    gate.guard_site()
    _gates[:] = [gate]
    with suppress(Exception):
        own = load_plan(plan)
        take_next(own)
        RetryingRequests(cell, timeouts_of(own), sees_fetching=False)


def has_room(plan: Path) -> bool:
    """True if the job's disk has space for two copies of the weight files that the plan's network needs."""
    return free_disk(plan) >= LEAST_ROOM + 2 * sum(load_plan(plan).network.files.values())


def await_room(plan: Path) -> None:
    """Wait until the disk has enough free space. Without waiting, a script on a full disk would start and die every few
    seconds.
    """
    deadline = time.monotonic() + LONGEST
    with suppress(MedsiloError):  # the site's answer to the request "join" reports what is wrong with a plan
        if not has_room(plan):
            LOG.error(WAITS)
        while not has_room(plan) and time.monotonic() < deadline:
            time.sleep(1.0)


def take_next(plan: Plan) -> None:
    """Set the count of received bytes to 0 before the next task."""
    for gate in _gates:
        gate.taken.clear()
        gate.allow(request_bounds(plan))


def write_error(ended: threading.ExceptHookArgs) -> None:
    """Log errors that end a thread and that NVFlare does not log: failed imports, and messages of sys.exit."""
    error = ended.exc_value
    if isinstance(error, ImportError):
        LOG.error("%s", "".join(traceback.format_exception(error)))
    elif isinstance(error, SystemExit):
        if error.code not in (None, 0):
            LOG.error("SystemExit: the training script ended itself: %s", error.code)
    else:
        threading.__excepthook__(ended)
