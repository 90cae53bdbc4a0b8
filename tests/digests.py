"""Compute digests of all tensors that a small study writes, for every method.

    python -m tests.digests             # record the digests again, after an intended change of numbers
    python -m tests.digests METHOD...   # record the digests of new methods
    python -m tests.digests --add       # add the digests of this machine's processor, at a commit without such a change

Digests depend on the order in which a processor adds numbers, so each case has digests by processor. A small
computation without medsilo identifies processors that add in the same order. On a processor without digests, the tests
compare only the norms of tensors.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tests.conftest as shared
from medsilo.site.settings import SiteSettings
from tests import inprocess
from tests.unit.methods.test_methods import SAYS

FILE = Path(__file__).with_name("digests.json")
SMALL = {
    "synthetic-activity": [],
    "synthetic-histology": ["task.size=32", "task.patients=5", "task.patches=4", "training.batch_size=8"],
    "synthetic-prostate": ["task.patients=4", "task.size=32", "task.slices=4", "training.batch_size=8"],
}
AMPLITUDE = 'algorithm.amplitude={"band": 0.1}'
SITE = SiteSettings(device="cpu", share_personal_model=True, public_data=True)
VARIANTS = {  # variants of methods, each of which runs code that the plain method does not run
    "fedavg, amplitude": ("synthetic-histology", "fedavg", [AMPLITUDE]),
    "fedbn, both halves": ("synthetic-histology", "fedbn", [AMPLITUDE, "algorithm.perturbation={}"]),
    "adafed, amplitude": ("synthetic-histology", "adafed", [AMPLITUDE]),
    "f-adafed, amplitude": ("synthetic-histology", "f-adafed", [AMPLITUDE]),
    "ditto, amplitude": ("synthetic-histology", "ditto", [AMPLITUDE]),
    "local, amplitude": ("synthetic-histology", "local", [AMPLITUDE]),
    "harmofl, neither half": (
        "synthetic-histology",
        "harmofl",
        ["algorithm.amplitude=null", "algorithm.perturbation=null"],
    ),
    "adafed, uniform": ("synthetic-activity", "adafed", ["algorithm.weights=uniform"]),
    "adafed, mean of batch norms": ("synthetic-activity", "adafed", ["algorithm.bn_share=mean"]),
    "adafed, weighted batch norms": ("synthetic-activity", "adafed", ["algorithm.bn_share=weighted"]),
    "fedavg, bfloat16": ("synthetic-activity", "fedavg", ["transport.precision=bfloat16"]),
    "fedprox, stragglers": ("synthetic-activity", "fedprox", ["algorithm.partial=0.7"]),
    "apfl, adaptive": ("synthetic-activity", "apfl", ["algorithm.adaptive=true"]),
    "fedsm, adam-moments": ("synthetic-activity", "fedsm", ["algorithm.selector_sync=adam-moments"]),
    "fedsm, full batch": (
        "synthetic-activity",
        "fedsm",
        ["algorithm.selector_sync=none", "algorithm.selector_step=full-batch"],
    ),
    "fedsm, ditto": ("synthetic-activity", "fedsm", ['algorithm.personal_method={"name": "ditto"}']),
    "fedsm, per-fedavg": ("synthetic-activity", "fedsm", ['algorithm.personal_method={"name": "per-fedavg"}']),
    "fedsm, apfl": ("synthetic-activity", "fedsm", ['algorithm.personal_method={"name": "apfl"}']),
    "fedsm, pfedme": ("synthetic-activity", "fedsm", ['algorithm.personal_method={"name": "pfedme"}']),
    "fedsm, fine-tuning": ("synthetic-activity", "fedsm", ['algorithm.personal_method={"name": "fine-tuning"}']),
    "fedsm, unseen": ("synthetic-activity", "fedsm", ["participation.evaluation_sites=[hospital-d]"]),
    "harmofl, unseen": ("synthetic-histology", "harmofl", ["participation.evaluation_sites=[hospital-d]"]),
    "fedavg, optimizer kept": ("synthetic-activity", "fedavg", ["training.optimizer_state=keep"]),
    "fedavg, truncated": ("synthetic-activity", "fedavg", ["training.truncate=true"]),
}
SEALED = [method for method in shared.METHODS if "unsealed" not in SAYS.get(method, {})]
VARIANTS |= {  # masks are random in each run, but sums of masked tensors have the same bits
    f"{method}, sealed": ("synthetic-activity", method, ["secure_aggregation.mode=pairwise"]) for method in SEALED
}
CASES: dict[str, tuple[str, str, list[str]]] = {
    **{
        f"{method}, {task}": (task, method, [])
        for method in [*shared.METHODS, "central"]
        for task in SMALL
        if (method, task) != ("fedrod", "synthetic-prostate")  # fedrod needs a task with classes
    },
    **VARIANTS,
}


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def digest(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def size_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the sum of the tensors' absolute values, which is nearly the same on every processor."""
    return sum(float(tensor.double().abs().sum()) for tensor in tensors.values())


def this_processor() -> str:
    """Return the bits of a small training run without medsilo; the bits are equal on processors that add in the same
    order.
    """
    with one_thread():
        random = torch.Generator().manual_seed(7)
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5)
        )
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random) / 10)
        for _ in range(3):
            images = torch.randn(6, 3, 16, 16, generator=random)
            loss = nn.functional.cross_entropy(layers(torch.fft.irfft2(torch.fft.rfft2(images))), torch.arange(6) % 5)
            loss.backward()
            with torch.no_grad():
                for parameter in layers.parameters():
                    parameter -= 0.1 * parameter.grad
        return digest(dict(layers.state_dict()))


def left_by(case: str) -> dict[str, Any]:
    task, method, changes = CASES[case]
    short = ["training.rounds=3"] if method == "f-adafed" else []
    plan = shared.make_plan(method, f"task.name={task}", *SMALL[task], *short, *changes)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        run = inprocess.run(plan, folder=root, settings=SITE)
        # the file secure-aggregation.safetensors has random masks, which differ between runs
        passing = {"checkpoints", "secure-aggregation.safetensors"}
        paths = sorted(path for path in root.rglob("*.safetensors") if not passing & set(path.parts))
        files = {
            path.relative_to(root).as_posix(): load_file(path) for path in paths if not path.name.startswith("state-")
        }
    here = this_processor()
    return {
        "bits": {here: {name: digest(tensors) for name, tensors in files.items()}},
        "sizes": {name: size_of(tensors) for name, tensors in files.items()},
        "tests": {here: {site: facts.test and facts.test["loss"] for site, facts in run.summary.sites.items()}},
    }


def main(methods: Sequence[str], add: bool) -> None:
    chosen = [case for case, (_, method, _) in CASES.items() if not methods or method in methods]
    known = json.loads(FILE.read_text("utf-8"))["cases"] if methods or add else {}
    for case in chosen:
        found = left_by(case)
        if add and case in known:
            found = {
                "bits": {**known[case]["bits"], **found["bits"]},
                "sizes": known[case]["sizes"],
                "tests": {**known[case]["tests"], **found["tests"]},
            }
        known[case] = found
    FILE.write_text(json.dumps({"cases": known}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(chosen)} cases in {FILE}")


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--add"], "--add" in sys.argv)
