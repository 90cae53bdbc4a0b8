"""The one executor of all methods: gives the participant its place in NVFlare's client."""

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from medsilo.algorithms.base import Parcel
from medsilo.errors import Aborted, MedsiloError, Refused
from medsilo.federation.participant import Participant
from medsilo.files import is_safe_name
from medsilo.flare.wire import let_tensors_travel, refusal, to_parcel, to_shareable
from medsilo.flare.workspace import output_folder, plan_of_job, settings_of_site
from medsilo.package import ROOT

ABORT_POLL = 0.2  # seconds until an abort is seen, however long a batch takes


class MedsiloExecutor(Executor):
    """Answers the coordinator's parcels; every failure becomes a refusal whose text is fit to leave the site."""

    participant_class: type[Participant] = Participant

    def __init__(self) -> None:
        super().__init__()
        self.participant: Participant | None = None
        self.folder: Path | None = None  # of this site in the study
        self.worker = ThreadPoolExecutor(1)  # one piece of work at a time, while this thread watches for aborts

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            let_tensors_travel()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        def stop() -> None:
            if abort_signal.triggered:
                raise Aborted("the run was aborted")

        def work() -> Shareable:
            parcel = to_parcel(shareable)
            return to_shareable(self._participant(parcel, fl_ctx).answer(parcel, stop))

        try:
            return _await(self.worker.submit(work), stop)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            reason = public_reason(error)
            self.log_error(fl_ctx, reason)
            self._write_private(error, fl_ctx)
            return refusal(reason)

    def _participant(self, parcel: Parcel, fl_ctx: FLContext) -> Participant:
        """This site in the parcel's study; made once per process."""
        if self.participant is None:
            study, site = parcel.facts["study"], fl_ctx.get_identity_name()
            plan, settings = plan_of_job(fl_ctx), settings_of_site(fl_ctx)
            if not is_safe_name(study):
                raise Refused("the study's name has odd characters")
            self.folder = output_folder(fl_ctx, settings) / study / "sites" / site
            if plan.hash != parcel.facts["plan"]:
                raise Refused("the job's plan at this site differs from the server's; submit the job again")
            self.participant = self.participant_class(plan, site, parcel.facts["sites"], settings, self.folder)
        return self.participant

    def _write_private(self, error: Exception, fl_ctx: FLContext) -> None:
        """The whole story, which may name files and patients, into a file of this site: NVFlare's logs may leave it."""
        try:
            folder = self.folder or output_folder(fl_ctx, settings_of_site(fl_ctx))
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "errors.log").open("a") as file:
                file.write("".join(traceback.format_exception(error)) + getattr(error, "private", "") + "\n")
        except Exception as second:
            self.log_error(fl_ctx, f"the error's details could not be kept: {type(second).__name__}")


def _await(work: Future, stop: Callable[[], None]) -> Shareable:
    """Wait for the work, or leave it at once when told to stop; it ends by itself before its next batch."""
    while True:
        try:
            return work.result(timeout=ABORT_POLL)
        except NotYet:
            if work.done():  # the work itself raised a TimeoutError
                raise
            stop()


def public_reason(error: Exception) -> str:
    """What may leave the site about an error: our own words, or the kind of error and the place in our code.

    Messages of other libraries name files, and files are named after patients.
    """
    if isinstance(error, MedsiloError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name!r} is missing at this site; install it"
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
    place = f" in {Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}; errors.log in the site's own results has the details"
