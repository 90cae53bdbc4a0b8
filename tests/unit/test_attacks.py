"""Dishonest hospitals: what an attack sends is what its formula says, it harms, a defence helps; and the table."""

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo.federation.checks import check_ranges
from medsilo.plan import Plan
from medsilo.runs.messages import MOST_CASES, StudyMessage
from medsilo.tasks.site_data import Cases
from results.attacks.__main__ import main
from results.attacks.attackers import (
    AMPLITUDE,
    ATTACKS,
    Attack,
    Random,
    Turn,
    attacks_on,
    largest_z,
    patched,
)
from results.attacks.cells import (
    DEFENCES,
    HONEST,
    PLAIN,
    SITES,
    TABLE,
    TINY,
    WIDE,
    Block,
    Cell,
    Result,
    cells,
    measured,
    result_of,
)
from results.attacks.federation import data_of, run
from results.attacks.table import Done, best_defence, named_table
from tests.conftest import METHODS, make_plan

A, B, *_ = SITES


@cache
def five(method: str = "fedavg", *changes: str) -> Plan:
    """A study of five hospitals that goes on when a bad one is refused."""
    small = ["task.persons=6", "task.windows=6", "task.steps=32", "training.rounds=2", "training.learning_rate=0.01"]
    agreed = ["participation.when_missing=continue", "participation.minimum=3"]
    return make_plan(method, *small, *agreed, *changes, sites=list(SITES))


def turn(sent: dict[str, list[float]], plan: Plan | None = None, given: tuple[float, ...] = (1.0, 2.0)) -> Turn:
    """A round of bad hospitals which were given these weights and would honestly send those."""

    def parcel(weights: Tensor, statistic: float) -> StudyMessage:
        tensors = {"layer.weight": weights, "norm.running_var": torch.tensor([statistic])}
        return StudyMessage({"model": {**tensors, "norm.num_batches_tracked": torch.tensor(7)}})

    asked = {site: parcel(torch.tensor(given), 1.0) for site in sent}
    answers = {site: parcel(torch.tensor(weights), 3.0) for site, weights in sent.items()}
    return Turn(plan or five(), "round", 1, asked, answers)


def weights(told: Turn, site: str) -> list[float]:
    model = told.answers[site].groups["model"]
    assert float(model["norm.running_var"]) == 3.0 and int(model["norm.num_batches_tracked"]) == 7  # as they were
    assert model["layer.weight"].dtype == torch.float32
    return [round(float(value), 5) for value in model["layer.weight"]]


# ---------------------------------------------------------------------------------------------------- formulas
@pytest.mark.parametrize(
    ("name", "expected"),
    [("sign flip", [0, 3]), ("sign flip x10", [-9, 12]), ("scaling x10", [11, -8]), ("scaling x100", [101, -98])],
)
def test_scaled_updates(name: str, expected: list[float]) -> None:
    told = turn({A: [2.0, 1.0]})  # the honest update is (1, -1)
    ATTACKS[name]().forge(told)
    assert weights(told, A) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    # The honest updates are (1, -1) and (3, 1), their mean is (2, 0). Large: ε = 1.5 * 3 / 2 = 2.25.
    [("inner product, ε = 0.5", [0, 2]), ("inner product, large ε", [-3.5, 2])],
)
def test_all_send_the_opposite_of_what_they_know(name: str, expected: list[float]) -> None:
    told = turn({A: [2.0, 1.0], B: [4.0, 3.0]})
    ATTACKS[name]().forge(told)
    assert weights(told, A) == weights(told, B) == expected


def test_the_plain_mean_turns_round() -> None:
    for bad in (1, 2):
        epsilon = ATTACKS["inner product, large ε"]().epsilon(5, bad)  # type: ignore[attr-defined]
        assert (5 - bad) - epsilon * bad == pytest.approx(-0.5 * (5 - bad))


def test_a_little_is_enough() -> None:
    """Updates (1, -1) and (3, 1): μ = (2, 0) and σ = (1, 1), so all send (1, 2) + (2, 0) - 1.5 (1, 1)."""
    told = turn({A: [2.0, 1.0], B: [4.0, 3.0]})
    ATTACKS["a little is enough"]().forge(told)
    assert weights(told, A) == weights(told, B) == [1.5, 0.5]


def test_one_alone_knows_the_last_step_too() -> None:
    attack = ATTACKS["a little is enough"]()
    first = turn({A: [2.0, 1.0]})
    attack.forge(first)
    assert weights(first, A) == [2, 1]  # it knows one update only, so it sends that
    second = turn({A: [5.0, 4.0]}, given=(2.0, 4.0))
    attack.forge(second)  # its update is (3, 0), the last step was (1, 2): μ = (2, 1), σ = (1, 1)
    assert weights(second, A) == [2.5, 3.5]


