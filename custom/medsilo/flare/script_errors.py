"""Why a training script in NVFlare's process ended, in the site's log.

NVFlare writes the traceback of most errors there; not that of an import that fails, nor what sys.exit says.
"""

import logging
import threading
import traceback

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

LOG = logging.getLogger(__name__)


class ScriptErrors(FLComponent):
    """A part of a recipe's job at each site."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen, before the script starts."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            threading.excepthook = write_error


def write_error(ended: threading.ExceptHookArgs) -> None:
    """Write what ended a thread, where NVFlare does not."""
    error = ended.exc_value
    if isinstance(error, ImportError):
        LOG.error("%s", "".join(traceback.format_exception(error)))
    elif isinstance(error, SystemExit):
        if error.code not in (None, 0):
            LOG.error("SystemExit: the training script ended itself: %s", error.code)
    else:
        threading.__excepthook__(ended)
