"""Measure the overhead of the federation, a round's time and the server's memory, relative to NVFlare's FedAvg.

    python benchmarks/federation.py [small|large|secure|import|all]

NVFlare's FedAvg and medsilo run one after the other in NVFlare's simulator, or with `secure` in one provisioned
federation over mutual TLS. NVFlare's FedAvg and medsilo exchange the same network (MONAI's U-Net) with the same sites
and tensors. No site trains, so a round's time is the time of the framework. The reference ("stock") is `FedAvgRecipe`
with `ExchangeFormat.PYTORCH`, which the benchmark exports and starts as `SimEnv` does. Medsilo runs its canonical job
with the real controller, executor and participant, without training and evaluation.

A round of medsilo is timed from the end of the previous round to its own end. A round of the reference is timed from
its own start to the start of the next round. The reported time is the median over all rounds except the first round.
Memory is the peak resident size of the server's process (VmHWM of Linux).
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).resolve().parent / "federation_parts"
SITES = ("hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e", "hospital-f")
POLLING = 0.1  # seconds between two polls of a site in medsilo's jobs; NVFlare's default is 2
BETWEEN = "medsilo, between rounds"
LIMIT = 300.0  # maximum seconds for one run
REPEATS = 5

TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")
STOCK_ROUND = re.compile(r"Sampled clients: ")  # the first line that NVFlare's controller logs in a round
OUR_ROUND = re.compile(r"round \d+: \d+ sites answered")


@dataclass(frozen=True)
class Size:
    title: str
    features: tuple[int, ...]
    residual_units: int
    rounds: int

    @property
    def unet(self) -> dict[str, Any]:
        numbers = {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": list(self.features),
            "strides": [2] * (len(self.features) - 1),
            "num_res_units": self.residual_units,
            "act": "RELU",
            "norm": "BATCH",
        }
        return {"class_path": "monai.networks.nets.UNet", "args": numbers}


SMALL = Size("1.3 k parameters", (3, 6, 9), 0, 8)
LARGE = Size("29 M parameters", (32, 64, 128, 256, 512, 512, 512), 2, 6)


# the size of FLIP's messages between hospitals in the United Kingdom and Thailand
LINE = Size("27 kB", (8, 14, 21), 0, 20)


@dataclass(frozen=True)
class Outcome:
    round_seconds: float
    server_mb: float
    site_mb: float


class Peaks:
    def __init__(self) -> None:
        self.server = self.site = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    is_site = any("simulator_worker" in word for word in process.cmdline())
                except (OSError, psutil.Error):
                    continue
                peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                if peak and is_site:
                    self.site = max(self.site, int(peak[1]) / 1024)
                elif peak:
                    self.server = max(self.server, int(peak[1]) / 1024)


# ---------------------------------------------------------------------- the two sides
def run_stock(size: Size, sites: int, folder: Path, polling: float | None) -> Outcome:
    job = _stock_job(size, sites, folder / "job", polling)
    return simulate(job, sites, folder, STOCK_ROUND, size.rounds)


def simulate(job: Path, sites: int, folder: Path, mark: re.Pattern[str], rounds: int) -> Outcome:
    names = ",".join(SITES[:sites])
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(job), "-w", str(folder / "ws")]
    command += ["-c", names, "-n", str(sites), "-t", str(sites)]
    peaks = Peaks()
    with (folder / "output.txt").open("w") as output, _started(command, output) as process:
        process.wait(timeout=LIMIT)
    peaks.stop()
    return Outcome(_median_round(folder / "output.txt", mark, rounds), peaks.server, peaks.site)


def _stock_job(size: Size, sites: int, folder: Path, polling: float | None) -> Path:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = FedAvgRecipe(
            name="stock",
            model=size.unet,
            min_clients=sites,
            num_rounds=size.rounds + 1,
            train_script=str(PARTS / "stock_site.py"),
            server_expected_format=ExchangeFormat.PYTORCH,
        )
        recipe.export(str(folder))
    if polling is not None:
        poll_every(polling, folder)
    return folder / "stock"


def poll_every(seconds: float, job: Path) -> None:
    for path in job.rglob("config_fed_server.json"):
        config = json.loads(path.read_text())
        config["server"] = {**config.get("server", {}), "task_request_interval": seconds}
        path.write_text(json.dumps(config))


def run_ours(size: Size, sites: int, folder: Path, precision: str = "float32") -> Outcome:
    from medsilo.site.settings import SiteSettings
    from medsilo_lab.engines import simulator

    plan, job = _our_job(size, sites, folder / "job", precision)
    peaks = Peaks()
    record = simulator.run(plan, folder / "run", SiteSettings(device="cpu"), job)
    peaks.stop()
    between = _median_round(record.folder / "nvflare.log", OUR_ROUND, size.rounds)
    inside = statistics.median(line.seconds for line in record.rounds()[1:])
    return Outcome(max(between, inside), peaks.server, peaks.site)


def _our_job(size: Size, sites: int, job: Path, precision: str = "float32") -> tuple[Any, Path]:
    from medsilo.plan import parse_plan

    plan = parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "synthetic-prostate", "size": 64},
            "network": {"name": "unet", "features": size.features, "residual_units": size.residual_units},
            "training": {"rounds": size.rounds},
            "participation": {"sites": SITES[:sites]},
            "transport": {"precision": precision},
        }
    )
    return plan, idle_job(job, plan)


def idle_job(job: Path, plan: Any, study: str | None = None) -> Path:
    from medsilo.flare.job_source import CONFIG
    from medsilo.flare.jobs import CUSTOM
    from medsilo_lab.jobs import write_job

    write_job(job, plan, study=study)
    (job / CUSTOM).mkdir()
    shutil.copy(PARTS / "idle_site.py", job / CUSTOM)
    path = job / CONFIG / "config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"]["path"] = "idle_site.IdleExecutor"
    path.write_text(json.dumps(config))
    return job


def run_secure(size: Size, sites: int, folder: Path, pollings: Sequence[float | None]) -> dict[str, float]:
    """Return the median round times of NVFlare's FedAvg and of medsilo, which take turns in one federation over mutual
    TLS.

    NVFlare's FedAvg runs with each of the polling intervals `pollings`; None keeps NVFlare's default. At medsilo's
    server, the time between rounds lasts from the mixing of the last answer to the start of the next round.
    """
    sys.path.insert(0, str(ROOT))
    from medsilo_server.record import Record
    from tests.secure.consortium import SERVER, Consortium

    consortium = Consortium(folder, dict.fromkeys(SITES[:sites], "teaching-hospital"))
    for party in (SERVER, *SITES[:sites]):
        local = consortium.kit(party) / "local"
        for settings in local.glob("*resources.json*"):
            values = json.loads(settings.read_text())
            settings.write_text(json.dumps({key: own for key, own in values.items() if not key.startswith("class_")}))
        if party != SERVER:
            (local / "medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    titles = {polling: f"stock, polling {polling or 'as it comes'}" for polling in pollings}
    marks = {
        titles[polling]: (_stock_job(size, sites, folder / f"stock-{polling}", polling), STOCK_ROUND)
        for polling in pollings
    }
    marks["medsilo"] = _our_job(size, sites, folder / "job")[1], OUR_ROUND
    found: dict[str, float] = {}
    try:
        consortium.start(LIMIT)
        for name, (job, mark) in marks.items():
            before = len(consortium.log(SERVER))
            status = consortium.run(job, LIMIT)
            if not status.startswith("FINISHED:COMPLETED"):
                raise RuntimeError(f"{name}: {status}; see the logs of its kits")
            found[name] = _median_of(consortium.log(SERVER)[before:], mark, size.rounds)
        ends = _times(consortium.log(SERVER)[before:], OUR_ROUND)
        (run,) = (consortium.kit(SERVER) / "medsilo").iterdir()
        lines = Record(run).rounds()
        between = [
            end - start - line.seconds for (start, end), line in zip(itertools.pairwise(ends), lines[1:], strict=True)
        ]
        found[BETWEEN] = max(0.0, statistics.median(between))
    finally:
        consortium.stop()
    return found


def _median_round(log: Path, mark: re.Pattern[str], rounds: int) -> float:
    return _median_of(log.read_text(errors="replace"), mark, rounds)


def _median_of(log: str, mark: re.Pattern[str], rounds: int) -> float:
    times = _times(log, mark)
    if mark is STOCK_ROUND:
        times = times[1:]
    if len(times) != rounds:
        raise RuntimeError(f"{len(times)} rounds in the log, expected {rounds}")
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def _times(log: str, mark: re.Pattern[str]) -> list[float]:
    times = []
    for line in log.splitlines():
        stamp = TIME.match(line)
        if stamp and mark.search(line):
            times.append(datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp())
    return times


@contextmanager
def _started(command: list[str], output: IO[str]) -> Iterator[subprocess.Popen]:
    """Run a process, and kill the process's children at the end."""
    process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
        process.wait()


