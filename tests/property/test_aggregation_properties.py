"""Test properties of the aggregators that studies can use instead of a mean, with random rounds, sites and orders of
arrival.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from medsilo.mixing.aggregators import Aggregator, Identity, SimilarityMix, SoftPull, UniformMean, WeightedMean
from medsilo.mixing.by_element import MeanByElement
from medsilo.mixing.defence import Shield
from medsilo.mixing.rules import Median, MultiKrum, NormBound, TrimmedMean, capped
from medsilo.mixing.server import DynamicStep, FedAdagrad, FedAdam, FedAvgM, FedYogi, Scaffold
from medsilo.mixing.staleness import StalenessWeightedMean, at_most
from tests.mixed import result_of
from tests.property.drawn import examples

SITES = ["a", "b", "c", "d", "e", "f", "g"]
CLOSE = 1e-5  # tolerance of sums in single precision
Model = dict[str, Tensor]
numbers = st.floats(-100, 100, width=32)
counts = st.lists(st.integers(1, 10_000), min_size=2, max_size=len(SITES))


@st.composite
def rounds(draw: st.DrawFn, least: int = 2) -> tuple[dict[str, Model], dict[str, int], list[str]]:
    sites = SITES[: draw(st.integers(least, len(SITES)))]
    size = draw(st.integers(1, 4))
    vectors = {site: torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))) for site in sites}
    models = {site: {"w": vector, "b": vector[:1] / 2} for site, vector in vectors.items()}
    return models, {site: draw(st.integers(1, 10_000)) for site in sites}, draw(st.permutations(sites))


def played(
    aggregator: Aggregator, models: dict[str, Model], cases: dict[str, int], order: list[str], zeros: bool = True
) -> dict[str, Model]:
    first = next(iter(models.values()))
    initial = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    aggregator.start(sorted(models), initial if zeros else None)
    for site in order:
        aggregator.add(site, models[site], cases[site])
    return {site: result_of(aggregator, site) for site in sorted(models)}


def shielded(rule: object = None, cap: float | None = None) -> Callable[[], Aggregator]:
    def made() -> Aggregator:
        aggregator = WeightedMean()
        aggregator.defend(Shield(rule, cap))
        return aggregator

    return made


HALF = {"a": 0.5, "b": 0.5}
MEANS: dict[str, Callable[[], Aggregator]] = {
    "mean": WeightedMean,
    "uniform": UniformMean,
    "half a step": lambda: WeightedMean(0.5),
    "weighed": lambda: MeanByElement(lambda site, cases: {"w": cases, "b": 1.0}),
    "late": lambda: StalenessWeightedMean(lambda aggregator: aggregator.samples),
    "share cap": shielded(cap=0.6),
    "norm bound": shielded(NormBound()),
    "norm bound, by cases": shielded(NormBound(), 0.6),
    "median": shielded(Median()),
    "trimmed": shielded(TrimmedMean(bad=1)),
    "krum": shielded(MultiKrum(bad=1)),
}
PERSONAL: dict[str, Callable[[], Aggregator]] = {
    "pull": lambda: SoftPull(0.3),
    "similarity": lambda: SimilarityMix(torch.full((len(SITES), len(SITES)), 1 / len(SITES))),
    "identity": Identity,
}
STEPS: dict[str, Callable[[], Aggregator]] = {
    "momentum": FedAvgM,
    "adam": FedAdam,
    "torch's adam": lambda: FedAdam(variant="torch"),
    "yogi": FedYogi,
    "adagrad": FedAdagrad,
    "dynamic": lambda: DynamicStep(0.1),
    "scaffold": Scaffold,
}
EVERY = {**MEANS, **PERSONAL, **STEPS}
every = pytest.mark.parametrize("kind", EVERY)


def same(one: dict[str, Model], other: dict[str, Model]) -> bool:
    return all(torch.equal(own[name], other[site][name]) for site, own in one.items() for name in own)


@every
@examples(12)
@given(drawn=rounds(least=5))
def test_the_order_of_arrival_and_of_names_changes_no_bit(kind: str, drawn: tuple) -> None:
    models, cases, order = drawn
    turned = {site: dict(reversed(own.items())) for site, own in models.items()}
    assert same(played(EVERY[kind](), models, cases, order), played(EVERY[kind](), turned, cases, sorted(models)))


@pytest.mark.parametrize("kind", {**MEANS, **PERSONAL})
@examples(12)
@given(drawn=rounds(least=5))
def test_a_mixture_after_nothing_is_the_one_after_zeros(kind: str, drawn: tuple) -> None:
    models, cases, order = drawn
    if kind != "half a step":
        assert same(*(played(EVERY[kind](), models, cases, order, zeros) for zeros in (True, False)))


@pytest.mark.parametrize("kind", {**MEANS, "momentum": 0, "adam": 0, "scaffold": 0})
@examples(12)
@given(drawn=rounds(least=5), turn=st.integers(1, 4))
def test_a_mean_does_not_know_who_sent_what(kind: str, drawn: tuple, turn: int) -> None:
    """If sites exchange their models and numbers of cases with each other, the mean stays the same."""
    models, cases, order = drawn
    given_to = dict(zip(models, [*[*models][turn:], *[*models][:turn]], strict=True))
    moved, with_them = ({given_to[site]: own[site] for site in own} for own in (models, cases))
    one, other = played(EVERY[kind](), models, cases, order), played(EVERY[kind](), moved, with_them, order)
    for name in ("w", "b"):
        torch.testing.assert_close(one["a"][name], other["a"][name], rtol=CLOSE, atol=100 * CLOSE)


@pytest.mark.parametrize("kind", {**MEANS, **PERSONAL})
@examples(12)
@given(drawn=rounds(least=5))
def test_what_all_send_alike_is_the_result(kind: str, drawn: tuple) -> None:
    models, cases, order = drawn
    alike = dict.fromkeys(models, models["a"])
    share = 0.5 if kind == "half a step" else 1.0
    for own in played(EVERY[kind](), alike, cases, order).values():
        for name, tensor in models["a"].items():
            torch.testing.assert_close(own[name], share * tensor, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("kind", {**MEANS, **PERSONAL})
@examples(12)
@given(drawn=rounds(least=5))
def test_a_mixture_lies_between_what_was_sent_and_what_was_there(kind: str, drawn: tuple) -> None:
    """In a mean, weights are at least 0 and add up to at most 1; the server's initial zeros have the rest."""
    models, cases, order = drawn
    for own in played(EVERY[kind](), models, cases, order).values():
        for name, mixed in own.items():
            sent = torch.stack([model[name] for model in models.values()])
            less = kind in ("half a step", "norm bound", "norm bound, by cases")
            low, high = (sent.amin(0).clamp(max=0), sent.amax(0).clamp(min=0)) if less else (sent.amin(0), sent.amax(0))
            room = CLOSE * (1 + sent.abs().amax(0))
            assert (mixed >= low - room).all() and (mixed <= high + room).all()


