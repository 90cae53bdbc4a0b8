"""The command line. Nothing heavy is imported before a command needs it: --help answers at once."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medsilo.cli.arguments import parser_of
from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain, printable

if TYPE_CHECKING:
    from medsilo.check.check import Visit
    from medsilo.site.settings import SiteSettings

NO_SETTINGS = "there is no such folder of settings; give the folder that holds medsilo.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 only when everything it promised happened."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:  # a command of its own: what it writes is for this account, and it may be ended as by Ctrl-C
        os.umask(0o077)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return options.command(options)
    except MedsiloError as error:
        _warn(_whole(error))
        return 1
    except KeyboardInterrupt:
        _warn("stopped; what was finished is kept ('medsilo resume', or the same compare again, goes on)")
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    runs, consortium = (_demo, _run, _compare, _resume), (_pack, _provision, _submit, _status, _watch, _abort, _fetch)
    results, hospital = (_report, _cross, _analyse, _clean), (_predict, _export, _leak_report, _check)
    commands = [*runs, *consortium, *results, *hospital, _methods, _tasks]
    return parser_of({command.__name__.strip("_").replace("_", "-"): command for command in commands})


def _settings(options: argparse.Namespace, before: "SiteSettings | None" = None, **more: Any) -> "SiteSettings":
    """What the command line says, over a site's own settings, or over those that a run had before."""
    from medsilo.site.settings import SiteSettings, make_settings, read_settings

    local = getattr(options, "site_config", None)
    if local and not local.is_dir():
        raise MedsiloError(NO_SETTINGS, str(local))
    settings = read_settings(local) if local else before or SiteSettings()
    given = {"device": options.device, "data": options.data and options.data.resolve()}
    said = {key: value for key, value in given.items() if value is not None}
    return make_settings({**settings.model_dump(), **said, **more}, "the command line")


# Who runs the simulator owns all the data: pictures may lie beside the results, sites may exchange their models.
ALL_MINE: dict[str, Any] = {"pictures": True, "share_personal_model": True}


def _demo(options: argparse.Namespace) -> int:
    from medsilo.report.page import write
    from medsilo.report.read import read_all
    from medsilo.report.table import text_table
    from medsilo.study.demo import run_demo

    runs, failures = run_demo(options.out, options.rounds, options.seed, _say)
    if runs:
        _say("\n" + text_table(read_all(runs)))
        page = write(runs, runs[0].parent / "report.html", "Demo: three synthetic hospitals")
        _say(f"\nreport: {page}")
    for failure in failures:
        _warn(failure)
    return 1 if failures else 0


def _run(options: argparse.Namespace) -> int:
    from medsilo.core.files import is_safe_name
    from medsilo.flare.jobs import find_job, plan_of
    from medsilo.runs.record import new_study
    from medsilo.study.progress import round_lines

    job = find_job(options.job)
    plan = plan_of(job, options.set, options.plan)
    if options.name and not is_safe_name(options.name):
        raise MedsiloError(f"--name {options.name!r} has odd characters; use letters, digits, '.', '_' and '-'")
    folder = options.out / (options.name or new_study(plan))
    settings = _settings(options, **ALL_MINE)
    for line in plan.method.cautions(plan.participation.sites):
        _say(f"caution: {line}")

    def on_round(record: dict) -> None:
        for line in round_lines(record, plan.rounds, plan.task.metric):
            _say(line)

    if options.engine == "simulator":
        from medsilo.flare import simulator

        simulator.run(plan, folder, settings, job, options.threads, on_round)
    else:
        from medsilo.federation import inprocess

        inprocess.run(plan, folder=folder, settings=settings, on_round=on_round)
    return _conclude(folder)


def _compare(options: argparse.Namespace) -> int:
    from medsilo.report.study import write_study
    from medsilo.study.asked import asked
    from medsilo.study.compare import Study, most_at_once, shown
    from medsilo.study.tables import About

    plan, cells = asked(options)
    machine = options.machine or f"{os.cpu_count()} CPU cores"
    about = About(options.title, options.notes, shown(options.arguments), machine)
    study = Study(options.out, about, plan, cells, options.against)
    failures = study.run(options.engine, _settings(options, **ALL_MINE), options.at_once or most_at_once(), _say)
    _say(f"\ntable: {options.out / 'table.md'}\nreport: {write_study(options.out)}")
    for failure in failures:
        _warn(failure)
    return 1 if failures else 0


def _resume(options: argparse.Namespace) -> int:
    if options.kit:
        from medsilo.consortium.lead import resume

        _say(resume(options.run, options.kit, _warn))
        return 0
    from medsilo.plan import load_plan
    from medsilo.study.cross import run_settings
    from medsilo.study.progress import round_lines

    run = Path(options.run)
    if not (run / "plan.yaml").is_file():
        raise MedsiloError(
            f"{run} is no run's folder; give one under runs/, or --kit with the id of a consortium's job"
        )
    plan = load_plan(run / "plan.yaml")

    def on_round(record: dict) -> None:
        for line in round_lines(record, plan.rounds, plan.task.metric):
            _say(line)

    settings = _settings(options, run_settings(run), **ALL_MINE)
    if (run / "job").is_dir():
        from medsilo.flare import simulator

        simulator.resume(run, settings, options.threads, on_round)
    else:  # it was begun with --engine inprocess
        from medsilo.federation import inprocess
        from medsilo.runs.record import Record

        Record(run).check_unfinished()
        inprocess.run(plan, folder=run, resume=True, settings=settings, on_round=on_round)
    return _conclude(run)


