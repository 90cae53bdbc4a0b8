"""FedDG-GA: rounds written out by hand; bounds on what a dishonest hospital gets; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.federation import inprocess
from medsilo.methods.feddg_ga import FedDGGA
from medsilo.mixing.late import LateMean, at_most
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, WEIGHED, make_plan, slow_but
from tests.unit import test_baselines as baselines
from tests.unit.test_algorithms import SMALL, assert_close
from tests.unit.test_harmofl import assert_resumes

Arrays = dict[str, np.ndarray]
CPU = SiteSettings(device="cpu", smallest_average=1)
NO_BATCH_NORM = ["network.name=activity-cnn", "network.norm=group"]  # nothing then travels beside trained weights


# ---------------------------------------------------------------------------------------------------- late means
def contributions(seed: int, sites: int = 3) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return a model and what sites send, in double precision."""
    draw = torch.Generator().manual_seed(seed)

    def model() -> dict[str, Tensor]:
        shapes = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 4, 2)}
        return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}

    return model(), {f"s{place}": model() for place in range(sites)}


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_late_mean_and_its_products_are_those_by_hand_in_any_order(memory: int) -> None:
    given, sent = contributions(1)
    seen: list[dict[str, Tensor]] = []

    def weigh(mean: LateMean) -> dict[str, float]:
        seen.append(mean.products(lambda name: name.split(".")[0]))
        return {"s0": 0.2, "s1": 0.0, "s2": 0.5}

    results = []
    for order in (list(sent), list(sent)[::-1]):
        mixer = LateMean(weigh)
        mixer.let_wait(memory)
        mixer.start(sent, given)
        for site in order:
            mixer.add(site, sent[site], 5)
        assert torch.equal(mixer.current("s0")["a.bias"], given["a.bias"])
        results.append(mixer.result("s1"))
        assert mixer.shares == pytest.approx({"s0": 2 / 7, "s1": 0, "s2": 5 / 7})
    for name, tensor in results[0].items():
        expected = (0.2 * sent["s0"][name].numpy() + 0.5 * sent["s2"][name].numpy()) / 0.7
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(tensor, results[1][name])
    for part in ("a", "b"):
        names = [name for name in given if name.startswith(part)]
        rows = [np.concatenate([given[n].numpy().ravel() for n in names])]
        rows += [np.concatenate([(sent[s][n] - given[n]).numpy().ravel() for n in names]) for s in sent]
        np.testing.assert_allclose(seen[0][part].numpy(), np.array(rows) @ np.array(rows).T, rtol=1e-12)
        assert torch.equal(seen[0][part], seen[1][part])


def test_no_share_is_above_the_largest() -> None:
    assert at_most({"a": 1.0, "b": 1.0, "c": 2.0}, 0.5) == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert at_most({"a": 0.0, "b": 0.0, "c": 2.0}, 0.5) == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.5})
    assert at_most({"a": 0.0, "b": 0.0, "c": 2.0}, 1.0) == {"a": 0.0, "b": 0.0, "c": 1.0}
    assert at_most({"a": 0.0, "b": 0.0}, 0.7) == {"a": 0.5, "b": 0.5}


# ---------------------------------------------------------------------------------------------------- FedDG-GA
def test_feddg_ga_equals_its_algorithm_written_by_hand() -> None:
    plan = make_plan("feddg-ga", *SMALL, *NO_BATCH_NORM, "training.rounds=3", "algorithm.largest_share=1")
    a, calls = dict.fromkeys(SITES, 1 / 3), [0]
    data = baselines.load_data(plan)

    def local(site: baselines.Site, given: dict[str, Tensor]) -> float | None:
        name = next(own for own in SITES if len(data[own].train) == site.cases)
        inputs, targets = data[name].train.tensors

        def loss() -> float:
            with torch.no_grad():
                return float(functional.cross_entropy(site.model.eval()(inputs), targets))

        gap = loss() - site.memory["loss"] if site.memory else None
        site.model.train()
        baselines.plain(site, given)
        site.memory["loss"] = loss()
        return gap

    def server(w: Arrays, sent: dict[str, Arrays], weights: dict[str, float], gaps: dict[str, Any]) -> Arrays:
        calls[0] += 1
        if calls[0] > 1:
            step = 0.2 * (1 - (calls[0] - 2) / 3) / 3
            largest = max(abs(gap) for gap in gaps.values())
            moved = {name: min(1, max(0, a[name] + step * gaps[name] / largest)) for name in a}
            a.update({name: value / sum(moved.values()) for name, value in moved.items()})
        return {key: sum(a[name] * sent[name][key] for name in sent) for key in w}

    expected = baselines.study(plan, local, server)
    run = inprocess.run(plan, settings=CPU)
    assert_close(run.models[SITES[0]].state_dict(), expected)
    shares = {site: line.share for site, line in run.history[-1].sites.items()}
    assert shares == pytest.approx(a, abs=1e-4) and len(set(shares.values())) == 3


def test_feddg_ga_s_liar_gets_no_more_than_the_largest_share() -> None:
    adjust = FedDGGA().adjusted(20)
    a = {"a": 1 / 3, "b": 1 / 3, "liar": 1 / 3}
    for number in range(1, 20):
        gaps = {"a": 0.3, "b": -0.1, "liar": 100.0}
        a = adjust(a, {site: {"gap": torch.tensor(gap)} for site, gap in gaps.items()}, number)
    assert a["liar"] > 0.6
    assert at_most(a, FedDGGA().largest_share)["liar"] == pytest.approx(0.5)
    assert adjust(a, {site: {"gap": torch.tensor(0.0)} for site in a}, 1) == a


# ---------------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize("method", slow_but([], WEIGHED))
def test_it_resumes_as_if_it_had_not_stopped(method: str, tmp_path: Path) -> None:
    assert_resumes(make_plan(method, *SMALL, "training.rounds=3"), 2, tmp_path)


@pytest.mark.parametrize("method", WEIGHED)
def test_what_cannot_be_is_refused(method: str) -> None:
    for change, said in (
        ("mixing.robust.name=median", f"is what {method} finds out"),
        ("transport.sealing=pairwise", "how much each hospital counts follows from what"),
        ('privacy={"epsilon": 2.0, "delta": 0.001}', f"under {method} follows from noisy gradients"),
    ):
        with pytest.raises(PlanError, match=said):
            make_plan(method, *SMALL, *NO_BATCH_NORM, change)
