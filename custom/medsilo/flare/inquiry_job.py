"""The job by which hospitals are asked something before there is a plan, on NVFlare."""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import write_json, write_text
from medsilo.federation.inquiry import Inquiry, SiteOfInquiry, inquiry_of
from medsilo.federation.limits import Clock
from medsilo.federation.sealed.identity import signer_of
from medsilo.federation.seams import Site
from medsilo.flare.controller import MedsiloController
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.jobs import CONFIG, job_files
from medsilo.flare.patience import Patience
from medsilo.flare.simulator import last_error, prepare_workspace, simulated
from medsilo.flare.transport import FlareTransport
from medsilo.flare.workspace import (
    file_of_job,
    kit_of,
    output_folder,
    results_of_job,
    settings_of_site,
    submitter_of,
)
from medsilo.registry import INQUIRIES
from medsilo.runs import paths
from medsilo.runs.messages import Parcel
from medsilo.site.policy import CONTROLLERS, EXECUTORS
from medsilo.site.settings import EachSites, SiteSettings

NAME, QUESTION = "inquiry.txt", "question.yaml"
PATIENCE = Patience(silence=600.0)
LONGEST = 200  # characters of a name
TIMEOUT = 86_400.0  # seconds that hospitals have to answer
RUN, POLL = "server/simulate_job", 0.1  # the server's folder of a job in the simulator; seconds between two looks
_, CONTROLLER = CONTROLLERS
_, EXECUTOR, SEALED_EXECUTOR = EXECUTORS


def _asked(fl_ctx: FLContext, sealed: bool | None = None) -> tuple[str, Inquiry, Any]:
    """Return the name of a job's inquiry, the inquiry, and its question."""
    try:
        name = file_of_job(fl_ctx, NAME).read_text("utf-8")[:LONGEST].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"the job's {NAME} can't be read; submit the job again", private=str(error)) from error
    inquiry = inquiry_of(name, sealed, settings_of_site(fl_ctx).packages)
    return name, inquiry, inquiry.read(file_of_job(fl_ctx, QUESTION))


class InquiryController(MedsiloController):
    """Asks all hospitals that are connected, and leaves what each answered for the lead."""

    def _lead(self, abort_signal: Signal, fl_ctx: FLContext) -> str:
        name, inquiry, question = _asked(fl_ctx)
        sites = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        self.transport = FlareTransport(self, fl_ctx, abort_signal)
        self.gate.allow(inquiry.bounds(question))
        folder = results_of_job(fl_ctx) / name
        for file, own in inquiry.collect(question, self.transport, sites, TIMEOUT).items():
            write_json(folder / file, own.model_dump(mode="json"))
        return name


class InquiryExecutor(MedsiloExecutor):
    """The same at a hospital."""

    sealed = False

    def _begin(self, parcel: Parcel, fl_ctx: FLContext, stop: Callable[[], None]) -> tuple[Site, Clock]:
        name, inquiry, question = _asked(fl_ctx, self.sealed)
        settings, site = settings_of_site(fl_ctx), fl_ctx.get_identity_name()
        folder = paths.site_folder(output_folder(fl_ctx, settings) / f"{name}-{fl_ctx.get_job_id()}", site)
        kit, lead = kit_of(fl_ctx), submitter_of(fl_ctx) or ""
        own = SiteOfInquiry(site, settings, folder, lambda: signer_of(kit), lead, kit)
        return inquiry.site(question, own), Clock(settings.limits)


class SealedInquiryExecutor(InquiryExecutor):
    """A hospital that answers nothing in clear; `class_allow_list` may name it without the other."""

    sealed = True


def executor_of(name: str) -> str:
    """Return the class that hospitals must allow for an inquiry."""
    return SEALED_EXECUTOR if INQUIRIES[name].sealed else EXECUTOR


def write_inquiry_job(destination: Path, name: str, question: str, sites: int) -> None:
    """Write the job. question: as the inquiry reads it; sites: how many hospitals are to take part."""
    for path, content in job_files(name, sites, [], CONTROLLER, executor_of(name), PATIENCE).items():
        write_json(destination / path, content)
    write_text(destination / CONFIG / NAME, name)
    write_text(destination / CONFIG / QUESTION, question)


def read_answers(workspace: Path, name: str, destination: Path) -> list[Path]:
    """Copy the files that hospitals sent from what a job left; returns them."""
    found = sorted((workspace / "medsilo" / name).glob("*.json"))
    if not found:
        raise MedsiloError("the job left no answers; its log on the server says why")
    for path in found:
        write_text(destination / path.name, path.read_text("utf-8"))
    return [destination / path.name for path in found]


def ask_in_simulator(name: str, question: str, sites: Mapping[str, SiteSettings], folder: Path) -> list[Path]:
    """Ask hospitals whose data are on this machine by the job, each a process of NVFlare's simulator.

    Returns the files with the answers, in `folder`.
    """
    job, workspace, log = (folder.resolve() / own for own in (paths.JOB, paths.NVFLARE, paths.NVFLARE_LOG))
    for left in (job, workspace):
        shutil.rmtree(left, ignore_errors=True)
    write_inquiry_job(job, name, question, len(sites))
    prepare_workspace(workspace, EachSites(sites=dict(sites)), folder.resolve(), sorted(sites))
    run, running = workspace / RUN, True
    refusal = run / paths.REFUSED
    with simulated(job, workspace, sorted(sites), len(sites), log) as process:
        while running and not refusal.is_file():
            running = process.poll() is None
            with suppress(MedsiloError):
                return read_answers(run, name, folder)
            time.sleep(POLL)
    if refusal.is_file():
        raise MedsiloError(refusal.read_text("utf-8"))
    raise MedsiloError(f"NVFlare ended without an answer: {last_error(log)} (all of it: {log})")