def _conclude(folder: Path) -> int:
    """The table, the page, and where both are."""
    from medsilo.report.page import write
    from medsilo.report.read import read_all
    from medsilo.report.table import text_table

    _say("\n" + text_table(read_all([folder])))
    _say(f"\nreport: {write([folder], folder / 'report.html', folder.name)}")
    return 0


def _cross(options: argparse.Namespace) -> int:
    from medsilo.report.page import write
    from medsilo.report.read import read
    from medsilo.report.table import cross_table
    from medsilo.study.cross import cross, run_settings

    cross(options.run, _settings(options, run_settings(options.run)))
    _say(cross_table(read(options.run)))
    _say(f"\nreport: {write([options.run], options.run / 'report.html', options.run.resolve().name)}")
    return 0


def _pack(options: argparse.Namespace) -> int:
    from medsilo.flare.jobs import find_job, pack

    job = find_job(options.job)
    folder = options.out or Path("dist") / (options.plan.stem if options.plan else job.resolve().name)
    destination = pack(job, folder, options.set, options.with_code, options.plan)
    _say(f"job: {destination}")
    return 0


def _provision(options: argparse.Namespace) -> int:
    from medsilo.consortium.description import read_consortium
    from medsilo.consortium.provision import provision, write_requests

    consortium = read_consortium(options.consortium)
    if not options.skip_network_checks and not (options.out / consortium.server.host).exists():
        consortium.check_network()
    if options.requests:
        write_requests(consortium, options.consortium.parent, options.out)
        _say(f"requests: {options.out}; provisioning/README.md says how each party goes on")
        return 0
    new = provision(consortium, options.consortium.parent, options.out, options.renew)
    for name in new:
        _say(f"kit: {options.out / name}")
    _say(f"{len(new)} kits are new; the others are as they were. Keep {options.out / 'private-root'} to yourself")
    return 0


def _submit(options: argparse.Namespace) -> int:
    from medsilo.consortium.lead import submit
    from medsilo.flare.jobs import find_job

    _say(submit(find_job(options.job), options.kit, _warn, options.set, options.with_code, options.plan))
    return 0


def _status(options: argparse.Namespace) -> int:
    from medsilo.consortium.lead import status

    for line in status(options.kit, options.id):
        _say(line)
    return 0


def _watch(options: argparse.Namespace) -> int:
    from medsilo.consortium.lead import watch
    from medsilo.study.progress import round_lines

    def on_round(record: dict, study: dict) -> None:
        for line in round_lines(record, study["planned"], study["metric"]):
            _say(line)

    try:
        ended = watch(options.id, options.kit, on_round, _say)
    except KeyboardInterrupt:
        _warn(f"no longer watching; the job goes on (to end it: medsilo abort {options.id} --kit {options.kit})")
        return 130
    _say(f"{ended}; results: medsilo fetch {options.id} --kit {options.kit}")
    if ended == "FINISHED:COMPLETED":
        return 0
    _say(f"to go on from the last finished round: medsilo resume {options.id} --kit {options.kit}")
    return 1


def _abort(options: argparse.Namespace) -> int:
    from medsilo.consortium.lead import abort

    _say(abort(options.id, options.kit))
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from medsilo.consortium.lead import fetch

    return _conclude(fetch(options.id, options.kit, options.out))


def _report(options: argparse.Namespace) -> int:
    from medsilo.report.page import write

    page = options.out or options.runs[0] / "report.html"
    _say(f"report: {write(options.runs, page, page.parent.resolve().name)}")
    return 0


def _analyse(options: argparse.Namespace) -> int:
    from medsilo.analyses.base import Question
    from medsilo.analyses.write import analyse

    settings = _settings(options, pictures=options.pictures)
    asked = Question(
        settings, options.seed, options.cases, options.reach, options.steps, options.iterations, options.network
    )
    files, lines = analyse(options.kind, options.runs, asked, options.out)
    for line in [*lines, *map(str, files)]:
        _say(line)
    return 0


def _clean(options: argparse.Namespace) -> int:
    from medsilo.runs.clean import find_old, remove

    old = find_old(options.folder, options.older_than)
    for one in old:
        _say(f"{one.bytes:>14,} bytes  {one.path}  {one.why}")
    total = f"{len(old)} files, {sum(one.bytes for one in old):,} bytes"
    if options.yes:
        remove(old)
        _say(f"removed: {total}")
    else:
        _say(f"may go: {total}" + ("; 'medsilo clean --yes' removes them" if old else ""))
    return 0


