"""The process in which a user's own script trains: its gate towards the server, what it logs, and why it ended.

NVFlare receives in it: the site's own process or, with launch_external_process, one of the script's.
"""

import logging
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, TrackConst
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.fuel.f3.cellnet.cell import Cell

from medsilo.federation.bounds import Bounds, request_bounds
from medsilo.flare.wire import let_tensors_travel
from medsilo.flare.workspace import file_of_job
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from nvflare_reliability.message_limits import Gate

LOG = logging.getLogger(__name__)
ENDED = (
    "the training script ended within a round; where no line above says why, let it loop while is_running(), and call "
    "send() in each round"
)
_gates: list[Gate] = []  # the one of this process


class ScriptProcess(ConvertToFedEvent):
    """A part of a recipe's job at each site. What the script logs goes to the server's tracker, as in NVFlare."""

    def __init__(self) -> None:
        super().__init__([ANALYTIC_EVENT_TYPE])
        self._told = False  # that the script ended: every later round fails, too

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Guard and listen, before the script starts and the first task is asked for."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            threading.excepthook = write_error
            guard(fl_ctx.get_engine().get_cell(), file_of_job(fl_ctx, paths.PLAN))
        elif event_type == ANALYTIC_EVENT_TYPE:  # MONAI's names are an enum, which the server does not know
            logged = from_shareable(fl_ctx.get_prop(FLContextKey.EVENT_DATA)).data
            logged[TrackConst.TRACK_KEY] = str.__str__(logged[TrackConst.TRACK_KEY])
        elif event_type == EventType.AFTER_TASK_EXECUTION and not self._told:
            answer: Shareable = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            self._told = answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
            if self._told:
                LOG.error("SystemExit: %s", ENDED)
        super().handle_event(event_type, fl_ctx)


def guard(cell: Cell, plan: Path) -> None:
    """Take no more from the server than the plan needs. What is wrong with a plan is said on joining."""
    let_tensors_travel(plainly=True)
    gate = Gate(cell, Bounds())
    gate.guard_site()
    _gates[:] = [gate]
    with suppress(Exception):
        take_next(load_plan(plan))


def take_next(plan: Plan) -> None:
    """Count the next task from zero: all of the one before has come. plan: for the sites that the server names."""
    for gate in _gates:
        gate.taken.clear()
        gate.allow(request_bounds(plan))


def write_error(ended: threading.ExceptHookArgs) -> None:
    """Write what ended a thread where NVFlare does not: an import that fails, and what sys.exit says."""
    error = ended.exc_value
    if isinstance(error, ImportError):
        LOG.error("%s", "".join(traceback.format_exception(error)))
    elif isinstance(error, SystemExit):
        if error.code not in (None, 0):
            LOG.error("SystemExit: the training script ended itself: %s", error.code)
    else:
        threading.__excepthook__(ended)
