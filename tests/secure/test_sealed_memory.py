"""What a running server's memory holds of a hospital's model, over TLS: nothing when the study seals."""

import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from medsilo.core.files import load_tensors
from medsilo.flare.jobs import pack, write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import SERVER, Consortium, wait_until
from tests.unit.test_sealed_engine import WIDE, initial_of, most_alike

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("consortium")]
STRETCH = 1 << 22  # numbers that are looked at together
LARGEST_REGION = 1 << 30


def writable(pid: int) -> list[bytes]:
    """Return what a process has in its own memory, while it stands still."""
    found = []
    os.kill(pid, signal.SIGSTOP)
    try:
        with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
            for line in maps:
                start, end, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
                size = int(end, 16) - int(start, 16)
                if rights.startswith("rw") and "/dev" not in line and size < LARGEST_REGION:
                    try:
                        memory.seek(int(start, 16))
                        found.append(memory.read(size) or b"")
                    except OSError:  # pages that nobody may read
                        continue
    finally:
        os.kill(pid, signal.SIGCONT)
    return [content for content in found if content.count(0) < len(content)]


def memory_after(consortium: Consortium, job: Path, study: str, rounds: int) -> list[bytes]:
    """Run a job; return the memory of the process that leads it after so many rounds."""
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(consortium.run(job)))
    thread.start()
    lines = consortium.kit(SERVER) / "medsilo" / study / "rounds.jsonl"
    wait_until(lambda: lines.exists() and lines.read_text().count("\n") >= rounds, 240, "rounds")
    leader = consortium.family(SERVER, "runner_process")[0]
    content = writable(leader.pid)
    thread.join()
    assert ended == ["FINISHED:COMPLETED"]
    return content


def stretches(contents: list[bytes], size: int) -> list[np.ndarray]:
    """Return memory as single-precision numbers, in overlapping stretches that are not all but empty."""
    found = []
    for content in contents:
        numbers = np.frombuffer(content[: len(content) // 4 * 4], "<f4")
        for start in range(0, max(len(numbers) - size, 0) + 1, STRETCH):
            part = numbers[start : start + STRETCH + size]
            if len(part) >= size:
                with np.errstate(invalid="ignore"):
                    found.append(np.nan_to_num(part.astype(np.float64), posinf=0.0, neginf=0.0))
    return found


def test_a_running_servers_memory_holds_no_model(consortium: Consortium, tmp_path: Path) -> None:
    alike = {}
    for mode in ("none", "group"):
        clear = ["transport.sealing_clear=[statistics]"] * (mode == "group")
        rules = [*WIDE, "training.batch_size=8", "training.rounds=2"]
        plan = make_plan("adafed", *rules, f"transport.sealing={mode}", *clear)
        study = f"memory-{mode}"
        write_job(tmp_path / f"plain-{mode}", plan, study=study)
        job = pack(tmp_path / f"plain-{mode}", tmp_path / mode, with_code=False)
        contents = memory_after(consortium, job, study, plan.rounds)
        site = consortium.kit(SITES[0]) / "medsilo" / study / "sites" / SITES[0]
        model = load_tensors(site / "last.safetensors")[0]
        name = max((n for n in model if n.endswith("weight")), key=lambda n: model[n].numel())
        weight, initial = (t.double().reshape(-1).numpy() for t in (model[name], initial_of(plan, name)))
        blank = [content.replace(initial.astype("<f4").tobytes(), bytes(4 * len(initial))) for content in contents]
        alike[mode] = most_alike(stretches(blank, len(weight)), weight, initial)
    assert alike["none"] > 0.9, alike
    assert alike["group"] < 0.01, alike
