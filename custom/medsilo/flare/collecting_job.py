"""The job that collects hospitals' fingerprints for nnU-Net's plans, on NVFlare."""

from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.federation.bounds import Bounds
from medsilo.federation.limits import Clock
from medsilo.federation.sealed.identity import signer_of
from medsilo.federation.seams import Channel, Site
from medsilo.flare.controller import MedsiloController
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.jobs import CONFIG, job_files
from medsilo.flare.patience import Patience
from medsilo.flare.transport import FlareTransport
from medsilo.flare.workspace import file_of_job, kit_of, output_folder, results_of_job, settings_of_site
from medsilo.nnunet.collecting import MeasuringSite, collect, fingerprint_bounds
from medsilo.nnunet.sealed_collecting import SealedCollecting, SealedMeasuringSite, sealed_bounds
from medsilo.runs import paths
from medsilo.runs.messages import Message, Parcel
from medsilo.site.policy import CONTROLLERS, EXECUTORS
from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.question import SegmentationQuestion, read_question

NAME = "nnunet-collect"
QUESTION = "question.yaml"
TOGETHER = "together.json"
PATIENCE = Patience(silence=600.0)
_, CONTROLLER, SEALED_CONTROLLER = CONTROLLERS
_, EXECUTOR, SEALED_EXECUTOR = EXECUTORS


class CollectingController(MedsiloController):
    """Asks all hospitals that are connected, and leaves what each measured for the lead."""

    def __init__(self, timeout: float = 86_400.0) -> None:
        """`timeout`: seconds that hospitals have to measure."""
        super().__init__()
        self.timeout = timeout

    def _lead(self, abort_signal: Signal, fl_ctx: FLContext) -> str:
        question = read_question(file_of_job(fl_ctx, QUESTION))
        sites = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        self.transport = FlareTransport(self, fl_ctx, abort_signal)
        if self.gate:
            self.gate.allow(self._bounds(question))
        folder = results_of_job(fl_ctx) / NAME
        for name, own in self._collected(question, self.transport, sites).items():
            write_json(folder / name, own.model_dump(mode="json"))
        return NAME

    def _bounds(self, question: SegmentationQuestion) -> Bounds:
        return fingerprint_bounds(question)

    def _collected(self, question: SegmentationQuestion, messenger: Channel, sites: list[str]) -> dict[str, Message]:
        """Return what was collected, by the name of its file."""
        return {f"{site}.json": own for site, own in collect(question, messenger, sites, self.timeout).items()}


class SealedCollectingController(CollectingController):
    """Collects so that the server reads sums alone."""

    def _bounds(self, question: SegmentationQuestion) -> Bounds:
        return sealed_bounds(question)

    def _collected(self, question: SegmentationQuestion, messenger: Channel, sites: list[str]) -> dict[str, Message]:
        return {TOGETHER: SealedCollecting(question, messenger, sites, self.timeout).collect()}


class CollectingExecutor(MedsiloExecutor):
    """The same at a hospital."""

    def __init__(self) -> None:
        super().__init__()
        self.measuring: tuple[MeasuringSite, Clock] | None = None

    def _site(self, parcel: Parcel, fl_ctx: FLContext, stop: Callable[[], None]) -> tuple[Site, Clock]:
        if self.measuring is None:
            settings, site = settings_of_site(fl_ctx), fl_ctx.get_identity_name()
            question = read_question(file_of_job(fl_ctx, QUESTION))
            folder = paths.site_folder(output_folder(fl_ctx, settings) / f"{NAME}-{fl_ctx.get_job_id()}", site)
            self.measuring = self._made(question, site, settings, folder, fl_ctx), Clock(folder, settings.limits)
        return self.measuring

    def _made(
        self, question: SegmentationQuestion, site: str, settings: SiteSettings, folder: Path, fl_ctx: FLContext
    ) -> MeasuringSite:
        return MeasuringSite(question, site, settings, folder)


class SealedCollectingExecutor(CollectingExecutor):
    """A hospital that answers nothing in clear; `class_allow_list` may name it without the other."""

    def _made(
        self, question: SegmentationQuestion, site: str, settings: SiteSettings, folder: Path, fl_ctx: FLContext
    ) -> MeasuringSite:
        return SealedMeasuringSite(question, site, settings, folder, signer_of(kit_of(fl_ctx)))


def write_collecting_job(destination: Path, question: SegmentationQuestion, sites: int, sealed: bool = False) -> None:
    """Write the job. sites: how many hospitals are to take part. sealed: whether the server reads sums alone."""
    parts = (SEALED_CONTROLLER, SEALED_EXECUTOR) if sealed else (CONTROLLER, EXECUTOR)
    for path, content in job_files(NAME, sites, [], *parts, PATIENCE).items():
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