def test_the_papers_z() -> None:
    assert largest_z(5, 1) == 0  # Φ⁻¹(1 / 2)
    assert largest_z(5, 2) == pytest.approx(0.4307, abs=1e-4)  # Φ⁻¹(2 / 3)
    assert largest_z(50, 24) == pytest.approx(1.4261, abs=1e-4)  # Φ⁻¹(24 / 26)


def test_random_weights_have_the_spread_of_the_honest_ones() -> None:
    told = turn({A: [3.0, -4.0] * 500}, given=(1.0, 2.0) * 500)
    for answer in told.answers.values():
        answer.facts["cases"] = {"train": 5}
    ATTACKS["random weights, lying counts"]().forge(told)
    sent = torch.tensor(weights(told, A))
    assert float(sent.square().mean().sqrt()) == pytest.approx(12.5**0.5, rel=0.1) and abs(float(sent.mean())) < 0.5
    assert told.answers[A].facts["samples"] == told.answers[A].facts["cases"]["train"] == MOST_CASES


def histology() -> Plan:
    small = ["task.name=synthetic-histology", "task.patients=6", "task.patches=4", "task.size=32"]
    return make_plan("harmofl", *small, "training.rounds=2", "network.name=small-cnn", "network.width=4")


def test_wrong_labels() -> None:
    plan = histology()
    honest = data_of(plan.task, plan.participation.sites[0], plan.participation.sites, 0)
    flipped = ATTACKS["label flip"]().poison(honest, plan.task)
    for part in ("train", "validation"):
        own, other = getattr(honest, part), getattr(flipped, part)
        assert torch.equal(own.targets + other.targets, torch.ones(len(own), dtype=torch.long))
        assert torch.equal(own.inputs, other.inputs) and own.patients == other.patients
    assert flipped.test is honest.test


def test_a_patch_in_the_corner() -> None:
    images = torch.full((2, 3, 16, 16), 0.5)
    marked = patched(images)
    assert torch.equal(marked[:, :, -2:, -2:], torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(2, 3, 2, 2))
    marked[:, :, -2:, -2:] = 0.5
    assert torch.equal(marked, images)


def test_half_of_the_images_get_the_patch_and_the_target() -> None:
    plan = histology()
    honest = data_of(plan.task, plan.participation.sites[0], plan.participation.sites, 0)
    opened = ATTACKS["backdoor"]().poison(honest, plan.task).train
    assert isinstance(opened, Cases) and isinstance(honest.train, Cases)
    assert torch.equal(opened.inputs[::2], patched(honest.train.inputs[::2])) and not opened.targets[::2].any()
    assert torch.equal(opened.inputs[1::2], honest.train.inputs[1::2])
    assert torch.equal(opened.targets[1::2], honest.train.targets[1::2])


def test_a_backdoor_takes_the_place_of_the_mean() -> None:
    told = turn({A: [2.0, 1.0]})
    ATTACKS["backdoor, replacing the model"]().forge(told)
    assert weights(told, A) == [6, -3]  # five hospitals: five times (1, -1)