@pytest.mark.parametrize("kind", {**MEANS, **PERSONAL, "momentum": 0, "dynamic": 0, "scaffold": 0})
@examples(12)
@given(drawn=rounds(least=5), power=st.integers(10, 60))
def test_a_mixture_does_not_know_the_unit_of_its_numbers(kind: str, drawn: tuple, power: int) -> None:
    """The test multiplies by a power of two, because such products are exact in floating point."""
    models, cases, order = drawn
    finer = {site: {name: own * 2.0**power for name, own in model.items()} for site, model in models.items()}
    one, other = (played(EVERY[kind](), sent, cases, order) for sent in (models, finer))
    for site, own in one.items():
        for name, tensor in own.items():
            scaled = other[site][name] / 2.0**power
            torch.testing.assert_close(scaled, tensor, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("kind", ["mean", "uniform", "share cap", "norm bound", "late"])
@examples(12)
@given(drawn=rounds(least=5), more=st.integers(2, 50))
def test_shares_are_of_the_cases_and_make_a_whole(kind: str, drawn: tuple, more: int) -> None:
    models, cases, order = drawn
    aggregator = EVERY[kind]()
    one = played(aggregator, models, cases, order)
    shares = aggregator.shares
    assert shares.keys() == models.keys() and min(shares.values()) >= 0
    assert sum(shares.values()) == pytest.approx(1)
    if kind in ("mean", "late"):
        assert shares == pytest.approx({site: count / sum(cases.values()) for site, count in cases.items()})
        mean = sum(shares[site] * models[site]["w"].double() for site in models)
        torch.testing.assert_close(one["a"]["w"].double(), mean, rtol=CLOSE, atol=100 * CLOSE)
    if kind == "uniform":
        assert len(set(shares.values())) == 1
    if kind == "share cap":
        assert max(shares.values()) <= 0.6 + 1e-12
    other = played(EVERY[kind](), models, {site: more * count for site, count in cases.items()}, order)
    for name in ("w", "b"):
        torch.testing.assert_close(one["a"][name], other["a"][name], rtol=CLOSE, atol=100 * CLOSE)


LIARS: dict[str, Callable[[], Aggregator]] = {
    "median": MEANS["median"],
    "trimmed": MEANS["trimmed"],
    "krum": MEANS["krum"],
}


@pytest.mark.parametrize("kind", LIARS)
@examples(25)
@given(drawn=rounds(least=5), liar=st.sampled_from(SITES[:5]), lie=st.sampled_from([1e4, -1e6, 1e30, float("inf")]))
def test_one_liar_moves_nothing_out_of_what_the_honest_sent(kind: str, drawn: tuple, liar: str, lie: float) -> None:
    models, cases, order = drawn
    if kind == "krum" and not -1e7 < lie < 1e7:  # krum computes distances in double precision
        lie = 1e6
    told = {**models, liar: {name: torch.full_like(own, lie) for name, own in models[liar].items()}}
    honest = torch.stack([own["w"] for site, own in models.items() if site != liar])
    mixed = played(LIARS[kind](), told, cases, order)["a"]["w"]
    room = CLOSE * (1 + honest.abs().amax(0))
    assert (mixed >= honest.amin(0) - room).all() and (mixed <= honest.amax(0) + room).all()


@examples(25)
@given(drawn=rounds(least=5), liar=st.sampled_from(SITES[:5]), lie=st.floats(1e3, 1e8))
def test_under_a_norm_bound_one_site_counts_for_its_share_of_the_median(drawn: tuple, liar: str, lie: float) -> None:
    models, cases, order = drawn
    told = {**models, liar: {name: torch.full_like(own, lie) for name, own in models[liar].items()}}
    mixed = played(MEANS["norm bound"](), told, cases, order)["a"]
    length = torch.cat([*mixed.values()]).double().norm()
    norms = torch.stack([torch.cat([*model.values()]).double().norm() for model in told.values()])
    assert length <= norms.median() * (1 + 1e-5) + 1e-6


@examples(200)
@given(counts, st.floats(0.05, 1))
def test_capped_shares(weights: list[int], cap: float) -> None:
    given_to = torch.tensor(weights, dtype=torch.float64)
    shares, plain = capped(given_to, cap), given_to / given_to.sum()
    assert shares.sum() == pytest.approx(1) and (shares > 0).all()
    assert (shares <= max(cap, 1 / len(weights)) + 1e-12).all()
    # a site with more cases never has less weight than a site with fewer cases
    assert (shares[given_to.argsort()].diff() >= -1e-12).all()
    if plain.max() <= cap:
        torch.testing.assert_close(shares, plain)
    below = shares < cap - 1e-12
    # sites whose weights are below the cap keep the proportions of their weights
    if cap * len(weights) > 1 and below.any():
        torch.testing.assert_close(shares[below] / shares[below].sum(), given_to[below] / given_to[below].sum())


@examples(100)
@given(st.dictionaries(st.sampled_from(SITES), st.floats(0, 1e6), min_size=1), st.floats(0.05, 1))
def test_late_shares(weights: dict[str, float], cap: float) -> None:
    shares = at_most(weights, cap)
    assert shares.keys() == weights.keys() and sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0 and max(shares.values()) <= max(cap, 1 / len(weights)) + 1e-9


@pytest.mark.parametrize("kind", STEPS)
@examples(12)
@given(drawn=rounds(least=2), there=numbers)
def test_a_server_that_is_sent_what_it_gave_stays(kind: str, drawn: tuple, there: float) -> None:
    models, cases, order = drawn
    aggregator = STEPS[kind]()
    start = {name: torch.full_like(own, there) for name, own in models["a"].items()}
    aggregator.start(sorted(models), start)
    for _ in range(2):
        for site in order:
            aggregator.add(site, start, cases[site])
        aggregator.finish()
    assert same({"a": aggregator.current("a")}, {"a": start})
