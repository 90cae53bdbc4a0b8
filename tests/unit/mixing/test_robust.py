"""Robust aggregation rules equal numpy and brute force, and only suitable plans may use robust rules."""

import itertools
import math

import numpy as np
import pytest
import torch

from medsilo.core.errors import PlanError
from medsilo.mixing.aggregators import SoftPull, UniformMean, WeightedMean
from medsilo.mixing.by_element import MeanByElement
from medsilo.mixing.defence import Shield
from medsilo.mixing.rules import Median, MultiKrum, NormBound, TrimmedMean, capped
from medsilo.mixing.server import FedAdam, FedAvgM, Scaffold
from tests.conftest import SITES, make_plan
from tests.mixed import result_of

RULES = [NormBound(), Median(), TrimmedMean(), MultiKrum()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
SHAPES = {"conv.weight": (4, 3, 5), "head.bias": (7,), "norm.running_var": (3,)}
FIVE = ["a", "b", "c", "d", "e"]


def tensors(seed, scale=1.0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    made = {name: (scale * torch.randn(shape, generator=draw)).to(dtype) for name, shape in SHAPES.items()}
    return {**made, "norm.num_batches_tracked": torch.tensor(10 + seed)}


def flat(model, names=("conv.weight", "head.bias")):
    return np.concatenate([model[name].double().numpy().ravel() for name in names])


GIVEN = tensors(99)
UPDATES = {site: tensors(place, 0.1 * (place + 1)) for place, site in enumerate(FIVE)}
SENT = {
    site: {name: GIVEN[name] + own if own.is_floating_point() else own for name, own in update.items()}
    for site, update in UPDATES.items()
}
CASES = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 1000}


def mixed(aggregator, shield, sent=SENT, order=FIVE, given=GIVEN):
    aggregator.start(FIVE, given)
    aggregator.defend(shield)
    aggregator.start(FIVE)
    for site in order:
        if site in sent:
            aggregator.add(site, sent[site], CASES[site])
    return result_of(aggregator, "a")


def shield_of(rule, max_weight=None):
    return Shield(rule, max_weight, frozenset({"norm.running_var"}))


# -- comparison with independently computed values -------------------------------------------------------------------


def by_numpy(rule, matrix):
    """Combine updates [sites, elements] as in the paper about the rule."""
    count = len(matrix)
    if rule.name == "norm-bound":
        norms = np.linalg.norm(matrix, axis=1)
        bound = rule.factor * np.sort(norms)[(count - 1) // 2]
        return np.mean([row * min(1, bound / norm) for row, norm in zip(matrix, norms, strict=True)], axis=0)
    if rule.name == "median":
        return np.median(matrix, axis=0)
    if rule.name == "trimmed-mean":
        return np.sort(matrix, axis=0)[rule.bad : count - rule.bad].mean(0)
    scores = []
    for one in range(count):
        others = [np.sum((matrix[one] - matrix[other]) ** 2) for other in range(count) if other != one]
        scores.append(sum(sorted(others)[: count - rule.bad - 2]))
    return matrix[np.argsort(scores, kind="stable")[: rule.keep or count - rule.bad]].mean(0)


@pytest.mark.parametrize(
    "rule",
    [*RULES, NormBound(factor=0.3), TrimmedMean(bad=2), MultiKrum(keep=1), MultiKrum(keep=2)],
    ids=lambda rule: str(rule),
)
def test_every_rule_gives_what_its_paper_says(rule):
    """The test uses each rule with five sites and with four sites.

    The median of four sites is the mean of the two middle values.
    """
    for sites in (FIVE, FIVE[:4]):
        if len(sites) < rule.fewest:
            continue
        result = mixed(WeightedMean(), shield_of(rule), {site: SENT[site] for site in sites})
        # Weights and statistics are compared separately, because large weights would hide differences of small
        # statistics.
        for names in (("conv.weight", "head.bias"), ("norm.running_var",)):
            wanted = by_numpy(rule, np.stack([flat(UPDATES[site], names) for site in sites]))
            assert np.allclose(flat(result, names) - flat(GIVEN, names), wanted, atol=3e-7)
        # the lower of the two middle values, or the single middle value
        assert result["norm.num_batches_tracked"] == (12 if sites == FIVE else 11)


def test_multi_krum_picks_the_best_of_all_choices():
    """The test computes Multi-Krum's scores by brute force over all sets of neighbours; Multi-Krum must keep the update
    with the smallest score.
    """
    draw = np.random.default_rng(5)
    points = draw.normal(size=(7, 3))
    sites = list("abcdefg")
    aggregator = UniformMean()
    aggregator.start(sites, {"w": torch.zeros(3).double()})
    aggregator.defend(Shield(MultiKrum(bad=2, keep=1)))
    aggregator.start(sites)
    for site, point in zip(sites, points, strict=True):
        aggregator.add(site, {"w": torch.tensor(point)}, 1)

    def score(one):
        others = [other for other in range(7) if other != one]
        return min(
            sum(np.sum((points[one] - points[other]) ** 2) for other in chosen)
            for chosen in itertools.combinations(others, 7 - 2 - 2)
        )

    assert np.allclose(result_of(aggregator, "a")["w"].numpy(), points[min(range(7), key=score)])


@pytest.mark.parametrize("cap", [0.21, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_shares_are_cut_at_the_cap_and_the_rest_goes_to_the_others(cap):
    cases = np.array(list(CASES.values()), dtype=float)
    found = capped(torch.tensor(cases), cap).numpy()
    # Bisection finds the scale for which the sum of min(cap, scale x cases) is 1.
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(cap, middle * cases).sum() < 1 else (low, middle)
    assert np.allclose(found, np.minimum(cap, high * cases)) and math.isclose(found.sum(), 1)


def test_share_cap_alone_is_a_mean_with_other_weights():
    result = mixed(WeightedMean(), shield_of(None, 0.4))
    shares = capped(torch.tensor([float(CASES[site]) for site in FIVE]).double(), 0.4).numpy()
    wanted = shares @ np.stack([flat(UPDATES[site]) for site in FIVE])
    assert np.allclose(flat(result) - flat(GIVEN), wanted, atol=3e-7)


# -- properties of all rules -------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("evil", [-10.0, 1e6, 1e30])
def test_one_of_five_can_not_move_the_result_far(rule, evil):
    honest = {site: tensors(7, 0.1) for site in "abcd"}
    noise = {site: tensors(place, 0.01) for place, site in enumerate("abcd")}
    sent = {
        site: {n: GIVEN[n] + own[n] + noise[site][n] if own[n].is_floating_point() else own[n] for n in own}
        for site, own in honest.items()
    }
    wanted = np.mean([flat(sent[site]) for site in "abcd"], axis=0)
    sent["e"] = {n: t * evil if t.is_floating_point() else t * 10**9 for n, t in honest["a"].items()}
    result = mixed(UniformMean(), shield_of(rule), sent)
    length = np.linalg.norm(flat(honest["a"]))
    away = np.linalg.norm(flat(result) - wanted) / length
    assert away < (0.5 if rule.name == "norm-bound" else 0.05)
    assert result["norm.num_batches_tracked"] == 17


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_of_numbers(rule, dtype):
    given = {"w": torch.zeros(50, dtype=dtype), "mask": torch.tensor([False, True])}
    draw = torch.Generator().manual_seed(0)
    sent = {
        site: {"w": torch.randn(50, generator=draw).to(dtype), "mask": torch.tensor([place < 3, place < 2])}
        for place, site in enumerate(FIVE)
    }
    found = mixed(UniformMean(), Shield(rule), sent, given=given)
    result, wanted = found["w"], by_numpy(rule, np.stack([sent[site]["w"].double().numpy() for site in FIVE]))
    assert found["mask"].tolist() == [True, False]  # each element of the mask has the value of the majority
    assert result.dtype == dtype
    assert np.allclose(result.double().numpy(), wanted, atol=1e-12 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: FedAvgM(lr=0.5, momentum=0.0, uniform=True), lambda d: 0.5 * d),
        (lambda: FedAdam(lr=0.1, betas=(0.0, 0.0), tau=1e-3), lambda d: 0.1 * d / (np.abs(d) + 1e-3)),
        (lambda: UniformMean(rate=2.0), lambda d: 2.0 * d),
        (lambda: Scaffold(), lambda d: d),
    ],
    ids=["fedavgm", "fedadam", "rate", "scaffold"],
)
def test_the_servers_step_is_made_along_the_robust_mean(make, wanted):
    result = mixed(make(), shield_of(Median()))
    d = np.median(np.stack([flat(UPDATES[site]) for site in FIVE]), axis=0)
    assert np.allclose(flat(result) - flat(GIVEN), wanted(d), atol=1e-6)


def test_scaffolds_control_goes_as_far_as_sites_answered():
    result = mixed(Scaffold(), shield_of(Median()), {site: SENT[site] for site in "abc"})
    d = np.median(np.stack([flat(UPDATES[site]) for site in "abc"]), axis=0)
    assert np.allclose(flat(result) - flat(GIVEN), 0.6 * d, atol=1e-6)


def test_shares_tell_who_counted():
    aggregator = WeightedMean()
    far = {site: dict(own) for site, own in SENT.items()}
    # an extreme statistic of site a does not change the sites' weights in the mean, which depend on trained weights
    # only
    far["a"]["norm.running_var"] = far["a"]["norm.running_var"] * 1e6
    far["e"] |= {name: far["e"][name] * 1e6 for name in ("conv.weight", "head.bias")}
    mixed(aggregator, shield_of(MultiKrum()), far)
    assert aggregator.shares == {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25, "e": 0.0}
    plain = WeightedMean()
    plain.start(FIVE, GIVEN)
    for site in "ab":
        plain.add(site, SENT[site], CASES[site])
    plain.finish()
    assert plain.shares == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    middle = WeightedMean()
    mixed(middle, shield_of(Median()))
    assert middle.shares == {}


def test_what_is_no_mean_can_not_be_defended():
    with pytest.raises(PlanError, match="SoftPull is not a mean"):
        SoftPull(0.7).defend(Shield(Median()))
    with pytest.raises(PlanError, match="different weights for every tensor"):
        MeanByElement(weigh=lambda site, samples: {"w": 1.0}).defend(Shield(Median()))


# -- in a plan ---------------------------------------------------------------------------------------------------------


def plan_with(method, *changes, sites=None):
    return make_plan(method, *changes, sites=sites or [f"hospital-{name}" for name in FIVE])


def test_a_defence_is_part_of_the_plan():
    assert make_plan("fedavg", "aggregation.robust=null").hash == make_plan().hash
    assert make_plan("fedavg", "aggregation.robust.name=median").hash != make_plan().hash


@pytest.mark.parametrize(
    ("method", "changes", "told"),
    [
        ("local", ["robust.name=median"], "local takes no mean over hospitals"),
        ("adafed", ["robust.name=median"], "adafed takes no mean over hospitals"),
        ("fednova", ["robust.name=median"], "weighs each hospital by the steps"),
        ("fednova", ["max_weight=0.5"], "weighs each hospital by the steps"),
        ("fedavg", ["robust.name=multi-krum", "robust.bad=2"], "multi-krum needs 7 hospitals in every"),
        ("fedavg", ["robust.name=trimmed-mean", "robust.bad=3"], "trimmed-mean needs 7 hospitals"),
        ("fedavg", ["robust.name=multi-krum", "robust.keep=6"], "multi-krum needs 6 hospitals"),
        ("fedavg", ["robust.name=median", "max_weight=0.5"], "all hospitals count alike in median"),
        ("fedavg", ["max_weight=0.1"], "give 0.2 or more"),
        ("fedavg", ["robust.name=krum"], "aggregation.robust.name"),
        ("fedavg", ["robust.name=trimmed-mean", "robust.bad=0"], "bad"),
        ("fedavg", ["robust.name=multi-krum", "robust.keeps=2"], r"keeps: .* \(did you mean keep\?\)"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(method, changes, told):
    with pytest.raises(PlanError, match=told):
        plan_with(method, *(f"aggregation.{change}" for change in changes))


def test_too_few_in_the_worst_round_are_refused():
    fewer = ["participation.minimum=3", "participation.when_missing=continue"]
    with pytest.raises(PlanError, match="needs 5 hospitals.*3 are enough"):
        plan_with("fedavg", "aggregation.robust.name=multi-krum", *fewer)
    assert plan_with("fedavg", "aggregation.robust.name=trimmed-mean", *fewer)


def test_shared_groups_are_defended_beside_personal_ones_and_the_plan_says_what_is_not():
    with pytest.raises(PlanError, match="FedSM's selector in closed form"):
        make_plan("fedsm", "aggregation.robust.name=median")
    plan = make_plan("fedsm", "aggregation.robust.name=median", "algorithm.selector_sync=server-adam")
    assert any("the method mixes the personal model of every hospital" in line for line in plan.warnings(SITES))
    assert not any(
        "aggregation" in line for line in make_plan("fedavg", "aggregation.robust.name=median").warnings(SITES)
    )


def test_a_change_of_the_rule_drops_the_numbers_of_the_one_before():
    plan = plan_with("fedavg", "aggregation.robust.name=multi-krum", "aggregation.robust.keep=2")
    assert plan.with_changes(["aggregation.robust.name=median"]).aggregation.robust == Median()
