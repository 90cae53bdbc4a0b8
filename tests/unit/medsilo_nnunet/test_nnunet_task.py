"""The task nnunet uses nnU-Net's own training in a study of any method."""

import json
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import yaml
from torch.utils.data import Subset

from medsilo.core.errors import PlanError
from medsilo.learning.compute import Compute
from medsilo.learning.loop import OutputLoss, train_step
from medsilo.learning.optimizers import begin_round
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.tasks.cache import held_case
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.sources import DataSource
from medsilo_lab.nnunet_planning import make_plans
from medsilo_nnunet.fingerprint import Fingerprint, MeasuredSite, facts_of
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_parts import TrainerName
from medsilo_nnunet.question import SegmentationQuestion
from tests.federations import write_volumes

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
pytestmark = pytest.mark.slow

QUESTION = SegmentationQuestion(name="Dataset007_Volumes", channels=("FLAIR",), labels={"background": 0, "lesion": 1})
HOSPITALS = {"north": 2.5, "st-anna": 3.0, "west": 3.5}  # distance between slices in mm
CASES = 4
SHORT = {"rounds": 2, "batch_size": 2, "local_steps": 1, "momentum": 0.9}
AS_NNUNET = {"momentum": 0.99, "nesterov": True, "weight_decay": 3e-5, "clip": 12.0, "schedule": "poly"}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, told, holdings = tmp_path_factory.mktemp("hospitals"), [], {}
    for site, between in HOSPITALS.items():
        write_volumes(folder / site, QUESTION, [f"{site}{case}" for case in range(CASES)], 1, (1, 1, between), 48)
        data = RawData.of(folder / site, QUESTION)
        told.append(Fingerprint.of(facts_of(data, 2000), 2000))
        holdings[site] = MeasuredSite.model_construct(reader=data.reader)
    made = make_plans(QUESTION, Fingerprint.merged(told), holdings)
    (folder / "plans.json").write_text(json.dumps(made.plans))
    return folder


def plan_of(hospitals: Path, training: Mapping[str, Any] = SHORT, **task: Any) -> Plan:
    plans = json.loads((hospitals / "plans.json").read_text())
    own = {"name": "nnunet", "question": QUESTION.model_dump(mode="json"), "plans": plans, "mirror": False, **task}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": own,
            "participation": {"sites": list(HOSPITALS)},
            "training": dict(training),
        }
    )


@pytest.fixture(scope="module")
def plan(hospitals: Path) -> Plan:
    return plan_of(hospitals)


@pytest.fixture(scope="module")
def data(hospitals: Path, plan: Plan) -> SiteData:
    return plan.task.site_data("north", plan.participation.sites, 0, DataSource(folder=hospitals))


