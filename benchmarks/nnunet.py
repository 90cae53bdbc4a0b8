"""Compare training with medsilo's task nnunet and with nnU-Net's trainer on the same volumes, in one run.

    python -m benchmarks.nnunet [--seeds N] [--epochs N] [--steps N] [--device cuda --features 32 --workers 8]

The program generates the volumes of five hospitals (benchmarks/brains.py) in one folder. Medsilo and nnU-Net use the
same plans, cases, epochs and steps, and for each seed the same initial weights. For medsilo's task, medsilo's engine
runs a study of one site. The trainer of nnU-Net is nnUNetTrainer as `nnUNetv2_train` creates it. nnUNetTrainer reads
the files of nnU-Net's preprocessor, and augments in a separate process. Neither medsilo nor nnU-Net validates in an
epoch. The epochs of medsilo and nnU-Net alternate. Times are processor times on one thread, or wall-clock times with a
GPU. The same code then scores both networks on test cases; on a CPU, nnU-Net's predictor and metrics must give the same
scores. The goal is that medsilo's epoch takes at most 1.05 times as long as nnU-Net's epoch.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

os.environ["nnUNet_def_n_proc"] = "2"  # noqa: SIM112 - which nnU-Net reads when it is imported

import numpy as np
import torch
from torch import nn

from benchmarks.brains import HOSPITALS, QUESTION, narrow, plans_of, write_hospitals
from benchmarks.timing import note, run
from medsilo.federation.participant import participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan, parse_plan
from medsilo.runs.messages import Request
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import patients_of
from medsilo.tasks.sources import DataSource
from medsilo_nnunet.question import SegmentationQuestion

MOST = 1.05
SITE, PARTS = "all", ("images", "labels")
AS_NNUNET = {"learning_rate": 0.01, "momentum": 0.99, "nesterov": True, "weight_decay": 3e-5, "clip": 12}


@dataclass(frozen=True)
class Size:
    cases: int = 6  # number of cases of each hospital
    width: float = 64.0  # width of a head, in millimetres
    batch: int = 4
    epochs: int = 14
    steps: int = 12
    features: int = 8  # features of the network's finest stage
    device: str = "cpu"
    workers: int = 0  # number of processes that create patches, the same for medsilo and nnU-Net


SIZE, SEEDS = Size(), 3


@dataclass(frozen=True)
class Outcome:
    dice: tuple[float, float]
    seconds: Sequence[tuple[float, ...]]
    said: float | None

    @property
    def ratio(self) -> float:
        """Return medsilo's median epoch time divided by nnU-Net's."""
        ours, theirs = (median(side) for side in zip(*self.seconds, strict=True))
        return ours / theirs


def write_data(folder: Path, size: Size) -> dict[str, Any]:
    write_hospitals(folder / "hospitals", HOSPITALS, size.cases, size.width)
    plans = narrow(plans_of(folder / "hospitals", HOSPITALS), size.features)
    plans["configurations"]["2d"]["batch_size"] = size.batch
    for part in PARTS:
        (folder / SITE / part).mkdir(parents=True)
        for file in (folder / "hospitals").glob(f"*/{part}/*"):
            shutil.move(file, folder / SITE / part / file.name)
    return plans


def study(plans: dict[str, Any], size: Size, seed: int) -> Plan:
    task = {"name": "nnunet", "question": QUESTION.model_dump(mode="json"), "plans": plans}
    training = {"rounds": size.epochs, "local_steps": size.steps, "batch_size": size.batch, "schedule": "poly"}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": task,
            "participation": {"sites": [SITE]},
            "training": AS_NNUNET | training,
            "model_selection": {"validate_every": size.epochs},
            "seed": seed,
        }
    )


class Ours:
    def __init__(self, plan: Plan, folder: Path, place: Path, device: str = "cpu", workers: int = 0) -> None:
        source = DataSource(folder=folder / SITE)
        settings = SiteSettings(data=source, device=device, threads=max(1, workers), public_data=True)
        self.plan, self.site = plan, TrainingSite(participant_of(SiteContext(plan, SITE, [SITE], settings, place)))
        given = views(plan.course.phase_of(1).given, plan.build_networks())
        self.groups = {name: {key: tensor.clone() for key, tensor in own.items()} for name, own in given.items()}
        self.round = 0

    def epoch(self) -> None:
        self.round += 1
        asked = Request(
            task="round", round=self.round, study="s", plan=self.plan.hash, sites=(SITE,), last=self.round - 1
        )
        self.groups = dict(self.site.answer(asked.message(self.groups)).groups)

    def cases(self, part: str) -> list[str]:
        return list(patients_of(getattr(self.site.participant.data, part)))

    def dice(self, model: nn.Module) -> float:
        """Return a network's mean Dice over the test cases, on the images' original grids."""
        return self.site.participant.evaluation.evaluate(
            self.site.participant.data.test, lambda: None, model, self.plan.task.goal.measuring
        )[1]


@contextmanager
def nnunet_folders(folder: Path, workers: int = 0) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {"nnUNet_n_proc_DA": str(workers)} | {
        f"nnUNet_{part}": str(folder / part) for part in ("raw", "preprocessed", "results")
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def preprocess(
    folder: Path,
    plans: dict[str, Any],
    trained: Sequence[str],
    tested: Sequence[str],
    question: SegmentationQuestion = QUESTION,
    configuration: str = "2d",
) -> None:
    """Let nnU-Net preprocess the cases for its trainer, with medsilo's division into training, validation and test
    cases.
    """
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    place = folder / "preprocessed" / question.name
    # removes the preprocessed cases of an earlier seed, because nnU-Net does not overwrite existing cases
    shutil.rmtree(place, ignore_errors=True)
    manager = PlansManager(plans)
    own = manager.get_configuration(configuration)
    settings = question.in_nnunet() | {"file_ending": ".nii.gz"}
    (place / own.data_identifier).mkdir(parents=True, exist_ok=True)
    for name in (*trained, *tested):
        files = [str(folder / SITE / part / f"{name}.nii.gz") for part in PARTS]
        target = str(place / own.data_identifier / name)
        DefaultPreprocessor(False).run_case_save(target, files[:1], files[1], manager, own, settings)
    written = {"splits_final": [{"train": trained, "val": tested}], "dataset_fingerprint": {}}
    for name, values in written.items():
        (place / f"{name}.json").write_text(json.dumps(values))


class Theirs:
    def __init__(
        self,
        plans: dict[str, Any],
        epochs: int,
        steps: int,
        seed: int,
        first: dict[str, torch.Tensor] | None = None,
        question: SegmentationQuestion = QUESTION,
        configuration: str = "2d",
        device: str = "cpu",
    ) -> None:
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        settings = question.in_nnunet() | {"file_ending": ".nii.gz"}
        given = json.loads(json.dumps(plans)) | {"continue_training": False}
        self.trainer = nnUNetTrainer(given, configuration, 0, settings, torch.device(device))
        self.trainer.num_epochs, self.steps = epochs, steps
        self.trainer.initialize()
        if first:
            self.network.load_state_dict(first)
        self.trainer.on_train_start()

    @property
    def network(self) -> nn.Module:
        """Return the network without the wrapper that nnU-Net's compilation on a GPU adds."""
        return getattr(self.trainer.network, "_orig_mod", self.trainer.network)

    def epoch(self) -> None:
        """Train an epoch in the same way as nnU-Net's run_training."""
        trainer = self.trainer
        trainer.on_train_epoch_start()
        trainer.on_train_epoch_end([trainer.train_step(next(trainer.dataloader_train)) for _ in range(self.steps)])
        trainer.current_epoch += 1

    def end(self) -> None:
        for loader in (self.trainer.dataloader_train, self.trainer.dataloader_val):
            getattr(loader, "_finish", lambda: None)()

    def said(self, folder: Path, cases: Sequence[str], labels: Sequence[int] = (1,)) -> dict[str, float]:
        from nnunetv2.evaluation.evaluate_predictions import compute_metrics
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        trainer, found = self.trainer, Path(tempfile.mkdtemp(dir=folder))
        predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
        manual = (trainer.plans_manager, trainer.configuration_manager, [trainer.network.state_dict()])
        own = (trainer.dataset_json, "nnUNetTrainer", trainer.inference_allowed_mirroring_axes)
        trainer.set_deep_supervision_enabled(False)
        predictor.manual_initialization(trainer.network, *manual, *own)
        images = [[str(folder / SITE / "images" / f"{name}.nii.gz")] for name in cases]
        predictor.predict_from_files_sequential(images, [str(found / name) for name in cases])
        reader = trainer.plans_manager.image_reader_writer_class()
        right = {name: folder / SITE / "labels" / f"{name}.nii.gz" for name in cases}
        dice = {}
        for name in cases:
            found_here = compute_metrics(str(right[name]), str(found / f"{name}.nii.gz"), reader, list(labels))
            dice[name] = fmean(float(found_here["metrics"][label]["Dice"]) for label in labels)
        return dice


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the processor time of one call, or on a GPU the wall-clock time until the GPU has finished."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    started = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - started


