"""Run a job in NVFlare's simulator, in separate processes, and report its progress."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import check_unquoted, write_json, write_text
from medsilo.core.parent_watch import end_with
from medsilo.core.text import size_text
from medsilo.flare.job_source import CONFIG, PLAN
from medsilo.flare.jobs import CLIENT, SERVER, has_code
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.runs import paths
from medsilo.runs.rounds import Round
from medsilo.runs.schema import SEE_LOG
from medsilo.site.party import FILE_NAME
from medsilo.site.policy import EXECUTOR
from medsilo.site.settings import SiteSettings
from medsilo_lab.jobs import CONTROLLER, check_components, classes_in, write_job
from medsilo_server.record import Record

# medsilo's controller must start within 120 seconds, plus 5 seconds for each site
START_LIMIT = 120.0, 5.0
# the simulator is stopped this number of seconds after a study, because the simulator would need five seconds to stop
# by itself
END_LIMIT = 2.0
MOST_SILENCE = 6.0  # maximum seconds without a progress line while NVFlare and the sites start
MOST_NAMES = 12
# classes with this prefix are NVFlare's receivers for experiment tracking, which a job without code may use
TRACKING = "nvflare.app_opt.tracking."
STARTS = 3
# Memory of a simulation in bytes, measured with `benchmarks/many_sites.py`: the memory at the start and for each site
# that trains at the same time.
ONCE, EACH = 800 << 20, 128 << 20
# number of tensors per parameter at a site that trains, for example the received parameter, the gradient and the
# optimizer's state
COPIES = 6
FORKED = (
    "medsilo.flare.executor",
    "medsilo_lab.engines.simulator",
    "medsilo_lab.engines.forked_plan",
)  # modules that are imported before sites are forked; the last module, forked_plan, reads the plan during its import
FORKED_PLAN = "MEDSILO_PLAN"
OnRound = Callable[[Round], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Needs:
    """The number of processes in a simulation, and an estimate of their memory. The data of the sites are not part of
    the estimate.
    """

    sites: int
    threads: int
    memory: int
    free: int

    @classmethod
    def of(cls, plan: Plan, threads: int | None, free: int) -> "Needs":
        """Estimate the memory of a simulation. If `threads` is None, as many sites train at the same time as fit into
        memory.
        """
        sites, each = len(plan.participation.everyone), EACH + COPIES * 4 * plan.parameters
        chosen = min(sites, threads or max(1, (free - ONCE) // each))
        return cls(sites, chosen, ONCE + chosen * each, free)

    @property
    def text(self) -> str:
        told = f"{self.threads} of {self.sites} sites at a time, each a process"
        if self.threads < self.sites:
            told += ", and a new one for each answer"
        return f"{told}: about {size_text(self.memory)} of memory and the sites' data; {size_text(self.free)} are free"


def run(
    plan: Plan,
    folder: Path,
    settings: SiteSettings,
    job: Path | None = None,
    threads: int | None = None,
    on_round: OnRound = lambda line: None,
    say: Say = lambda line: None,
) -> Record:
    """Run a plan with all its sites in NVFlare's simulator. If `job` is given, the simulation also uses the filters,
    components and code of `job`. Return the record of the finished run.

    say: A function that receives lines of text about the progress until the first round begins.
    """
    if plan.algorithm.pooled:
        raise MedsiloError(
            f"{plan.algorithm.name} pools all data, which NVFlare can't do; give --engine inprocess, or compare it "
            f"with FedAvg: medsilo compare --methods {plan.algorithm.name},fedavg"
        )
    plan, record = plan.on_one_machine, Record(folder.resolve())
    check_unquoted(record.folder, "choose another --out, or give --engine inprocess")
    check_unquoted(sys.executable, "install medsilo elsewhere, or give --engine inprocess")
    _check_sources(plan, settings)
    taken = (paths.JOB, paths.CHECKPOINTS, paths.NVFLARE)
    if not record.make_way() or any((record.folder / name).exists() for name in taken):
        raise MedsiloError(f"run folder {folder} exists; choose another --name, or use 'medsilo resume {folder}'")
    write_job(record.folder / paths.JOB, plan, job, study=record.folder.name, engine="simulator")
    weight_cache.keep_beside(plan.network.files, record.folder / model_folders.FOLDER)
    try:
        return _simulate(record, plan, settings, threads, on_round, say)
    except BaseException:
        if not (record.folder / paths.PLAN).exists():  # the folder of a run that did not begin is removed
            shutil.rmtree(record.folder / paths.JOB)
            shutil.rmtree(record.folder / paths.NVFLARE, ignore_errors=True)
            with suppress(OSError):  # a folder that contains a log is kept, because rmdir only removes empty folders
                record.folder.rmdir()
        raise


def prepare_longer(run: Path, plan: Plan, folder: Path) -> None:
    write_job(folder / paths.JOB, plan, run / paths.JOB, study=folder.name, engine="simulator")


def resume(
    folder: Path,
    settings: SiteSettings,
    threads: int | None = None,
    on_round: OnRound = lambda line: None,
    say: Say = lambda line: None,
) -> Record:
    record = Record(folder.resolve())
    if not (folder / paths.JOB).is_dir() or not record.checkpoints.is_dir():
        raise MedsiloError(f"{folder} cannot be resumed: it has no job or no checkpoint")
    record.check_unfinished()
    check_unquoted(record.folder, "move this run to another folder")
    plan = load_plan(folder / paths.PLAN)
    _check_sources(plan, settings)
    path = folder / paths.JOB / CONFIG / SERVER
    with reading(f"the job of run {record.folder.name}"):
        config = json.loads(path.read_text("utf-8"))
        config["workflows"][0]["args"]["resume"] = True
    write_json(path, config)
    (folder / paths.SUMMARY).unlink(missing_ok=True)
    return _simulate(record, plan, settings, threads, on_round, say)


def _simulate(
    record: Record, plan: Plan, settings: SiteSettings, threads: int | None, on_round: OnRound, say: Say
) -> Record:
    for own in (settings, *(settings.of(site) for site in plan.participation.everyone)):
        own.compute()  # raises an error for a missing device before any process starts
        parse_plan(plan.resolved(), allowed=own.packages)  # raises an error for packages that the sites would reject
    job, workspace = record.folder / paths.JOB, record.folder / paths.NVFLARE
    check_components(job)
    trackers = [path for name in (SERVER, CLIENT) for path in classes_in(job, name) if path.startswith(TRACKING)]
    prepare_workspace(workspace, settings, record.folder.parent, plan.participation.everyone, trackers)
    needs = Needs.of(plan, threads, psutil.virtual_memory().available)
    say(needs.text)
    seen, log = len(record.rounds()), record.folder / paths.NVFLARE_LOG
    starting = Starting(record, plan.participation.everyone, say)
    with simulated(job, workspace, plan.participation.everyone, needs.threads, log) as process:
        _watch(process, record, seen, on_round, starting, start_limit(needs.sites))
    summary = record.summary()
    if summary is None:
        raise MedsiloError(f"NVFlare ended without a result: {last_error(log)} (the whole log: {log})")
    if not summary.finished:
        reason = summary.reason or f"the study failed and does not say why; {SEE_LOG}"
        raise MedsiloError(
            f"{reason}: {last_error(log)} (the whole log: {log})" if reason.endswith(SEE_LOG) else reason
        )
    return record


@contextmanager
def simulated(job: Path, workspace: Path, sites: Sequence[str], threads: int, log: Path) -> Iterator[subprocess.Popen]:
    """Run a job in NVFlare's simulator until the `with` block ends. `threads` is the number of sites that train at the
    same time.
    """
    command = [sys.executable, "-m", __name__, str(job), str(workspace), ",".join(sites), str(threads)]
    # with only two memory arenas, malloc returns the memory of freed models to the system
    environment = {"MALLOC_ARENA_MAX": "2", **os.environ}
    # files in the current folder are not imported, because such a file could have the name of a module, for example
    # random.py
    if not {"", str(Path.cwd())} & {*sys.path}:
        environment["PYTHONSAFEPATH"] = "1"
    with log.open("a") as said:
        process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            for one in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        if sys.platform != "win32":  # if only the simulator were killed, NVFlare's processes would continue
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check_sources(plan: Plan, settings: SiteSettings) -> None:
    settings.check_sites(plan.participation.everyone, plan.task.deals)
    for site in plan.participation.everyone:
        plan.task.check_source(settings.of(site).data)


def prepare_workspace(
    workspace: Path,
    settings: SiteSettings,
    output: Path,
    sites: Sequence[str] = (),
    trackers: Sequence[str] = (),
) -> None:
    """Write the settings of the sites and a class allow-list into a simulator's workspace.

    A site whose settings differ from the common settings gets a settings file in a folder with the name of the site.

    Args:
        trackers: The classes of NVFlare's experiment tracking that the job names.
    """
    local = workspace / "local"
    _write_settings(local, settings, output)
    for site in sites:
        if settings.of(site) is not settings:
            _write_settings(local / site, settings.of(site), output)
    write_json(local / "resources.json", {"format_version": 2, "class_allow_list": [CONTROLLER, EXECUTOR, *trackers]})


def _write_settings(folder: Path, settings: SiteSettings, output: Path) -> None:
    # all sites are processes of one user on one machine, so the memory limit of a site is switched off
    one_machine = {"memory_limit": 0}
    own = settings.model_dump(mode="json", include=set(SiteSettings.model_fields))
    write_text(folder / FILE_NAME, yaml.safe_dump({**own, **one_machine, "output": str(output)}))


class Starting:
    """Reports how far the start of NVFlare and of the sites has progressed. The progress is read from files that
    NVFlare and the sites write.
    """

    def __init__(
        self, record: Record, sites: Sequence[str], say: Say, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._signs = {"the server": record.checkpoints}
        self._signs |= {site: paths.site_folder(record.folder, site) / paths.DIARY for site in sites}
        # in a continued run, files of the sites and a checkpoint already exist before the start
        self._before = {who: _changed(sign) for who, sign in self._signs.items()}
        self._say, self._clock = say, clock
        self._started = self._told = clock()

    def look(self) -> None:
        """Report the sites that have become ready since the last call. If no site has become ready for some seconds,
        report the sites that are still starting.
        """
        ready = [who for who, sign in self._signs.items() if _changed(sign) != self._before[who]]
        now = self._clock()
        if ready:
            self._signs = {who: sign for who, sign in self._signs.items() if who not in ready}
            self._say(f"ready: {_some(ready)}")
        elif self._signs and now - self._told >= MOST_SILENCE:
            self._say(f"still starting ({now - self._started:.0f} s): {_some([*self._signs])}")
        else:
            return
        self._told = now


def _some(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join([*names[:MOST_NAMES], *([f"{rest} more"] if rest > 0 else [])])


def start_limit(sites: int) -> float:
    once, each = START_LIMIT
    return once + each * sites


def _changed(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _watch(
    process: subprocess.Popen, record: Record, seen: int, on_round: OnRound, starting: Starting, limit: float
) -> None:
    """Report each round as soon as the record of the round is written. Return when the study or the simulator has
    ended, or if no round begins within the time limit.
    """
    started, ended, first = time.monotonic(), math.inf, seen
    while True:
        running = process.poll() is None
        rounds = record.rounds()
        if len(rounds) <= seen == first:
            starting.look()
        for line in rounds[seen:]:
            on_round(line)
        seen = max(seen, len(rounds))
        now = time.monotonic()
        if record.summary():
            ended = min(ended, now)
        overdue = now - started > limit and not record.checkpoints.is_dir()
        if not running or overdue or now - ended > END_LIMIT:
            return
        time.sleep(0.1)


def last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "ERROR" in line or "CRITICAL" in line]
    return (errors or lines or ["it said nothing"])[-1]


def main() -> int:
    """Run NVFlare's simulator. The simulator needs a separate process, because it changes the current folder and starts
    processes.
    """
    from nvflare_reliability import fork_server
    from nvflare_reliability import forked as forks
    from nvflare_reliability.kit_patches import patient_simulator, sites_started_by

    def until_begun(site: str, once: Callable[[], Any]) -> Any:
        """Run a site's process. If another program has taken the port that NVFlare chose, start the process again."""
        if not forked:
            return once()
        for _ in range(STARTS):
            try:
                ended = once()
            except OSError:  # if the connection closes before an answer arrives, NVFlare forgets the site's process
                if own := forks.SITES.get(site):
                    own.kill()
                ended = True, None, site
            if (own := forks.SITES.get(site)) is None:
                logging.getLogger(__name__).warning("this NVFlare starts %s by itself, and no faster", site)
                return ended
            if ended[1] or own.begun:
                return ended
            logging.getLogger(__name__).warning("another program answered in the place of %s", site)
        if own := forks.SITES.get(site):
            own.given_up = True
        return ended

    job, workspace, sites, threads, parent = sys.argv[1:]
    end_with(int(parent))
    count, plan = len(sites.split(",")), (Path(job) / PLAN).absolute()
    forked = sys.platform == "linux" and not has_code(Path(job))  # sites with custom code are not forked
    begin = partial(fork_server.begin, FORKED, lasting=int(threads) == count) if forked else lambda: None
    os.environ[FORKED_PLAN] = str(plan)
    runner = patient_simulator(job, workspace, sites, int(threads), start_limit(count), begin, until_begun)
    with sites_started_by(fork_server.ForkedSite) if forked else nullcontext():
        return runner.run()


if __name__ == "__main__":
    sys.exit(main())
