"""Test layers from another installed package; the layers change the site's answers or the server's messages."""

import json
import re
from inspect import isfunction
from pathlib import Path

import pytest
import torch

from medsilo.check.disclosure import describe
from medsilo.core.errors import PlanError
from medsilo.core.section import Feature
from medsilo.plan import parse_plan
from medsilo.schedule.layer import Layer
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.hospital import NAMES, write_photos
from tests.outside import installed_as
from tests.sites import CPU
from tests.unit.methods.test_algorithms import SMALL
from tests.unit.site.test_account import PRIVATE, settings_of, standing

PAGE = Path(__file__).parents[3] / "docs/research/extend.md"
NOISE = 'layers=[{"name": "group-noise", "group": "model", "noise": %s, "bound": %s}]'


installed = installed_as(
    "outside-layers",
    "[medsilo.layers]\ngroup-noise = group_noise:GroupNoise\nhourly-bytes = hourly_bytes:HourlyBytes\n",
)


def test_noise_on_one_group_changes_what_leaves_and_nothing_else(tmp_path: Path) -> None:
    """The noise changes what leaves the site, but not the site's own model; the server's model contains noise of the
    chosen size.
    """
    changes = [*SMALL, "training.rounds=1"]
    noisy = inprocess.run(make_plan("fedbn", *changes, NOISE % (1.0, 0.5)), folder=tmp_path / "noisy", settings=CPU)
    exact = inprocess.run(make_plan("fedbn", *changes), folder=tmp_path / "exact", settings=CPU)
    one, other = (run.models[SITES[0]].state_dict() for run in (noisy, exact))
    differences = torch.cat(
        [
            (one[name] - other[name]).flatten()
            for name in one
            if one[name].is_floating_point() and one[name].numel() > 99
        ]
    )
    assert 0.2 < differences.std() < 0.45
    assert noisy.summary.finished
    assert Record(tmp_path / "noisy").rounds()[0].sites[SITES[0]].train_loss == pytest.approx(
        Record(tmp_path / "exact").rounds()[0].sites[SITES[0]].train_loss
    )


@pytest.mark.slow
def test_noise_is_charged_to_the_ledger_round_by_round(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", NAMES)
    plan = parse_plan(PRIVATE, [NOISE % (60.0, 1.0)])
    inprocess.run(plan, folder=tmp_path / "study", settings=settings_of(photos))
    found = standing(tmp_path)
    charged = [(entry.what, charge.of.noise) for entry in found.entries if entry.kind == "charged"
               for charge in entry.charges if charge.what == "noise on model"]  # fmt: skip
    assert charged == [("round 1", 30.0), ("round 2", 30.0)]
    assert found.epsilon(1e-3) > 2.0


def test_a_layer_says_what_leaves_and_what_it_can_not_stand_beside() -> None:
    plan = make_plan("fedavg", *SMALL, NOISE % (2.0, 0.5))
    assert any("noise of 2 times its bound, 0.5" in line for line in describe(plan, CPU))
    assert plan.packages["outside-layers"].version == "1.0"
    with pytest.raises(PlanError, match="layers:.*name one"):
        make_plan("fedavg", *SMALL, (NOISE % (2.0, 0.5)).replace('"model"', '"selector"'))
    with pytest.raises(PlanError, match="'other-layer' is not known"):
        make_plan("fedavg", *SMALL, 'layers=[{"name": "other-layer"}]')


def test_the_page_has_all_that_a_layer_may_give() -> None:
    """docs/research/extend.md lists each method of a layer that the engine calls."""
    section = PAGE.read_text("utf-8").partition("\n## Layers\n")[2].partition("\n## ")[0]
    told = {method for line in section.splitlines() for method in re.findall(r"^\| `(\w+)\(", line)}
    own = {name for kind in (Feature, Layer) for name, one in vars(kind).items() if isfunction(one) and name[0] != "_"}
    assert told == own


def test_a_channel_layer_counts_what_travels(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, f'layers=[{{"name": "hourly-bytes", "file": "{tmp_path / "bytes.json"}"}}]')
    inprocess.run(plan, folder=tmp_path / "run", settings=CPU)
    lines = Record(tmp_path / "run").rounds()
    in_rounds = sum(own.bytes_up + own.bytes_down for line in lines for own in line.sites.values())
    assert sum(json.loads((tmp_path / "bytes.json").read_text()).values()) >= in_rounds > 0
