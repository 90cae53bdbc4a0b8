"""Try everything with another NVFlare, and write what works to docs/trust/reliability.md.

    make upgrade NVFLARE=2.9.0                                     # all of it: some hours
    make upgrade NVFLARE=2.9.0 QUICK=1                             # some minutes
    python -m tests.upgrade 2.9.0 --steps contracts,secure

The environment, build/nvflare-<version>, has that NVFlare and what it pins, over the environment that runs this. A step
that fails does not stop the others, and its result replaces the one that the page had. What each test said is in
build/nvflare-<version>/.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from docs.markdown import table
from medsilo.core.files import write_json, write_text
from medsilo.core.text import plain
from tests.junit import read_junit

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDED = ROOT / "docs/trust/reliability.md", ROOT / "tests/upgrades.json"
MARKED = re.compile(r"(<!-- upgrades -->\n).*?(<!-- end -->)", re.DOTALL)
LONGEST = 4 * 3600  # seconds that one command may take
PARALLEL = ("-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder")  # as in the Makefile
QUICK_JOBS = ("fedavg", "harmofl", "fedsm")
SHORT = ("--set", "training.rounds=2")
# Pages with commands that need neither a kit nor a hospital's data; those of reproduce.md are in `make test-long`.
WITH_COMMANDS = (
    "README.md",
    "docs/start/tutorial.md",
    "docs/research/methods.md",
    "docs/trust/privacy.md",
    "docs/study/consortium.md",
)
HERE = re.compile(r"(?<![\w/])/\w[^\s'\"`)]*")  # a path of the machine that tried, perhaps cut off
# A reader's own, or what an earlier command left.
NEEDS_MORE = re.compile(r"\bX\b|--kit|--data|runs/|kits\b|unet|plans/prostate|--no-train|st-anna/|prune")


@dataclass
class Result:
    """The result of one step with one NVFlare."""

    command: str
    ran: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # what failed, and the first line of why
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")

    def in_short(self) -> str:
        """Return the result for the page's table."""
        if not self.ran:
            return "no quick tests"
        return f"{len(self.failed)} of {self.ran} fail" if self.failed else f"all {self.ran} pass"


@dataclass(frozen=True)
class Trial:
    """An NVFlare to try, in an environment of its own."""

    version: str
    quick: bool

    @property
    def folder(self) -> Path:
        return ROOT / "build" / f"nvflare-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Make the environment, unless it is there."""
        ready = self.folder / ".ready"
        if ready.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, symlinks=True)
        own = sysconfig.get_path("purelib", vars={"base": str(self.folder), "platbase": str(self.folder)})
        Path(own, "below.pth").write_text("".join(f"{below}\n" for below in installed_folders()))
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "install"]
        for wanted in ([f"nvflare=={self.version}"], ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]):
            subprocess.run([*pip, "--quiet", *wanted], check=True)
        ready.touch()

    def run(self, command: Sequence[str], cwd: Path = ROOT) -> subprocess.CompletedProcess:
        """Run a command of the environment; what it says comes back as one text."""
        path = f"{self.python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        words = [str(self.python), "-m", *command]
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.run(words, cwd=cwd, env=environment, timeout=LONGEST, check=False, **said)


def installed_folders() -> list[str]:
    """Return the folders of installed packages that this Python sees, those that it borrows too."""
    return [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]


# ---------------------------------------------------------------------------------------------------- steps
def pytest_step(name: str, *arguments: str, quick: Sequence[str] = ()) -> Callable[[Trial], Result]:
    """Return a step that runs tests."""

    def step(trial: Trial) -> Result:
        asked = list(quick if trial.quick and quick else arguments)
        report = trial.folder / f"{name}.xml"
        report.unlink(missing_ok=True)
        done = trial.run(["pytest", *asked, *PARALLEL, f"--junitxml={report}"])
        (trial.folder / f"{name}.log").write_text(done.stdout)
        result = Result(shlex.join(["pytest", *asked]))
        if not report.exists():
            return Result(result.command, 1, {"pytest": plain(done.stdout.strip().splitlines()[-1])})
        for case in read_junit(report).cases:
            if case.outcome != "skipped":
                result.ran += 1
            if case.outcome == "failed":
                result.failed[f"{case.test.partition('::')[0]}::{case.name}"] = case.reason
        return result

    return step


def installed(trial: Trial) -> Result:
    """Try whether what is installed fits together, but for our own pin of NVFlare."""
    pip = [sys.executable, "-m", "pip", "--python", str(trial.python), "check"]
    said = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    ours = re.compile(r"^medsilo .* requirement nvflare==|^No broken")
    wrong = [line for line in said.splitlines() if line.strip() and not ours.match(line)]
    return Result("pip check", max(1, len(wrong)), {line.split()[0]: line for line in wrong})