# ---------------------------------------------------------------------- the tables
def small() -> None:
    """Measure the round overhead of a small model (table a)."""
    # imported here, because benchmarks that import this module do not need the module timing
    from timing import note

    print(f"\nA round of {SMALL.title}, without training (seconds; ratios of medsilo to stock)")
    print(f"{'sites':>5} {'stock as it comes':>18} {'stock, same polling':>20} {'medsilo':>8}   ratios")
    for sites in (2, 6):
        as_it_comes = _measure(run_stock, SMALL, sites, None).round_seconds
        same = _measure(run_stock, SMALL, sites, POLLING).round_seconds
        ours = _measure(run_ours, SMALL, sites).round_seconds
        note(f"federation: a small round, {sites} sites", ours / same)
        ratios = f"{_goal(ours / as_it_comes, 0.3)}, {_goal(ours / same, 0.65)}"
        print(f"{sites:>5} {as_it_comes:>18.2f} {same:>20.2f} {ours:>8.2f}   {ratios}", flush=True)


def secure() -> None:
    """Measure the round overhead over mutual TLS, for a small model over a slow network."""
    print(f"\nA round of {LINE.title} over mutual TLS, 6 sites, without training (seconds)")
    with tempfile.TemporaryDirectory() as folder:
        found = run_secure(LINE, 6, Path(folder), (None, POLLING))
    for name, seconds in found.items():
        print(f"{name:<24} {_goal(seconds, 0.1) if name == BETWEEN else f'{seconds:.2f}'}", flush=True)


