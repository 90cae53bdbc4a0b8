"""The server's memory and a round's time over mutual TLS: answers in flight, and what is not sent again, or not whole.

    python -m benchmarks.over_tls [--sites 2,4,8] [--features 32,64,128,256,512,512,224] [--rounds 3] [--keep]
    python -m benchmarks.over_tls --delta fedavg,fedadam [--features 32,64,128,256] [--rounds 20] [--set KEY=VALUE ...]

Provisioned kits and real processes on this machine; sites do no training (federation_parts/idle_site.py), so that all
answers are on their way at once. Memory is the greatest resident size of the server's process for the job (VmHWM).
With --keep sites keep what they receive, and their unchanged model is named and not sent.

With --delta nothing is started: two sites train in this process, their messages are those of a line under
`transport.delta`, and their bytes are compared with those of whole tensors in the same run. Time is that of the
processor, for all that differences cost at both ends.
"""

import argparse
import io
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.federation import idle_job
from medsilo.consortium import lead
from medsilo.core.tensors import Groups
from medsilo.federation.asking import Missing, Outgoing, Receive
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.known import Marks, ReceivedTensors
from medsilo.federation.participant import Participant
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import site_folder
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until

LIMIT = 1200.0  # seconds a study may take


@dataclass(frozen=True)
class Cost:
    """One federation's cost."""

    parameters: int
    server_mb: float
    round_seconds: float  # the median without the first
    sent_mb: float  # in a round after the first, by all sites, both ways

    @property
    def row(self) -> str:
        """Return it as a row of a table."""
        return f"{self.server_mb:.0f} MB | {self.round_seconds:.2f} s | {self.sent_mb:.1f} MB |"


def plan_of(sites: Sequence[str], features: Sequence[int], rounds: int) -> Plan:
    """Return FedAvg of a U-Net over these sites."""
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "synthetic-prostate", "size": 64},
            "network": {"name": "unet", "features": list(features), "residual_units": 2 if len(features) > 3 else 0},
            "training": {"rounds": rounds},
            "participation": {"sites": list(sites)},
        }
    )


def cost(sites: int, features: Sequence[int], rounds: int, keep: bool, folder: Path) -> Cost:
    """Run one federation."""
    names = [f"site-{number:02d}" for number in range(sites)]
    plan = plan_of(names, features, rounds)
    with redirect_stdout(io.StringIO()):
        consortium = Consortium(folder, dict.fromkeys(names, "teaching-hospital"))
    for name in names:
        settings = "device: cpu\nisolation: false\n" + ("" if keep else "keep_received: false\n")
        (consortium.kit(name) / "local/medsilo.yaml").write_text(settings)
    record = Record(consortium.kit(SERVER) / "medsilo" / "idle")
    try:
        consortium.start(LIMIT)
        lead.submit(idle_job(folder / "job", plan, study="idle"), consortium.kit(LEAD), lambda line: None)
        peak = 0.0

        def over() -> bool:
            nonlocal peak
            peak = max(peak, *map(_peak, consortium.family(SERVER)), 0.0)
            return record.summary() is not None

        wait_until(over, LIMIT, "the study's end")
    finally:
        consortium.stop()
    lines = record.rounds()
    sent = [sum(site.bytes_up + site.bytes_down for site in line.sites.values()) for line in lines]
    seconds = statistics.median(line.seconds for line in lines[1:])
    return Cost(plan.parameters, peak, seconds, statistics.median(sent[1:]) / 1e6)


@dataclass
class Sent:
    """The tensors of one direction in a round, of one site."""

    whole: int = 0  # bytes
    sent: int = 0
    packed: int = 0  # bytes of whole tensors that are packed by themselves, without what they differ from
    seconds: float = 0.0  # of packing and unpacking

    @property
    def ratio(self) -> float:
        return self.sent / self.whole


@dataclass
class Line:
    """A line to sites in this process, which sends what it would over NVFlare."""

    participants: dict[str, Participant]
    down: dict[int, Sent] = field(default_factory=dict)  # by round
    up: dict[int, Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.received = {site: ReceivedTensors(own.folder, True) for site, own in self.participants.items()}
        self.unpacking = Sent()

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        """Ask one site after the other."""
        for site in sites:
            down, up = Sent(), Sent()
            with _timed(down):
                order = outgoing(site)
                opened = self.received[site].open(order)
            answer = self.participants[site].answer(opened)
            with _timed(up):
                leaves = self.received[site].close(answer, names=True)
            self.unpacking = up
            receive(site, leaves)
            if order.facts["task"] == "round" and site == sites[0]:  # the server packs an order for the first alone
                number = order.facts["round"]
                self.down[number], self.up[number] = down, up
                down.whole, down.sent, up.whole, up.sent = opened.size(), order.size(), answer.size(), leaves.size()
                up.packed = _packed_alone(answer.groups)
        return {}

    def pause(self, seconds: float) -> None:
        """Nobody is missing."""


@contextmanager
def _timed(sent: Sent) -> Iterator[None]:
    started = time.process_time()
    yield
    sent.seconds += time.process_time() - started


def _packed_alone(groups: Groups) -> int:
    """Return the bytes of tensors whose first bytes, second bytes and so on are packed, and no differences."""

    def size(tensor: Tensor) -> int:
        planes = tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size()).T if tensor.numel() else []
        packed = 0
        for plane in planes:
            stream = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
            packed += len(stream.compress(plane.numpy().tobytes()) + stream.flush())
        return min(tensor.nbytes, packed)

    return sum(size(tensor) for own in groups.values() for tensor in own.values())


