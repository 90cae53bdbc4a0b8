"""Draw the papers' figures from finished runs, and write the plotted data; docs/research/reproduce.md explains each
figure.

    python -m results.analyses KIND RUN... -o FOLDER [--seed N] [--cases N] [--reach LENGTH] [--steps N]
        [--iterations N] [--network NETWORK] [--pictures] [--device DEVICE] [--data FOLDER] [--settings FOLDER]

The machine that draws the figures must have the data of all sites. The program exits with 1 if data are missing, or if
a model should not be released.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medsilo.cli import options
from medsilo.cli.options import settings_of
from medsilo.core.errors import MedsiloError
from results.analyses.analysis import KINDS, Question, analyse


def positive(value: object) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def length(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{str(value)!r} is not a number above 0")
    return number


def told(check: Callable[[object], Any]) -> Callable[[str], Any]:
    def of(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.analyses", description="Draw figures from finished runs.")
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("-o", "--out", required=True, type=told(options.output_folder), help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of random directions, maps and attacks")
    parser.add_argument(
        "--cases",
        type=told(positive),
        help="number of cases of each site (default: depends on the kind of analysis)",
    )
    parser.add_argument(
        "--reach",
        type=told(length),
        default=1.0,
        help="landscape, profile: distance from the centre of the figure to its edge",
    )
    parser.add_argument(
        "--steps",
        type=told(positive),
        help="landscape, profile: number of points from the centre of the figure to its edge (default: 10)",
    )
    parser.add_argument(
        "--iterations", type=told(positive), default=300, help="inversion: number of steps of the attack"
    )
    parser.add_argument("--network", help="drift, tsne: one of the method's networks, e.g. selector")
    parser.add_argument("--pictures", action="store_true", help="inversion: also draw images that are not synthetic")
    parser.add_argument("--device", help=options.DEVICES)
    parser.add_argument("--data", type=Path, help=options.DATA)
    parser.add_argument("--settings", type=Path, help=options.SETTINGS_OF_SITES)
    chosen = vars(parser.parse_args(arguments))
    kind, runs, out = (chosen.pop(name) for name in ("kind", "runs", "out"))
    given = {name: chosen.pop(name) for name in ("device", "data", "settings", "pictures")}
    try:
        settings = settings_of(given["device"], given["data"], given["settings"], pictures=given["pictures"])
        files, found = analyse(kind, runs, Question(settings, **chosen), out)
    except MedsiloError as error:
        print(f"{kind}: {error} {error.private}".rstrip(), file=sys.stderr)
        return 1
    print(*found.lines, *files, sep="\n")
    return 1 if found.warns else 0


def quick() -> int:
    from medsilo_lab.api import run

    with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        task = {"name": "synthetic-histology", "size": 32, "patients": 16, "patches": 4}
        plan = {"algorithm": {"name": "fedavg"}, "task": task, "participation": {"sites": ["a", "b"]}}
        run(plan, folder=Path(place, "run"), changes=["training.rounds=1", "network.name=small-cnn"], device="cpu")
        return main(["convergence", f"{place}/run", "-o", f"{place}/figures"])


if __name__ == "__main__":
    sys.exit(quick() if sys.argv[1:] == ["--quick"] else main())
