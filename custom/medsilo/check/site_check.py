"""Check the machine, the kit and the data of a site before the site joins a job.

The output of the check contains counts, but no names of patients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from medsilo.check.approval import accepted_findings, event_findings
from medsilo.check.hospital_checks import files_of
from medsilo.check.kit import Kit, check_certificates, check_expelled, check_network, check_seal
from medsilo.check.machine import (
    check_airlock,
    check_apart,
    check_device,
    check_disk,
    check_environment,
    required_versions,
)
from medsilo.check.own_data_set import data_set_findings, data_set_table
from medsilo.check.result import Finding, Report, guarded
from medsilo.core.errors import MedsiloError
from medsilo.core.files import check_unquoted
from medsilo.core.package import ENGINE, facts_of, in_words
from medsilo.site.job_code import JobCode
from medsilo.site.party import FILE_NAME
from medsilo.site.policy import ways_around
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource

if TYPE_CHECKING:  # a check that is not about a job needs no training code
    from medsilo.learning.compute import Compute
    from medsilo.plan import Plan

UNSEEN = "no job was given, so the data were not looked at"
CHECKS = {"settings": "`medsilo.yaml` exists and is well-formed"}


@dataclass(frozen=True)
class Visit:
    site: str
    plan: "Plan | None" = None  # the plan of the job
    scope: str | None = None  # the privacy scope of NVFlare that the job asks for
    code: JobCode | None = None  # the code that the job contains
    local: Path | None = None  # the folder with medsilo.yaml
    kit: Kit | None = None
    source: DataSource | None = None  # a data source that replaces the data source in medsilo.yaml
    required: Mapping[str, str] = field(default_factory=required_versions)
    free_disk: Callable[[Path], int] = lambda folder: disk_usage(folder).free
    # returns the device's free memory; None: the check measures the free memory itself
    free_memory: "Callable[[Compute], int] | None" = None
    accept: bool = False

    @property
    def carries_code(self) -> bool:
        return self.code is not None


def check(visit: Visit, say: Callable[[str], None] = lambda line: None) -> Report:
    """Run all checks of a site, even after one of them has failed with an error."""
    now = datetime.now(UTC)
    code = visit.plan.code if visit.plan else {ENGINE: facts_of(ENGINE)}
    facts = {"site": visit.site, **{name: in_words(own) for name, own in code.items()}}
    facts["time"] = f"{now:%Y-%m-%d %H:%M} UTC"
    if visit.plan:
        facts["job"] = f"{visit.plan.algorithm.title}, task {visit.plan.task.name}, plan {visit.plan.hash[:12]}"
    report = Report(facts, whole=visit.plan is not None)

    def note(where: str, *findings: Iterable[Finding]) -> None:
        with guarded(where, report):
            report.findings.extend(chain(*findings))

    say("looking at the machine")
    settings = _settings(visit, report)
    hospital = visit.kit if visit.kit and visit.kit.party != "server" else None
    is_read = report.go
    note("policy", _ways_around(visit, settings))
    if hospital and is_read:
        note("settings", accepted_findings(hospital, settings, visit.accept))
    note("environment", check_environment(visit.required))
    with guarded("disk", report):
        output = settings.output or (visit.local.parent if visit.local else Path.cwd())
        report.findings.append(check_disk(output.absolute(), visit.plan, visit.free_disk))
    note("disk", check_apart(settings, visit.local))
    note("device", check_device(settings))
    note("airlock", check_airlock(settings))
    if visit.kit:
        say("looking at the kit and the network")
        with guarded("environment", report):
            check_unquoted(visit.kit.folder.parent.resolve(), "move the kit to another folder")
        note("certificates", check_certificates(visit.kit, now), check_seal(visit.kit))
        if visit.kit.party != "server":
            with guarded("network", report):
                report.findings.append(check_network(visit.kit))
        note("network", check_expelled(visit.kit))
        note("events", event_findings(visit.kit, visit.accept))
    own = files_of(visit.kit) if hospital and visit.kit else None
    if visit.source is None and not (visit.plan and (visit.plan.task.synthetic or visit.plan.task.scripted)):
        note("data", data_set_findings(settings, visit.kit is not None, visit.plan is not None, own))
        with guarded("data", report):
            report.tables.extend(data_set_table(settings, own))
    if visit.plan is None:
        with guarded("data", report):
            if settings.data:
                settings.data.check_folder()
            report.findings.append(Finding("data", "note", UNSEEN, "give a job or --plan"))
        return report
    from medsilo.check.job_check import check_job

    check_job(visit, visit.plan, settings, report, say)
    return report


def _settings(visit: Visit, report: Report) -> SiteSettings:
    """Read the site's settings. If they are unreadable, use the default settings, so that the other checks can run."""
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
    """Yield a finding for each way in which a job could bypass a promise that the site's medsilo.yaml makes."""
    promises = settings.promise(in_kit=visit.kit is not None)
    for told, remedy in ways_around(visit.local) if visit.local and promises else ():
        told += f"; so approval, privacy and takes_part in {FILE_NAME} hold nothing"
        yield Finding("policy", "stops", told, remedy)