def compared(folder: Path, plans: dict[str, Any], size: Size, seed: int, asks: bool) -> Outcome:
    plan = study(plans, size, seed)
    ours = Ours(plan, folder, folder / f"study-{seed}", size.device, size.workers)
    first = plan.build_networks()["model"].network.state_dict()
    quiet = StringIO()
    with nnunet_folders(folder, size.workers), redirect_stdout(quiet):
        preprocess(folder, plans, ours.cases("train"), ours.cases("test"))
        theirs = Theirs(plans, size.epochs, size.steps, seed, first, device=size.device)
        both = ours.epoch, theirs.epoch
        times = [tuple(seconds(epoch, size.device) for epoch in both) for _ in range(size.epochs)]
        theirs.end()
        said = fmean(theirs.said(folder, ours.cases("test")).values()) if asks else None
        other = plan.build_networks()["model"].to(size.device)
        other.network.load_state_dict(theirs.network.state_dict())
        dice = (ours.dice(ours.site.participant.state.model), ours.dice(other))
    # medsilo's first and last epochs also validate, so their times do not count
    return Outcome(dice, times[1:-1] or times, said)


def main(arguments: Sequence[str] | None = None, size: Size | None = None) -> int:
    size = size or SIZE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    for name, default in asdict(size).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    chosen = vars(parser.parse_args(arguments))
    seeds = chosen.pop("seeds")
    size = Size(**chosen)
    torch.set_num_threads(1)
    print(f"{5 * size.cases} volumes, {size.epochs} epochs of {size.steps} steps of {size.batch} patches, one thread")
    print(f"{'seed':<6}{'Dice nnU-Net':>13}{'medsilo':>9}{'epoch nnU-Net':>15}{'medsilo':>9}{'ratio':>7}")
    found = []
    with tempfile.TemporaryDirectory(prefix="medsilo-bench-") as place:
        plans = write_data(Path(place), size)
        for seed in range(seeds):
            one = compared(Path(place), plans, size, seed, asks=seed == 0 and size.device == "cpu")
            found.append(one)
            ours, theirs = (median(side) for side in zip(*one.seconds, strict=True))
            print(f"{seed:<6}{one.dice[1]:>13.4f}{one.dice[0]:>9.4f}{theirs:>15.2f}{ours:>9.2f}{one.ratio:>7.3f}")
            if one.said is not None:
                print(f"      nnU-Net's own score of its network: {one.said:.4f}", flush=True)
    ratio = median(one.ratio for one in found)
    for name, side in (("nnU-Net", 1), ("medsilo", 0)):
        own = [one.dice[side] for one in found]
        print(f"{name}: Dice {fmean(own):.4f}, over seeds ± {stdev(own) if len(own) > 1 else 0:.4f}")
    print(f"epochs' time: {ratio:.3f} times nnU-Net's")
    note("nnunet: an epoch", ratio)
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    run(main, globals(), SIZE=Size(cases=2, width=32.0, batch=2, epochs=2, steps=1, features=4), SEEDS=1)
