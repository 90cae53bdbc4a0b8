"""Clean up behind NVFlare: components of the server's and of hospitals' `local/resources.json`."""

import gc

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext


class ForgottenJobs(FLComponent):
    """Ends, in the server's books, the jobs that ran when it died.

    NVFlare 2.9 leaves them RUNNING for ever, and such a job can be neither aborted, deleted nor downloaded.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:  # nothing can run yet
            fl_ctx.get_engine().job_runner.update_abnormal_finished_jobs([], fl_ctx)


class LostConnections(FLComponent):
    """Closes, at a hospital, the sockets of connections that were lost."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.JOB_COMPLETED:
            # NVFlare 2.9 closes none that the server or a line has ended, and its SocketConnection is in a circle with
            # what reads from it: so each keeps a handle until Python looks for such circles.
            gc.collect()
