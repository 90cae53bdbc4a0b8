"""The command line. Nothing heavy is imported before a command needs it: --help answers at once."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medsilo import __version__
from medsilo.errors import MedsiloError
from medsilo.study.analyses import KINDS

if TYPE_CHECKING:
    from medsilo.site.settings import SiteSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 only when everything it promised happened."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return options.command(options)
    except MedsiloError as error:
        print(f"medsilo: {error}" + (f" [{error.private}]" if error.private else ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("medsilo: stopped; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medsilo", description="Federated training of medical-imaging models on NVFlare."
    )
    parser.add_argument("--version", action="version", version=f"medsilo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run nine methods over three synthetic hospitals and write a report")
    demo.add_argument("--rounds", type=int, default=6)
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    demo.set_defaults(command=_demo)

    run = commands.add_parser("run", help="run a job in NVFlare's simulator")
    run.add_argument("job", help="a job's folder, for example jobs/fedavg")
    run.add_argument("--plan", type=Path, default=None, help="another plan than the job's, e.g. jobs/*/plans/*.yaml")
    _add_changes(run)
    run.add_argument("--name", default="", help="name of the run's folder (default: method, task and time)")
    run.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    run.add_argument("--engine", choices=("simulator", "inprocess"), default="simulator")
    _add_site_options(run)
    run.set_defaults(command=_run)

    compare = commands.add_parser("compare", help="run methods and seeds on one task and write a table")
    compare.add_argument("--task", default=None, help="the task (default: synthetic-histology)")
    compare.add_argument("--plan", type=Path, default=None, help="a plan or a job's folder that the rows change")
    compare.add_argument("--methods", action="append", default=[], metavar="M,M:KEY=VALUE", help="local,fedavg,...")
    compare.add_argument(
        "--row", action="append", default=[], metavar="'TITLE: KEY=VALUE ...'", help="a row with changes of its own"
    )
    compare.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="N,N,N")
    compare.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V,V", help="every row with every value")
    compare.add_argument("--protocol", choices=("paper", "released-code", "clinical"), default=None)
    _add_changes(compare)
    compare.add_argument("--out", type=Path, default=Path("runs/compare"), help="where runs and the table are kept")
    compare.add_argument("--engine", choices=("simulator", "inprocess"), default="simulator")
    compare.add_argument("--at-once", type=_positive, default=None, help="runs side by side (default: 2 if they fit)")
    compare.add_argument("--title", default="Comparison")
    compare.add_argument("--notes", default="", help="a paragraph for the page")
    compare.add_argument("--machine", default="", help="a word on the machine, for the page")
    _add_site_options(compare)
    compare.set_defaults(command=_compare)

    resume = commands.add_parser("resume", help="go on with a run that stopped, from its last finished round")
    resume.add_argument("run", type=Path, help="the run's folder")
    _add_site_options(resume)
    resume.set_defaults(command=_resume)

    pack = commands.add_parser("pack", help="write a job as it is submitted")
    pack.add_argument("job", help="a job's folder, for example jobs/fedavg")
    pack.add_argument(
        "--with-code", action="store_true", help="put the package into the job (for sites that allow code)"
    )
    pack.add_argument("-o", "--out", type=Path, default=None, help="the folder to write (default: dist/<job>)")
    _add_changes(pack)
    pack.set_defaults(command=_pack)

    provision = commands.add_parser("provision", help="make signed kits for a consortium, or for who is new in it")
    provision.add_argument("consortium", type=Path, help="the consortium's file, like provisioning/consortium.yaml")
    provision.add_argument("-o", "--out", type=Path, required=True, metavar="KITS", help="the folder for the kits")
    provision.add_argument("--renew", action="append", default=[], metavar="NAME", help="give NAME a new certificate")
    provision.add_argument(
        "--requests", action="store_true", help="no kits, but what each party needs to make its own key and request"
    )
    provision.add_argument(
        "--skip-network-checks", action="store_true", help="the server's name and ports can't be seen from here"
    )
    provision.set_defaults(command=_provision)

    submit = commands.add_parser("submit", help="submit a job to a consortium")
    submit.add_argument("job", help="a job's folder, for example jobs/fedavg")
    _add_changes(submit)
    submit.add_argument("--with-code", action="store_true", help="put the package into the job, as pack does")
    _add_kit(submit, _submit)
    status = commands.add_parser("status", help="say who is connected and what runs")
    status.add_argument("id", nargs="?", default=None, help="one job's id (default: all)")
    _add_kit(status, _status)
    watch = commands.add_parser("watch", help="show a job's rounds, one line per site, until it ends")
    watch.add_argument("id", help="the job's id, as submit printed it")
    _add_kit(watch, _watch)
    abort = commands.add_parser("abort", help="end a job")
    abort.add_argument("id", help="the job's id")
    _add_kit(abort, _abort)
    fetch = commands.add_parser("fetch", help="download a job's results and write the report")
    fetch.add_argument("id", help="the job's id")
    fetch.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    _add_kit(fetch, _fetch)

    report = commands.add_parser("report", help="write one HTML page about one or more runs")
    report.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    report.add_argument("-o", "--out", type=Path, default=None, help="the page (default: report.html in the first run)")
    report.set_defaults(command=_report)

    cross = commands.add_parser("cross", help="test every site's model of a run on every site's data")
    cross.add_argument("run", type=Path, help="the run's folder, with all its sites on this machine")
    cross.add_argument("--device", default=None, help="auto, cpu, cuda or cuda:<n> (default: the run's)")
    cross.add_argument("--data", type=Path, default=None, help="folder with the sites' data (default: the run's)")
    cross.set_defaults(command=_cross)

    predict = commands.add_parser("predict", help="find masks or classes in a hospital's own images")
    predict.add_argument("model", type=Path, help="folder of a super model or of a run")
    predict.add_argument("images", type=Path, nargs="+", help="images, DICOM folders, or folders with such")
    predict.add_argument("-o", "--out", type=Path, required=True, help="folder for the masks and predictions.csv")
    predict.add_argument("--site", default="", help="the run's model of this hospital instead of the shared one")
    predict.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    predict.set_defaults(command=_predict)

    export = commands.add_parser("export", help="write a super model as a MONAI Bundle")
    export.add_argument("model", type=Path, help="folder of a super model or of a run")
    export.add_argument("-o", "--out", type=Path, required=True, help="the bundle's folder, which must not exist yet")
    export.add_argument("--site", default="", help="the run's model of this hospital instead of the shared one")
    export.set_defaults(command=_export)

    analyse = commands.add_parser("analyse", help="draw a figure of the papers from finished runs, with its data")
    analyse.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    analyse.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    analyse.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    analyse.add_argument("--seed", type=int, default=0, help="of directions, maps and attacks")
    analyse.add_argument("--cases", type=_positive, default=None, help="of each site")
    analyse.add_argument("--reach", type=_length, default=1.0, help="landscape, profile: how far they go")
    analyse.add_argument("--steps", type=_positive, default=10, help="landscape, profile: from the centre to the edge")
    analyse.add_argument("--iterations", type=_positive, default=300, help="inversion: steps of the attacker")
    analyse.add_argument("--network", default=None, help="drift, tsne: one of the method's networks, e.g. selector")
    analyse.add_argument("--pictures", action="store_true", help="inversion: draw images that are not synthetic, too")
    analyse.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    analyse.add_argument("--data", type=Path, default=None, help="folder with the sites' data, for tasks that need one")
    analyse.set_defaults(command=_analyse)

    leak = commands.add_parser("leak-report", help="say what leaves a site under a job, before anything runs")
    leak.add_argument("job", help="a job's folder, for example jobs/harmofl")
    _add_changes(leak)
    leak.add_argument("--data", type=Path, default=None, help="folder with the sites' data, for tasks that need one")
    leak.add_argument("--local", type=Path, default=None, help="the folder with a site's medsilo.yaml")
    leak.set_defaults(command=_leak_report)

    commands.add_parser("methods", help="list the methods").set_defaults(command=_methods)
    commands.add_parser("tasks", help="list the tasks").set_defaults(command=_tasks)
    return parser


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the plan: training.rounds=3"
    )


def _add_kit(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--kit", type=Path, required=True, help="your own kit, from the consortium's lead")
    parser.set_defaults(command=command)


def _add_site_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=_positive, default=None, help="sites that work at the same time (default: all)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    parser.add_argument("--data", type=Path, default=None, help="folder with the sites' data, for tasks that need one")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _length(text: str) -> float:
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 0 < length < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a length above 0")
    return length


def _numbers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers, like 0,1,2")
    return [int(number) for number in numbers]


def _settings(options: argparse.Namespace, pictures: bool = True) -> "SiteSettings":
    """Who runs the simulator owns the data, so pictures of them may lie beside the results."""
    from medsilo.site.settings import make_settings

    data = options.data.resolve() if options.data else None
    # Who runs the simulator owns all the data: pictures may lie beside the results, sites may exchange their models.
    values = {"device": options.device, "data": data, "pictures": pictures, "share_personal_model": True}
    return make_settings(values, "the command line")


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
        print(f"medsilo: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _run(options: argparse.Namespace) -> int:
    from medsilo.federation.record import new_study
    from medsilo.files import is_safe_name
    from medsilo.flare.jobs import find_job, plan_of
    from medsilo.plan import load_plan
    from medsilo.study.progress import round_lines

    job = find_job(options.job)
    plan = load_plan(options.plan, options.set) if options.plan else plan_of(job, options.set)
    if options.name and not is_safe_name(options.name):
        raise MedsiloError(f"--name {options.name!r} has odd characters; use letters, digits, '.', '_' and '-'")
    folder = options.out / (options.name or new_study(plan))
    settings = _settings(options)
    for line in plan.method.cautions(plan.participation.sites):
        _say(f"caution: {line}")

    def on_round(record: dict) -> None:
        for line in round_lines(record, plan.rounds, plan.task.metric):
            _say(line)

    if options.engine == "simulator":
        from medsilo.flare import simulator

        simulator.run(plan, folder, settings, job, options.threads, on_round)
    else:
        from medsilo.study import inprocess

        inprocess.run(plan, folder=folder, settings=settings, on_round=on_round)
    return _conclude(folder)


def _compare(options: argparse.Namespace) -> int:
    import os

    from medsilo.flare.jobs import PLAN, find_job
    from medsilo.plan import load_plan, parse_plan
    from medsilo.study.base import base_plan
    from medsilo.study.cells import Row, cells_of, parse_sweep
    from medsilo.study.compare import Study, most_at_once, shown
    from medsilo.study.tables import About

    task = [f"task.name={options.task}"] if options.task else []
    if options.plan:
        path = find_job(options.plan) / PLAN if options.plan.is_dir() else options.plan
        plan = load_plan(path, task)
    else:
        plan = parse_plan(base_plan(), task)
    protocol = [f"protocol={options.protocol}"] if options.protocol else []
    rows = [Row.parse(text) for text in [*",".join(options.methods).split(","), *options.row] if text]
    if not rows:
        raise MedsiloError("nothing to compare; give --methods local,fedavg or --row 'title: key=value'")
    rows = [swept for row in rows for swept in row.swept(parse_sweep(options.sweep))]
    cells = cells_of(plan, rows, options.seeds, [*protocol, *options.set], options.out)
    machine = options.machine or f"{os.cpu_count()} CPU cores"
    about = About(options.title, options.notes, shown(options.arguments), machine)
    study = Study(options.out, about, plan, cells)
    failures = study.run(options.engine, _settings(options), options.at_once or most_at_once(), _say)
    _say(f"\ntable: {options.out / 'table.md'}")
    for failure in failures:
        print(f"medsilo: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _resume(options: argparse.Namespace) -> int:
    from medsilo.flare import simulator
    from medsilo.plan import load_plan
    from medsilo.study.progress import round_lines

    plan = load_plan(options.run / "plan.yaml")

    def on_round(record: dict) -> None:
        for line in round_lines(record, plan.rounds, plan.task.metric):
            _say(line)

    simulator.resume(options.run, _settings(options), options.threads, on_round)
    return _conclude(options.run)


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
    from medsilo.site.settings import make_settings
    from medsilo.study.cross import cross, run_settings

    given = {key: value for key, value in (("device", options.device), ("data", options.data)) if value is not None}
    settings = make_settings({**run_settings(options.run).model_dump(), **given}, "the command line")
    cross(options.run, settings)
    _say(cross_table(read(options.run)))
    _say(f"\nreport: {write([options.run], options.run / 'report.html', options.run.resolve().name)}")
    return 0


def _pack(options: argparse.Namespace) -> int:
    from medsilo.flare.jobs import find_job, pack

    job = find_job(options.job)
    destination = pack(job, options.out or Path("dist") / job.resolve().name, options.set, options.with_code)
    _say(f"job: {destination}")
    return 0


def _provision(options: argparse.Namespace) -> int:
    from medsilo.flare.consortium import read_consortium
    from medsilo.flare.provision import provision, write_requests

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
    from medsilo.flare.jobs import find_job
    from medsilo.flare.lead import submit

    _say(submit(find_job(options.job), options.kit, options.set, options.with_code))
    return 0


def _status(options: argparse.Namespace) -> int:
    from medsilo.flare.lead import status

    for line in status(options.kit, options.id):
        _say(line)
    return 0


def _watch(options: argparse.Namespace) -> int:
    from medsilo.flare.lead import watch
    from medsilo.study.progress import round_lines

    def on_round(record: dict, study: dict) -> None:
        for line in round_lines(record, study["planned"], study["metric"]):
            _say(line)

    ended = watch(options.id, options.kit, on_round, _say)
    _say(f"{ended}; results: medsilo fetch {options.id} --kit {options.kit}")
    return 0 if ended == "FINISHED:COMPLETED" else 1


def _abort(options: argparse.Namespace) -> int:
    from medsilo.flare.lead import abort

    _say(abort(options.id, options.kit))
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from medsilo.flare.lead import fetch

    return _conclude(fetch(options.id, options.kit, options.out))


def _report(options: argparse.Namespace) -> int:
    from medsilo.report.page import write

    page = options.out or options.runs[0] / "report.html"
    _say(f"report: {write(options.runs, page, page.parent.resolve().name)}")
    return 0


def _analyse(options: argparse.Namespace) -> int:
    from medsilo.study.analyses.base import Question
    from medsilo.study.analyses.write import analyse

    settings = _settings(options, options.pictures)
    asked = Question(
        settings, options.seed, options.cases, options.reach, options.steps, options.iterations, options.network
    )
    files, lines = analyse(options.kind, options.runs, asked, options.out)
    for line in [*lines, *map(str, files)]:
        _say(line)
    return 0


def _leak_report(options: argparse.Namespace) -> int:
    from medsilo.flare.jobs import find_job, plan_of
    from medsilo.site.leaks import describe
    from medsilo.site.settings import SiteSettings, read_settings

    plan = plan_of(find_job(options.job), options.set)
    settings = read_settings(options.local) if options.local else SiteSettings()
    images: dict[str, int | str] = {}
    for site in plan.participation.sites:
        try:
            data = plan.task.load(site, plan.participation.sites, plan.seed, options.data or settings.data)
            images[site] = len(data.train)
        except MedsiloError as error:
            images[site] = str(error)
    for line in describe(plan, images, settings):
        _say(line)
    return 0


def _predict(options: argparse.Namespace) -> int:
    from medsilo.site.settings import make_settings
    from medsilo.supermodel.predict import predict_all
    from medsilo.supermodel.source import open_source

    device = make_settings({"device": options.device}, "the command line").compute().device
    failed = predict_all(open_source(options.model, options.site), options.images, options.out, device, _say)
    _say(f"predictions: {options.out / 'predictions.csv'}")
    if failed:
        print(f"medsilo: {failed} images failed; the reasons are in predictions.csv", file=sys.stderr)
    return 1 if failed else 0


def _export(options: argparse.Namespace) -> int:
    from medsilo.supermodel.bundle import export
    from medsilo.supermodel.source import open_source

    _say(f"bundle: {export(open_source(options.model, options.site), options.out)}")
    return 0


def _methods(options: argparse.Namespace) -> int:
    from medsilo.algorithms import ALGORITHMS

    for name, algorithm in ALGORITHMS.items():
        _say(f"{name:<12} {algorithm.paper:<26} travels: {algorithm.travels}")
    return 0


def _tasks(options: argparse.Namespace) -> int:
    from medsilo.tasks import TASKS

    for name, task in TASKS.items():
        _say(f"{name:<22} {task.title} ({task.metric})")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
