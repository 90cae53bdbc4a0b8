"""Measure the cost of FedSM's three networks: a site's time, bytes on the network, and the server's memory.

    python benchmarks/fedsm.py [time|bytes|memory]

Time: a site's training in a FedSM round reads every batch once for all three networks; the reference makes three
passes. Cases are read from files each time, as if memory were too small: PNG tiles of 1000 x 1000 pixels, and slices of
compressed NIfTI volumes. If cases are in memory, three passes cost little more than one pass, so that row has no bound.
Bytes: the bytes that a site sends and receives in a round, as in the run's summary, relative to two models and a
selector. Memory: the real coordinator runs a whole study with the paper's U-Net and VGG-11, and the sites send
synthetic answers. The benchmark compares the increase of the server's memory with the size of the results plus two
messages from a site. With `server-adam`, the server's disk holds Adam's two moments for the selector. Step: the
processor time of aggregating the VGG-11 tensors of twelve sites in a round, relative to plain loops over dictionaries.
The reported time is the fastest of three rounds.

The program exits with 1 if a bound is exceeded. The program needs Linux, because it forks and reads the peak memory
from /proc.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite
from medsilo.runs.messages import ANSWERS, PARTS, Counted, Request, StudyMessage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from mixing import in_a_fork
from timing import fastest, fastest_in_turn, note, run
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from medsilo.core.parent_watch import most_held
from medsilo.deploy.supermodel import THRESHOLDS
from medsilo.methods.fedsm import FedSM
from medsilo.plan import Plan, parse_plan
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.scans import Scan
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_lab.start.example import write_volume
from medsilo_papers.public_files import read_labels, read_picture
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import inprocess

SITES = ("hospital-a", "hospital-b")
PAPER = {"name": "unet", "features": [16, 32, 64, 128, 256], "residual_units": 2, "norm": "instance"}
ANY_SITES = {"name": "prostate"}
LESS_TIME = 0.75
QUICKLY: list[str] = []
SELECTORS, LARGE, COUNTS, SYNCS = ("compact", "vgg11"), "vgg11", (3, 6, 12), ("none", "server-adam")
KINDS = (("tiles", True), ("slices", True), ("slices", False))
STEP_SECONDS = 2.0
SLACK = 64  # allowance in MiB for torch's internal memory and the allocator's rounding


def make_plan(task: dict[str, Any], sites: Sequence[str], **changes: Any) -> Plan:
    method = {"name": "fedsm", "selector_sync": "server-adam"}
    values = {"algorithm": method, "task": task, "participation": {"sites": list(sites)}, **changes}
    return parse_plan(values)


# ---------------------------------------------------------------------------------------------------- time
class Tiles(Dataset):
    def __init__(self, plan: Plan, folder: Path, count: int = 8, size: int = 1000) -> None:
        import SimpleITK

        self.task, self.folder, self.count = cast(Any, plan.task), folder, count
        random = np.random.default_rng(0)
        for kind in ("images", "masks"):
            (folder / kind).mkdir()
        for place in range(count):
            noise = torch.from_numpy(random.normal(size=(1, 3, size // 8, size // 8)))
            tissue = functional.interpolate(noise, (size, size), mode="bilinear")[0].permute(1, 2, 0).numpy()
            pixels = np.clip(150 + 40 * tissue + random.normal(scale=4, size=tissue.shape), 0, 255).astype(np.uint8)
            nuclei = (tissue[..., 0] > 0.5).astype(np.uint8) * 255
            for kind, values in (("images", pixels), ("masks", nuclei)):
                image = SimpleITK.GetImageFromArray(values, isVector=values.ndim == 3)
                SimpleITK.WriteImage(image, str(folder / kind / f"{place}.png"))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image, mask = (self.folder / kind / f"{place}.png" for kind in ("images", "masks"))
        inputs = self.task.inputs_of(read_picture(image))[0]
        return inputs, self.task.labels_of((read_labels(mask) > 0).astype(np.uint8))


class Slices(Dataset):
    """Slices of volumes in compressed NIfTI files; reading a slice decompresses the slice's volume."""

    def __init__(self, plan: Plan, folder: Path, volumes: int = 2, size: int = 320, slices: int = 20) -> None:
        self.task, self.folder = cast(Any, plan.task), folder
        self.cases = [(volume, place) for volume in range(volumes) for place in range(2, slices, 5)]
        random = np.random.default_rng(0)
        for volume in range(volumes):
            values = random.normal(400, 100, (slices, size, size)).astype(np.int16).astype(np.float32)
            write_volume(folder / f"{volume}.nii.gz", values, (0.6, 0.6, 3.0))
            write_volume(folder / f"{volume}-mask.nii.gz", (values > 500).astype(np.uint8), (0.6, 0.6, 3.0))

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, case: int) -> tuple[Tensor, Tensor]:
        volume, place = self.cases[case]
        scan = Scan.read(self.folder / f"{volume}.nii.gz")
        image, mask = scan.values[0], scan.mask(self.folder / f"{volume}-mask.nii.gz")
        inputs = self.task.inputs_of(image[None, place : place + 1])[0] / 400
        labels = torch.from_numpy(mask[None, None, place].astype(np.float32))
        return inputs, (functional.interpolate(labels, inputs.shape[1:], mode="area")[0, 0] > 0.5).long()


