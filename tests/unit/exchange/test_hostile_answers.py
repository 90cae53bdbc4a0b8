"""The server rejects a site's invalid answer, and the other sites' results do not change."""

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from torch import Tensor

from medsilo.core.errors import Refused, TemporaryRefusal
from medsilo.core.files import load_tensors
from medsilo.core.package import ENGINE
from medsilo.core.text import LONGEST
from medsilo.deploy.supermodel import THRESHOLDS
from medsilo.exchange.channel import Missing
from medsilo.flare.wire import PASSES, REFUSAL, refusal, to_parcel
from medsilo.runs.messages import DEEPEST, StudyMessage
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Summary
from medsilo_lab.api import Run
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.unit.medsilo_server.test_coordinator import (
    GO_ON,
    LOST,
    SMALL,
    Answers,
    Scripted,
    Study,
    assert_equal,
    task_and_round,
)

A, B, C = SITES
LONG = "x" * 30_000_000
STEERS = "\x1b[2J\x1b]0;owned\x07\r\n"
METHODS = ["fedavg", "fedsm"]
# tests of one group share the results of studies without faults
pytestmark = pytest.mark.xdist_group("hostile-answers")
Falsify = Callable[[StudyMessage], Any]
Key = tuple[str, str, int]


def planned(method: str) -> Any:
    return make_plan(method, *SMALL, *GO_ON)


@cache
def honest_answers(method: str) -> dict[Key, StudyMessage]:
    kept: dict[Key, StudyMessage] = {}

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = kept[site, *task_and_round(asked)] = work()
        return [(site, reply)]

    Study(planned(method), Path(mkdtemp()) / "run", script).run()
    return kept


def again(
    method: str, folder: Path, change: Callable[[str, str, int, StudyMessage], StudyMessage | Missing]
) -> list[str]:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        task, number = task_and_round(asked)
        known = honest_answers(method)[site, task, number]
        reply = StudyMessage({g: dict(own) for g, own in known.groups.items()}, deepcopy(known.facts))
        changed = change(site, task, number, reply)
        return changed if isinstance(changed, Missing) else [(site, changed)]

    transport = Scripted({}, script)
    Coordinator(planned(method), SITES, transport, Record(folder), "scripted").run()
    return transport.refusals


@cache
def without(method: str, task: str) -> Path:
    folder = Path(mkdtemp()) / "run"
    again(method, folder, lambda site, asked, number, reply: LOST if (site, asked) == (C, task) else reply)
    return folder


def numbers(summary: Summary) -> dict[str, Any]:
    values = summary.as_json()
    for name in ("seconds", "memory", "started", "ended"):
        del values[name]
    for name in ("missed", "missed_ends"):
        values["sites"][C][name] = dict.fromkeys(values["sites"][C][name])
    return values


def assert_sound(folder: Path) -> Summary:
    summary = read_summary(folder)
    assert summary.status == "finished"
    assert [summary.sites[site].contributed for site in (A, B)] == [2, 2]
    page = Run(folder).report()
    for path in (page, folder / "summary.json", folder / "rounds.jsonl"):
        assert path.stat().st_size < 1_000_000
        assert not {letter for letter in path.read_text() if not letter.isprintable()} - {"\n", "\t"}
    told = [*summary.sites[C].missed.values(), *summary.sites[C].missed_ends.values()]
    assert all(len(text.encode()) <= LONGEST + len("refused: ") for text in told)
    return summary


def facts(**changes: Any) -> Falsify:
    return lambda reply: reply.facts.update(changes)


def cases(**changes: Any) -> Falsify:
    return lambda reply: reply.facts["cases"].update(changes)


def counts(**changes: Any) -> Falsify:
    return lambda reply: reply.facts["counts"].update(changes)


def outcome(**changes: Any) -> Falsify:
    return lambda reply: reply.facts["outcome"].update(changes)


def both(cases: dict[str, Any], **changes: Any) -> Falsify:
    def falsify(reply: StudyMessage) -> None:
        reply.facts["cases"].update(cases)
        reply.facts.update(changes)

    return falsify


LAST, COUNTER = "6.weight", "0.1.num_batches_tracked"


def tensor(change: Callable[[Any], Any], name: str = LAST) -> Falsify:
    def falsify(reply: StudyMessage) -> None:
        for own in reply.groups.values():
            if name in own:
                own[name] = change(own[name])

    return falsify