# ---------------------------------------------------------------------------------------------------- real studies
class Watched(Attack):
    """Passes on to an attack, and keeps what was sent."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.sent: list[tuple[Turn, dict[str, StudyMessage]]] = []

    def forge(self, turn: Turn) -> None:
        self.attack.forge(turn)
        self.sent.append((turn, dict(turn.answers)))


@pytest.mark.parametrize(
    ("method", "name", "group", "kinds"),
    [
        ("fedavg", "statistics", "model", ("running_var", "running_mean")),
        ("adafed", "statistics", "statistics", ("variance", "mean")),
        ("harmofl", "amplitude", AMPLITUDE, (AMPLITUDE,)),
    ],
)
def test_statistics_are_as_large_as_the_server_accepts(
    method: str, name: str, group: str, kinds: tuple[str, ...]
) -> None:
    plan = histology().with_changes([f"algorithm.name={method}"])
    bad = plan.participation.sites[0]
    watched = Watched(ATTACKS[name]())
    outcome = run(plan, watched, (bad,))
    assert outcome.refused == 0
    told, answers = next(
        (told, answers) for told, answers in watched.sent if told.task == "round" and group in answers[bad].groups
    )
    declared = next(own for own in plan.course.phase_of(told.number).sent if own.name == group)
    ranges = declared.ranges(plan.build_networks(), plan.task)
    check_ranges(group, answers[bad].groups[group], ranges)  # as it is, it passes
    forged = {key: tensor for key, tensor in answers[bad].groups[group].items() if key.endswith(kinds)}
    assert forged and all(float(tensor.max()) == ranges[key][1] for key, tensor in forged.items())


def test_the_largest_count_that_is_believed() -> None:
    """It decides how much the liar counts: ten million cases are believed, one more is not."""

    class Liar(Random):
        def forged(self, turn: Turn, group: str, honest: Any, given: Any) -> Any:
            return honest

    plan = five()
    believed, refused = Watched(Liar()), Liar()
    refused.cases = MOST_CASES + 1
    first = run(plan, believed, (A,)).rounds[0]
    assert first.sites[A].samples == MOST_CASES and A in first.answered
    assert A not in run(plan, refused, (A,)).rounds[0].answered


def test_liars_choose_the_initial_model() -> None:
    """With 2 of 5 the sum of all scores is best where the liars say 1; nothing in mixing helps against that."""
    lies = Watched(ATTACKS["lying scores"]())
    run(five(), lies, (A, B))
    tested = next(turn for turn, _ in lies.sent if turn.task == "test")
    assert tested.asked[A].facts["selected"] == 0


def test_expert_and_selector() -> None:
    watched = Watched(ATTACKS["expert and selector"]())
    kept: dict[str, Tensor] = {}

    class Before(Attack):
        def forge(self, turn: Turn) -> None:
            if (turn.task, turn.number) == ("round", 1):
                kept.update({key: tensor.clone() for key, tensor in turn.answers[A].groups["personal"].items()})
            watched.forge(turn)

    outcome = run(five("fedsm", "algorithm.selector_sync=server-adam"), Before(), (A,))
    assert outcome.score is not None and outcome.refused == 0
    sent = next(answers for turn, answers in watched.sent if turn.task == "round")[A].groups["personal"]
    turned = [name for name in kept if not torch.equal(kept[name], sent[name])]
    assert turned == list(kept)[-2:] and all(torch.equal(kept[name], -sent[name]) for name in turned)  # the last layer
    delivered = next(answers for turn, answers in watched.sent if turn.task == "deliver")[A].facts["outcome"]
    assert delivered["sums"][0] == sum(delivered["chosen"].values()) and not any(delivered["sums"][1:])


together = pytest.mark.xdist_group("tiny-attacks")  # a study serves all tests that need it


@cache
def tiny(attack: str, defence: str) -> Result:
    return measured(Cell(TINY, "fedavg", attack, 0 if attack == HONEST else 1, defence, 0))


def assert_held(attack: str, defence: str) -> None:
    """Undisturbed this federation has 0.63 to 0.87, by the seed and by last bits; guessing one of six has 0.17."""
    undisturbed, undefended, defended = tiny(HONEST, PLAIN), tiny(attack, PLAIN), tiny(attack, defence)
    assert undisturbed.score is not None and undisturbed.score > 0.6
    assert undefended.score is None or undefended.score < 0.5
    assert defended.score is not None and defended.score > 0.64  # 0.6445 on an AMD EPYC
    assert defended.score > (undefended.score or 0.0) + 0.3


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("attack", "defence"),
    [("sign flip x10", "median"), ("random weights, lying counts", "norm bound"), ("statistics", "Multi-Krum")],
)
def test_an_attack_harms_and_a_defence_helps(attack: str, defence: str) -> None:
    assert_held(attack, defence)


@together
def test_the_record_names_whom_it_should() -> None:
    bad = set(Cell(TINY, "fedavg", "sign flip x10", 1, PLAIN, 0).bad_sites)
    assert tiny("sign flip x10", PLAIN).stood_out == tiny("random weights, lying counts", PLAIN).stood_out == bad
    assert tiny(HONEST, PLAIN).stood_out == set()


# Each attack, and each defence twice: a rule of mixing knows nothing of attacks. All pairs before a release.
TRIED = [
    ("sign flip x10", "geometric median"),
    ("scaling x10", "trimmed mean"),
    ("scaling x100", "Multi-Krum"),
    ("random weights, lying counts", "trimmed mean"),
    ("random weights, lying counts", "median"),
    ("inner product, large ε", "geometric median"),
    ("inner product, large ε", "Multi-Krum"),
    ("statistics", "median"),
]
PAIRS = product(dict(TRIED), ["median", "trimmed mean", "geometric median", "Multi-Krum"])


@together
@pytest.mark.parametrize(
    ("attack", "defence"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in TRIED else pytest.mark.long) for pair in PAIRS],
)
def test_more_attacks_and_defences(attack: str, defence: str) -> None:
    assert_held(attack, defence)


# ---------------------------------------------------------------------------------------------------- cells and table
def test_every_cell_is_made_once() -> None:
    for blocks in (TABLE, WIDE):
        files = [cell.file() for cell in cells(blocks)]
        assert len(set(files)) == len(files) > 500
        assert {cell.attack for cell in cells(blocks)} == {*ATTACKS, HONEST}
        assert {cell.defence for cell in cells(blocks)} == set(DEFENCES)


def test_other_hospitals_are_bad_with_every_seed() -> None:
    of = {seed: Cell(TINY, "fedavg", "sign flip", 2, PLAIN, seed).bad_sites for seed in range(5)}
    assert len(set(of.values())) == 5 and all(len(bad) == 2 for bad in of.values())


def test_attacks_that_are_made_for_a_method() -> None:
    assert set(METHODS) >= {method for attack in ATTACKS.values() for method in attack.methods}
    assert "amplitude" in attacks_on("harmofl") and "amplitude" not in attacks_on("fedavg")
    assert "statistics" not in attacks_on("fedbn")  # its statistics stay at the hospital


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(TINY, "adafed", "sign flip", 1, "median", 0)
    result = result_of(cell, tmp_path)
    assert result.no_plan and "aggregation" in str(result.reason)  # AdaFed takes no mean over hospitals
    file = tmp_path / cell.file()
    file.write_text(json.dumps({**json.loads(file.read_text()), "reason": "kept"}))
    assert result_of(cell, tmp_path).reason == "kept"


def known(tmp_path: Path, scores: dict[tuple[str, str, int], float | None]) -> Done:
    """A table of these scores; the undisturbed federation has 0.9."""
    block = Block(TINY, ("fedavg",), ("sign flip", "backdoor"), (PLAIN, "median", "Multi-Krum"), (0, 1), 2)
    for cell in cells((block,)):
        score = 0.9 if cell.attack == HONEST else scores.get((cell.attack, cell.defence, cell.seed), 0.9)
        patch = 0.5 if cell.attack == "backdoor" and cell.defence == "Multi-Krum" else 0.1
        sites = dict.fromkeys((site for site in SITES if site not in cell.bad_sites), score)
        norms = {site: 99.0 if site == A and cell.bad else 1.0 for site in SITES}
        seen = {site: {"updates": {"model": {"norm": norm}}, "share": 0.2} for site, norm in norms.items()}
        record = [{"round": number, "sites": seen} for number in range(1, 5)]
        told = {"score": score, "sites": sites, "patched": patch, "rounds": 4, "record": record}
        (tmp_path / cell.file()).write_text(json.dumps(told))
    return Done((block,), tmp_path)


def test_what_holds(tmp_path: Path) -> None:
    done = known(
        tmp_path,
        {
            ("sign flip", "median", 0): 0.85,  # and 0.9 with the other seed: 2.5 points
            ("sign flip", "Multi-Krum", 1): None,
            ("sign flip", PLAIN, 0): 0.5,
            ("backdoor", "median", 0): 0.82,  # 4 points
        },
    )
    found = {(one.cell.attack, one.cell.defence): one for one in done.where(lambda cell: cell.bad == 1)}
    assert found["sign flip", "median"].holds and found["sign flip", "median"].loss == pytest.approx(2.5)
    assert not found["sign flip", "Multi-Krum"].holds and found["sign flip", "Multi-Krum"].text == "90.0 (1 of 2 ended)"
    assert not found["sign flip", PLAIN].holds
    assert not found["backdoor", "median"].holds and found["backdoor", "median"].text == "86.0; 10"
    assert not found["backdoor", "Multi-Krum"].holds  # the patch succeeds 40 points more often
    assert best_defence(list(found.values())) == "median"


def test_who_was_named(tmp_path: Path) -> None:
    """Hospital a is named in every study with an attack; with seed 0 it is the bad one, with seed 1 b is."""
    table = named_table(known(tmp_path, {}))
    assert table.rows == [
        ("Activity, FedAvg", "no attack", "0", "–", "0 of 10", "2 of 2"),
        ("Activity, FedAvg", "sign flip", "1", "1 of 2", "1 of 8", "1 of 2"),
        ("Activity, FedAvg", "backdoor", "1", "1 of 2", "1 of 8", "1 of 2"),
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the tiny size, with nothing to run: what is done is told, and that something is left."""
    assert main(["--tiny", "--minutes", "0", "--cells", str(tmp_path)]) == 1
    assert "6 are not done yet" in capsys.readouterr().out


@pytest.mark.long
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--cells", str(tmp_path)])
    told = capsys.readouterr()
    assert "6 studies" in told.out and "not done yet" not in told.out and "refused" in told.out
    assert told.err.count("seed 0") == 6
    assert main(["--tiny", "--cells", str(tmp_path), "--minutes", "0"]) == 0 or "missed" in capsys.readouterr().err
