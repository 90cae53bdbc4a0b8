"""Count the bytes that are written and copied between a tensor's arrival through NVFlare and the calculation of the
mean.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from medsilo.core import parent_watch

SCRIPT = """
import json, os, resource, torch
from medsilo.core.parent_watch import reuse_blocks
from medsilo.exchange.bounds import Bounds
from medsilo.mixing.aggregators import WeightedMean
from medsilo.runs.messages import StudyMessage
from tests.federation.test_gate import Cells, answer_of, to_parcel

reuse_blocks()  # as the server does
written, write = [0], os.pwritev

def counted(file, parts, place):
    done = write(file, parts, place)
    written[0] += done
    return done

os.pwritev = counted
model = {f"layer {place}": torch.randn(3_000_000) for place in range(4)}
sent = 2 * sum(tensor.nbytes for tensor in model.values())
cells, mean = Cells(), WeightedMean()
cells.gate.allow(Bounds(size=2 * sent))
for turn in range(3):  # at first, memory is new
    mean.start(["a", "b"])
    faults, written[0] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 0
    for site in "ba":
        assert cells.send(answer_of(StudyMessage({"model": model}, {"task": "round"})), timeout=120) == "ok"
        mean.add(site, to_parcel(cells.got.pop()).groups["model"], 1)
    mean.finish()
    faulted = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) * resource.getpagesize() / sent
print(json.dumps({"written": written[0] / sent, "faulted": faulted}))
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.skipif(not parent_watch.STATUS.exists(), reason="counts as Linux does")
def test_an_answer_is_written_once_and_memory_is_used_again() -> None:
    """The test's process is both the hospital and the server.

    In an earlier version, the server freed memory after each use, so the system zeroed ten bytes for each byte sent.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["written"] == 1.0  # the server writes the answer's tensors only once, to the file that receives them
    assert found["faulted"] < 3
