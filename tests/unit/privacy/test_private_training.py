"""Test private studies: the allowed plans, the cost of each round, and the equality of repeated and resumed runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.core.errors import PlanError, Refused
from medsilo.core.files import load_tensors, save_tensors
from medsilo.federation.private_site import PrivateNumbers, PrivateSite
from medsilo.methods.fedavg import FedAvg
from medsilo.plan import Plan
from medsilo.privacy.accounting import epsilon
from medsilo.privacy.mechanisms import SampledGaussian
from medsilo.registry import METHODS
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.declared import Private
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from medsilo_lab.engines import inprocess
from tests.conftest import SITES, make_plan, slow_but

GROUP = ["network.name=activity-cnn", "network.norm=group"]
PROMISE = 'privacy={"epsilon": 2.0, "delta": 0.001}'
SMALL = ["task.persons=6", "task.windows=4", "task.steps=32", "training.batch_size=8", "training.learning_rate=0.2"]
STEPS = ["algorithm.selector_sync=server-adam"]
FILE = ["algorithm.pretraining.source=file", "privacy.statistics.epsilon=0.5"]
MORE = {
    "harmofl": ["algorithm.amplitude=null"],
    "fedbn": [],
    "fedrdn": ["privacy.statistics.epsilon=0.5"],
    "adafed": FILE,
    "d-adafed": FILE,
    "fedsm": STEPS,
}
NEEDS: dict[str, dict[str, Any]] = {
    "harmofl": {"amplitude": None},
    "fedsm": {"selector_sync": "server-adam"},
    **{name: {"pretraining": {"source": "file"}} for name in ("adafed", "d-adafed")},
}


ABLE = [name for name in METHODS.ours if METHODS[name].declares_account()]


def promised(method: str = "fedavg", *changes: str) -> Plan:
    return make_plan(method, *GROUP, *SMALL, PROMISE, *MORE.get(method, []), *changes)


def test_who_declares_an_account_keeps_a_promise_and_others_are_told_of_them() -> None:
    assert all(isinstance(METHODS[name](**NEEDS.get(name, {})).privacy_mechanism(ABLE), Private) for name in ABLE)
    with pytest.raises(PlanError, match="leave privacy out") as refused:
        promised("scaffold")
    named = str(refused.value).partition("; use ")[2].rpartition(", or ")[0].split(", ")
    assert {*ABLE} <= {*named} and all(METHODS[name].declares_account() for name in named)
    page = Path("docs/trust/privacy.md").read_text("utf-8")
    lacking = [METHODS[name].title for name in ABLE if METHODS[name].title not in page]
    assert not lacking, f"docs/trust/privacy.md does not name {', '.join(lacking)}"


def test_a_method_that_derives_from_one_that_can_has_to_say_so_itself() -> None:
    class Other(FedAvg):
        """A method that inherits from FedAvg, but might send anything."""

    with pytest.raises(PlanError, match="numbers without noise"):
        Other().privacy_mechanism(ABLE)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("fedavg", ["network.norm=batch"], "BatchNorm1d of network model"),
        ("fedavg", ["network.norm=batch-statistics"], "choose network.norm=group"),
        ("scaffold", [], "privacy: scaffold"),
        ("fedsm", ['algorithm.personal_method={"name": "ditto"}'], "algorithm.personal_method"),
        ("fedsm", ["algorithm.selector_sync=closed-form"], "sums over a hospital's features leave without noise"),
        ("fedavg", ["training.truncate=true"], "training.truncate"),
        ("adafed", ["network.norm=batch"], "BatchNorm1d of network model"),
        ("adafed", ["algorithm.pretraining.source=share"], "a share of the cases"),
        ("adafed", ["privacy.statistics=null"], "set privacy.statistics.epsilon"),
        ("fedavg", ["privacy.statistics.epsilon=0.5"], "nothing leaves before training under this plan"),
        ("f-adafed", ["network.norm=batch"], "which breaks the promise; use fedavg"),
        ("central", [], "numbers without noise"),
    ],
)
def test_promises_that_would_be_false_are_refused(method: str, changes: list[str], said: str) -> None:
    with pytest.raises(PlanError, match="privacy|algorithm|training") as caught:
        promised(method, *changes)
    assert said in str(caught.value)


def test_an_amplitude_is_refused() -> None:
    histology = ["task.name=synthetic-histology", "network.name=small-cnn", "network.norm=group", PROMISE]
    with pytest.raises(PlanError, match="algorithm.amplitude:.*measured while training"):
        make_plan("harmofl", *histology)
    assert make_plan("harmofl", *histology, "algorithm.amplitude=null").gradients == 2


def test_a_promise_is_part_of_the_plan() -> None:
    assert make_plan().hash != promised().hash
    assert promised().hash != promised("fedavg", "privacy.clip=2.0").hash


# -------------------------------------------------------------------------------------------------------------- charges
def at(plan: Plan, demands: PrivacyRequirements | None = None) -> PrivateSite:
    data = plan.task.read(SITES[0], SITES, plan.seed, None)
    numbers = PrivateNumbers.of(plan, SITES[0], SiteSettings(device="cpu", privacy=demands), Path(), data)
    assert numbers
    return PrivateSite(numbers, data.train)


@pytest.mark.slow
@pytest.mark.parametrize("method", ABLE)
def test_what_all_rounds_are_charged_is_what_was_promised(method: str) -> None:
    plan = promised(method, "privacy.epsilon=1.0")
    site = at(plan)
    charges = [c for number in range(1, plan.rounds + 1) for c in site.charges(number, plan.course.phase_of(number))]
    assert 0.95 < epsilon(charges, 0.001) <= 1.0
    gradients = {"fedsm": 3, "harmofl": 2}.get(method, 1)
    assert plan.gradients == gradients
    of = charges[-1].of
    assert isinstance(of, SampledGaussian)
    # several gradients of the same batch share their noise
    assert site.noise == pytest.approx(of.noise * gradients**0.5)


@pytest.mark.slow
def test_the_stricter_of_plan_and_hospital_holds() -> None:
    plan = promised()
    assert at(plan).numbers.promise.unit == "record"
    strict = at(plan, PrivacyRequirements(epsilon=0.5, delta=1e-4))
    promise = strict.numbers.promise
    assert (promise.epsilon, promise.delta, promise.unit) == (0.5, 1e-4, "patient")
    assert strict.noise > at(plan).noise
    assert len(strict.sample(strict.numbers.secret(1)).members) < len(at(plan).sample(strict.numbers.secret(1)).members)
    with pytest.raises(Refused, match="demands differential privacy"):
        at(make_plan(), PrivacyRequirements(epsilon=1, delta=1e-4))


# -------------------------------------------------------------------------------------------------------- whole studies
def tensors_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = [*folder.glob("global/*.safetensors"), *folder.glob("sites/*/last.safetensors")]
    return {str(path.relative_to(folder)): load_tensors(path)[0] for path in files}


def run(plan: Plan, folder: Path, resume: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    settings = SiteSettings(device="cpu")
    if "adafed" in plan.algorithm.name:  # adafed needs a network that was trained on other data
        folder.mkdir(parents=True, exist_ok=True)
        data = folder.parent / "server"
        save_tensors(data / "pretrained.safetensors", dict(plan.build_networks()["pretrained"].state_dict()))
        settings = SiteSettings(device="cpu", data=data)  # type: ignore[arg-type]
    inprocess.run(plan, folder=folder, resume=resume, settings=settings)
    return tensors_of(folder)


def same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[file][name]) for file, own in one.items() for name, tensor in own.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["fedavg", "fedsm", "harmofl"], ABLE, ()))
def test_every_method_trains_and_gives_the_same_tensors_again(method: str, tmp_path: Path) -> None:
    plan = promised(method, "training.batch_size=64")  # with this batch size, each step uses all cases
    one = run(plan, tmp_path / "one")
    assert same(one, run(plan, tmp_path / "two"))
    other = run(plan.with_changes(["seed=1"]), tmp_path / "three")
    assert not same(one, other)


def test_a_hospital_s_model_hardly_depends_on_one_record_where_the_promise_is_strict(tmp_path: Path) -> None:
    """With ε near zero, the noise moves the weights far more than the same steps without noise do."""
    noisy = promised("fedavg", "privacy.epsilon=0.01", "training.batch_size=64", "training.rounds=3")
    plain = make_plan("fedavg", *GROUP, *SMALL, "training.batch_size=64", "training.rounds=3")
    start, private, open_ = (
        noisy.build_networks()["model"].state_dict(),
        *(next(iter(tensors.values())) for tensors in (run(noisy, tmp_path / "1"), run(plain, tmp_path / "2"))),
    )
    moved = {name: float((private[name] - tensor).norm()) for name, tensor in start.items()}
    assert sum(moved.values()) > 10 * sum(float((open_[name] - tensor).norm()) for name, tensor in start.items())


def test_a_resumed_study_gives_the_same_tensors(tmp_path: Path) -> None:
    """A resumed study uses the saved clipping bounds and the noise of the uninterrupted study, because the round
    determines the noise.
    """
    plan = promised("mr-mtl", "training.rounds=3", "training.batch_size=64")
    whole = run(plan, tmp_path / "whole")

    class Killed(Exception):
        """Ends a study after round 2."""

    def stop(line: object) -> None:
        if getattr(line, "round", 0) == 2:
            raise Killed

    with pytest.raises(Killed):
        inprocess.run(plan, folder=tmp_path / "part", settings=SiteSettings(device="cpu"), on_round=stop)
    assert same(whole, run(plan, tmp_path / "part", resume=True))


def test_ditto_s_own_model_learns_exactly_and_the_shared_one_does_not_see_it(tmp_path: Path) -> None:
    """Ditto's parameter "pull" changes the personal models, and no bit of the shared model."""
    one, other = (
        run(promised("ditto", "training.batch_size=64", f"algorithm.pull={pull}"), tmp_path / pull)
        for pull in ("0.1", "5.0")
    )
    common = [file for file in one if file.startswith("global")]
    own = [file for file in one if file.startswith("sites")]
    assert common and own
    assert all(torch.equal(one[file][name], other[file][name]) for file in common for name in one[file])
    assert any(not torch.equal(one[file][name], other[file][name]) for file in own for name in one[file])


def test_every_declared_network_exists() -> None:
    for method in ABLE:
        plan = promised(method)
        names = plan.build_networks().keys()
        private = plan.private
        assert {*private.networks, *private.exact_networks} <= names
        sent = {group.name for phase in plan.course.phases for group in phase.sent}
        assert sent and isinstance(plan.algorithm, Algorithm)