def large() -> None:
    """Measure the round time and the memory of a large model (table b)."""
    from timing import note

    sites = 6
    print(f"\nA round of {LARGE.title}, {sites} sites, without training (polling {POLLING} s; ratios to stock)")
    print(f"{'':<20} {'round s':>8} {'server MB':>10} {'site MB':>8}   ratios: round, server")
    stock = _measure(run_stock, LARGE, sites, POLLING)
    _row("stock", stock)
    for precision, goal in (("float32", 1.0), ("bfloat16", 0.75)):
        ours = _measure(run_ours, LARGE, sites, precision)
        note(f"federation: a large round, {precision}, time", ours.round_seconds / stock.round_seconds)
        note(f"federation: a large round, {precision}, memory", ours.server_mb / stock.server_mb)
        time_ratio = _goal(ours.round_seconds / stock.round_seconds, goal)
        _row(f"medsilo {precision}", ours, f"{time_ratio}, {_goal(ours.server_mb / stock.server_mb, 0.7)}")


def _row(name: str, outcome: Outcome, ratios: str = "") -> None:
    figures = f"{outcome.round_seconds:>8.2f} {outcome.server_mb:>10.0f} {outcome.site_mb:>8.0f}"
    print(f"{name:<20} {figures}   {ratios}".rstrip(), flush=True)


def imports() -> None:
    """Measure the time of importing the package and of starting a command (table d)."""
    print("\nStarting (seconds, median of 5; ratio to importing torch)")
    torch = _seconds("-c", "import torch")
    print(f"{'import torch':<16} {torch:>6.2f}")
    for name, arguments in (
        ("import medsilo", ("-c", "import medsilo")),
        ("medsilo --help", ("-m", "medsilo", "--help")),
    ):
        seconds = _seconds(*arguments)
        print(f"{name:<16} {seconds:>6.2f}   {seconds / torch:.2f}   {_goal(seconds, 1.0)} seconds", flush=True)


def _seconds(*arguments: str) -> float:
    def once() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started

    once()  # the first import fills the file system's cache
    return statistics.median(once() for _ in range(REPEATS))


def _measure(run: Callable[..., Outcome], size: Size, sites: int, *options: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run(size, sites, Path(folder), *options)


def _goal(value: float, most: float) -> str:
    return f"{value:.2f} ({'holds' if value <= most else 'MISSES'} {most:g})"


TABLES: dict[str, Callable[[], None]] = {"small": small, "large": large, "secure": secure, "import": imports}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of the federation relative to NVFlare's FedAvg.")
    parser.add_argument("table", nargs="?", choices=(*TABLES, "all"), default="all")
    chosen = parser.parse_args().table
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    # The benchmark measures a copy of the package, so that edits of the package during the run have no effect.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "custom", folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        for name, table in TABLES.items():
            if chosen in (name, "all"):
                table()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from benchmarks.timing import run

    run(main, globals(), TABLES={"import": imports}, REPEATS=1)