def test_a_seed_decides_a_patch(plan: Plan, data: SiteData) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (plan.task.draw_batches(data.train, 2, 1, seed)[1] for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tuple(first[0].shape) == plan.task.shape and first[1].shape == first[0].shape[1:]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    copy = pickle.loads(pickle.dumps(plan))  # noqa: S301 - as it goes to the training process
    assert torch.equal(copy.task.draw_batches(data.train, 2, 1, 5)[1][0], first[0])


def test_a_patch_from_the_disk_is_the_same(hospitals: Path, plan: Plan, data: SiteData, tmp_path: Path) -> None:
    source = DataSource(folder=hospitals, cache_memory=0, cache_folder=tmp_path)
    kept = plan.task.site_data("north", plan.participation.sites, 0, source)
    ours, wanted = (plan.task.draw_batches(one.train, 4, 1, 5) for one in (kept, data))
    for number in range(4):
        assert all(map(torch.equal, ours[number], wanted[number]))


def test_batches_are_drawn_as_by_nnunets_loader(plan: Plan, data: SiteData) -> None:
    from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader

    for batch in (2, 3, 7, 19):
        drawn = plan.task.draw_batches(data.train, batch, 40, 0)
        # nnU-Net's default fraction of patches with foreground
        loader = SimpleNamespace(batch_size=batch, oversample_foreground_percent=0.33)
        rule = partial(nnUNetDataLoader._oversample_last_XX_percent, loader)
        assert [place >= drawn.certain for place in range(batch)] == [rule(place) for place in range(batch)]
        assert len(drawn) == 40 * batch
    counts = torch.bincount(torch.tensor(drawn.chosen), minlength=len(data.train))
    # the sampler chooses random cases with replacement, so that each batch is full
    assert (counts / len(drawn) - 1 / len(data.train)).abs().max() < 0.1
    few = Subset(data.train, [len(data.train) - 1])  # like the test, `training.truncate` selects cases by a Subset
    pairs = ((few, 0), (data.train, len(data.train) - 1))
    one, other = (held.kept(place) for held, place in (held_case(*pair) for pair in pairs))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    _, labels, places = one
    label, *where = places[0].tolist()
    assert label > 0 and labels[tuple(where)] == label


@pytest.mark.parametrize("configuration", ["3d_fullres", "3d_lowres"])
def test_volumes_are_learned_in_three_dimensions(hospitals: Path, configuration: str) -> None:
    plans = json.loads((hospitals / "plans.json").read_text())
    own = dict(plans["configurations"]["3d_fullres"])
    lower = {"spacing": [1.5 * along for along in own["spacing"]], "next_stage": "3d_cascade_fullres"}
    # nnU-Net's planner writes the configuration 3d_lowres for larger volumes
    plans["configurations"]["3d_lowres"] = own | lower
    plan = plan_of(hospitals, plans=plans, configuration=configuration)
    data = plan.task.site_data("north", plan.participation.sites, 0, DataSource(folder=hospitals))
    image, labels = plan.task.draw_batches(data.train, 2, 1, 0)[1]
    assert tuple(image.shape) == plan.task.shape and image.shape[1:] == labels.shape and (labels == 1).any()
    network = plan.build_networks()["model"]
    loss = plan.task.goal.loss(network.train()(image[None]), labels[None])
    loss.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in network.parameters())
    volume, whole = data.test[0]
    with torch.no_grad():
        output = plan.task.infer(network.eval(), volume[None])
    assert output.shape == (1, 2, *whole.shape)
    assert 0 <= float(plan.task.goal.case_scores(output, whole[None])) <= 1


def test_a_plan_takes_question_and_plans_from_files_beside_it(hospitals: Path, plan: Plan) -> None:
    (hospitals / "question.yaml").write_text(yaml.safe_dump(QUESTION.model_dump(mode="json")))
    values = plan.resolved()
    values["task"] |= {"question": "question.yaml", "plans": "plans.json"}
    (hospitals / "plan.yaml").write_text(json.dumps(values))
    assert load_plan(hospitals / "plan.yaml").hash == plan.hash
    for name, told in (("../plans.json", "odd characters"), ("other.json", "no such file")):
        values["task"]["plans"] = name
        (hospitals / "plan.yaml").write_text(json.dumps(values))
        with pytest.raises(PlanError, match=f"task.plans: .*{told}"):
            load_plan(hospitals / "plan.yaml")


