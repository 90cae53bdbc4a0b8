"""Groups of hospitals: means are taken within each first, in whole studies."""

import pytest
import torch

from medsilo.core.errors import PlanError
from medsilo.federation import inprocess
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan

A, B, C = SITES
CPU = SiteSettings(device="cpu")
SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8", "training.rounds=1"]
GROUPS = f"participation.groups={{south: [{A}, {C}], north: [{B}]}}"


def models(*changes):
    run = inprocess.run(make_plan("fedadam", *SMALL, *changes), settings=CPU)
    return {name: tensor for name, tensor in run.models[A].state_dict().items() if tensor.is_floating_point()}


def test_a_study_takes_its_means_within_groups_first():
    flat, grouped = models(), models(GROUPS)
    alone = models(f"participation.groups={{x: [{A}], y: [{B}], z: [{C}]}}")
    assert all(torch.equal(tensor, flat[name]) for name, tensor in alone.items())
    assert not all(torch.equal(tensor, flat[name]) for name, tensor in grouped.items())
    for name, tensor in grouped.items():
        torch.testing.assert_close(tensor, flat[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("local", [], "takes no mean over sites"),
        ("adafed", [], "takes no mean over sites"),
        ("fedawa", [], "needs every site's tensors at once"),
        ("fedavg", ["mixing.share_cap=0.9"], "robust rules and shares"),
        ("fedavg", ["transport.sealing=pairwise"], "sealed numbers are integers"),
    ],
)
def test_what_has_no_mean_in_parts_is_refused(method, changes, said):
    with pytest.raises(PlanError, match=f"participation.groups: .*{said}"):
        make_plan(method, GROUPS, *changes)


def test_sites_may_be_left_out_where_groups_name_them():
    plan = make_plan("fedsm", GROUPS, "participation.sites=[]")
    assert plan.participation.sites == tuple(SITES)
    assert plan.participation.groups == {"north": (B,), "south": (A, C)}
    assert plan.hash == make_plan("fedsm", GROUPS).hash != make_plan("fedsm").hash