@dataclass(frozen=True)
class Spared:
    """The bytes and the time that differences cost and spare in a study."""

    parameters: int
    down: dict[int, Sent]
    up: dict[int, Sent]

    @property
    def milliseconds(self) -> float:
        """Return the time for a MB of tensors, both ends together, over all rounds but the first."""
        rounds = [own for sent in (self.down, self.up) for number, own in sent.items() if number > 1]
        return 1e9 * sum(own.seconds for own in rounds) / sum(own.whole for own in rounds)

    @property
    def pays_below(self) -> float:
        """Return the Mbit/s of a line below which a round gets shorter."""
        last = max(self.down)
        spared = 1 - (self.down[last].sent + self.up[last].sent) / (self.down[last].whole + self.up[last].whole)
        return 8 * spared / (self.milliseconds / 1000)

    @property
    def row(self) -> str:
        """Return it as a row of a table."""
        last = max(self.down)
        ratios = [self.up[1], self.down[2], self.up[2], self.down[last], self.up[last]]
        alone = self.up[last].packed / self.up[last].whole
        cells = [f"{own.ratio:.2f}" for own in ratios]
        return " | ".join([*cells, f"{alone:.2f}", f"{self.milliseconds:.0f} ms", f"{self.pays_below:.0f} Mbit/s"])


def spared(method: str, features: Sequence[int], rounds: int, folder: Path, changes: Sequence[str] = ()) -> Spared:
    """Train two sites, with changes to their plan, and measure what goes over their lines."""
    sites = ["a", "b"]
    values = plan_of(sites, features, rounds).resolved()
    values |= {"algorithm": {"name": method}, "transport": {"delta": True}, "network": values["network"]}
    plan = parse_plan(values, ["training.optimizer=adam", "training.learning_rate=0.001", *changes])
    settings = SiteSettings(device="cpu")
    line = Line({site: Participant(plan, site, sites, settings, site_folder(folder, site)) for site in sites})
    coordinator = Coordinator(plan, sites, line, Record(folder), "line")
    whole = coordinator.last_orders.whole

    def timed(groups: Groups, differences: Marks, told: Marks, order: Groups) -> Groups:
        with _timed(line.unpacking):
            return whole(groups, differences, told, order)

    coordinator.last_orders.whole = timed  # type: ignore[method-assign]
    coordinator.run()
    return Spared(plan.parameters, line.down, line.up)


def _peak(process: psutil.Process) -> float:
    """Return the most memory that a process ever had, in MB; nothing where it is gone."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def main() -> None:
    """Print a row for each number of sites, or for each method."""
    parser = argparse.ArgumentParser(description="Server memory and round time over mutual TLS, without training.")
    parser.add_argument("--sites", default="2,4,8")
    parser.add_argument("--features")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--delta", metavar="METHODS", help="bytes and time of differences in studies that train")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="with --delta: changes to plans"
    )
    asked = parser.parse_args()
    features = asked.features or ("32,64,128,256" if asked.delta else "32,64,128,256,512,512,224")
    sizes = [int(number) for number in features.split(",")]
    if asked.delta:
        _print_deltas(asked.delta.split(","), sizes, asked.rounds or 20, asked.set)
        return
    print("| sites | server | round | sent in a round |\n|---|---|---|---|")
    for sites in map(int, asked.sites.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = cost(sites, sizes, asked.rounds or 3, asked.keep, Path(folder))
            print(f"| {sites} | {found.row}", flush=True)
    print(f"{found.parameters} parameters")


def _print_deltas(methods: Sequence[str], features: Sequence[int], rounds: int, changes: Sequence[str]) -> None:
    head = ["up 1", "down 2", "up 2", f"down {rounds}", f"up {rounds}", "packed alone", "for a MB", "pays below"]
    print(f"| method | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}")
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            found = spared(method, features, rounds, Path(folder), changes)
            print(f"| {method} | {found.row} |", flush=True)
    print(f"{found.parameters} parameters, {torch.get_num_threads()} thread")


if __name__ == "__main__":
    main()
