"""The ratchet of sizes: what somebody must read and trust may become less, and more only with a reason.

    make sizes                        # what there is, beside what tests/sizes.json allows and what is aimed at
    python -m tests.sizes --write     # write what there is now into tests/sizes.json, unless something grew

A reason is an entry of `grown` in docs/seats.yaml. tests/unit/test_sizes.py holds the tree to the table.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.seats import SEATS, THINGS, Grown, modules

ROOT = Path(__file__).parents[1]
CUSTOM, TABLE = ROOT / "custom", ROOT / "tests/sizes.json"
STARTS = ("medsilo.flare.executor", "medsilo.flare.controller")
REACHED, PACKAGE, ATTRIBUTES = "lines that {} reaches by import", "lines of {}", "attributes of {}"
ALL, KEYS = PACKAGE.format("all packages"), "keys of a hospital"
ROUND_FILES, ROUND_LINES = "files that run in a round of FedAvg over NVFlare", "lines of these files"
GOALS = {
    REACHED.format(STARTS[0]): 12_000,
    REACHED.format(STARTS[1]): 10_000,
    ROUND_FILES: 30,
    ROUND_LINES: 6_000,
    PACKAGE.format("medsilo"): 19_000,
    ALL: 36_000,
    KEYS: 35,
}
CLASSES = (
    *("Plan", "Algorithm", "Phase", "Group", "Layer", "Task", "Network", "Aggregator", "PartySettings"),
    *("SiteSettings", "SiteContext", "Participant", "Trainer", "TrainContext", "Coordinator", "RequestScheduler"),
    *("ServerState", "Record"),
)
ROOM, LARGEST = 100, 1 << 40
FIRST, ROUNDS = 2, 5  # of the rounds that are looked at: the first one prepares
TELLS = "add_round"  # the method that is called at the end of each round
TRACER = """
import os, sys, threading, time
place, out, last = os.environ["SIZES_PLACE"] + os.sep, os.environ["SIZES_OUT"], {}
def look(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(place) or not code.co_flags & 1:  # 1: a function's body
        return
    now, ends = time.time(), code.co_name == "TELLS"
    if ends or now - last.get(code.co_filename, 0) > 0.01:
        last[code.co_filename] = now
        with open(out, "a") as file:
            file.write(f"{now} {os.getpid()} {int(ends)} {code.co_filename[len(place):]}\\n")
threading.setprofile(look)
sys.setprofile(look)
""".replace("TELLS", TELLS)


# ---------------------------------------------------------------------------------------------------- reach
class Imports(ast.NodeVisitor):
    """The modules of ours that a file imports, in functions too; what only types need does not count."""

    def __init__(self, known: Mapping[str, Path]) -> None:
        self.known, self.found = known, set[str]()

    def visit_If(self, node: ast.If) -> None:
        types_only = "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))
        for inner in node.orelse if types_only else ast.iter_child_nodes(node):
            self.visit(inner)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= self.known.keys() & {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found |= self.known.keys() & {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def imported_by(name: str, known: Mapping[str, Path]) -> set[str]:
    """Return the modules that one of them imports."""
    reader = Imports(known)
    reader.visit(tree_of(known[name]))
    return reader.found


def reached(start: str, known: Mapping[str, Path]) -> set[str]:
    """Return all modules that one reaches by imports, itself included. Entry points are not followed."""
    found, ahead = {start}, [start]
    while ahead:
        new = imported_by(ahead.pop(), known) - found
        found |= new
        ahead.extend(new)
    return found


# ---------------------------------------------------------------------------------------------------- a class
def attributes(node: ast.ClassDef) -> set[str]:
    """Return what a class has by its own body: methods, fields, and what its methods assign to `self`."""
    own = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    targets = [target for inner in node.body if isinstance(inner, ast.Assign) for target in inner.targets]
    targets += [inner.target for inner in node.body if isinstance(inner, ast.AnnAssign)]
    own |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            own.add(inner.attr)
    return {name for name in own if not name.startswith("__")}


# ---------------------------------------------------------------------------------------------------- a round
def files_in_a_round(folder: Path) -> set[str]:
    """Return the files whose functions run while server and sites work on a round of FedAvg in NVFlare's simulator.

    What runs in one round alone, such as the end of the first, is left out, and so is the process that shows it.
    """
    (folder / "sitecustomize.py").write_text(TRACER)
    told = folder / "told"
    seen = {"SIZES_PLACE": str(CUSTOM), "SIZES_OUT": str(told), "PYTHONPATH": str(folder)}
    job = ["run", "fedavg", "--set", f"training.rounds={ROUNDS}", "--engine", "simulator", "--out"]
    for attempt in ("runs", "more-runs"):  # CPython 3.11's profiler once made a call in C fail with SystemError
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "medsilo", *job, attempt]
        program = subprocess.Popen(command, env={**os.environ, **seen}, stdout=subprocess.PIPE, cwd=folder)
        shown, _ = program.communicate()
        if program.returncode == 0:
            break
    assert program.returncode == 0, f"the run that is traced has failed: {shown.decode()[-2000:]}"
    calls = sorted((line.split() for line in told.read_text().splitlines()), key=lambda call: float(call[0]))
    ends = [float(time) for time, _, is_end, _ in calls if is_end == "1"]
    assert len(ends) == ROUNDS, f"no {TELLS} at the end of each round: say in tests/sizes.py what is called there"
    calls = [call for call in calls if call[1] != str(program.pid)]
    within = [
        {file for time, _, _, file in calls if start < float(time) <= end} for start, end in pairwise(ends[FIRST - 2 :])
    ]
    return {file for file in set().union(*within) if sum(file in files for files in within) > len(within) / 2}


# ---------------------------------------------------------------------------------------------------- the measures
def from_the_source() -> dict[str, int]:
    """Return what reading the source tells."""
    known = modules()
    sizes = {REACHED.format(start): sum(lines_of(known[name]) for name in reached(start, known)) for start in STARTS}
    for package in sorted({name.partition(".")[0] for name in known}):
        own = (path for name, path in known.items() if name.partition(".")[0] == package)
        sizes[PACKAGE.format(package)] = sum(map(lines_of, own))
    sizes |= {ALL: sum(map(lines_of, known.values())), KEYS: len(THINGS["hospital"]())}
    nodes = [node for path in known.values() for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    found = {node.name: node for node in nodes if node.name in CLASSES}
    sizes |= {ATTRIBUTES.format(name): len(attributes(found[name])) for name in CLASSES if name in found}
    return sizes


def from_a_run() -> dict[str, int]:
    """Return what a traced run tells."""
    with tempfile.TemporaryDirectory() as folder:
        files = files_in_a_round(Path(folder))
    return {ROUND_FILES: len(files), ROUND_LINES: sum(lines_of(CUSTOM / file) for file in files)}


@dataclass(frozen=True)
class Ratchet:
    """What the sizes may be at most, by measure."""

    most: Mapping[str, int]
    grown: tuple[Grown, ...] = ()

    def allowed(self, measure: str) -> int | None:
        """Return the most that a measure may be; None for one that is new, such as a package that others fill."""
        if measure not in self.most:
            return None
        return max([self.most[measure], *(own.to for own in self.grown if own.measure == measure)])

    def risen(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield, for each measure that is larger than it may be, by how much, and what to do."""
        for measure, size in sizes.items():
            most = self.allowed(measure)
            if most is not None and size > most:
                yield (
                    f"{measure}: {size:,}, which is {size - most:,} more than before ({most:,}); take that away "
                    f"elsewhere, or say why in docs/seats.yaml: grown: [{{measure: {measure}, to: {size}, why: ...}}]"
                )

    def taken_up(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the table that these sizes make: no measure is more than it may be, what is gone is left out."""
        goes = {measure for measure in self.most if measure not in sizes and measure not in (ROUND_FILES, ROUND_LINES)}
        kept = {name: most for name, most in self.most.items() if name not in goes}
        return kept | {name: min(with_room(name, size), kept.get(name, LARGEST)) for name, size in sizes.items()}


def with_room(measure: str, size: int) -> int:
    """Return a size as the table has it: lines have room up to the next hundred, so that a fix needs no reason."""
    return -(-size // ROOM) * ROOM if measure.startswith("lines") else size


def table() -> Ratchet:
    """Return the table that is checked in."""
    return Ratchet(json.loads(TABLE.read_text("utf-8")), SEATS.grown)


def main(arguments: list[str]) -> int:
    """Print the sizes; with --write, write them, unless one grew without a reason."""
    ratchet, sizes = table(), {**from_the_source(), **from_a_run()}
    width = max(map(len, sizes))
    print(f"{'':{width}}  {'now':>7}  {'at most':>7}  {'goal':>7}")
    for measure, size in sizes.items():
        most, goal = ratchet.allowed(measure), GOALS.get(measure)
        told = [f"{number:>7,}" if number is not None else f"{'':>7}" for number in (size, most, goal)]
        print(f"{measure:{width}}  {'  '.join(told)}".rstrip())
    problems = list(ratchet.risen(sizes))
    print(*problems, sep="\n", file=sys.stderr)
    if "--write" in arguments and not problems:
        TABLE.write_text(json.dumps(ratchet.taken_up(sizes), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
