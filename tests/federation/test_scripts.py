"""Run the examples of training scripts in NVFlare's simulator as a user does; the models must have learned."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.airlock.room import ability
from medsilo.client import super_model
from medsilo.core.files import load_tensors
from medsilo.runs import paths

# Lightning imports torchvision, which fails with a CPU-only torch, because a CPU-only torch lacks two of torchvision's
# operators.
WHOLE_TORCHVISION = """
import torch

try:
    import torchvision
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


def simulated(
    root: Path, folder: Path, name: str, *arguments: str, changes: Mapping[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    place = folder / name
    shutil.copytree(root / "examples" / name, place, dirs_exist_ok=True)
    script = place / "client.py"
    for own, instead in (changes or {}).items():
        assert own in script.read_text()
        script.write_text(script.read_text().replace(own, instead))
    said = subprocess.run(
        [sys.executable, "job.py", "--workspace", "workspace", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    found = list(place.glob(f"workspace/{name}/server/medsilo/*/{paths.SUMMARY}"))
    assert said.returncode == 0 and len(found) == 1, said.stderr[-2000:]
    summary = json.loads(found[0].read_text())
    assert summary["status"] == "finished" and f"medsilo report {found[0].parent}" in said.stdout
    return found[0].parent, summary


def gains(summary: dict[str, Any]) -> list[float]:
    scores = [[score for score in own["validation"] if score is not None] for own in summary["sites"].values()]
    return [own[-1] - own[0] for own in scores]


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hello_fedbn_keeps_each_sites_batch_norm(external: bool, root: Path, tmp_path: Path) -> None:
    """In an earlier version, the server did not fetch the tensors of a script that runs in a separate process, as with
    `external`.
    """
    script = (root / "examples/hello-fedbn/client.py").read_text()
    (line,) = (line for line in script.splitlines() if "flare.init()" in line)
    looks = "from medsilo.flare.script_process import _gates; assert 8 << 20 < _gates[0].most.size < 20 << 20"
    changes = {line: f"{line}; torch.manual_seed(0); {looks}"}
    run, summary = simulated(root, tmp_path, "hello-fedbn", *["--external"] * external, changes=changes)
    assert min(gains(summary)) > 0.1
    theirs = run.parents[1] / "simulate_job/metrics/round_metrics.jsonl"
    lines = [json.loads(line) for line in theirs.read_text().splitlines()]
    assert [line["round"] for line in lines] == [*range(summary["rounds"]["done"])]
    models = [
        load_tensors(paths.site_folder(place, place.parents[1].name) / paths.LAST)[0]
        for place in sorted(run.parents[2].glob("site-*/medsilo/*"))
    ]
    assert len(models) == 3
    for name in models[0]:
        same = all(torch.equal(models[0][name], other[name]) for other in models[1:])
        assert same == (not name.startswith("features.1.") or name.endswith("num_batches_tracked")), name


def blocks(page: str, kind: str) -> list[list[str]]:
    found = re.findall(rf"^ *```{kind}\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block).splitlines() for block in found]


def changed_by(text: str, diff: list[str]) -> str:
    """Apply the diff of a page in skills/ to a file's text; each line that the diff removes must occur once in the
    text.
    """
    hunks = re.findall(r"-(.*)\n((?:\+.*\n?)+)", "\n".join(diff))
    assert hunks
    for gone, come in hunks:
        assert text.count(f"{gone}\n") == 1
        text = text.replace(f"{gone}\n", "".join(f"{line[1:]}\n" for line in come.splitlines()))
    return text


@pytest.mark.slow
def test_the_skill_makes_a_stock_job_fedbn_by_what_it_says_alone(root: Path, tmp_path: Path) -> None:
    folder = root / "skills/medsilo-make-fedbn"
    skill = (folder / "SKILL.md").read_text()
    shutil.copytree(folder / "evals/files/fedavg-job", tmp_path, dirs_exist_ok=True)
    for name, diff in zip(("job.py", "client.py"), blocks(skill, "diff"), strict=True):
        (tmp_path / name).write_text(changed_by((tmp_path / name).read_text(), diff))
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said, study = "", ""
    for command in [line for block in blocks(skill, "bash") for line in block]:
        words = [word.replace("STUDY", study) for word in shlex.split(command)]
        done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        said += done.stdout
        study = study or "".join(re.findall(r"medsilo report (\S+)", done.stdout))
    assert "name: fedbn" in said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"round"')]
    assert [[site["name"] for site in line["sites"]] for line in lines] == [["site-1", "site-2"]] * 2
    assert Path(study, paths.REPORT).exists()


def test_the_skill_has_the_evaluations_that_nvflare_asks_of_a_skill(root: Path) -> None:
    """NVFlare's checks require three prompts (for the skill, for another skill, for none) and the files that the skill
    edits.
    """
    folder = root / "skills/medsilo-make-fedbn"
    cases = json.loads((folder / "evals/evals.json").read_text())["evals"]
    named = [case["nvflare"] for case in cases]
    assert {folder.name, None} < {one["expected_skill"] for one in named}
    assert [one["expected_skill"] for one in named if one.get("negative_for") == folder.name] == [
        "nvflare-convert-pytorch"
    ]
    stock, example = folder / "evals/files/fedavg-job", root / "examples/hello-fedbn"
    assert (stock / "model.py").read_text() == (example / "model.py").read_text()
    code, ours = ((place / "client.py").read_text().partition("def ")[2] for place in (stock, example))
    assert code == ours.replace("    flare.join(model, optimizer, train_loader)\n", "")
    edited = {path for case in cases for path in case["files"]}
    assert {folder / "evals" / path for path in edited} == {*folder.glob("evals/files/*/*.py")} != set()
    aims = [aim for one in named for kind in ("mandatory", "prohibited") for aim in one.get(f"{kind}_behavior", [])]
    assert aims and all(aim["id"] and aim["description"] for aim in aims + named[0]["process_metrics"])


@pytest.mark.long
@pytest.mark.parametrize("method", ["HarmoFL", "FedSM"])
def test_a_monai_script_learns_by_harmofl_and_fedsm(method: str, root: Path, tmp_path: Path) -> None:
    run, summary = simulated(root, tmp_path, "monai-segmentation", "--method", method)
    assert min(gains(summary)) > 0.03
    if method == "FedSM":
        sys.path.insert(0, str(root / "examples/monai-segmentation"))
        try:
            from model import unet  # type: ignore[import-not-found]
        finally:
            sys.path.pop(0)
        model = super_model(run / paths.SUPER_MODEL, unet())
        assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 2, 64, 64)


@pytest.mark.long
def test_adafed_mixes_studies_of_a_table_by_their_statistics(root: Path, shared_data: Path, tmp_path: Path) -> None:
    _, summary = simulated(root, tmp_path, "tabular", "--table", str(shared_data / "impact/impact.csv"), "--sites", "3")
    weights = torch.tensor(summary["details"]["similarity"]["weights"])
    assert torch.allclose(weights.sum(1), torch.ones(3)) and (weights.diagonal() == 0.5).all()
    assert len({round(float(weight), 6) for weight in weights[0, 1:]}) == 2
    assert min(own["test"]["auc"] for own in summary["sites"].values()) > 0.7


@pytest.fixture
def lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tmp_path / "before/sitecustomize.py"
    before.parent.mkdir()
    before.write_text(WHOLE_TORCHVISION)
    monkeypatch.setenv("PYTHONPATH", str(before.parent))


@pytest.mark.slow
def test_lightnings_trainer_trains_both_networks_of_ditto(root: Path, tmp_path: Path, lightning: None) -> None:
    seeded = {"flare.init()": "flare.init(); torch.manual_seed(0)"}
    assert min(gains(simulated(root, tmp_path, "lightning", changes=seeded)[1])) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("method", ["FedBN", "Ditto", "FedSM"])
def test_a_script_that_is_started_anew_for_each_turn_ends_with_the_same_bits(
    method: str, root: Path, tmp_path: Path
) -> None:
    """With fewer threads than sites, NVFlare's simulator ends the script's process after each answer."""
    ends = []
    loop = {
        "for _ in range(epochs)": "for net, optimizer in (own for own in flare.networks() for _ in range(epochs))",
        "model(images), labels": "net(images), labels",
        "optimizer, train_loader)": "optimizer, train_loader, validation=test_loader)",
    }
    for threads in ("3", "2", "1"):
        arguments = ("--method", method, "--threads", threads, "--rounds", "2", "--seed", "0")
        run, _ = simulated(root, tmp_path / threads, "hello-fedbn", *arguments, changes=loop)
        files = sorted(run.parents[2].glob(f"site-*/medsilo/*/sites/*/{paths.LAST}"))
        ends.append([load_tensors(file)[0] for file in files])
    for other in ends[1:]:
        assert len(other) == 3
        assert all(torch.equal(one[name], two[name]) for one, two in zip(ends[0], other, strict=True) for name in one)


JOB = """
import sys
from model import Net
from nvflare.recipe import SimEnv
from medsilo_lab import recipes

ranks = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
given = {"launch_external_process": True, "command": ranks, "train_script": "client.py"}
recipe = getattr(recipes, sys.argv[1])(name="ddp", model=Net(), min_clients=1, num_rounds=2, **given)
recipe.execute(SimEnv(num_clients=1, workspace_root="workspace"))
"""


BATCH_NORM = "features.1."  # the two ranks have different batches, and therefore different batch-norm statistics


@pytest.mark.long
@pytest.mark.parametrize("method", ["FedAvg", "FedProx"])
def test_two_processes_train_one_model_or_are_refused(method: str, root: Path, tmp_path: Path) -> None:
    """In an earlier version, the models of the two processes differed with FedProx, and the second process died with
    FedAvg.
    """
    shutil.copy(root / "examples/hello-fedbn/model.py", tmp_path)
    script = (root / "examples/hello-fedbn/two_processes.py").read_text()
    sends = "        flare.send("
    saves = "        torch.save(model.state_dict(), f'{distributed.get_rank()}.pt')"
    assert script.count(sends) == 1
    (tmp_path / "client.py").write_text(script.replace(sends, f"{saves}\n{sends}"))
    (tmp_path / "job.py").write_text(JOB)
    said = subprocess.run(
        [sys.executable, "job.py", f"{method}Recipe"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if method == "FedProx":
        assert said.returncode == 1 and "join: FedProx" in said.stderr.splitlines()[-1]
        return
    assert said.returncode == 0, said.stderr[-2000:]
    one, other = (torch.load(next(tmp_path.rglob(f"{rank}.pt")), weights_only=True) for rank in (0, 1))
    assert all(torch.equal(own, other[name]) for name, own in one.items() if not name.startswith(BATCH_NORM))


FILTER = '''
from pathlib import Path

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter


class Doubles(Filter):
    """Doubles what leaves, and keeps what it saw."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def process(self, shareable, fl_ctx):
        answer = from_shareable(shareable)
        with Path(self.file).open("a") as file:
            file.write(f"{fl_ctx.get_identity_name()} {len(answer.data)}\\n")
        answer.data = {name: 2 * own for name, own in answer.data.items()}
        return answer.update_shareable(shareable)
'''


@pytest.mark.slow
def test_a_filter_of_nvflares_runs_on_what_a_round_sends(root: Path, tmp_path: Path) -> None:
    """NVFlare's example filters apply to the task "train"; in an earlier version, medsilo's task had another name, so
    filters never ran.
    """
    place = tmp_path / "hello-fedbn"
    shutil.copytree(root / "examples/hello-fedbn", place)
    (place / "doubles.py").write_text(FILTER)
    job, seen = place / "job.py", tmp_path / "seen"
    adds = (
        f'from doubles import Doubles\n    recipe.add_client_output_filter(Doubles("{seen}"), tasks=["train"])\n    run'
    )
    text = job.read_text()
    assert "    run = " in text
    job.write_text(text.replace("    run = ", f"    {adds} = "))
    command = [sys.executable, "job.py", "--method", "FedAvg", "--rounds", "2", "--seed", "0"]
    said = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=1200)
    assert said.returncode == 0, said.stderr[-2000:]
    lines = seen.read_text().split("\n")[:-1]
    (size,) = {line.split()[1] for line in lines}  # requests to join and to end carry no tensors
    assert int(size) > 3 and sorted(lines) == sorted(f"site-{site} {size}" for site in (1, 2, 3) for _ in range(2))


@pytest.mark.slow
def test_nvflares_patch_of_lightnings_trainer_ends_in_one_line(root: Path, tmp_path: Path, lightning: None) -> None:
    """With NVFlare's patch of Lightning, a script would receive the first message again in every round.

    The recipe rejects a script that imports NVFlare's patch, so the test hides the import in another module.
    """
    place = tmp_path / "lightning"
    shutil.copytree(root / "examples/lightning", place)
    script = place / "client.py"
    text = script.read_text()
    begin, end = text.index("    flare.join("), text.index("\n\nif __name__")
    loop = (
        "    trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False)\n"
    )
    loop += "    model.configure_optimizers = lambda: optimizer\n    flare.patch(trainer)\n"
    loop += "    while flare.is_running():\n        trainer.fit(model, loader)\n"
    text = (text[:begin] + loop + text[end:]).replace(
        "import medsilo.client as flare", "import nvflare.client.lightning as flare"
    )
    # NVFlare's patch imports pytorch_lightning
    text = text.replace("import lightning\n", "import pytorch_lightning as lightning\n")
    model = place / "model.py"
    model.write_text(model.read_text().replace("import lightning\n", "import pytorch_lightning as lightning\n"))
    told = []
    for hidden in (False, True):
        script.write_text(text)
        if hidden:
            module = "import importlib\n\nflare = importlib.import_module('nvflare.client.' + 'lightning')"
            script.write_text(text.replace("import nvflare.client.lightning as flare", module))
        said = subprocess.run(
            [sys.executable, "job.py", "--rounds", "2"], cwd=place, capture_output=True, text=True, timeout=1200
        )
        assert said.returncode
        told.append(said.stderr.strip().splitlines()[-1])
    assert "train_script: client.py has NVFlare's patch" in told[0]
    assert "this script has not joined: use medsilo.client" in told[1]


@pytest.mark.slow
@pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces")
def test_a_script_ends_with_the_same_bits_inside_and_outside_of_the_airlock(root: Path, tmp_path: Path) -> None:
    ends = []
    for airlock in (False, True):
        arguments = ["--rounds", "2", "--seed", "0", *["--airlock"] * airlock]
        run, summary = simulated(root, tmp_path / str(airlock), "hello-fedbn", *arguments)
        files = sorted(run.parents[2].glob(f"site-*/medsilo/*/sites/*/{paths.LAST}"))
        scores = {site: own["validation"] for site, own in summary["sites"].items()}
        ends.append(([load_tensors(file)[0] for file in files], scores))
    (outside, scores), (inside, own_scores) = ends
    assert len(outside) == len(inside) == 3 and scores == own_scores
    assert all(torch.equal(one[name], two[name]) for one, two in zip(outside, inside, strict=True) for name in one)
