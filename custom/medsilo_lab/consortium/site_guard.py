"""Reject all jobs at a hospital where medsilo is not installed. `medsilo kits make` copies this file into the folder
local/custom of a hospital's kit, where NVFlare loads it.

If medsilo is not installed, the site stays connected, but rejects every job and names the reason.
"""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

try:
    from medsilo.flare.kit_events import HospitalEvents as Guard
except Exception as error:
    REASON = f"medsilo can't be imported here ({type(error).__name__}); install it for this site's Python"

    class Guard(FLComponent):  # type: ignore[no-redef]
        def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
            if event_type == EventType.SYSTEM_START:
                self.log_critical(fl_ctx, f"no job will run: {REASON}")
            elif event_type == EventType.BEFORE_CHECK_RESOURCE_MANAGER:
                self.log_error(fl_ctx, f"job refused: {REASON}")
                fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, REASON, private=True, sticky=False)