def names(change: Callable[[dict[str, Any]], Any]) -> Falsify:
    return lambda reply: change(next(iter(reply.groups.values())))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


DEEP = nested(5_000)


UNTOLD = {"train": None, "validation": None, "test": None}
TENSOR, NAN, HUGE = torch.ones(3), float("nan"), 1e308
JOIN = {
    "no cases": (facts(cases={"x": 1}, classes={"x": None}), "the field cases.train: field required"),
    "cases as a list": (facts(cases=[1, 2, 3]), "cases"),
    "no training cases": (both({"train": 0}, classes=UNTOLD), "cases.train: 0 is out of range"),
    "fewer than none": (both({"train": -5}, classes=UNTOLD), "train: input should be greater than or equal to 0"),
    "more than any": (both({"train": 10**12}, classes=UNTOLD), "cases.train: input should be less than or equal to"),
    "a number beyond all": (cases(train=10**5000), "is out of range"),
    "cases NaN": (cases(test=NAN), "cases.test: input should be a valid integer"),
    "a tensor as a count": (cases(train=TENSOR), "the answer's train holds a Tensor, not a number or a text"),
    "an array as a study": (facts(study=TENSOR.numpy()), "the answer's study holds a ndarray"),
    "negative classes": (
        lambda reply: reply.facts["classes"]["train"].__setitem__(0, -1),
        "classes.train.0: input should be greater than or equal to 0",
    ),
    "classes that do not add up": (both({"train": 1_000_000}), "not 1000000 cases"),
    "no classes": (facts(classes={"x": None}), "must name the parts"),
    "a share in words": (facts(shares="yes"), "shares"),
    "surplus": (facts(more=1), "the field more: extra inputs are not permitted"),
    "a key that is no text": (lambda reply: reply.facts.update({7: 1}), "every key must be a string"),
    "a package of tensors": (facts(packages={"version": TENSOR}), "the answer's version holds a Tensor"),
    "a package without words": (facts(packages={STEERS: 1, "a": [LONG]}), "install the same package"),
    "a warning in words": (facts(warnings=["words"]), "the field warnings.0: "),
    "a warning of another kind": (facts(warnings=[{"kind": LONG}]), "the field warnings.0.kind: "),
    "a warning with words": (
        facts(warnings=[{"kind": "near", "numbers": [LONG, 5]}]),
        "the field warnings.0.numbers.0: ",
    ),
    "a warning with more numbers": (facts(warnings=[{"kind": "near", "numbers": [1]}]), "a warning of near"),
    "a long text": (facts(more=LONG), "the field more: extra inputs are not permitted"),
    "a long key": (lambda reply: reply.facts.update({STEERS + LONG: 1}), "…: extra inputs are not permitted"),
    "a long study": (facts(study=LONG), "or another study, instead of join 0 of this one"),
    "a long task": (facts(task=STEERS + LONG), "or another study, instead of join 0 of this one"),
    "a long class": (facts(classes={LONG: None}), "must name the parts"),
    "a text as a count": (cases(train=STEERS + LONG), "input should be a valid integer"),
    "many warnings": (facts(warnings=["x"] * 1_000_000), "more than"),
    "many keys": (facts(cases={str(number): 1 for number in range(100_000)}), "more than"),
    "deep": (facts(packages=DEEP), f"nested more than {DEEPEST} deep"),
    "groups": (lambda reply: reply.groups.update({STEERS + LONG: {"w": TENSOR}}), "groups: has the surplus xxx"),
}
ROUND = {
    "a score beyond its range": (facts(validation=7.5), "validation score 7.5 is outside 0 to 1"),
    "a loss beyond all": (facts(train_loss=HUGE), "train_loss: input should be less than or equal to"),
    "a score NaN": (facts(validation=NAN), "validation: input should be a finite number"),
    "a tensor as a score": (facts(validation=TENSOR), "the answer's validation holds a Tensor"),
    "cases it did not join with": (
        lambda reply: (cases(train=10**6)(reply), facts(samples=10**6)(reply)),
        "differ from those at joining",
    ),
    "more samples than cases": (facts(samples=10**6), "is more than its"),
    "a tensor as samples": (facts(samples=TENSOR), "the answer's samples holds a Tensor"),
    "memory beyond all": (facts(memory=1e17), "memory: input should be less than or equal to"),
    "a score too many": (facts(**{STEERS: 1.0}), "extra inputs are not permitted"),
    "a score too few": (lambda reply: reply.facts.pop("validation"), "the field validation: field required"),
    "suppressed ten thousand times": (
        facts(suppressed=["test"] * 5_000),
        "suppressed: list should have at most 2 items",
    ),
    "finite weights beyond all": (
        lambda reply: reply.groups.update(
            {
                g: {n: torch.full_like(t, 1e37) if n.endswith("weight") else t for n, t in own.items()}
                for g, own in reply.groups.items()
            }
        ),
        ", beyond any honest one",
    ),
    "a sparse tensor": (
        lambda reply: reply.groups.update(
            {g: {n: t.to_sparse() if t.ndim else t for n, t in own.items()} for g, own in reply.groups.items()}
        ),
        "is not a dense tensor",
    ),
    "a weight NaN": (tensor(lambda own: own.clone().fill_(NAN)), "6.weight holds NaN or infinity"),
    "one number infinite": (
        tensor(lambda own: own.clone().index_fill(0, torch.tensor([len(own) - 1]), -float("inf"))),
        "holds NaN or",
    ),
    "a shape": (tensor(lambda own: own[:-1]), "6.weight has shape [5, 64], expected [6, 64]"),
    "a scalar": (tensor(lambda own: own[0, 0]), "has shape [], expected [6, 64]"),
    "a counter as vector": (tensor(lambda own: own.view(1), COUNTER), "has shape [1], expected []"),
    "double": (tensor(Tensor.double), "has dtype torch.float64, expected torch.float32"),
    "a counter as float": (tensor(Tensor.float, COUNTER), "has dtype torch.float32, expected torch.int64"),
    "an array": (tensor(Tensor.numpy), "6.weight is a ndarray, not a tensor"),
    "a tensor too few": (names(lambda own: own.pop(LAST)), "lacks 6.weight"),
    "no tensors": (names(dict.clear), "lacks 0.0.bias, 0.0.weight, 0.1.bias, ..."),
    "no groups": (lambda reply: reply.groups.clear(), "groups: lacks "),
    "facts that are a list": (lambda reply: setattr(reply, "facts", [1]), "the answer's facts are not a mapping"),
    "a group too many": (lambda reply: reply.groups.update(more={}), "groups: has the surplus more"),
    "of the round before": (
        lambda reply: facts(round=reply.facts["round"] - 1)(reply),
        "or another study, instead of round",
    ),
    "of the round after": (
        lambda reply: facts(round=reply.facts["round"] + 1)(reply),
        "or another study, instead of round",
    ),
    "of another task": (facts(task="test"), "names test"),
    "of another study": (facts(study="the-other-one"), "or another study, instead of round"),
    "another package": (
        lambda reply: reply.facts["packages"][ENGINE].update(hash="0" * 64),
        "(000000000000), the server",
    ),
    "another version": (lambda reply: reply.facts["packages"][ENGINE].update(version="0.0.9"), "runs medsilo 0.0.9"),
    "no packages": (facts(packages=None), "install the same package at both"),
    **{
        f"{value!r} samples": (facts(samples=value), f"the field samples: input should be {words}")
        for value, words in {0: "greater", -5: "greater", 10**12: "less", 1.5: "a valid i", "30": "a valid i"}.items()
    },
    "true samples": (facts(samples=True), "the field samples: input should be a valid integer"),
    "a warning that is a number": (facts(warnings=[7]), "the field warnings.0: "),
    "no seconds": (lambda reply: reply.facts.pop("seconds"), "seconds"),
    "negative seconds": (facts(seconds=-1.0), "seconds: input should be greater than or equal to 0"),
    "a surplus tensor with an odd name": (
        lambda reply: next(iter(reply.groups.values())).update({STEERS + LONG: TENSOR}),
        "has the surplus xxx",
    ),
}
DELIVER = {
    "a score below its range": (facts(validation=-0.5), "validation score -0.5 is outside 0 to 1"),
    "a loss beyond all": (facts(validation_loss=HUGE), "validation_loss: input should be less than or equal to"),
    "an outcome in words": (facts(outcome=LONG), "outcome"),
    "an outcome of tensors": (facts(outcome={"chosen": TENSOR}), "the answer's chosen holds a Tensor"),
}
TEST = {
    "no number of cases": (cases(test=None), "cases.test: input should be a valid integer"),
    "a score beyond all": (facts(test=HUGE), "test: input should be less than or equal to"),
    "a score beyond its range": (facts(test=7.5), "test score 7.5 is outside 0 to 1"),
    "cases NaN": (cases(test=NAN), "cases.test: input should be a valid integer"),
    "a tensor as cases": (cases(test=TENSOR), "holds a Tensor"),
    "cases it did not join with": (cases(test=10**6), "differ from those at joining"),
    "a round to come": (facts(selected=3), "tested the model of round 3, and there are 2 rounds"),
    "a round before the first": (facts(selected=-1), "selected: input should be greater than or equal to 0"),
    "a count beyond all": (counts(accuracy=[HUGE, 5.0]), "counts.accuracy.0: input should be less than or equal to"),
    "a negative count": (counts(accuracy=[-1.0, 5.0]), "the site's sum of accuracy, -1, is not one of 5 values"),
    "a negative number": (counts(accuracy=[1.0, -5.0]), "the site's counts of accuracy cover -5 cases"),
    "a count of too many": (counts(accuracy=[1.0, 1e9]), "the site's counts of accuracy cover 1e+09 cases"),
    "a count of more than all": (counts(accuracy=[6.0, 5.0]), "the site's sum of accuracy, 6, is not one of 5 values"),
    "half a case": (counts(accuracy=[0.5, 0.5]), "the site's counts of accuracy cover 0.5 cases"),
    "a short count": (counts(accuracy=[1.0]), "the site's counts of accuracy are not 2 numbers"),
    "a tensor as a count": (counts(accuracy=TENSOR), "the answer's accuracy holds a Tensor"),
    "a confusion of others": (counts(confusion=[1.0] * 36), "the site's counts of confusion are not whole numbers"),
    "negative chances": (
        lambda reply: reply.facts["counts"].update(chances=[-1.0] * len(reply.facts["counts"]["chances"])),
        "the site's counts of chances are not whole numbers",
    ),
    "a surplus count": (counts(**{STEERS + LONG: [1.0, 1.0]}), "the site's counts have the unexpected entry xxx"),
    "long texts": (facts(counts={"accuracy": [LONG, LONG]}, warnings=[LONG] * 9), "the field "),
}
SUPER_DELIVER = {
    "no outcome": (facts(outcome=None), "the answer has no results of the super model"),
    "nothing chosen": (outcome(chosen={}), "the answer does not say how often each model was chosen"),
    "a stranger": (outcome(chosen={STEERS + LONG: 3}), "which is not a site of the study"),
    "a negative choice": (outcome(chosen={A: -3}), "chosen.hospital-a"),
    "more choices than cases": (outcome(chosen={A: 10**9}), "the site chose models for 1000000000 cases and has"),
    "half a choice": (outcome(chosen={A: 1.5}), "chosen.hospital-a"),
    "too few sums": (outcome(sums=[0.0]), f"the answer does not give {len(THRESHOLDS)} sums of scores"),
    "a sum NaN": (outcome(sums=[NAN] * len(THRESHOLDS)), "sums.0"),
    "a sum beyond all": (outcome(sums=[HUGE] * len(THRESHOLDS)), "a sum of scores is not between 0 and"),
    "a negative sum": (outcome(sums=[-1.0] * len(THRESHOLDS)), "a sum of scores is not between 0 and"),
    "surplus": (outcome(**{STEERS + LONG: 1}), "…: extra inputs are not permitted"),
}
SUPER_TEST = {
    "no outcome": (facts(outcome=None), "the answer has no results of the super model"),
    "nothing chosen": (outcome(chosen={}), "the answer does not say how often each model was chosen"),
    "a stranger": (outcome(chosen={"nobody": 3}), "'nobody', which is not a site of the study"),
    "sums": (outcome(sums=[0.0] * len(THRESHOLDS)), "the answer does not give 0 sums of scores"),
}
TABLES = [JOIN, ROUND, DELIVER, TEST]
HOSTILE = [
    pytest.param(
        method,
        task,
        *case,
        id=f"{method}-{task}-{name}",
        marks=[] if method == METHODS[0] else pytest.mark.long if table in TABLES else pytest.mark.slow,
    )
    for method, task, table in [
        *((method, "join", JOIN) for method in METHODS),
        *((method, "round", ROUND) for method in METHODS),
        *((method, "deliver", DELIVER) for method in METHODS),
        *((method, "test", TEST) for method in METHODS),
        ("fedavg", "deliver", {"an outcome": (facts(outcome={"x": 1}), "unexpected field: outcome")}),
        ("fedsm", "deliver", SUPER_DELIVER),
        ("fedsm", "test", SUPER_TEST),
    ]
    for name, case in table.items()
]


