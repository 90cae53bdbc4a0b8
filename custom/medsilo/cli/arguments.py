"""What the command line takes, in words. Nothing heavy is imported here: --help answers at once."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from medsilo import __version__
from medsilo.analyses import KINDS

Command = Callable[[argparse.Namespace], int]
JOB = "a job's folder, for example jobs/fedavg"
KIT = "your own kit, from the consortium's lead"
DATA = "folder with the sites' data, for tasks that need one"
DEVICE = "auto, cpu, cuda or cuda:<n>"
MODEL_OF = "the run's model of this hospital instead of the shared one"
LOCAL = "a folder with a medsilo.yaml, which may describe the data (docs/your-data.md)"


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser of `medsilo`; the chosen function of `commands` comes as `command`."""
    parser = argparse.ArgumentParser(
        prog="medsilo",
        description="Federated training of medical-imaging models on NVFlare.",
        epilog="'medsilo COMMAND --help' says what a command needs. It ends with 0 only when all it promised happened.",
    )
    parser.add_argument("--version", action="version", version=f"medsilo {__version__}")
    every = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, does: str, text: str, example: str) -> argparse.ArgumentParser:
        added = every.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}. {text}".rstrip(),
            epilog=f"example: medsilo {name} {example}".rstrip(),
            allow_abbrev=False,
        )
        added.set_defaults(command=commands[name])
        return added

    _add_runs(add)
    _add_consortium(add)
    _add_results(add)
    _add_hospital(add)
    add("methods", "list the methods", "With the paper, and what travels.", "")
    add("tasks", "list the tasks", "With the metric of each; a plan names one as task.name.", "")
    return parser


Add = Callable[[str, str, str, str], argparse.ArgumentParser]


def _add_runs(add: Add) -> None:
    demo = add(
        "demo", "run nine methods over three synthetic hospitals and write a report", "Takes minutes.", "--rounds 3"
    )
    demo.add_argument("--rounds", type=_positive, default=6, help="of each method (default: 6)")
    demo.add_argument("--seed", type=int, default=0, help="of data, weights and order (default: 0)")
    _add_out(demo)

    run = add(
        "run",
        "run a job in NVFlare's simulator, with all its sites on this machine",
        "Prints a line per site and round; leaves a folder with models, scores and report.html (docs/run-tree.md).",
        "jobs/fedbn --set training.rounds=3 --set seed=1",
    )
    run.add_argument("job", help=JOB)
    _add_plan(run)
    run.add_argument("--name", default="", help="name of the run's folder (default: method, task and time)")
    _add_out(run)
    _add_engine(run)
    _add_threads(run)
    _add_site_options(run)

    compare = add(
        "compare",
        "run methods and seeds on one task and write a table with intervals",
        "Every row runs with every seed. Called again, it skips what is finished; a run that fails stops no other.",
        "--methods local,fedavg,harmofl --seeds 0,1,2 --set training.rounds=10",
    )
    compare.add_argument("--task", default=None, help="the task, of 'medsilo tasks' (default: synthetic-histology)")
    compare.add_argument("--plan", type=Path, default=None, help="a plan or a job's folder that the rows change")
    compare.add_argument(
        "--methods",
        action="append",
        default=[],
        metavar="M,M:KEY=VALUE",
        help="rows: methods, each with changes of its own section: local,fedavg,fedprox:mu=0.1",
    )
    compare.add_argument(
        "--row",
        action="append",
        default=[],
        metavar="'TITLE: KEY=VALUE ...'",
        help="a row with changes anywhere in the plan: 'slow: algorithm.name=fedavg training.learning_rate=0.001'",
    )
    compare.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="N,N,N", help="(default: 0,1,2)")
    compare.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V,V,V", help="every row that has KEY with every value"
    )
    compare.add_argument(
        "--equal-work", action="store_true", help="with a sweep of training.local_epochs: fewer rounds for more of them"
    )
    compare.add_argument(
        "--against", default=None, metavar="ROW", help="the row that all are held against (default: fedavg)"
    )
    compare.add_argument(
        "--protocol",
        choices=("paper", "released-code", "clinical"),
        default=None,
        help="whose numbers every row declares and follows (default: the plan's)",
    )
    _add_changes(compare)
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        help="where runs and the table are kept (default: runs/compare)",
    )
    _add_engine(compare)
    compare.add_argument("--at-once", type=_positive, default=None, help="runs side by side (default: 2 if they fit)")
    compare.add_argument("--title", default="Comparison", help="of the page (default: %(default)s)")
    compare.add_argument("--notes", default="", help="a paragraph for the page")
    compare.add_argument("--machine", default="", help="a word on the machine, for the page (default: its CPU cores)")
    _add_site_options(compare)

    resume = add(
        "resume",
        "go on with a run that stopped, from its last finished round",
        "The numbers are those of a run that never stopped. In a consortium: waits as submit does, prints the new id.",
        "runs/fedavg-synthetic-histology-20261120-120000",
    )
    resume.add_argument("run", help="the run's folder; with --kit also the id of the job that ended")
    resume.add_argument("--kit", type=Path, default=None, help="your own kit: go on in the consortium, not here")
    _add_threads(resume)
    _add_site_options(resume, "the run's")


