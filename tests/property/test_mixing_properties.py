"""Test properties of every aggregator with random sites, weights, shapes and types from fixed seeds."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from medsilo.mixing import contributions, layout
from medsilo.mixing.aggregators import Identity, SimilarityMix, SoftPull, UniformMean, WeightedMean
from tests.conftest import over_all
from tests.mixed import result_of

SEEDS = range(8)
NEAR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KINDS = ["weighted", "uniform", "soft", "similarity", "identity"]
every_study = over_all("seed", SEEDS)
every_mixer = pytest.mark.parametrize("kind", KINDS)


class Study:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        count = self.draw.randint(2, 9)
        self.sites = sorted(self.draw.sample([f"hospital-{letter}" for letter in "abcdefghijklm"], count))
        self.pull = self.draw.uniform(0.05, 1)
        weights = torch.rand(count, count, generator=self.generator, dtype=torch.float64)
        weights *= torch.rand(count, count, generator=self.generator) > 0.3
        weights += 1e-3 * torch.eye(count, dtype=torch.float64)
        self.weights = weights / weights.sum(1, keepdim=True)
        self.shapes = {
            f"net/layer{place}": (
                [self.draw.randint(0, 9) for _ in range(self.draw.randint(0, 3))],
                self.draw.choice(list(NEAR)),
            )
            for place in range(self.draw.randint(1, 12))
        }
        self.counts = {site: self.draw.randint(1, 1000) for site in self.sites}

    def model(self) -> dict[str, torch.Tensor]:
        drawn = {
            name: torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        steps = torch.randint(0, 99, (2,), generator=self.generator)
        return {**drawn, "steps": steps, "mask": steps > 49}

    def models(self) -> dict[str, dict[str, torch.Tensor]]:
        return {site: self.model() for site in self.sites}

    def aggregator(self, kind: str) -> Any:
        return {
            "weighted": WeightedMean,
            "uniform": UniformMean,
            "soft": lambda: SoftPull(self.pull),
            "similarity": lambda: SimilarityMix(self.weights),
            "identity": Identity,
        }[kind]()

    def matrix(self, kind: str, present: list[str]) -> torch.Tensor:
        count = len(present)
        if kind == "weighted":
            rows = torch.tensor([float(self.counts[site]) for site in present]).double().expand(count, count)
        elif kind == "uniform":
            rows = torch.ones(count, count, dtype=torch.float64)
        elif kind == "soft" and count > 1:
            rows = torch.full((count, count), (1 - self.pull) / (count - 1), dtype=torch.float64)
            rows.fill_diagonal_(self.pull)
        elif kind == "similarity":
            places = [self.sites.index(site) for site in present]
            rows = self.weights[places][:, places]
        else:
            rows = torch.eye(count, dtype=torch.float64)
        return rows / rows.sum(1, keepdim=True)


def play(aggregator, study, models, initial=None):
    order = list(models)
    study.draw.shuffle(order)
    aggregator.start(study.draw.sample(study.sites, len(study.sites)), initial)
    for site in order:
        aggregator.add(site, {name: tensor.clone() for name, tensor in models[site].items()}, study.counts[site])
    return {site: result_of(aggregator, site) for site in models}


@pytest.fixture(params=["usual sizes", "tiny blocks, all on disk"])
def sizes(request, monkeypatch):
    """Run a test twice: with the usual sizes, and with tensors in tiny blocks that are all stored on disk."""
    if request.param != "usual sizes":
        monkeypatch.setattr(layout, "BLOCK", 7)
        monkeypatch.setattr(layout, "NARROWEST", 2)
        monkeypatch.setattr(contributions, "MEMORY", 0)


@every_study
@every_mixer
def test_every_mixer_is_its_matrix_over_who_answered(seed, kind, sizes):
    study = Study(seed)
    aggregator = study.aggregator(kind)
    for _ in range(3):
        models = study.models()
        for site in study.draw.sample(study.sites, study.draw.randrange(len(study.sites))):
            del models[site]
        results, present = play(aggregator, study, models), sorted(models)
        for name, (_, dtype) in study.shapes.items():
            theta = torch.stack([models[site][name].double() for site in present])
            wanted = torch.tensordot(study.matrix(kind, present).double(), theta, 1)
            got = torch.stack([results[site][name].double() for site in present])
            torch.testing.assert_close(got, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
        for site in present:
            owner = present[0] if kind in ("weighted", "uniform") else site
            assert all(torch.equal(results[site][name], models[owner][name]) for name in ("steps", "mask"))


@every_study
@every_mixer
def test_resuming_after_any_round_changes_no_bit(seed, kind):
    study = Study(seed)
    initial = study.model()
    whole, resumed = study.aggregator(kind), study.aggregator(kind)
    for _ in range(4):
        models = study.models()
        for site in study.draw.sample(study.sites, study.draw.randrange(len(study.sites))):
            del models[site]
        play(whole, study, models, initial)
        play(resumed, study, models, initial)
        tensors, facts = resumed.state()
        resumed = study.aggregator(kind)
        resumed.load_state(tensors, facts)
        for site in study.sites:
            one, two = whole.current(site), resumed.current(site)
            assert one.keys() == two.keys()
            assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@every_study
@pytest.mark.parametrize("width", [1, 4, 7, 1000])
def test_blocks_are_all_numbers_in_order_and_none_is_wider_than_asked(seed, width):
    study = Study(seed)
    shapes = {name: torch.Size(shape) for name, (shape, _) in study.shapes.items()}
    section = layout.TypeSection(torch.float32, shapes)
    numbers = {name: torch.rand(shape, generator=study.generator) for name, shape in shapes.items()}
    blocks = section.cut(width)
    assert [block.size for block in blocks] == [sum(block.sizes) for block in blocks]
    assert all(0 < block.size <= width for block in blocks)
    assert all(block.size + after.sizes[0] > width for block, after in pairwise(blocks))
    whole = torch.cat([torch.empty(0), *(numbers[name].flatten() for name in sorted(shapes))])
    for form in ("flat", "of"):
        pieces = [piece.flatten() for block in blocks for piece in getattr(block, form)(numbers)]
        assert torch.equal(torch.cat([torch.empty(0), *pieces]), whole)


HARD = {
    "denormal": lambda numbers, sign: numbers * 1e-40,
    "wide": lambda numbers, sign: numbers * 10.0 ** (30 * sign),
    "ties": lambda numbers, sign: (numbers * 8).round() / 8 * (1 + 2.0**-23 * (sign > 0)),
    "infinite": lambda numbers, sign: torch.where(sign > 0.99, torch.inf, numbers),
}


COUNTS = {"a": 3, "b": 50, "c": 1, "d": 1, "e": 400}


def drawn(hard, dtype):
    generator, models = torch.Generator().manual_seed(5), {}
    for site in COUNTS:
        numbers, sign = (torch.rand(1111, generator=generator, dtype=torch.float64) * 2 - 1 for _ in range(2))
        vector = HARD[hard](numbers, sign).to(dtype)
        models[site] = {"long": vector[:1000].view(10, 100), "short": vector[1000:1001].view(()), "rest": vector[1001:]}
    return models


def mean_of(models, counts):
    """Return the mean that m ← m + a (θ - m) gives in single precision if sites are added one after the other."""
    (first, *others), (total, *counts) = models, counts
    mean = {name: tensor.float() for name, tensor in first.items()}
    for own, count in zip(others, counts, strict=True):
        total += count
        mean = {name: m.lerp(own[name].float(), count / total) for name, m in mean.items()}
    return mean


def found(aggregator, models, order, initial=None):
    aggregator.start(COUNTS, initial)
    aggregator.start(COUNTS)
    for site in order:
        aggregator.add(site, models[site], COUNTS[site])
    return result_of(aggregator, "a")


def same_bits(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(_bits(tensor), _bits(other[name].to(tensor.dtype))) for name, tensor in one.items())


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_the_same_whatever_came_when(dtype, hard, sizes):
    """For any order of arrival, the mean is bit-identical to m ← m + a (θ - m) in sorted order."""
    models = drawn(hard, dtype)
    begun = {name: torch.full_like(tensor, 0.1) for name, tensor in models["a"].items()}
    for order in ("abcde", "edcba", "cbead", "dc", "eca", "b"):
        here = [site for site in COUNTS if site in order]
        wanted = mean_of([models[site] for site in here], [COUNTS[site] for site in here])
        for initial in (None, begun):
            same_bits(found(WeightedMean(), models, order, initial), wanted)


def test_a_mean_of_many_is_nearly_as_close_as_with_steps_in_double_precision():
    """The reference rounds each step to single precision, in which tensors are stored."""
    generator = torch.Generator().manual_seed(7)
    sent = [0.05 * torch.randn(20_000, generator=generator) for _ in range(100)]
    true = sum(count * own.double() for count, own in enumerate(sent, 1)) / sum(range(1, 101))
    rounded = sent[0]
    aggregator = WeightedMean()
    aggregator.start([f"{place:03}" for place in range(100)])
    for place, own in enumerate(sent):
        share = (place + 1) / sum(range(1, place + 2))
        rounded = rounded.double().lerp(own.double(), share).float()
        aggregator.add(f"{place:03}", {"w": own}, place + 1)
    mean = result_of(aggregator, "000")["w"]
    away, rounded_away = (float((own - true).square().mean().sqrt()) for own in (mean, rounded))
    assert away < 1.05 * rounded_away < 1e-8


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int16)