@pytest.mark.parametrize(("method", "task", "falsify", "reason"), HOSTILE)
def test_a_hostile_answer_costs_its_sender_that_answer_and_nobody_else_anything(
    method: str, task: str, falsify: Falsify, reason: str, tmp_path: Path
) -> None:
    def change(site: str, asked: str, number: int, reply: StudyMessage) -> StudyMessage:
        if (site, asked) == (C, task):
            falsify(reply)
        return reply

    again(method, tmp_path / "run", change)
    summary = assert_sound(tmp_path / "run")
    told = summary.sites[C].missed if task == "round" else summary.sites[C].missed_ends
    assert list(told) == ([1, 2] if task == "round" else [task])
    assert all(text.startswith("refused: ") and reason in text for text in told.values()), told
    lost = without(method, task)
    assert numbers(summary) == numbers(read_summary(lost))
    for model in sorted(lost.glob("global/*.safetensors")):
        assert_equal(load_tensors(tmp_path / "run/global" / model.name)[0], load_tensors(model)[0])


# ----------------------------------------------------------------------------------------------- random answers
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 10**9, 10**18, 2**64, -(2**63), 10**400, 0.5, -0.5, 1e308, -1e308, 5e-324),
    *(NAN, float("inf"), float("-inf"), "", "x", "\ud800", STEERS, "x" * 5_000, b"x", [], {}, [[]], {"": None}, (1, 2)),
    *({1: 2}, {None: []}, {"x"}, [None] * 20_000, nested(40), DEEP, TENSOR, TENSOR[0], TENSOR.numpy()),
    *(TENSOR.numpy()[0], torch.tensor(3), 1j, object(), float, ...),
]


