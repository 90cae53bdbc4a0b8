"""Send a canary through a consortium: a study of one round on synthetic data that says which hospitals are ready."""

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session

from medsilo import __version__
from medsilo.check.canary import NAME
from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import plan_of, write_job
from medsilo.plan import Plan
from medsilo.runs.schema import SiteResult
from medsilo.runs.site_files import Readiness
from medsilo_lab.consortium import lead

JOB = "fedavg"
SYNTHETIC = (
    "task.name=synthetic-activity",
    "task.persons=8",
    "task.windows=10",
    "task.steps=32",
    "training.rounds=1",
    f"layers=[{{name: {NAME}}}]",
)
MOST = 110.0  # seconds until it is ended


@dataclass(frozen=True)
class Found:
    """What a canary found of a hospital."""

    reached: bool
    reason: str = ""  # why it is not ready
    told: Readiness | None = None

    @property
    def ready(self) -> bool:
        """Return whether a study can begin there."""
        return not self.reason

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        told = self.told.as_json() if self.told else {}
        return {"reached": self.reached, "ready": self.ready, "reason": self.reason, **told}

    def line(self, name: str) -> str:
        """Return it for people."""
        state = "ready" if self.ready else "not ready" if self.reached else "not reached"
        return "; ".join([f"{name}: {state}", *filter(None, [self.reason]), *(_words(self.told) if self.told else ())])


def send(kit: Path, changes: Iterable[str], say: lead.Say) -> dict[str, Found]:
    """Send a canary to the hospitals that the changes name (participation.sites), or else to all that are connected."""
    asked = plan_of(JOB, [*SYNTHETIC, *changes]).participation.sites
    with lead.connected(kit) as session:
        here = {client.name for client in session.get_system_info().client_info}
        there = sorted(set(asked or here) & here)
        absent = dict.fromkeys(sorted(set(asked) - here), Found(False, "it is not connected"))
        if not there:
            raise MedsiloError(f"none of {', '.join(asked) or 'the hospitals'} is connected; start them first")
        say(f"sends a canary to {', '.join(there)}: a round on synthetic data, {MOST:g} s at most")
        return absent | _sent(session, _plan_for(there, changes), there)


def _plan_for(sites: list[str], changes: Iterable[str]) -> Plan:
    """Return the canary's plan, in which one hospital that is not ready hinders no other."""
    several = ["participation.minimum=1", "participation.when_missing=continue"] if len(sites) > 1 else []
    named = [*changes, f"participation.sites={sites}"]
    return plan_of(JOB, [*SYNTHETIC, *named, *(several or ["participation.minimum=null"])])


def _sent(session: Session, plan: Plan, sites: list[str]) -> dict[str, Found]:
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder) / NAME, plan)
        job_id = session.submit_job(str(Path(folder) / NAME))
    deadline = time.monotonic() + MOST
    while not str(session.get_job_status(job_id)).startswith("FINISHED"):
        if time.monotonic() > deadline:
            session.abort_job(job_id)
            deadline = time.monotonic() + lead.ENDING
        time.sleep(lead.POLL)
    summary, _, refusal = lead.outcome_left(session, job_id)
    if summary is None:
        job = session.get_job_meta(job_id)
        why = refusal or "; ".join(lead.obstacles(job)) or lead.MEANT.get(job["status"], lead.NO_REASON)
        return dict.fromkeys(sites, Found(True, why))
    return {site: Found(True, _why_not(own), own.readiness) for site, own in sorted(summary.sites.items())}


def _why_not(own: SiteResult) -> str:
    """Return why a hospital is not ready."""
    told = own.readiness
    if missed := [*own.missed_ends.values(), *own.missed.values()]:
        return missed[0]
    if told is None:
        return "it told nothing"
    wrong = [told.device] if told.device not in ("cpu", "cuda") else []
    if (told.gpus or 0) < (told.gpus_promised or 0):
        wrong.append(f"local/resources.json promises {told.gpus_promised} GPUs, and {told.gpus} are there")
    if told.data == "not readable":
        wrong.append("its own data can't be read; 'medsilo check' there says why")
    return "; ".join(wrong)


def _words(told: Readiness) -> list[str]:
    """Return what a hospital told, in words."""
    line = "line not measured" if told.line is None else f"line {told.line * 8 / 1e6:.3g} Mbit/s"
    gpus = f"{told.gpus} of {told.gpus_promised} GPUs" if told.gpus_promised else told.device
    return [
        f"medsilo {__version__}",
        f"data {told.data}",
        gpus,
        f"{told.memory} GiB of memory",
        f"{told.disk} GiB of disk",
        line,
    ]
