"""A training script of one's own: its tensors are those of medsilo's own job."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medsilo.core import shelf
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation.coordinator import Coordinator
from medsilo.federation.seams import Line
from medsilo.learning.loop import Compute, batches
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import Parcel
from medsilo.runs.record import Record
from medsilo.script.site import Data, ScriptSite
from medsilo.script.study import plan_of_script
from tests.conftest import SITES, make_plan
from tests.inprocess import run

BATCH, RATE = 32, 0.05
IMAGES = ("task.name=synthetic-histology", "task.patients=6", "task.size=32")
JOINT = ("moon", "apfl", "pfedme", "fedsm-extra")  # their objective is more than a loss


class Shuffled:
    """A loader whose order is that of medsilo's own job in a round."""

    def __init__(self, plan: Plan, site: str, cases: torch.utils.data.Dataset) -> None:
        self.plan, self.site, self.dataset, self.round = plan, site, cases, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = generator_for(self.plan.seed, self.site, "shuffle", self.round, 0)
        return batches(self.dataset, BATCH, Compute(), order)

    def __len__(self) -> int:
        return -(-len(self.dataset) // BATCH)  # type: ignore[arg-type]


class Script:
    """A site with a training script, which is started anew for each answer if `anew`."""

    def __init__(self, own: Plan, plan: Plan, site: str, folder: Path, anew: bool, closures: bool) -> None:
        self.own, self.plan, self.name, self.folder, self.anew, self.closures = own, plan, site, folder, anew, closures
        self.data = own.task.site_data(site, SITES, own.seed, None)
        self.started: ScriptSite | None = None

    def start(self) -> ScriptSite:
        torch.manual_seed(7)  # weights of its own, which give way to the recipe's
        self.model = self.own.network.build(self.own.task.channels, self.own.task.goal.outputs)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.loader = Shuffled(self.own, self.name, self.data.train)
        validation = list(batches(self.data.validation, 64, Compute()))
        joint = self.own.algorithm.name in JOINT
        data = Data(self.loader, validation, loss=self.own.task.goal.loss if joint else None)
        return ScriptSite(self.plan, self.name, self.folder, self.model, optimizer, data, self.evaluate)

    def evaluate(self, net: nn.Module) -> float:
        right = [(net(x).argmax(1) == y).float() for x, y in batches(self.data.validation, 64, Compute())]
        return float(torch.cat(right).mean())

    def answer(self, parcel: Parcel, stop: object) -> Parcel:
        site = self.started = self.start() if self.anew or not self.started else self.started
        self.loader.round = parcel.facts["round"]
        if (reply := site.ask(parcel)) is not None:
            return reply
        for net, optimizer in site.networks():
            net.train()
            for x, y in self.loader:

                def closure(net=net, optimizer=optimizer, x=x, y=y) -> Tensor:
                    optimizer.zero_grad()
                    loss = self.own.task.goal.loss(net(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        return site.finish()


def scripted(own: Plan, folder: Path, anew: bool = False, **more: object) -> tuple[Record, dict[str, dict[str, Tensor]]]:
    """Run the same study as `own` by scripts; returns its record, and each site's last model."""
    model = own.build_networks()["model"]
    method = own.algorithm.model_dump(mode="json")
    shape = own.task.shape if own.algorithm.amplitude else None
    plan = plan_of_script(
        model, folder / "job", method, rounds=own.training.rounds, minimum=2, sites=SITES, input_shape=shape
    )
    shelf.look_in(folder / "job")
    sites = {site: Script(own, plan, site, folder / site, anew, False) for site in SITES}
    record = Record(folder / "runs" / "study")
    Coordinator(plan, SITES, Line(sites), record, "in-process").run()
    kept = paths.site_folder
    return record, {site: load_tensors(kept(folder / site / "study", site) / paths.LAST)[0] for site in SITES}


def check_equal(own: Plan, folder: Path, nearly: float = 0.0, anew: bool = False) -> Record:
    """The script's tensors are those of medsilo's own job."""
    expected = run(own).models
    record, found = scripted(own, folder, anew)
    for site, model in expected.items():
        for name, tensor in model.state_dict().items():
            assert (found[site][name].double() - tensor.double()).abs().max() <= nearly, f"{site} {name}"
    return record


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    "method", ["fedavg", "fedbn", "fedper", "fedprox", "scaffold", "fednova", "feddyn", "fedadam", "ditto", "moon"]
)
def test_a_script_ends_with_the_tensors_of_medsilos_own_job(method: str, anew: bool, tmp_path: Path) -> None:
    check_equal(make_plan(method, "training.rounds=3"), tmp_path, anew=anew)


@pytest.mark.parametrize("method", ["apfl", "pfedme"])
def test_methods_that_train_networks_together_pass_over_the_scripts_loader(method: str, tmp_path: Path) -> None:
    check_equal(make_plan(method, "training.rounds=3"), tmp_path)


@pytest.mark.parametrize("anew", [False, True])
def test_harmofl_of_a_script_is_medsilos_own(anew: bool, tmp_path: Path) -> None:
    check_equal(make_plan("harmofl", *IMAGES, "training.rounds=3"), tmp_path, anew=anew)


@pytest.mark.parametrize("anew", [False, True])
def test_fedsm_of_a_script_ends_with_a_super_model(anew: bool, tmp_path: Path) -> None:
    record = check_equal(make_plan("fedsm", "training.rounds=3"), tmp_path, anew=anew)
    told = record.summary().details.super_model
    assert sum(sum(own.values()) for own in told.validated.values()) > 0


@pytest.mark.parametrize("method", ["adafed", "d-adafed", "f-adafed"])
def test_adafeds_of_a_script_are_medsilos_own_but_for_the_order_of_sums(method: str, tmp_path: Path) -> None:
    source = [] if method == "f-adafed" else ["algorithm.pretraining.source=initial"]
    check_equal(make_plan(method, "training.rounds=3", *source), tmp_path, nearly=1e-6)
