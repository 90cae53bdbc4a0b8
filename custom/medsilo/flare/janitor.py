"""Clean up what NVFlare's server forgets when it is started anew: a component of its `local/resources.json`."""

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