@pytest.fixture
def trainer(hospitals: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    plans = json.loads((hospitals / "plans.json").read_text())
    settings = {**QUESTION.in_nnunet(), "file_ending": ".nii.gz"}
    own = nnUNetTrainer(plans | {"continue_training": False}, "2d", 0, settings, torch.device("cpu"))
    own.network = own.build_network_architecture(own.plans_manager, own.configuration_manager, 1, 2, True)
    own.loss = own._build_loss()
    own.optimizer, own.lr_scheduler = own.configure_optimizers()
    return own


def batch_of(plan: Plan, data: SiteData, trainer: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    from batchgeneratorsv2.transforms.utils.deep_supervision_downsampling import DownsampleSegForDSTransform

    drawn = plan.task.draw_batches(data.train, 3, 1, seed)
    patches = [drawn[number] for number in range(3)]
    images, labels = torch.stack([one[0] for one in patches]), torch.stack([one[1] for one in patches])
    scale = DownsampleSegForDSTransform(trainer._get_deep_supervision_scales())
    targets = [scale(segmentation=one[None].short())["segmentation"] for one in labels]
    return images, labels, {"data": images, "target": [torch.stack(own) for own in zip(*targets, strict=True)]}


def test_the_loss_and_its_gradients_are_nnunets(plan: Plan, data: SiteData, trainer: Any) -> None:
    ours, theirs = plan.build_networks()["model"].train(), trainer.network
    theirs.load_state_dict(ours.network.state_dict())
    images, labels, batch = batch_of(plan, data, trainer, 0)
    loss, wanted = plan.task.goal.loss(ours(images), labels), trainer.loss(theirs(images), batch["target"])
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None and other.grad is None) or torch.equal(mine.grad, other.grad)


def test_a_variant_of_the_trainer_has_its_loss_its_augmentation_and_its_mirroring(
    hospitals: Path, plan: Plan, data: SiteData, trainer: Any
) -> None:
    from nnunetv2.training.nnUNetTrainer.variants.data_augmentation import nnUNetTrainerNoMirroring as mirroring
    from nnunetv2.training.nnUNetTrainer.variants.loss import nnUNetTrainerTopkLoss as topk

    images, labels, batch = batch_of(plan, data, trainer, 0)
    output = plan.build_networks()["model"].train()(images)
    default = plan.task.draw_batches(data.train, 3, 1, 0)[0]
    changed = {}
    for name in get_args(TrainerName):
        task = plan_of(hospitals, trainer=name).task
        loss, drawn = task.goal.loss(output, labels), [task.draw_batches(data.train, 3, 1, 0)[0] for _ in range(2)]
        assert torch.equal(drawn[0][0], drawn[1][0]) and loss.isfinite(), name
        changed[name] = not torch.equal(drawn[0][0], default[0]), float(loss)
        if name in (topk.nnUNetTrainerDiceTopK10Loss.__name__, mirroring.nnUNetTrainerNoMirroring.__name__):
            base = getattr(topk, name, None) or getattr(mirroring, name)
            built = base._build_loss(trainer)(output, batch["target"])
            assert torch.equal(loss, built), name
    plain = changed["nnUNetTrainer"]
    assert not plain[0] and changed["nnUNetTrainerNoMirroring"][0] and changed["nnUNetTrainerDA5"][0]
    assert changed["nnUNetTrainerDiceTopK10Loss"][1] != plain[1] != changed["nnUNetTrainerDiceLoss"][1]
    assert plan_of(hospitals, trainer="nnUNetTrainerNoMirroring").task.parts.mirrored is None
    with pytest.raises(PlanError, match="trainer"):
        plan_of(hospitals, trainer="nnUNetTrainerAdam")
    volumes = plan_of(hospitals, configuration="3d_fullres")
    assert volumes.task.tests_as(plan.task)  # `medsilo compare` can choose between 2d and 3d configurations
    assert not volumes.task.tests_as(plan_of(hospitals, fold={"number": 1, "of": 4}).task)
    changed = plan.with_changes(["task.configuration=3d_fullres", "network=null"])
    assert changed.network == volumes.network != plan.network


def test_epochs_are_those_of_nnunets_trainer(hospitals: Path, data: SiteData, trainer: Any) -> None:
    rounds = 4
    plan = plan_of(hospitals, training=AS_NNUNET | {"rounds": rounds})
    trainer.num_epochs, training = rounds, plan.training
    _, trainer.lr_scheduler = trainer.configure_optimizers()
    trainer.lr_scheduler.optimizer = trainer.optimizer
    ours = plan.build_networks()["model"]
    trainer.network.load_state_dict(ours.network.state_dict())
    optimizer = training.make_optimizer(ours.parameters())
    learn = train_step(ours, OutputLoss(plan.task.goal.loss), optimizer, Compute())
    for number in range(1, rounds + 1):
        begin_round(training, optimizer, number, rounds)
        trainer.network.train()
        trainer.lr_scheduler.step(number - 1)
        for seed in range(2):
            images, labels, batch = batch_of(plan, data, trainer, 2 * number + seed)
            assert float(learn(images, labels)) == float(trainer.train_step(batch)["loss"])
    for mine, other in zip(ours.parameters(), trainer.network.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("configurations", "2d", "architecture", "network_class_name"), "os.system"),
        (("configurations", "2d", "architecture", "arch_kwargs", "nonlin"), "subprocess.Popen"),
        (("configurations", "2d", "architecture", "arch_kwargs", "norm_op"), "builtins.exec"),
        (("configurations", "2d", "preprocessor_name"), "Other"),
        (("configurations", "2d", "resampling_fn_data"), "load_json"),
        (("image_reader_writer",), "Other"),
        (("label_manager",), "Other"),
        (("configurations", "2d", "patch_size"), [10**9, 10**9]),
    ],
)
def test_plans_name_nothing_to_import_that_nnunet_does_not_write(
    hospitals: Path, path: tuple[str, ...], value: Any
) -> None:
    plans = place = json.loads((hospitals / "plans.json").read_text())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError, match=path[-1]):
        plan_of(hospitals, plans=plans)