def odd(drawn: random.Random) -> Any:
    value = drawn.choice(ODD)
    return value if value is DEEP else deepcopy(value)


# --------------------------------------------------------------------------------------- messages over NVFlare
def test_a_refusal_of_many_megabytes_is_cut_where_it_comes_in() -> None:
    with pytest.raises(Refused) as caught:
        to_parcel(refusal(STEERS + LONG))
    text = str(caught.value)
    assert len(text.encode()) <= LONGEST and text.isprintable() and text.startswith("xxx")
    gone = Missing.refused(Refused(STEERS + LONG))
    assert len(gone.text.encode()) <= 400 + len("refused: ") and gone.text.isprintable() and not gone.passing


@pytest.mark.parametrize("reason", [TENSOR, 7, {"x": 1}, b"x", DEEP, ""], ids=lambda reason: type(reason).__name__)
def test_a_refusal_that_is_no_text_is_one_all_the_same(reason: Any) -> None:
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(REFUSAL, reason)
    reply.set_header(PASSES, TENSOR)
    with pytest.raises(Refused, match="the site answered EXECUTION_EXCEPTION") as caught:
        to_parcel(reply)
    assert not isinstance(caught.value, TemporaryRefusal)


@pytest.mark.parametrize("code", [ReturnCode.TASK_ABORTED, ReturnCode.EXECUTION_EXCEPTION])
def test_a_training_that_stops_without_an_answer_is_told_as_such(code: str) -> None:
    """If a training script ends without an answer, the server's error reports the missing answer.

    medsilo retries after a failure in NVFlare, such as a full disk, but not after an error in a training script.
    """
    for of_script in (True, False):
        with pytest.raises(Refused, match="training (stopped|ended).*log") as caught:
            to_parcel(make_reply(code), of_script)
        passes = code == ReturnCode.EXECUTION_EXCEPTION and not of_script
        assert isinstance(caught.value, TemporaryRefusal) == passes


def test_a_return_code_of_many_megabytes_is_cut() -> None:
    with pytest.raises(Refused) as caught:
        to_parcel(make_reply(STEERS + LONG))
    assert len(str(caught.value).encode()) <= LONGEST and str(caught.value).isprintable()
