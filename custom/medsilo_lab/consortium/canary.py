"""Run a canary in a consortium: a study of one round on synthetic data, to find out which hospitals are ready."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import MonitorReturnCode
from nvflare.fuel.flare_api.flare_api import Session

from medsilo.check.canary import NAME
from medsilo.core.errors import MedsiloError
from medsilo.core.version import __version__
from medsilo.flare.jobs import plan_of
from medsilo.plan import Plan
from medsilo.runs.ends import end_of
from medsilo.runs.schema import SiteResult
from medsilo.runs.site_files import Readiness
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job

JOB = "fedavg"
SYNTHETIC = (
    "study.title=A canary",
    "study.purpose=to see whether a hospital is reached and ready",
    "task.name=synthetic-activity",
    "task.persons=8",
    "task.windows=10",
    "task.steps=32",
    "training.rounds=1",
    f"layers=[{{name: {NAME}}}]",
)
CODE = {
    "none": "runs no code of a job",
    "approved": "runs a job's code once its engineer approved it (medsilo approve)",
    "any": "runs any code of a job",
}
MOST = 110.0  # seconds after which a canary is cancelled
LATE = f"no answer within {MOST:g} s, so the canary was cancelled; send another one when the hospital is less busy"


@dataclass(frozen=True)
class CanaryResult:
    reached: bool
    reason: str = ""
    readiness: Readiness | None = None

    @property
    def ready(self) -> bool:
        return not self.reason

    def as_json(self) -> dict[str, Any]:
        reported = self.readiness.as_json() if self.readiness else {}
        return {"reached": self.reached, "ready": self.ready, "reason": self.reason, **reported}

    def line(self, name: str) -> str:
        state = "ready" if self.ready else "not ready" if self.reached else "not reached"
        reported = _words(self.readiness) if self.readiness else []
        return "; ".join(filter(None, [f"{name}: {state}", self.reason, *reported]))


def send(kit: Path, changes: Iterable[str], say: lead.Say) -> dict[str, CanaryResult]:
    """Run a canary with all connected hospitals, or with the connected hospitals in participation.sites if `changes`
    sets this key.
    """
    asked = plan_of(JOB, [*SYNTHETIC, *changes]).participation.sites
    with lead.connected(kit, lead.ANSWER) as session:
        here = lead.heard_lately(session.get_system_info())
        there = sorted(set(asked or here) & here)
        absent = dict.fromkeys(sorted(set(asked) - here), CanaryResult(False, "it is not connected"))
        if not there:
            raise MedsiloError(f"none of {', '.join(asked) or 'the hospitals'} is connected; start the hospitals first")
        say(f"sends a canary of medsilo {__version__} to {', '.join(there)}: a synthetic round, {MOST:g} s at most")
        return absent | _sent(session, _plan_for(there, changes), there)


def _plan_for(sites: list[str], changes: Iterable[str]) -> Plan:
    """Return the plan of a canary, which runs at the ready hospitals even if other hospitals are not ready."""
    minimum = ["participation.minimum=null"]
    if len(sites) > 1:
        minimum = ["participation.minimum=1", "participation.when_missing=continue"]
    return plan_of(JOB, [*SYNTHETIC, *changes, f"participation.sites={sites}", *minimum])


def _sent(session: Session, plan: Plan, sites: list[str]) -> dict[str, CanaryResult]:
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder) / NAME, plan)
        job_id = session.submit_job(str(Path(folder) / NAME))
    late = session.monitor_job(job_id, MOST, lead.POLL) is MonitorReturnCode.TIMEOUT
    if late:
        lead.cancel_in(session, job_id)
    summary, _, refusal = lead.outcome_left(session, job_id)
    if summary is None:
        job = session.get_job_meta(job_id)
        why = refusal or "; ".join(lead.obstacles(job)) or end_of(job["status"]).words
        return dict.fromkeys(sites, CanaryResult(True, LATE if late else why))
    return {site: CanaryResult(True, _why_not(own, late), own.readiness) for site, own in sorted(summary.sites.items())}


def _why_not(result: SiteResult, late: bool = False) -> str:
    """Return the reason why a hospital is not ready. `late` is true if the canary was cancelled at its time limit."""
    readiness = result.readiness
    if late and not any(said.startswith("refused: ") for said in result.missed_ends.values()):
        return LATE
    if missed := [*result.missed_ends.values(), *result.missed.values()]:
        return missed[0]
    if readiness is None:
        return "it reported nothing"
    wrong = [readiness.device] if readiness.device not in ("cpu", "cuda") else []
    if (readiness.gpus or 0) < (readiness.gpus_promised or 0):
        wrong.append(f"local/resources.json promises {readiness.gpus_promised} GPUs, and {readiness.gpus} are there")
    if readiness.data == "not readable":
        wrong.append("its own data can't be read; 'medsilo check' there says why")
    return "; ".join(wrong)


def _words(readiness: Readiness) -> list[str]:
    line, promised = readiness.line, readiness.gpus_promised
    return [
        f"data {readiness.data}",
        *([CODE[readiness.code]] if readiness.code else []),
        f"{readiness.gpus} of {promised} GPUs" if promised else readiness.device,
        f"{readiness.memory} GiB of memory and {readiness.disk} GiB of disk are free",
        "line not measured" if line is None else f"line {line * 8 / 1e6:.3g} Mbit/s",
    ]
