"""The job that collects hospitals' fingerprints for nnU-Net's plans, on NVFlare."""

from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.federation.limits import Clock
from medsilo.flare.controller import MedsiloController
from medsilo.flare.executor import AnsweringSite, MedsiloExecutor
from medsilo.flare.jobs import CONFIG, job_files
from medsilo.flare.patience import Patience
from medsilo.flare.transport import FlareTransport
from medsilo.flare.workspace import file_of_job, output_folder, results_of_job, settings_of_site
from medsilo.nnunet.collecting import MeasuringSite, collect, fingerprint_bounds
from medsilo.runs import paths
from medsilo.runs.messages import Parcel
from medsilo.tasks.own.question import SegmentationQuestion, read_question

NAME = "nnunet-collect"
QUESTION = "question.yaml"
PATIENCE = Patience(silence=600.0)
CONTROLLER, EXECUTOR = f"{__name__}.CollectingController", f"{__name__}.CollectingExecutor"


class CollectingController(MedsiloController):
    """Asks all hospitals that are connected, and leaves what each measured for the lead."""

    def __init__(self, timeout: float = 86_400.0) -> None:
        """`timeout`: seconds that hospitals have to measure."""
        super().__init__()
        self.timeout = timeout

    def _lead(self, abort_signal: Signal, fl_ctx: FLContext) -> str:
        question = read_question(file_of_job(fl_ctx, QUESTION))
        sites = sorted(client.name for client in self._engine.get_clients())
        self.transport = FlareTransport(self, fl_ctx, abort_signal)
        if self.gate:
            self.gate.allow(fingerprint_bounds(question))
        folder = results_of_job(fl_ctx) / NAME
        for site, own in collect(question, self.transport, sites, self.timeout).items():
            write_json(folder / f"{site}.json", own.model_dump(mode="json"))
        return NAME


class CollectingExecutor(MedsiloExecutor):
    """The same at a hospital."""

    def _participant(self, parcel: Parcel, fl_ctx: FLContext, stop: Callable[[], None]) -> tuple[AnsweringSite, Clock]:
        settings, site = settings_of_site(fl_ctx), fl_ctx.get_identity_name()
        question = read_question(file_of_job(fl_ctx, QUESTION))
        folder = paths.site_folder(output_folder(fl_ctx, settings) / f"{NAME}-{fl_ctx.get_job_id()}", site)
        return MeasuringSite(question, site, settings, folder), Clock(folder, settings.limits)


def write_collecting_job(destination: Path, question: SegmentationQuestion, sites: int) -> None:
    """Write the job. sites: how many hospitals are to take part."""
    for path, content in job_files(NAME, sites, [], CONTROLLER, EXECUTOR, PATIENCE).items():
        write_json(destination / path, content)
    write_text(destination / CONFIG / QUESTION, question.in_yaml())


def read_collected(workspace: Path, destination: Path) -> list[Path]:
    """Copy the files that hospitals sent from what a job left; returns them."""
    found = sorted((workspace / "medsilo" / NAME).glob("*.json"))
    if not found:
        raise MedsiloError("the job left no fingerprints; its log on the server says why")
    for path in found:
        write_text(destination / path.name, path.read_text("utf-8"))
    return [destination / path.name for path in found]