def in_memory(cases: Dataset) -> Cases:
    inputs, targets = zip(*(cases[place] for place in range(len(cases))), strict=True)  # type: ignore[arg-type]
    return Cases(torch.stack(inputs), torch.stack(targets), ["x"] * len(inputs))


def training_time(kind: str, from_files: bool, device: str = "cpu") -> tuple[float, float, float]:
    task = {"tiles": {"name": "nuclei", "size": 128}, "slices": {"name": "synthetic-prostate", "size": 128}}[kind]
    network = {"name": "unet", "features": [16, 32, 64], "norm": "instance"}
    plan = make_plan(task, SITES, network=network, training={"batch_size": 4, "learning_rate": 0.001})
    with tempfile.TemporaryDirectory() as place:
        cases = {"tiles": Tiles, "slices": Slices}[kind](plan, Path(place))
        reading = fastest(lambda: in_memory(cases), 3)
        data = SiteData(cases if from_files else in_memory(cases), in_memory(cases), in_memory(cases))
        settings = make_settings({"device": device, "min_patients_per_metric": 1, "public_data": True}, "a benchmark")
        site = TrainingSite(participant_of(SiteContext(plan, SITES[0], SITES, settings, Path(place) / "site"), data))
        context = site.participant.trainer.train_context("shuffle", 1, lambda: None)

        def tell_apart(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            scores = selector(inputs)
            return functional.cross_entropy(scores, torch.zeros(len(inputs), dtype=torch.long, device=scores.device))

        def three_passes() -> None:
            context.train(context.train_step("model"))
            context.train(context.train_step("global"))
            with cast(FedSM, plan.algorithm).learning_selector(context, tell_apart) as selector:
                context.train(selector)

        return *fastest_in_turn(three_passes, lambda: plan.course.phase_of(1).train_round(context), 5), reading


# ---------------------------------------------------------------------------------------------------- bytes
def bytes_of_a_round(selector: str, sync: str) -> tuple[int, int, int]:
    task = {"name": "synthetic-prostate", "patients": 3, "slices": 3, "size": 32}
    method = {"name": "fedsm", "selector": selector, "selector_sync": sync}
    plan = make_plan(task, SITES, algorithm=method, network=PAPER, training={"rounds": 1, "learning_rate": 1e-5})
    settings = SiteSettings(device="cpu", public_data=True)
    site = inprocess.run(plan, settings=settings).summary.sites[SITES[0]]
    with torch.device("meta"):
        networks = plan.build_networks()
    sizes = [sum(t.nbytes for t in networks[name].state_dict().values()) for name in ("global", "model", "selector")]
    return site.bytes_up, site.bytes_down, sum(sizes)


# ---------------------------------------------------------------------------------------------------- memory
class MadeUp:
    """Simulated sites without data, which answer each request by tensors of the right shape."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        with torch.device("meta"):
            self.layout = plan.build_networks()

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        for number, site in enumerate(sites, 1):
            receive(site, self.answer(outgoing(site).facts, number))
        return {}

    def answer(self, facts: dict[str, Any], number: int) -> StudyMessage:
        asked = Request.received(facts)
        chosen, sums = {"chosen": {"global": 1}}, [1.0] * len(THRESHOLDS)
        told: dict[str, dict[str, Any]] = {
            "join": {"shares": True, "classes": dict.fromkeys(PARTS)},
            "round": {"samples": 1, "train_loss": 1.0, "validation": 1.0, "validation_loss": 1.0},
            "deliver": {
                "validation": 1.0,
                "validation_loss": 1.0,
                "outcome": {**chosen, "sums": sums},
            },
            "test": {"test": 1.0, "test_loss": 1.0, "selected": 1, "counts": {}, "outcome": chosen},
        }
        answer = ANSWERS[asked.task](
            task=asked.task,
            round=asked.round,
            study=asked.study,
            packages=self.plan.code,
            cases=Counted(train=1, validation=1, test=1),
            seconds=0.0,
            memory=0,
            warnings=[],
            suppressed=[],
            **told[asked.task],
        )
        return answer.message(self.groups(number) if asked.task == "round" else {})

    def groups(self, number: int) -> dict[str, dict[str, Tensor]]:
        shared = views(self.plan.course.phase_of(1).sent, self.layout)
        return {
            group: {name: torch.full(like.shape, number / 100, dtype=like.dtype) for name, like in tensors.items()}
            for group, tensors in shared.items()
        }

    def pause(self, seconds: float) -> None:
        """Return at once, because no site is late."""


def server_memory(count: int, selector: str, sync: str) -> tuple[float, float, float]:
    sites = [f"site{place:02}" for place in range(count)]
    small = make_plan({"name": "synthetic-activity"}, SITES, training={"rounds": 1})
    method = {"name": "fedsm", "selector": selector, "selector_sync": sync}
    plan = make_plan(ANY_SITES, sites, algorithm=method, network=PAPER, training={"rounds": 2})
    with tempfile.TemporaryDirectory() as place:
        Coordinator(small, SITES, MadeUp(small), Record(Path(place) / "small"), "made up").run()
        shared = views(plan.course.phase_of(1).sent, MadeUp(plan).layout)
        sizes = {group: sum(tensor.nbytes for tensor in tensors.values()) for group, tensors in shared.items()}
        before = most_held()
        Coordinator(plan, sites, MadeUp(plan), Record(Path(place) / "large"), "made up").run()
        message = sum(sizes.values())
        return most_held() - before, message + (count - 1) * sizes["personal"], message


# ---------------------------------------------------------------------------------------------------- the server's step
def server_step(count: int, selector: str) -> tuple[float, float]:
    sites = [f"site{place:02}" for place in range(count)]
    method = {"name": "fedsm", "selector": selector, "selector_sync": "none"}
    plan = make_plan(ANY_SITES, sites, algorithm=method, network=PAPER, training={"rounds": 9})
    made, phase = MadeUp(plan), plan.course.phase_of(1)
    groups = made.groups(1)
    with tempfile.TemporaryDirectory() as place:
        state = Coordinator(plan, sites, made, Record(Path(place) / "run"), "made up").state
        pull = cast(FedSM, plan.algorithm).pull

        def loops() -> None:
            for name, tensors in groups.items():
                for own in range(count if name == "personal" else 1):
                    others = (1 - pull) / (count - 1)
                    mixed = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
                    for site in range(count):
                        share = 1 / count if name != "personal" else pull if site == own else others
                        for key in mixed:
                            mixed[key] += share * tensors[key]

        def mixers() -> None:
            for site in sites:
                for group in phase.sent:
                    state.aggregators[group.name].add(site, groups[group.name], 10)
            for group in phase.sent:
                state.aggregators[group.name].finish()
                for site in sites:
                    state.aggregators[group.name].current(site)

        def of_a_round(number: int) -> tuple[float, float]:
            state.open(number)
            begin = time.process_time()
            loops()
            middle = time.process_time()
            mixers()
            return middle - begin, time.process_time() - middle

        slow, fast = zip(*(of_a_round(number) for number in range(1, 4)), strict=True)
        state.writer.shutdown()
    return min(slow), min(fast)


# ---------------------------------------------------------------------------------------------------- the lines
def times() -> bool:
    kept = True
    for kind, from_files in KINDS:
        apart, together, reading = in_a_fork(training_time, kind, from_files)
        ratio = together / apart
        note(f"fedsm: a round, {kind}, {'from files' if from_files else 'in memory'}", ratio)
        bound = f"  (at most {LESS_TIME}x)  {_kept(ratio <= LESS_TIME)}" if from_files else ""
        kept = kept and (not from_files or ratio <= LESS_TIME)
        where = f"from files, reading them once {reading:.2f} s" if from_files else "in memory"
        print(f"{kind} {where}: three passes {apart:.2f} s, a round {together:.2f} s, {ratio:.2f}x{bound}", flush=True)
    return kept


def parcels() -> bool:
    kept = True
    for selector in SELECTORS:
        for sync in ("closed-form", "server-adam", "none", "adam-moments"):
            up, down, reference = in_a_fork(bytes_of_a_round, selector, sync)
            ratio = max(up, down) / reference
            bounded = sync in ("server-adam", "none")
            kept = kept and (not bounded or ratio <= 1)
            bound = f"  (at most 1x)  {_kept(ratio <= 1)}" if bounded else "  (with what travels beside it)"
            megabytes = f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down, {ratio:.3f} of two models and a selector"
            print(f"{selector}, {sync}: {megabytes}{bound}", flush=True)
    return kept


def memories() -> bool:
    kept = True
    for sync in SYNCS:
        for count in COUNTS:
            used, given, message = (size / 2**20 for size in in_a_fork(server_memory, count, LARGE, sync))
            bound = given + 2 * message
            kept = kept and used <= bound + SLACK
            parts = f"given back {given:.0f} and two messages of {message:.0f}: {bound:.0f} MiB"
            print(
                f"VGG-11, {sync}, {count} sites: peak {used:.0f} MiB ({parts})  {_kept(used <= bound + SLACK)}",
                flush=True,
            )
    return kept


def steps() -> bool:
    loops, mixers = in_a_fork(server_step, max(COUNTS), LARGE)
    good = mixers <= STEP_SECONDS
    print(
        f"server's step, VGG-11, 12 sites: plain loops {loops:.2f} s, mixers {mixers:.2f} s, {mixers / loops:.2f}x"
        f"  (at most {STEP_SECONDS:g} s)  {_kept(good)}",
        flush=True,
    )
    return good


def _kept(good: bool) -> str:
    return "kept" if good else "MISSED"


TABLES = {"time": times, "bytes": parcels, "memory": memories, "step": steps}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of FedSM's three networks.")
    parser.add_argument("table", nargs="?", choices=(*TABLES, "all"), default="all")
    chosen = parser.parse_args().table
    if chosen != "all" or QUICKLY:
        torch.set_num_threads(1)
        kept = [table() for name, table in TABLES.items() if chosen in (name, "all")]
        return 0 if all(kept) else 1
    # Freed memory returns to the system at once, so that heap fragmentation does not change the peak.
    frugal = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    tables = [
        subprocess.run([sys.executable, __file__, name], env=frugal if name == "memory" else None) for name in TABLES
    ]
    return max(table.returncode for table in tables)


if __name__ == "__main__":
    once = {"fastest_in_turn": lambda one, other, repeats, turns=fastest_in_turn: turns(one, other, 1)}
    small = once | {
        "SELECTORS": ("compact",),
        "LARGE": "compact",
        "COUNTS": (2,),
        "SYNCS": ("none",),
        "KINDS": KINDS[2:],
    }
    run(main, globals(), PAPER={**PAPER, "features": [4, 8]}, Slices=partial(Slices, volumes=1, size=64), **small)
