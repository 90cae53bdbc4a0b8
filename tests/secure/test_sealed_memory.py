"""Search the memory, disk and logs of a running server for the hospitals' models over TLS.

With secure aggregation, the search finds no model; without secure aggregation, the search finds the models.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from medsilo.core.files import load_tensors
from medsilo.plan import Plan
from medsilo.runs.reading import read_summary
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.search import CHANCE, Numbers, found_pieces, most_alike, pieces_of, segments, strange_part
from tests.secure.consortium import SERVER, Consortium
from tests.unit.medsilo_secagg.test_sealed_engine import WIDE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sealed-consortium")]
LARGEST_REGION = 1 << 30
# three numbers: the fewest snapshots of the server's memory, the seconds between two snapshots, and the most snapshots
# between two rounds
LEAST_LOOKS, BETWEEN, MOST_LOOKS = (
    3,
    1.5,
    4,
)
Image = dict[tuple[int, int], bytes]


@pytest.fixture(scope="module")
def teaching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    consortium = Consortium(tmp_path_factory.mktemp("sealed"), dict.fromkeys(SITES, "teaching-hospital"))
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def memory_of(process: psutil.Process) -> Image:
    found: Image = {}
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
            for line in maps:
                start, end, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
                size = int(end, 16) - int(start, 16)
                if rights.startswith("rw") and "/dev" not in line and size < LARGEST_REGION:
                    try:
                        memory.seek(int(start, 16))
                        found[pid, int(start, 16)] = memory.read(size) or b""
                    except OSError:
                        continue
    finally:
        os.kill(pid, signal.SIGCONT)
    return found


class Watch:
    def __init__(self, consortium: Consortium, lines: Path) -> None:
        self.consortium, self.lines = consortium, lines
        self.first: Image = {}  # the server's memory before any model arrived
        self.changed: set[bytes] = set()
        self.looks = 0

    def until_it_ends(self) -> None:
        rounds, last, deadline = 0, 0.0, time.monotonic() + 240
        while not self.lines.with_name("summary.json").exists():
            assert time.monotonic() < deadline, "the study does not end"
            time.sleep(0.05)
            done = self.lines.read_text().count("\n") if self.lines.exists() else 0
            due = self.lines.parent.exists() and time.monotonic() > last + BETWEEN and self.looks < MOST_LOOKS
            if done > rounds or due:
                self.look()
                rounds, last = done, time.monotonic()

    def look(self) -> None:
        image: Image = {}
        for process in self.consortium.family(SERVER):
            with suppress(OSError, psutil.Error):
                image |= memory_of(process)
        if not self.first:
            self.first = image
            return
        self.looks += 1
        for place, content in image.items():
            self.changed.update(segments(content, self.first.get(place, b"")))


def watched(consortium: Consortium, job: Path, study: str) -> Watch:
    session = consortium.session()
    try:
        session.submit_job(str(job))
    finally:
        session.close()
    watch = Watch(consortium, consortium.kit(SERVER) / "medsilo" / study / "rounds.jsonl")
    watch.until_it_ends()
    summary = read_summary(watch.lines.parent)
    assert summary.status == "finished", summary.reason
    return watch


def written_since(consortium: Consortium, start: float) -> list[bytes]:
    folders = [consortium.kit(SERVER), consortium.root / "storage"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    new = [path.read_bytes() for path in files if path.stat().st_mtime >= start]
    return [*new, consortium.log(SERVER).encode()]


def models_of(consortium: Consortium, plan: Plan, study: str) -> tuple[dict[str, Numbers], Numbers, Numbers]:
    initial = plan.build_networks()["model"].state_dict()
    name = max(initial, key=lambda key: initial[key].numel())
    found = {}
    for site in SITES:
        folder = consortium.kit(site) / "medsilo" / study / "sites" / site
        for file in ("last.safetensors", f"state-{plan.rounds}.safetensors"):
            tensors = load_tensors(folder / file)[0]
            weight = tensors.get(name, tensors.get(f"module/model/{name}"))
            if weight is not None:
                found[f"{site} {file}"] = weight.double().reshape(-1).numpy()
    checkpoint = consortium.kit(SERVER) / "medsilo" / study / "checkpoints" / f"round-{plan.rounds}.safetensors"
    common = load_tensors(checkpoint)[0][f"global/{name}"]
    return found, *(tensor.double().reshape(-1).numpy() for tensor in (initial[name], common))


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "mode"),
    [(1, "pairwise"), (2, "none")],
)
def test_a_server_holds_no_model_that_a_study_seals(teaching: Consortium, seed: int, mode: str, tmp_path: Path) -> None:
    """Each study has a different seed, so that remains of an earlier study do not resemble the models of this study."""
    plan = make_plan(
        "fedsm",
        *WIDE,
        "algorithm.selector_sync=server-adam",
        f"seed={seed}",
        "training.rounds=1",  # few rounds, because averages over many rounds would reveal more about a hospital's model
        "training.local_epochs=60",
        "algorithm.pull=0.95",
        f"secure_aggregation.mode={mode}",
    )
    study, start = f"memory-{mode}", time.time()
    write_job(tmp_path / "plain", plan, study=study)
    write_job(tmp_path / "job", plan, tmp_path / "plain")
    watch = watched(teaching, tmp_path / "job", study)
    models, initial, common = models_of(teaching, plan, study)
    assert watch.looks >= LEAST_LOOKS and len(models) >= len(SITES)
    contents = watch.changed.union(written_since(teaching, start))
    found = found_pieces(contents, {name: pieces_of(model, initial) for name, model in models.items()})
    last = {name.partition(" ")[0]: model for name, model in models.items()}
    means = sum(last.values()) / len(last), common
    alike = most_alike(contents, [strange_part(model, initial, *means) for model in last.values()], initial)
    if mode == "none":
        assert alike > 20 * CHANCE and {f"{site} last.safetensors" for site in SITES} <= found, (alike, found)
    else:
        assert alike < 5 * CHANCE and not found, (alike, found)