def _leak_report(options: argparse.Namespace) -> int:
    from medsilo.check.leaks import averages_images, describe
    from medsilo.flare.jobs import find_job, plan_of, stated
    from medsilo.site.policy import Policy, read_policy
    from medsilo.site.settings import SiteSettings, read_settings
    from medsilo.tasks.sources import DataSource

    job = find_job(options.job)
    plan = plan_of(job, options.set, options.plan)
    if options.local and not options.local.is_dir():
        raise MedsiloError(NO_SETTINGS, str(options.local))
    settings = read_settings(options.local) if options.local else SiteSettings()
    policy = read_policy(options.local, stated(job)[1]) if options.local else Policy()
    source = DataSource(folder=options.data) if options.data else settings.data
    images: dict[str, int | str] = {}
    for site in plan.participation.sites if averages_images(plan) else ():
        try:
            data = plan.task.read(site, plan.participation.sites, plan.seed, source)
            images[site] = len(data.train)
        except MedsiloError as error:
            images[site] = str(error)
    for line in describe(plan, images, settings, policy):
        _say(line)
    return 0


def _check(options: argparse.Namespace) -> int:
    """0 go, 1 no-go, 2 wrong use."""
    from medsilo.check.check import check
    from medsilo.check.rehearsal import rehearse
    from medsilo.core.files import write_json, write_text

    try:
        visit = _visit(options)
    except MedsiloError as error:
        _warn(_whole(error))
        return 2
    report = check(visit, rehearse, lambda line: print(f"{line} ...", file=sys.stderr, flush=True))
    if options.json:
        write_json(options.json, report.as_json())
    if options.html:
        write_text(options.html, report.as_html())
    kept = report.write_private(options.private)
    _say(report.as_text())
    if kept:
        print(f"names of files and patients, for this hospital only: {options.private}", file=sys.stderr)
    return 0 if report.go else 1


def _visit(options: argparse.Namespace) -> "Visit":
    """Who is checked for what; an error where the command makes no sense."""
    from medsilo.check.check import Visit
    from medsilo.check.kit import read_kit
    from medsilo.core.files import is_safe_name
    from medsilo.flare.jobs import CUSTOM, find_job, plan_of, stated
    from medsilo.plan import load_plan
    from medsilo.tasks.sources import DataSource

    job = find_job(options.job) if options.job else None
    kit = read_kit(options.kit) if options.kit else None
    local = options.kit / "local" if options.kit else options.site_config
    if local and not local.is_dir():
        raise MedsiloError(NO_SETTINGS, str(local))
    plan = load_plan(options.plan, options.set) if options.plan else None
    if job:
        plan = plan_of(job, options.set, options.plan)
    if options.set and not plan:
        raise MedsiloError("--set changes a plan, and there is none; give --job or --plan")
    site = options.site or (kit.name if kit else None)
    if site is None and plan and plan.participation.everyone:
        known = ", ".join(plan.participation.everyone)
        raise MedsiloError(f"which site is this? give --site; the job names {known}")
    site = site or "this-site"
    if not is_safe_name(site):
        raise MedsiloError(f"--site {site!r} has odd characters; use letters, digits, '.', '_' and '-'")
    package, scope = stated(job) if job else ({}, None)
    source = DataSource(folder=options.data) if options.data else None
    carries_code = job is not None and (job / CUSTOM).is_dir()
    return Visit(site, plan, package, scope, carries_code, local, kit, source)


def _predict(options: argparse.Namespace) -> int:
    from medsilo.deploy.predict import predict_all
    from medsilo.deploy.source import open_source
    from medsilo.site.settings import make_settings

    device = make_settings({"device": options.device}, "the command line").compute().device
    failed = predict_all(open_source(options.model, options.site), options.images, options.out, device, _say)
    _say(f"predictions: {options.out / 'predictions.csv'}")
    if failed:
        _warn(f"images that failed: {failed}; the reasons are in predictions.csv")
    return 1 if failed else 0


def _export(options: argparse.Namespace) -> int:
    from medsilo.deploy.bundle import export
    from medsilo.deploy.source import open_source

    _say(f"bundle: {export(open_source(options.model, options.site), options.out)}")
    return 0


def _methods(options: argparse.Namespace) -> int:
    from medsilo.methods import ALGORITHMS

    for name, algorithm in ALGORITHMS.items():
        _say(f"{name:<14} {algorithm.paper:<23} travels: {algorithm.travels}")
    return 0


def _tasks(options: argparse.Namespace) -> int:
    from medsilo.tasks import TASKS

    for name, task in TASKS.items():
        _say(f"{name:<19} {task.title} ({task().metric})")
    return 0


def _whole(error: MedsiloError) -> str:
    """An error with what only this side may read."""
    return str(error) + (f" [{error.private}]" if error.private else "")


def _warn(line: str) -> None:
    print(f"medsilo: {plain(line)}", file=sys.stderr)


def _say(lines: str) -> None:
    print("\n".join(map(printable, lines.split("\n"))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
