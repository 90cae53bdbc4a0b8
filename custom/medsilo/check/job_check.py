"""Check whether a site can join a job: its policies, data, quotas and privacy, and a rehearsal with a few batches.

This module imports PyTorch and medsilo's training code, so import it only when a job is checked.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
import torch

from medsilo.check.approval import approval_findings
from medsilo.check.data import data_findings, data_tables, score_findings
from medsilo.check.demands import limit_findings, privacy_findings, source_of
from medsilo.check.disclosure import leaks
from medsilo.check.hospital_checks import KitAtHome, budget_of_kit, files_of
from medsilo.check.machine import check_memory
from medsilo.check.plan_words import words_table
from medsilo.check.rehearsal import free_memory, rehearsal_findings, rehearse, round_seconds
from medsilo.check.result import Finding, Report, guarded
from medsilo.plan import Plan
from medsilo.site.policy import EXECUTOR, Policy
from medsilo.site.settings import SiteSettings
from medsilo.tasks.shares import PARTS

if TYPE_CHECKING:
    from medsilo.check.site_check import Visit

CHECKS = {
    "job": "the job names this site",
    "policy": "`resources.json` and `privacy.json` allow the job",
    "rehearsal": "whether `medsilo check` trained a few batches",
}


def check_job(visit: "Visit", plan: Plan, settings: SiteSettings, report: Report, say: Callable[[str], None]) -> None:
    with guarded("data", report):
        _look_at_data(visit, plan, settings, report, say)
    report.tables.append(words_table(plan))
    with guarded("policy", report):
        report.findings.extend(_policy(visit, plan, settings))
    if visit.kit and visit.kit.party != "server":
        with guarded("approval", report):
            report.findings.extend(approval_findings(KitAtHome.read(visit.kit.folder.parent), plan, visit.code))


def _policy(visit: "Visit", plan: Plan, settings: SiteSettings) -> Iterator[Finding]:
    """Yield a finding for each reason in the plan or in the hospital's policy files that prevents this site from
    joining.
    """
    named = plan.participation.everyone
    if named and visit.site not in named:
        told = f"the job names {', '.join(named)}, not {visit.site}"
        own = f"check it with --set 'participation.sites=[{visit.site}]'" if visit.kit else "give --site"
        yield Finding("job", "stops", told, f"ask the lead to name this site in participation.sites, or {own}")
    trains = visit.site not in plan.participation.evaluation_sites or visit.carries_code or plan.task.scripted
    if refusal := settings.refuses(trains):
        yield Finding.stopping("policy", refusal)
    if visit.carries_code or plan.task.scripted:
        told = "the job brings code of its own, which this check does not look at"
        yield Finding("job", "note", told, "read it, as 'medsilo approve JOB --kit KIT' shows it")
    if visit.local is None:
        return
    policy = Policy.read(visit.local, visit.scope)
    if not policy.starts and not visit.carries_code:  # NVFlare ignores class_allow_list if a job contains code
        told = "class_allow_list in local/resources.json has none of medsilo's classes"
        yield Finding("policy", "stops", told, f"add {EXECUTOR} to it, as the example site_configs do")
    if policy.gpus > (there := torch.cuda.device_count()):
        told = f"local/resources.json promises {policy.gpus} GPUs, and {there} are here; NVFlare will not start"
        yield Finding("policy", "stops", told, "set num_of_gpus (and mem_per_gpu_in_GiB) to what is there, or 0")
    if held := sorted({leak.group for leak in leaks(plan) if not policy.lets_out(leak.group)}):
        told = f"privacy.json holds back {', '.join(held)}, which this method sends"
        yield Finding("policy", "stops", told, "see 'medsilo disclosure': allow it, or ask for another method")


def _look_at_data(
    visit: "Visit", plan: Plan, settings: SiteSettings, report: Report, say: Callable[[str], None]
) -> None:
    """Survey the site's data, check quotas and privacy, then rehearse training with a few batches."""
    least, sites = settings.least(plan.task.synthetic), sorted({*plan.participation.everyone, visit.site})
    say("reading the data")
    budget = budget_of_kit(settings, visit.local, visit.site)
    only_tested = visit.site in plan.participation.evaluation_sites
    source = source_of(plan, settings, budget, only_tested, visit.kit is not None)
    if plan.task.synthetic and source is not None:
        told = f"task {plan.task.name} draws its data; none of this hospital's own are read"
        report.findings.append(Finding("data", "note", told, "check the study's own plan, too"))
    survey = plan.task.survey(visit.site, sites, plan.seed, source)
    report.findings.extend(data_findings(survey, plan, least))
    report.tables.extend(data_tables(survey, plan, least))
    with guarded("quotas", report):
        report.findings.extend(limit_findings(plan, settings, budget, survey))
    with guarded("privacy", report):
        report.findings.extend(privacy_findings(plan, settings, budget, files_of(visit.kit) if visit.kit else None))
    if not survey.usable or any(f.where == "device" and f.severity == "stops" for f in report.findings):
        told = "no batch was tried, because the data or the device stop it"
        report.findings.append(Finding("rehearsal", "note", told, "settle these first, then check again"))
        return
    if only_tested:
        told = "no batch was tried, because this site does not train in the study (participation.evaluation_sites)"
        report.findings.append(Finding("rehearsal", "note", told))
        return
    compute = settings.compute()
    there = (visit.free_memory or free_memory)(compute)
    # part of the isolated process's memory limit goes to Python and the libraries, which need about as much memory as
    # this process has
    if settings.isolated and compute.device.type == "cpu":
        there = max(0, min(there, settings.most_memory - psutil.Process().memory_info().rss))
    if too_much := check_memory(plan, there):
        report.findings.append(too_much)
        return
    say("trying a few batches")
    with guarded("rehearsal", report), TemporaryDirectory(prefix="medsilo-") as folder:
        data = plan.task.site_data(visit.site, sites, plan.seed, source)
        cases = {part: len(getattr(data, part)) for part in PARTS}
        report.findings.extend(score_findings(data, plan, settings))
        tried = rehearse(plan, visit.site, sites, settings, data, Path(folder))
        if tried:
            report.findings.extend(rehearsal_findings(tried, plan, cases, there))
            report.seconds.extend(round_seconds(one, plan, cases) for one in tried)