def commands_step(command: str, found: Callable[[Trial], Iterator[tuple[str, list[str]]]]) -> Callable[[Trial], Result]:
    """Return a step that runs medsilo's commands, one after another in one new folder."""

    def step(trial: Trial) -> Result:
        place = trial.folder / "tried"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name in ("jobs", "provisioning", "site_configs"):
            (place / name).symlink_to(ROOT / name)
        result = Result(command)
        for title, words in found(trial):
            done = trial.run(["medsilo.cli", *words], place)
            result.ran += 1
            if done.returncode:
                said = done.stdout.strip().splitlines() or [f"ended with {done.returncode}"]
                result.failed[title] = plain(said[-1], 300)
        return result

    return step


def jobs(trial: Trial) -> Iterator[tuple[str, list[str]]]:
    """Yield each job as a short run in the simulator."""
    for plan in sorted(ROOT.glob("jobs/*/app/config/plan.yaml")):
        name = plan.parents[2].name
        if name in QUICK_JOBS or not trial.quick:
            yield f"jobs/{name}", ["run", f"jobs/{name}", "--name", name, *SHORT]


def page_commands(trial: Trial) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of the pages; training is cut short."""
    from tests.unit.test_docs import commands

    seen: set[str] = set()
    for page in WITH_COMMANDS:
        for line in commands(ROOT / page):
            words = shlex.split(line, comments=True)
            own = page == "docs/start/tutorial.md"  # a tutorial: each command goes on with what the one before left
            if line in seen or (NEEDS_MORE.search(line) and not own):
                continue
            seen.add(line)
            shortened = [] if own or words[0] not in ("run", "compare") else SHORT
            if not (trial.quick and shortened):
                yield f"{page}: medsilo {line}", [*words, *shortened]


NOT_LONG = ("-m", "not long")
DEFAULT = ("-m", "not long and not slow")
NAMES = "tests/federation/test_nvflare_names.py"
STEPS: dict[str, Callable[[Trial], Result]] = {
    "installed": installed,
    "contracts": pytest_step("contracts", NAMES),
    "units": pytest_step("units", *NOT_LONG, "tests/unit", quick=[*DEFAULT, "tests/unit/test_filters.py"]),
    "federation": pytest_step("federation", *NOT_LONG, "tests/federation", quick=[*DEFAULT, "tests/federation"]),
    "faults": pytest_step("faults", *NOT_LONG, "tests/faults", quick=[*DEFAULT, "tests/faults"]),
    "secure": pytest_step("secure", *NOT_LONG, "tests/secure", quick=[*DEFAULT, "tests/secure"]),
    "jobs": commands_step(f"medsilo run jobs/<each> {shlex.join(SHORT)}", jobs),
    "pages": commands_step("the commands of README, tutorial, methods, privacy and consortium", page_commands),
}


# ---------------------------------------------------------------------------------------------------- the page
Recorded = dict[str, dict[str, Result]]


def recorded() -> Recorded:
    """Return the results of all NVFlares that were tried."""
    kept = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    return {version: {step: Result(**own) for step, own in steps.items()} for version, steps in kept.items()}


def record(version: str, step: str, result: Result) -> None:
    """Put a result in the place of the one that was there, without the names of this machine's folders."""
    kept = recorded()
    told = {what: HERE.sub("PATH", why) for what, why in result.failed.items()}
    kept.setdefault(version, {})[step] = replace(result, failed=told)
    in_order = {name: {step: asdict(kept[name][step]) for step in STEPS if step in kept[name]} for name in sorted(kept)}
    write_json(RECORDED, in_order)
    write_text(PAGE, page())


def page() -> str:
    """Return the page with its table made again."""
    kept = recorded()
    rows = [
        [version, *(own[step].in_short() if step in own else "not run" for step in STEPS), _dates(own)]
        for version, own in kept.items()
    ]
    text = table(["NVFlare", *STEPS, "tried on"], rows)
    return MARKED.sub(lambda found: f"{found[1]}{text}{found[2]}", PAGE.read_text("utf-8"))


def _dates(own: dict[str, Result]) -> str:
    days = sorted({result.date for result in own.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def main() -> int:
    """Try one version; 1 when a step failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--quick", action="store_true", help="no slow tests, three jobs, no training from the pages")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    asked = parser.parse_args()
    steps = asked.steps.split(",")
    if unknown := sorted(set(steps) - STEPS.keys()):
        parser.error(f"there is no step {unknown[0]}; steps: {', '.join(STEPS)}")
    trial, failed = Trial(asked.version, asked.quick), 0
    trial.make()
    for step in steps:
        print(f"NVFlare {trial.version}, {step} ...", flush=True)
        result = STEPS[step](trial)
        record(trial.version, step, result)
        failed += bool(result.failed)
        print(f"NVFlare {trial.version}, {step}: {result.in_short()}", flush=True)
    print(f"{PAGE.relative_to(ROOT)} has the table", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
