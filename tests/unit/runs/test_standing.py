"""Test figures about each site's updates: their sketches, their values in the record, and the detection of outliers."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medsilo.runs.messages import StudyMessage
from medsilo.runs.outliers import AGREE, AWAY, DOUBT, FEWEST, HEAVY, LONG, standing_out
from medsilo.runs.progress import StudyProgress
from medsilo.runs.rounds import Round, SentUpdate, SiteRound
from medsilo_lab.api import Run
from medsilo_server.coordinator import Coordinator
from medsilo_server.directions import SAMPLED, Direction, Sketcher, standings
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.sites import sites_of
from tests.unit.medsilo_server.test_coordinator import Answers, Script, Scripted, Study, honest, task_and_round

A, B, C = SITES


# -- sketches ----------------------------------------------------------------------------------------------------------


def vectors(size, count, seed=0, common=0.5):
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(size, generator=draw)
    return [common * shared + torch.randn(size, generator=draw) for _ in range(count)]


def model_of(vector, rows):
    return {"weight": vector[: rows * 100].view(rows, 100), "bias": vector[rows * 100 :]}


@pytest.mark.parametrize("size", [50, 4000, 30_000, 700_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_are_exact_and_cosines_are_near(size, dtype):
    given = {name: tensor.to(dtype) for name, tensor in model_of(torch.randn(size), size // 200).items()}
    moved = [model_of(0.1 * vector, size // 200) for vector in vectors(size, 4)]
    sent = [{name: given[name] + own[name].to(dtype) for name in given} for own in moved]
    sketcher = Sketcher(given, seed=1)
    measured = {str(place): sketcher.measure(own, given) for place, own in enumerate(sent)}
    updates = [torch.cat([(own[n].double() - given[n].double()).flatten() for n in given]) for own in sent]
    for place, update in enumerate(updates):
        assert measured[str(place)].norm == pytest.approx(float(update.norm()), rel=1e-5)
    units = [update / update.norm() for update in updates]
    for place, found in standings(measured).items():
        others = [unit for other, unit in enumerate(units) if str(other) != place]
        rest = sum(others)
        assert found.cosine == pytest.approx(float(units[int(place)] @ rest / rest.norm()), abs=0.06)
        pairs = [float(one @ other) for one in others for other in others if one is not other]
        assert found.agreement == pytest.approx(sum(pairs) / len(pairs), abs=0.06)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [10, 5 * SAMPLED])
def test_no_number_escapes_a_norm(value, size):
    given = {"w": torch.zeros(size)}
    sent = {"w": torch.zeros(size)}
    sent["w"][size // 2] = value
    assert not math.isfinite(Sketcher(given).measure(sent, given).norm)


def test_huge_updates_keep_their_norm_and_no_change_has_no_direction():
    given = {"w": torch.zeros(1000)}
    sketcher = Sketcher(given)
    huge = sketcher.measure({"w": torch.full((1000,), 1e30)}, given)
    assert huge.norm == pytest.approx(1e30 * math.sqrt(1000), rel=1e-5) and huge.sketch is not None
    still = sketcher.measure({"w": torch.zeros(1000)}, given)
    assert still == Direction(0.0, None)
    assert standings({"a": huge, "b": still})["a"].cosine is None


# -- outliers ----------------------------------------------------------------------------------------------------------


def rounds_of(count, cosine=0.5, agreement=0.5, norm=1.0, share=0.2, times=None):
    usual = SiteRound(updates={"model": SentUpdate(norm=1.0, cosine=0.5, agreement=0.5)}, share=0.2)
    odd = SiteRound(updates={"model": SentUpdate(norm=norm, cosine=cosine, agreement=agreement)}, share=share)
    names = list("abcde")
    return [
        Round(
            round=number,
            asked=names,
            answered=names,
            sites={name: odd if name == "b" and number <= (times or count) else usual for name in names},
        )
        for number in range(1, count + 1)
    ]


def test_who_points_away_is_named_in_calm_words():
    found = standing_out(rounds_of(10, cosine=-0.42, times=9))
    assert found == {
        "b": [
            "b's updates point away from the others' in 9 of 10 rounds (cosine −0.42); ask what differs there before "
            "you trust this model"
        ]
    }
    (long,) = standing_out(rounds_of(5, norm=37.0))["b"]
    assert "37 times as long as the others' in 5 of 5" in long
    (heavy,) = standing_out(rounds_of(4, share=0.98))["b"]
    assert heavy.startswith("b makes up 98% of the mean")


def test_two_who_share_the_mean_are_both_named():
    """Two sites are both outliers if each of them has half of the weight in the mean."""
    shares = {"a": 0.5, "b": 0.5, "c": 1e-6, "d": 2e-6, "e": 1e-6}
    sites = {name: SiteRound(share=share) for name, share in shares.items()}
    rounds = [Round(round=number, asked=list(shares), answered=list(shares), sites=sites) for number in (1, 2, 3)]
    assert sorted(standing_out(rounds)) == ["a", "b"]


@pytest.mark.parametrize(
    "rounds",
    [
        rounds_of(10),
        rounds_of(10, cosine=-0.9, times=5),  # the unusual values occur in at most half of the rounds
        rounds_of(FEWEST - 1, cosine=-0.9),
        rounds_of(10, cosine=AWAY + 0.01),
        rounds_of(
            10, cosine=-0.9, agreement=AGREE + DOUBT / 6 - 0.01
        ),  # no site is an outlier, because all hospitals' updates differ
        rounds_of(10, cosine=None, agreement=None),
        rounds_of(10, norm=LONG * 0.99),
        rounds_of(10, share=HEAVY - 0.01),
        rounds_of(10, share=None),
        [],
    ],
)
def test_nobody_is_named_without_a_reason(rounds):
    assert standing_out(rounds) == {}


def test_of_two_nobody_is_said_to_point_away():
    """If only one or two sites answered, no site is an outlier, whatever the record contains."""
    odd = SiteRound(updates={"model": SentUpdate(norm=1.0, cosine=-0.9, agreement=0.9)})
    for names in (["b"], ["a", "b"]):
        line = Round(round=1, asked=names, answered=names, sites=dict.fromkeys(names, odd))
        assert standing_out([line] * FEWEST) == {}


def test_whoever_watches_is_told_once():
    progress = StudyProgress("abcde", 6, "dice")
    told = [progress.add(line) for line in rounds_of(6, cosine=-0.42)]
    said = [[line for line in lines if "STANDS OUT" in line] for lines in told]
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0, 0]
    assert said[2][0].startswith("round 3/6  STANDS OUT: b's updates point away")


# -- in the engine -----------------------------------------------------------------------------------------------------

# The hospitals' data are similar, and four rounds of training improve the model.
ALIKE = [
    *("task.shift=none", "task.persons=12", "task.windows=40", "task.steps=32"),
    *("training.batch_size=16", "training.rounds=4"),
]
DIFFERENT = ["task.shift=feature", "task.persons=6", "task.windows=10", *ALIKE[3:]]


def flipped(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
    """Let site B train honestly and send the opposite of its update."""
    reply = work()
    if site == B and task_and_round(asked)[0] == "round":
        given = asked.groups["model"]
        reply.groups["model"] = {
            name: (2 * given[name] - tensor if name.endswith(("weight", "bias")) else tensor)
            for name, tensor in reply.groups["model"].items()
        }
    return [(site, reply)]


@pytest.mark.slow
def test_a_site_that_sends_the_other_way_is_named_and_no_other(tmp_path: Path):
    study = Study(make_plan("fedavg", *ALIKE, "task.persons=15"), tmp_path / "run", flipped)
    study.run()
    first, last = study.rounds[0].sites, study.rounds[-1].sites
    assert first[B].updates["model"].cosine < -0.3 < 0.3 < first[B].updates["model"].agreement
    assert sum(own.share for own in last.values()) == pytest.approx(1, abs=1e-3)
    assert [own.share for own in last.values()] == pytest.approx(
        [own.samples / sum(one.samples for one in last.values()) for own in last.values()], abs=1e-3
    )
    assert list(standing_out(study.rounds)) == [B]
    page = Run(tmp_path / "run").report().read_text()
    said = [part for part in page.split("<") if "point away from the others" in part]
    assert said and all(B in part and A not in part and C not in part for part in said)


@pytest.mark.slow
def test_honest_hospitals_that_differ_are_not_named(tmp_path: Path):
    study = Study(make_plan("fedsm", *DIFFERENT), tmp_path / "run")
    study.run()
    assert standing_out(study.rounds) == {}
    assert {*study.rounds[0].sites[A].updates} == {"global", "personal", "selector"}


FIVE = [f"hospital-{letter}" for letter in "abcde"]


def bent(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
    """Let site B train honestly and send its update multiplied by -4."""
    reply = work()
    if site == B and task_and_round(asked)[0] == "round":
        given, own = asked.groups["model"], reply.groups["model"]
        sent = {n: 5 * given[n] - 4 * t if n.endswith(("weight", "bias")) else t for n, t in own.items()}
        reply.groups["model"] = sent
    return [(site, reply)]


def score_of_the_others(method: str, folder: Path, script: Script, *changes: str) -> float:
    plan = make_plan(method, *ALIKE, *changes, sites=FIVE)
    participants = sites_of(plan, folder, FIVE)
    coordinator = Coordinator(plan, FIVE, Scripted(participants, script), Record(folder), "scripted")
    summary = coordinator.run()
    assert list(standing_out(coordinator.rounds)) == ([] if script is honest else [B])
    scores = [summary.sites[site].validation[-1] or 0.0 for site in FIVE if site != B]
    return sum(scores) / len(scores)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "numbers", "rules"),
    [
        ("fedavg", [], ["multi-krum", "trimmed-mean"]),
        ("fedadam", ["algorithm.server_lr=0.1", "algorithm.tau=0.01"], ["median"]),
    ],
)
def test_the_shipped_plan_is_bent_and_a_defended_one_is_not(
    method: str, numbers: list[str], rules: list[str], tmp_path: Path
) -> None:
    undisturbed = score_of_the_others(method, tmp_path / "honest", honest, *numbers)
    bare = score_of_the_others(method, tmp_path / "bent", bent, *numbers)
    assert bare < 0.25 < 0.5 < undisturbed
    for rule in rules:
        change = f"aggregation.robust.name={rule}"
        defended = score_of_the_others(method, tmp_path / rule, bent, *numbers, change)
        assert defended > bare + (undisturbed - bare) / 3, rule
