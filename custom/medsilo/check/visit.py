"""The check of a site before it joins: machine, kit and data against a job. It tells counts and names nobody."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

import psutil
import torch

from medsilo.check.approving import accepted_findings, approval_findings
from medsilo.check.at_home import KitAtHome, book_of_kit, files_of
from medsilo.check.data import data_findings, data_tables
from medsilo.check.demands import limit_findings, privacy_findings, source_of
from medsilo.check.disclosure import leaks
from medsilo.check.kit import Kit, check_certificates, check_expelled, check_network, check_seal
from medsilo.check.machine import check_device, check_disk, check_environment, check_memory, required_versions
from medsilo.check.plan_words import words_table
from medsilo.check.rehearsal import REMEDY, free_memory, rehearsal_findings, rehearse, round_seconds
from medsilo.check.result import Finding, Report
from medsilo.core.errors import MedsiloError, Unfit
from medsilo.core.files import check_unquoted
from medsilo.core.package import ENGINE, facts_of, in_words
from medsilo.learning.compute import Compute
from medsilo.plan import Plan
from medsilo.site.party import FILE_NAME
from medsilo.site.policy import EXECUTOR, Policy, ways_around
from medsilo.site.settings import SiteSettings
from medsilo.tasks.shares import PARTS
from medsilo.tasks.sources import DataSource

UNSEEN = "no job was given, so the data were not looked at"


@dataclass(frozen=True)
class Visit:
    """The site to check, and for what. The functions ask the machine; a test may answer in its place."""

    site: str
    plan: Plan | None = None  # the job's
    scope: str | None = None  # the privacy scope that the job asks for
    carries_code: bool = False  # the job
    local: Path | None = None  # the folder with medsilo.yaml
    kit: Kit | None = None
    source: DataSource | None = None  # instead of the one in medsilo.yaml
    required: Mapping[str, str] = field(default_factory=required_versions)
    free_disk: Callable[[Path], int] = lambda folder: disk_usage(folder).free
    free_memory: Callable[[Compute], int] = free_memory
    accept: bool = False  # whether the engineer says that the settings are as they should be


def check(visit: Visit, say: Callable[[str], None] = lambda line: None) -> Report:
    """Look at everything; what goes wrong in one place is a finding and hinders no other."""
    now = datetime.now(UTC)
    code = visit.plan.code if visit.plan else {ENGINE: facts_of(ENGINE)}
    facts = {"site": visit.site, **{name: in_words(own) for name, own in code.items()}}
    facts["time"] = f"{now:%Y-%m-%d %H:%M} UTC"
    if visit.plan:
        facts["job"] = f"{visit.plan.algorithm.title}, task {visit.plan.task.name}, plan {visit.plan.hash[:12]}"
    report = Report(facts, whole=visit.plan is not None)

    def note(where: str, *found: Iterable[Finding]) -> None:
        with _guarded(where, report):
            report.findings.extend(chain(*found))

    say("looking at the machine")
    settings = _settings(visit, report)
    hospital = visit.kit if visit.kit and visit.kit.party != "server" else None
    is_read = report.go
    note("policy", _ways_around(visit, settings))
    if hospital and is_read:
        note("settings", accepted_findings(hospital, settings, visit.accept))
    note("environment", check_environment(visit.required))
    with _guarded("disk", report):
        output = settings.output or (visit.local.parent if visit.local else Path.cwd())
        report.findings.append(check_disk(output.absolute(), visit.plan, visit.free_disk))
    note("device", check_device(settings))
    if visit.kit:
        say("looking at the kit and the network")
        with _guarded("environment", report):
            check_unquoted(visit.kit.folder.parent.resolve(), "move the kit to another folder")
        note("certificates", check_certificates(visit.kit, now), check_seal(visit.kit))
        if visit.kit.party != "server":
            with _guarded("network", report):
                report.findings.append(check_network(visit.kit))
        note("network", check_expelled(visit.kit))
    if visit.plan is None:
        with _guarded("data", report):
            if settings.data:
                settings.data.check_folder()
            report.findings.append(Finding("data", "note", UNSEEN, "give a job or --plan"))
        return report
    with _guarded("data", report):
        _look_at_data(visit, visit.plan, settings, report, say)
    report.tables.append(words_table(visit.plan))
    note("policy", _policy(visit, visit.plan))
    if hospital:
        with _guarded("approval", report):
            report.findings.extend(approval_findings(KitAtHome.read(hospital.folder.parent), visit.plan))
    return report


def _settings(visit: Visit, report: Report) -> SiteSettings:
    """The site's settings; the defaults where they can't be read, so that the rest is still looked at."""
    settings, found = SiteSettings(), Finding("settings", "ok", f"{FILE_NAME} is well-formed")
    if visit.local is None:
        found = Finding("settings", "note", "the defaults are used", f"give --kit, or --settings with a {FILE_NAME}")
    elif not (visit.local / FILE_NAME).exists():
        told = f"there is no {FILE_NAME}: the defaults are used"
        found = Finding("settings", "note", told, "copy that of site_configs/example there")
    else:
        try:
            settings = SiteSettings.read(visit.local)
        except MedsiloError as error:
            private = (error.private,) if error.private else ()
            found = Finding("settings", "stops", str(error), "see site_configs/example", private)
    report.findings.append(found)
    return settings.model_copy(update={"data": visit.source}) if visit.source else settings


def _ways_around(visit: Visit, settings: SiteSettings) -> Iterator[Finding]:
    """Yield how a job could take away what medsilo.yaml promises."""
    promises = settings.approval != "none" or settings.privacy is not None
    for told, remedy in ways_around(visit.local) if visit.local and promises else ():
        yield Finding("policy", "stops", f"{told}; so approval and privacy in {FILE_NAME} hold nothing", remedy)


def _policy(visit: Visit, plan: Plan) -> Iterator[Finding]:
    """Yield what the plan and the hospital's own files say about this site."""
    named = plan.participation.everyone
    if named and visit.site not in named:
        told = f"the job names {', '.join(named)}, not {visit.site}"
        own = f"check it with --set 'participation.sites=[{visit.site}]'" if visit.kit else "give --site"
        yield Finding("job", "stops", told, f"ask the lead to name this site in participation.sites, or {own}")
    if visit.carries_code or plan.task.scripted:
        yield Finding("job", "note", "the job brings code of its own, which this check does not look at", "read it")
    if visit.local is None:
        return
    policy = Policy.read(visit.local, visit.scope)
    if not policy.starts and not visit.carries_code:  # NVFlare asks the list only where a job brings no code
        told = "class_allow_list in local/resources.json has none of medsilo's classes"
        yield Finding("policy", "stops", told, f"add {EXECUTOR} to it, as the example site_configs do")
    if policy.gpus > (there := torch.cuda.device_count()):
        told = f"local/resources.json promises {policy.gpus} GPUs, and {there} are here; NVFlare will not start"
        yield Finding("policy", "stops", told, "set num_of_gpus (and mem_per_gpu_in_GiB) to what is there, or 0")
    if held := sorted({leak.group for leak in leaks(plan) if not policy.lets_out(leak.group)}):
        told = f"privacy.json holds back {', '.join(held)}, which this method sends"
        yield Finding("policy", "stops", told, "see 'medsilo disclosure': allow it, or ask for another method")


