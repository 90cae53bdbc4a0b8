"""Test SiloBN's batch-norm statistics at a hospital, in particular at a hospital that did not train."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from medsilo.core.errors import PlanError
from medsilo.core.files import load_tensors
from medsilo.learning.statistics import adapt_batch_norm
from medsilo.tasks.site_data import SiteData
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SMALL, make_plan
from tests.sites import CPU, site_of

SITES, NEW = ["a", "b"], "z"
PLAN = make_plan("silobn", *SMALL, f"participation.evaluation_sites=[{NEW}]", sites=SITES)


@pytest.mark.parametrize("batch", [1, 8, 32, 66])
def test_every_case_counts_the_same_whatever_the_batch_size(batch: int) -> None:
    """The reference normalises all cases as a single batch in float64.

    The last batch has only two cases; if all batches counted equally, the mean would be wrong by a third of a standard
    deviation.
    """
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.5), nn.Conv1d(3, 2, 3), nn.BatchNorm1d(2)]
    model = nn.Sequential(*layers)
    cases = torch.randn(66, 2, 9) * 3 + 10
    cases[-2:] += 20
    exact = copy.deepcopy(model).double().train()
    exact[1].momentum = exact[5].momentum = None
    exact[3].eval()
    exact(cases.double())
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    adapt_batch_norm(model, lambda: cases.split(batch))
    for place, numbers in ((1, 66 * 7), (5, 66 * 5)):  # torch's variance divides by n - 1
        population = exact[place].running_var * (numbers - 1) / numbers
        torch.testing.assert_close(model[place].running_mean.double(), exact[place].running_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model[place].running_var.double(), population, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], own.data) for name, own in model.named_parameters())
    assert (model[1].momentum, model.training) == (0.1, False)


def test_a_hospital_that_did_not_train_has_statistics_of_its_own_images(tmp_path: Path) -> None:
    run = inprocess.run(PLAN, folder=tmp_path / "run")
    assert run.summary.evaluation_sites[NEW].test["cases"] > 0
    (new, old) = (run.models[site].state_dict() for site in (NEW, SITES[0]))
    statistics = {name for name in new if "running" in name or "tracked" in name}
    selected = run.summary.selected.rounds
    if selected[NEW] == selected[SITES[0]]:
        assert all(torch.equal(new[name], old[name]) for name in new.keys() - statistics)
    expected = PLAN.build_networks()["model"]
    expected.load_state_dict(new)
    inputs = PLAN.task.load(NEW, [*SITES, NEW], PLAN.seed, None).train.inputs
    adapt_batch_norm(expected, lambda: inputs.split(PLAN.task.evaluation_batch))
    for name in statistics:
        torch.testing.assert_close(new[name], expected.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert "tracked" in name or not torch.equal(new[name], old[name])


@pytest.mark.parametrize("cases", [5, 1])
def test_a_hospital_that_has_test_images_alone_is_measured_on_these(cases: int, tmp_path: Path) -> None:
    plan, folder = PLAN.with_changes(["participation.minimum=1", "participation.when_missing=continue"]), tmp_path / "r"
    everyone = [*SITES, NEW]
    sites = {site: site_of(plan, site, everyone, CPU, folder / "sites" / site) for site in SITES}
    data = plan.task.load(NEW, everyone, plan.seed, None)
    nothing, tested = Subset(data.train, []), Subset(data.test, range(cases))
    sites[NEW] = site_of(plan, NEW, everyone, CPU, folder / "sites" / NEW, SiteData(nothing, nothing, tested))
    Coordinator(plan, SITES, inprocess.Loop(sites), Record(folder), "in-process").run()
    summary = Record(folder).summary()
    assert summary.sites["a"].test
    if cases == 1:
        assert "need two cases at least" in summary.evaluation_sites[NEW].missed_ends["deliver"]
        return
    expected = plan.build_networks()["model"]
    expected.load_state_dict(load_tensors(folder / "sites" / NEW / "best.safetensors")[0])
    kept = {name: tensor.clone() for name, tensor in expected.named_buffers()}
    adapt_batch_norm(expected, lambda: [torch.stack([tested[case][0] for case in range(cases)])])
    assert all(torch.allclose(kept[name], tensor, atol=1e-6) for name, tensor in expected.named_buffers())


def test_a_network_without_batch_norm_is_refused() -> None:
    with pytest.raises(PlanError, match="silobn keeps .* this network has none"):
        make_plan("silobn", *SMALL, "network.norm=group")
