"""A round of a training script by medsilo's recipe beside NVFlare's own: time, and the server's memory.

    python benchmarks/scripts.py [--quick]

Both run the same script in NVFlare's simulator, all sites at once. A round is the median time between two rounds of a
site; both send tensors as they are.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

SIZES = {"small": (20, 32), "large": (1700, 8500)}  # inputs and hidden numbers: 1.3 thousand and 29 million weights
MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear({0}, {1}), nn.ReLU(), nn.Linear({1}, {2}))
    def forward(self, x):
        return self.layers(x)
"""
SCRIPT = """
import sys, time, torch
from model import Net
import nvflare.client as flare
torch.set_num_threads(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = [(torch.ones(4, {0}), torch.zeros(4, dtype=torch.long))]
flare.init()
told = open(sys.argv[1] + "/" + flare.get_site_name(), "a")
if sys.argv[2] == "medsilo":
    from medsilo.client import join
    site = join(model, optimizer, batch)
    running = site.is_running
else:
    running = flare.is_running
while running():
    told.write(f"{{time.time()}}\\n"); told.flush()
    if sys.argv[2] == "medsilo":
        site.receive()
    else:
        model.load_state_dict(flare.receive().params)
    for inputs, targets in batch:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if sys.argv[2] == "medsilo":
        site.send()
    else:
        flare.send(flare.FLModel(params=dict(model.state_dict()), metrics={{"accuracy": 0.0}}))
"""
JOB = """
import sys
from model import Net
from nvflare.recipe import SimEnv
from nvflare.client.config import ExchangeFormat
own, sites, rounds, told = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if own == "medsilo":
    from medsilo.recipes import FedAvgRecipe
    more = {}
else:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    more = {"server_expected_format": ExchangeFormat.PYTORCH}
recipe = FedAvgRecipe(name="round", model=Net(), min_clients=sites, num_rounds=rounds, train_script="client.py",
    train_args=f"{told} {own}", **more)
recipe.execute(SimEnv(num_clients=sites, workspace_root="workspace-" + own))
"""


def measured(own: str, size: str, sites: int, rounds: int) -> tuple[float, int]:
    """Return the seconds of a round, and the most bytes that the server's process held."""
    inputs, hidden = SIZES[size]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "told").mkdir()
        (folder / "model.py").write_text(MODEL.format(inputs, hidden, inputs))
        (folder / "client.py").write_text(SCRIPT.format(inputs))
        (folder / "job.py").write_text(JOB)
        command = [sys.executable, "job.py", own, str(sites), str(rounds), str(folder / "told")]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        most = 0
        while process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if "nvflare.private.fed.app.simulator.simulator" in child.cmdline():
                        most = max(most, child.memory_info().rss)
                except psutil.Error:
                    continue
            time.sleep(0.1)
        assert process.returncode == 0, f"{own}, {size}, {sites} sites: exit code {process.returncode}"
        gaps = []
        for file in (folder / "told").iterdir():
            at = [float(line) for line in file.read_text().split()]
            gaps += [after - before for before, after in pairwise(at[1:])]
        return statistics.median(gaps), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small network at three sites alone")
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    for size in ("small",) if asked.quick else SIZES:
        for sites in (3,) if asked.quick else (3, 6):
            found = {own: measured(own, size, sites, asked.rounds) for own in ("nvflare", "medsilo")}
            (theirs, held), (ours, holds) = found["nvflare"], found["medsilo"]
            told = {"size": size, "sites": sites, "round": round(ours / theirs, 3), "memory": round(holds / held, 3)}
            print(json.dumps({**told, "seconds": [round(ours, 3), round(theirs, 3)], "MiB": [holds >> 20, held >> 20]}))


if __name__ == "__main__":
    main()
