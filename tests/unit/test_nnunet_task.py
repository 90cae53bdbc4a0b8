"""The task nnunet: nnU-Net's own training, in a study as any other."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import medsilo
from medsilo.core.errors import PlanError
from medsilo.nnunet.fingerprint import Fingerprint
from medsilo.nnunet.fingerprint_message import HeldCases
from medsilo.nnunet.measuring_cases import facts_of
from medsilo.nnunet.planning import make_plans
from medsilo.plan import Plan, parse_plan
from medsilo.tasks.own.nnunet_files import RawData
from medsilo.tasks.own.question import SegmentationQuestion
from medsilo.tasks.sources import DataSource
from medsilo.tasks.task import SiteData
from tests.federations import write_volumes

pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
pytestmark = pytest.mark.slow

QUESTION = SegmentationQuestion(name="Dataset007_Volumes", channels=("FLAIR",), labels={"background": 0, "lesion": 1})
HOSPITALS = {"north": 2.5, "st-anna": 3.0, "west": 3.5}  # mm between slices
CASES = 4


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each hospital's volumes, and the plans for all of them."""
    folder, told, holdings = tmp_path_factory.mktemp("hospitals"), [], {}
    for site, between in HOSPITALS.items():
        write_volumes(folder / site, QUESTION, [f"{site}{case}" for case in range(CASES)], 1, (1, 1, between), 48)
        data = RawData.of(folder / site, QUESTION)
        told.append(Fingerprint.of(facts_of(data, 2000), 2000))
        holdings[site] = HeldCases(cases=CASES, reader=data.reader)
    made = make_plans(QUESTION, Fingerprint.merged(told), holdings)
    (folder / "plans.json").write_text(json.dumps(made.plans))
    return folder


def plan_of(hospitals: Path, **task: Any) -> Plan:
    """Return a short study."""
    plans = json.loads((hospitals / "plans.json").read_text())
    own = {"name": "nnunet", "question": QUESTION.model_dump(mode="json"), "plans": plans, "mirror": False, **task}
    training = {"rounds": 2, "batch_size": 2, "local_steps": 1, "momentum": 0.9}
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": own,
            "participation": {"sites": list(HOSPITALS)},
            "training": training,
        }
    )


@pytest.fixture(scope="module")
def plan(hospitals: Path) -> Plan:
    return plan_of(hospitals)


@pytest.fixture(scope="module")
def data(hospitals: Path, plan: Plan) -> SiteData:
    return plan.task.site_data("north", plan.participation.sites, 0, DataSource(folder=hospitals))


def test_a_seed_decides_a_patch(plan: Plan, data: SiteData) -> None:
    case = data.train[0]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (plan.task.augmented(case, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tuple(first[0].shape) == plan.task.shape and first[1].shape == first[0].shape[1:]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    copy = pickle.loads(pickle.dumps(plan))  # noqa: S301 - as it goes to the training process
    assert torch.equal(copy.task.augmented(case, 5)[0], first[0])


def test_every_patch_has_a_structure_where_the_plan_asks_for_it(hospitals: Path, data: SiteData) -> None:
    always = plan_of(hospitals, foreground=1.0).task
    assert all((always.cropped(data.train[0], seed)[1] == 1).any() for seed in range(20))


def test_the_loss_and_its_gradients_are_nnunets(
    hospitals: Path, plan: Plan, data: SiteData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from batchgeneratorsv2.transforms.utils.deep_supervision_downsampling import DownsampleSegForDSTransform
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    plans = json.loads((hospitals / "plans.json").read_text())
    settings = {**QUESTION.in_nnunet(), "file_ending": ".nii.gz"}
    trainer = nnUNetTrainer(plans | {"continue_training": False}, "2d", 0, settings, torch.device("cpu"))
    ours = plan.build_networks()["model"].train()
    theirs = trainer.build_network_architecture(trainer.plans_manager, trainer.configuration_manager, 1, 2, True)
    theirs.load_state_dict(ours.network.state_dict())

    patches = [plan.task.augmented(data.train[0], seed) for seed in range(3)]
    images, labels = torch.stack([one[0] for one in patches]), torch.stack([one[1] for one in patches])
    scale = DownsampleSegForDSTransform(trainer._get_deep_supervision_scales())
    targets = [scale(segmentation=one[None].short())["segmentation"] for one in labels]
    loss = plan.task.loss(ours(images), labels)
    wanted = trainer._build_loss()(theirs(images), [torch.stack(own) for own in zip(*targets, strict=True)])
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None and other.grad is None) or torch.equal(mine.grad, other.grad)


def test_whole_volumes_go_through_nnunets_windows(plan: Plan, data: SiteData) -> None:
    image, labels = data.test[0]
    network = plan.build_networks()["model"].eval()
    with torch.no_grad():
        output = plan.task.infer(network, image[None])
    assert output.shape == (1, 2, *labels.shape)
    assert plan.task.loss(output, labels[None]).isfinite()
    assert 0 <= float(plan.task.case_scores(output, labels[None])) <= 1


@pytest.mark.long
def test_a_study_learns_and_its_numbers_are_the_same_again(hospitals: Path, plan: Plan) -> None:
    runs = [medsilo.run(plan, data=hospitals) for _ in range(2)]
    losses = [[site.train_loss for site in line.sites.values()] for line in runs[0].history]
    assert max(losses[1]) < min(losses[0])
    first, second = (run.models["north"].state_dict() for run in runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


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