def _add_consortium(add: Add) -> None:
    pack = add(
        "pack",
        "write a job as it is submitted",
        "For NVFlare's own tools, and for hospitals that review a job before they run it.",
        "jobs/fedavg --with-code -o dist/fedavg-with-code",
    )
    pack.add_argument("job", help=JOB)
    pack.add_argument(
        "--with-code", action="store_true", help="put the package into the job (for sites that allow code)"
    )
    pack.add_argument("-o", "--out", type=Path, default=None, help="the folder to write (default: dist/<job or plan>)")
    _add_plan(pack)

    provision = add(
        "provision",
        "make signed kits for a consortium, or for who is new in it",
        "Kits that are there stay as they are. provisioning/README.md says who gets which, and what to guard.",
        "provisioning/consortium.yaml -o kits",
    )
    provision.add_argument("consortium", type=Path, help="the consortium's file, like provisioning/consortium.yaml")
    provision.add_argument("-o", "--out", type=Path, required=True, metavar="KITS", help="the folder for the kits")
    provision.add_argument("--renew", action="append", default=[], metavar="NAME", help="give NAME a new certificate")
    provision.add_argument(
        "--requests", action="store_true", help="no kits, but what each party needs to make its own key and request"
    )
    provision.add_argument(
        "--skip-network-checks", action="store_true", help="the server's name and ports can't be seen from here"
    )

    submit = add(
        "submit",
        "submit a job to a consortium",
        "Waits until all hospitals have joined (at most 2 minutes), says why one can't, and prints the job's id.",
        'jobs/fedbn --kit kits/lead@clinic.example --set "participation.sites=[st-anna,university-clinic]"',
    )
    submit.add_argument("job", help=JOB)
    _add_plan(submit)
    submit.add_argument("--with-code", action="store_true", help="put the package into the job, as pack does")
    _add_kit(submit)
    status = add("status", "say who is connected and what runs", "The latest 20 jobs, with id and state.", "--kit KIT")
    status.add_argument("id", nargs="?", default=None, help="one job's id (default: all)")
    _add_kit(status)
    watch = add(
        "watch",
        "show a job's rounds, one line per site, until it ends",
        "Ends with 0 if the job finished, else with 1. Ctrl-C ends the watching, not the job.",
        "ID --kit KIT",
    )
    watch.add_argument("id", help="the job's id, as submit printed it")
    _add_kit(watch)
    abort = add("abort", "end a job", "What is finished is kept: 'medsilo resume' goes on from there.", "ID --kit KIT")
    abort.add_argument("id", help="the job's id")
    _add_kit(abort)
    fetch = add(
        "fetch",
        "download a job's results and write the report",
        "Scores, rounds and shared models of a job that ended; hospitals' own models stay with them.",
        "ID --kit KIT",
    )
    fetch.add_argument("id", help="the job's id")
    _add_out(fetch)
    _add_kit(fetch)


def _add_results(add: Add) -> None:
    report = add(
        "report",
        "write one HTML page about one or more runs",
        "The page needs no network.",
        "runs/one runs/other -o comparison.html",
    )
    report.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    report.add_argument("-o", "--out", type=Path, default=None, help="the page (default: report.html in the first run)")

    cross = add(
        "cross",
        "test every site's model of a run on every site's data",
        "Prints the table, and adds it to the run as cross.json and to its report.",
        "runs/local",
    )
    cross.add_argument("run", type=Path, help="the run's folder, with all its sites on this machine")
    cross.add_argument("--device", default=None, help=f"{DEVICE} (default: the run's)")
    cross.add_argument("--data", type=Path, default=None, help="folder with the sites' data (default: the run's)")

    analyse = add(
        "analyse",
        "draw a figure of the papers from finished runs, with its data",
        "docs/analyses.md says what each shows and how it is read.",
        "landscape runs/fedavg runs/harmofl -o figures",
    )
    analyse.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    analyse.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    analyse.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    analyse.add_argument("--seed", type=int, default=0, help="of directions, maps and attacks (default: 0)")
    analyse.add_argument("--cases", type=_positive, default=None, help="so many of each site (default: by kind)")
    analyse.add_argument(
        "--reach", type=_length, default=1.0, help="landscape, profile: how far they go, in lengths (default: 1)"
    )
    analyse.add_argument(
        "--steps", type=_positive, default=10, help="landscape, profile: from the centre to the edge (default: 10)"
    )
    analyse.add_argument(
        "--iterations", type=_positive, default=300, help="inversion: steps of the attacker (default: 300)"
    )
    analyse.add_argument("--network", default=None, help="drift, tsne: one of the method's networks, e.g. selector")
    analyse.add_argument("--pictures", action="store_true", help="inversion: draw images that are not synthetic, too")
    _add_site_options(analyse)

    clean = add(
        "clean",
        "list what old runs no longer need, and remove it with --yes",
        "That is what was kept for going on with studies that have finished since, and half-written files. Models, "
        "scores and reports stay.",
        "runs --older-than 30 --yes",
    )
    clean.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="runs (default: runs)")
    clean.add_argument(
        "--older-than", type=_length, default=7.0, metavar="DAYS", help="what was last changed before (default: 7)"
    )
    clean.add_argument("--yes", action="store_true", help="remove it")