def _look_at_data(visit: Visit, plan: Plan, settings: SiteSettings, report: Report, say: Callable[[str], None]) -> None:
    """The data in counts, then a few batches of them."""
    least, sites = settings.least(plan.task.synthetic), sorted({*plan.participation.everyone, visit.site})
    say("reading the data")
    book = book_of_kit(settings, visit.local, visit.site)
    only_tested = visit.site in plan.participation.evaluation_sites
    source = source_of(plan, settings, book, only_tested, visit.kit is not None)
    if plan.task.synthetic and source is not None:
        told = f"task {plan.task.name} draws its data; none of this hospital's own are read"
        report.findings.append(Finding("data", "note", told, "check the study's own plan, too"))
    survey = plan.task.survey(visit.site, sites, plan.seed, source)
    report.findings.extend(data_findings(survey, plan, least))
    report.tables.extend(data_tables(survey, plan, least))
    with _guarded("quotas", report):
        report.findings.extend(limit_findings(plan, settings, book, survey))
    with _guarded("privacy", report):
        report.findings.extend(privacy_findings(plan, settings, book, files_of(visit.kit) if visit.kit else None))
    if not survey.usable or any(f.where == "device" and f.severity == "stops" for f in report.findings):
        told = "no batch was tried, because the data or the device stop it"
        report.findings.append(Finding("rehearsal", "note", told, "settle these first, then check again"))
        return
    if only_tested:
        told = "no batch was tried, because this site does not train in the study (participation.evaluation_sites)"
        report.findings.append(Finding("rehearsal", "note", told))
        return
    compute = settings.compute()
    there = visit.free_memory(compute)
    if settings.isolated and compute.device.type == "cpu":  # for a training process that is as large as this one
        there = max(0, min(there, settings.most_memory - psutil.Process().memory_info().rss))
    if too_much := check_memory(plan, there):
        report.findings.append(too_much)
        return
    say("trying a few batches")
    with _guarded("rehearsal", report), TemporaryDirectory(prefix="medsilo-") as folder:
        data = plan.task.site_data(visit.site, sites, plan.seed, source)
        cases = {part: len(getattr(data, part)) for part in PARTS}
        tried = rehearse(plan, visit.site, sites, settings, data, Path(folder))
        if tried:
            report.findings.extend(rehearsal_findings(tried, plan, cases, there))
            report.seconds.extend(round_seconds(one, plan, cases) for one in tried)


@contextmanager
def _guarded(where: str, report: Report) -> Iterator[None]:
    """Turn what fails inside into a finding in our own words: other libraries' messages name files."""
    try:
        yield
    except MedsiloError as error:
        why = error.__cause__ if isinstance(error.__cause__, Unfit) else error  # which no lead reads
        report.findings.append(Finding.stopping(where, str(why), error.private))
    except Exception as error:
        private = tuple("".join(traceback.format_exception(error)).splitlines())
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            report.findings.append(Finding("memory", "stops", f"{where}: the memory did not suffice", REMEDY, private))
        else:
            told = f"it failed with {type(error).__name__}"
            report.findings.append(Finding(where, "stops", told, "the hospital's own file has the details", private))