def _add_hospital(add: Add) -> None:
    predict = add(
        "predict",
        "find masks or classes in a hospital's own images",
        "Writes a mask for each image, on its own grid, predictions.csv and .json. Ends with 1 if any image failed.",
        "supermodel scan.nii.gz folder-of-scans/ -o predictions",
    )
    predict.add_argument("model", type=Path, help="folder of a super model or of a run")
    predict.add_argument("images", type=Path, nargs="+", help="images, DICOM folders, or folders with such")
    predict.add_argument("-o", "--out", type=Path, required=True, help="folder for the masks and predictions.csv")
    predict.add_argument("--site", default="", help=MODEL_OF)
    predict.add_argument("--device", default="auto", help=f"{DEVICE} (default: auto)")

    export = add(
        "export",
        "write a run's model or super model as a MONAI Bundle",
        "docs/supermodel.md says how MONAI runs it.",
        "runs/<run>/supermodel -o bundle",
    )
    export.add_argument("model", type=Path, help="folder of a super model or of a run")
    export.add_argument("-o", "--out", type=Path, required=True, help="the bundle's folder, which must not exist yet")
    export.add_argument("--site", default="", help=MODEL_OF)

    leak = add(
        "leak-report",
        "say what leaves a site under a job, before anything runs",
        "Every group of tensors with its bytes, every number that is told, and what can be done about each.",
        "jobs/harmofl --local kits/st-anna/local",
    )
    leak.add_argument("job", help=JOB)
    _add_plan(leak)
    leak.add_argument("--data", type=Path, default=None, help=DATA)
    leak.add_argument("--local", type=Path, default=None, help="a hospital's local/: its medsilo.yaml and privacy.json")

    check = add(
        "check",
        "at a hospital, before joining: look at machine, kit and data for a job",
        "Sends nothing; what it prints may be mailed (docs/check.md). 0: go, 1: no-go, 2: the command makes no sense.",
        "--job jobs/fedavg --kit kits/st-anna --html check.html",
    )
    check.add_argument("--job", default=None, help=JOB)
    _add_plan(check)
    where = check.add_mutually_exclusive_group()
    where.add_argument("--kit", type=Path, default=None, help="this site's kit: its settings, certificates and network")
    where.add_argument("--site-config", type=Path, default=None, help="without a kit: " + LOCAL)
    check.add_argument("--data", type=Path, default=None, help="another data folder than the settings name")
    check.add_argument("--site", default=None, help="this site's name in the job (default: the kit's)")
    check.add_argument("--json", type=Path, default=None, help="write the report as JSON, too")
    check.add_argument("--html", type=Path, default=None, help="write the report as a page that may be mailed, too")
    check.add_argument(
        "--private",
        type=Path,
        default=Path("medsilo-check-private.txt"),
        help="where names of files go that only this hospital may see (default: %(default)s)",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        type=Path,
        default=None,
        help="another plan of the job's method, for example jobs/fedavg/plans/nifti-folder.yaml",
    )
    _add_changes(parser)


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the plan, as often as wanted: training.rounds=3 (docs/plan.md has every key)",
    )


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept (default: %(default)s)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("simulator", "inprocess"),
        default="simulator",
        help="inprocess: the same numbers in one process, without NVFlare (default: %(default)s)",
    )


def _add_kit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kit", type=Path, required=True, help=KIT)


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=_positive, default=None, help="sites that work at the same time (default: all)"
    )


def _add_site_options(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    parser.add_argument("--device", default=None, help=f"{DEVICE} (default: {default})")
    before = f" (default: {default})" if default != "auto" else ""
    parser.add_argument("--data", type=Path, default=None, help=DATA + before)
    parser.add_argument("--site-config", type=Path, default=None, help=LOCAL)


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
