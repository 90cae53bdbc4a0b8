"""Test the real coordinator and real participants with messages that are lost, repeated or falsified."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.package import ENGINE, facts_of
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.runs.progress import round_lines
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Agreement, RoundCount, Selection, Summary
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from medsilo_server.requests import RETRY_PAUSE
from tests.conftest import SITES, SMALL, make_plan
from tests.sites import CPU, site_of

A, B, C = SITES
GO_ON = ["participation.when_missing=continue", "participation.minimum=2"]
LOST = Missing("lost", "no answer")

Answers = list[tuple[str, StudyMessage]] | Missing
Script = Callable[[str, StudyMessage, Callable[[], StudyMessage]], Answers]


def honest(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
    return [(site, work())]


class Scripted:
    def __init__(
        self,
        participants: dict[str, TrainingSite],
        script: Script = honest,
        order: Callable[[Sequence[str]], Sequence[str]] = sorted,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.participants, self.script, self.order, self.wait = participants, script, order, pause
        self.sent: list[tuple[str, StudyMessage]] = []
        self.pauses: list[float] = []
        self.refusals: list[str] = []

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        missing: dict[str, Missing] = {}
        answered: set[str] = set()
        for site in self.order(sites):
            message = outgoing(site)
            self.sent.append((site, message))
            answers = self.script(
                site, message, lambda site=site, message=message: self.participants[site].answer(message)
            )
            if isinstance(answers, Missing):
                missing[site] = answers
                continue
            for sender, reply in answers:
                try:
                    receive(sender, reply)
                    answered.add(sender)
                except Refused as error:
                    self.refusals.append(str(error))
                    missing[sender] = Missing.refused(error)
        return {site: gone for site, gone in missing.items() if site not in answered and site in sites}

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.wait()


class Study:
    def __init__(self, plan: Plan, folder: Path, script: Script = honest, **options: Any) -> None:
        self.plan, self.folder = plan, folder
        data = options.pop("data", {})
        self.participants = {
            site: site_of(plan, site, SITES, CPU, folder / "sites" / site, data.get(site)) for site in SITES
        }
        self.transport = Scripted(self.participants, script, **options)
        self.record = Record(folder)
        self.coordinator = Coordinator(plan, SITES, self.transport, self.record, "scripted")

    def run(self) -> Summary:
        return self.coordinator.run()

    @property
    def rounds(self) -> list[Round]:
        return Record(self.folder).rounds()

    @property
    def summary(self) -> Summary:
        return read_summary(self.folder)

    def model(self, name: str) -> dict[str, Tensor]:
        return load_tensors(self.folder / f"{name}.safetensors")[0]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def task_and_round(message: StudyMessage) -> tuple[str, int]:
    return message.facts["task"], message.facts["round"]


@cache
def without_c(method: str = "fedavg", rounds: int = 2) -> dict[str, Tensor]:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return LOST if site == C and asked.facts["task"] == "round" else honest(site, asked, work)

    plan = make_plan(method, *SMALL, *GO_ON, f"training.rounds={rounds}")
    study = Study(plan, Path(mkdtemp()) / "run", script)
    study.run()
    return study.model("global/last")


@cache
def undisturbed() -> dict[str, Tensor]:
    study = Study(make_plan("fedavg", *SMALL), Path(mkdtemp()) / "run")
    study.run()
    return study.model("global/last")


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("task", ["join", "round", "deliver", "test"])
def test_one_refusal_ends_a_study_that_needs_all(task: str, tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        if site == B and asked.facts["task"] == task and asked.facts["round"] in (0, 2):
            reply.facts["study"] = "another"
        return [(site, reply)]

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    with pytest.raises(ParticipationError) as caught:
        study.run()
    text = str(caught.value)
    assert "2 of 3 sites answered, the plan needs 3" in text
    assert f"{B} refused: " in text
    assert len(text.splitlines()) == 1
    summary = study.summary
    assert (summary.status, summary.reason) == ("failed", text)
    done = {"join": 0, "round": 1, "deliver": 2, "test": 2}[task]
    assert summary.rounds == RoundCount(planned=2, done=done)
    assert [record.round for record in study.rounds] == [1, 2][: done + (task == "round")]
    if task == "round":
        assert list(study.rounds[-1].refused) == [B]
        assert study.rounds[-1].answered == [A, C]
        assert list(summary.sites[B].missed) == [2]
        assert summary.sites[A].contributed == 1  # a failed round does not count as a contribution
    assert load_tensors(study.folder / "checkpoints" / f"round-{done}.safetensors")[1]["round"] == done


@pytest.mark.parametrize("task", ["join", "deliver", "test"])
def test_a_refusal_before_or_after_the_rounds_reaches_the_summary(task: str, tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        if site == B and asked.facts["task"] == task:
            reply.facts["study"] = "another"
        return [(site, reply)]

    study = Study(make_plan("fedavg", *SMALL, *GO_ON), tmp_path / "run", script)
    study.run()
    assert "another" in study.summary.sites[B].model_dump_json()


def test_the_first_of_two_answers_counts(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        other = {name: tensor + 1 for name, tensor in reply.groups.get("model", {}).items()}
        return [(site, reply), (site, replace(reply, groups={"model": other} if other else {}))]

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    assert study.run().status == "finished"
    assert len(study.transport.refusals) == len(SITES) * 5
    assert set(study.transport.refusals) == {f"{site} answered twice; the first answer counts" for site in SITES}
    assert_equal(study.model("global/last"), undisturbed())


def test_an_unknown_site_is_refused(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        return [("intruder", reply), (site, reply)]

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    study.run()
    assert set(study.transport.refusals) == {"intruder is not a site of this study"}
    assert "intruder" not in json.dumps(study.summary.as_json())
    assert_equal(study.model("global/last"), undisturbed())


def test_a_site_cannot_answer_for_another(tmp_path: Path) -> None:
    """The transport, and not the answer, determines the sender's name."""

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return [(A, work())] if site == C else honest(site, asked, work)

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    with pytest.raises(ParticipationError):
        study.run()
    assert study.transport.refusals == [f"{A} answered twice; the first answer counts"]


def test_an_answer_to_the_round_before_is_refused(tmp_path: Path) -> None:
    late: list[StudyMessage] = []

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        if site == C and task_and_round(asked) == ("round", 1):
            late.append(reply)
            return LOST
        return [(site, late.pop()) if site == C and late and asked.facts["task"] == "round" else (site, reply)]

    study = Study(make_plan("fedavg", *SMALL, *GO_ON), tmp_path / "run", script)
    study.run()
    assert study.rounds[0].lost == {C: "no answer"}
    assert study.rounds[1].refused[C].startswith("the answer names round 1") and len(study.rounds[1].refused) == 1
    assert_equal(study.model("global/last"), without_c())


# ---------------------------------------------------------------------------------------------------- participation
def loses(times: int, site: str = C, task: str = "round") -> Script:
    left = [times]

    def script(who: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if who == site and asked.facts["task"] == task and left[0]:
            left[0] -= 1
            return LOST
        return honest(who, asked, work)

    return script


def test_stop_ends_the_run_even_when_the_minimum_is_met(tmp_path: Path) -> None:
    study = Study(make_plan("fedavg", *SMALL, "participation.minimum=2"), tmp_path / "run", loses(1))
    with pytest.raises(
        ParticipationError, match=f"round 1: 2 of 3 sites answered, the plan needs 3: {C} lost: no answer"
    ):
        study.run()
    assert study.rounds[0].lost == {C: "no answer"}
    assert study.summary.sites[C].missed == {1: "lost: no answer"}
    assert study.summary.rounds.done == 0


def test_continue_goes_on_and_says_who_contributed(tmp_path: Path) -> None:
    study = Study(make_plan("fedavg", *SMALL, *GO_ON), tmp_path / "run", loses(1))
    summary = study.run()
    assert summary.status == "finished"
    assert [record.answered for record in study.rounds] == [[A, B], [A, B, C]]
    assert summary.sites[C].missed == {1: "lost: no answer"}
    assert [summary.sites[site].contributed for site in SITES] == [2, 2, 1]
    assert summary.sites[C].validation[0] is None


def test_continue_needs_its_minimum(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return LOST if site != A and task_and_round(asked) == ("round", 2) else honest(site, asked, work)

    study = Study(make_plan("fedavg", *SMALL, *GO_ON), tmp_path / "run", script)
    with pytest.raises(ParticipationError, match="round 2: 1 of 3 sites answered, the plan needs 2"):
        study.run()
    assert study.summary.rounds == RoundCount(planned=2, done=1)
    assert study.rounds[1].answered == [A]


@pytest.mark.parametrize("task", ["join", "round", "deliver", "test"])
def test_wait_asks_again_and_changes_nothing(task: str, tmp_path: Path) -> None:
    study = Study(make_plan("fedavg", *SMALL, "participation.when_missing=wait"), tmp_path / "run", loses(2, task=task))
    summary = study.run()
    assert study.transport.pauses == [RETRY_PAUSE, RETRY_PAUSE]
    asked = [site for site, message in study.transport.sent if message.facts["task"] == task][:5]
    assert asked == [A, B, C, C, C]  # the server repeats the request only to the missing site
    assert all(record.answered == SITES and not record.lost for record in study.rounds)
    assert all(site.missed == {} for site in summary.sites.values())
    assert_equal(study.model("global/last"), undisturbed())


def test_wait_ends_when_patience_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("medsilo_server.requests.time", SimpleNamespace(monotonic=lambda: now[0], time=time))

    def pause() -> None:
        now[0] += 0.6

    rules = ["participation.when_missing=wait", "participation.retry_timeout=6"]
    study = Study(make_plan("fedavg", *SMALL, *rules), tmp_path / "run", loses(99), pause=pause)
    with pytest.raises(ParticipationError, match=f"{C} lost: no answer"):
        study.run()
    assert len(study.transport.pauses) == 2


def test_wait_with_a_minimum_goes_on_when_patience_is_over(tmp_path: Path) -> None:
    rules = ["participation.when_missing=wait", "participation.retry_timeout=1", "participation.minimum=2"]
    study = Study(make_plan("fedavg", *SMALL, *rules), tmp_path / "run", loses(99))
    assert study.run().status == "finished"
    assert_equal(study.model("global/last"), without_c())


def test_an_abort_while_waiting_ends_the_run(tmp_path: Path) -> None:
    def abort() -> None:
        raise Aborted("the run was aborted")

    plan = make_plan("fedavg", *SMALL, "participation.when_missing=wait")
    study = Study(plan, tmp_path / "run", loses(99), pause=abort)
    with pytest.raises(Aborted):
        study.run()
    assert (study.summary.status, study.summary.reason) == ("failed", "the run was aborted")


def test_an_error_of_the_server_leaves_a_failed_summary_without_its_text(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if task_and_round(asked) == ("round", 2):
            raise OSError("/secret/path/patient-7")
        return honest(site, asked, work)

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    with pytest.raises(OSError, match="secret"):
        study.run()
    assert study.summary.status == "failed"
    assert study.summary.reason == "OSError: see the server's log"
    assert study.summary.rounds.done == 1


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ([A], "the plan needs 2; .*participation.minimum"),
        ([], r"\(none\) but the plan needs 2"),
    ],
)
def test_too_few_sites_end_the_study_before_anything_is_asked(there: list[str], says: str, tmp_path: Path) -> None:
    plan = make_plan("local", *SMALL, "participation.sites=[]", "participation.minimum=2")
    transport = Scripted({})
    with pytest.raises(ParticipationError, match=says):
        Coordinator(plan, there, transport, Record(tmp_path / "run"), "scripted").run()
    assert transport.sent == []
    assert Record(tmp_path / "run").summary().status == "failed"


def test_sites_that_the_plan_does_not_name_are_not_asked(tmp_path: Path) -> None:
    plan = make_plan("local", *SMALL, sites=[A, B])
    transport = Scripted({site: site_of(plan, site, [A, B], CPU, tmp_path / site) for site in (A, B)})
    summary = Coordinator(plan, SITES, transport, Record(tmp_path / "run"), "scripted").run()
    assert summary.agreed.sites == [A, B]
    assert {site for site, _ in transport.sent} == {A, B}


def test_a_named_site_that_is_not_there_is_missing(tmp_path: Path) -> None:
    study = Study(
        make_plan("fedavg", *SMALL), tmp_path / "run", lambda *asked: LOST if asked[0] == C else honest(*asked)
    )
    study.coordinator = Coordinator(study.plan, [A, B], study.transport, study.record, "scripted")
    with pytest.raises(ParticipationError, match=f"join: 2 of 3 sites answered, the plan needs 3: {C} lost"):
        study.run()


def test_a_site_that_lost_its_own_state_says_so(tmp_path: Path) -> None:
    """A site with a new process and without files reports that its state is lost.

    A site that has only missed a round does not report a lost state.
    """

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        folder = study.folder / "sites" / site
        if site == C and task_and_round(asked) == ("round", 2):
            return LOST
        if site != A and task_and_round(asked) == ("round", 3):
            study.participants[site] = site_of(study.plan, site, SITES, CPU, folder)
        if site == B and task_and_round(asked) == ("round", 3):
            for path in folder.glob("state-*"):
                path.unlink()
        return [(site, study.participants[site].answer(asked))]

    study = Study(make_plan("fedbn", *SMALL, *GO_ON, "training.rounds=4"), tmp_path / "run", script)
    sites = study.run().sites
    assert sites[A].warnings == sites[C].warnings == {}
    ((when, (warning,)),) = sites[B].warnings.items()
    assert warning.startswith("the site's own state after round 2")
    assert when == "3"
    assert [record.warnings for record in study.rounds] == [{}, {}, {B: [warning]}, {}]
    lines = round_lines(study.rounds[2], 4, "accuracy")
    assert [line for line in lines if "WARNING" in line] == [f"round 3/4  {B}  WARNING: {warning}"]


# ---------------------------------------------------------------------------------------------------- order, privacy
def test_what_is_sent_never_changes_afterwards(tmp_path: Path) -> None:
    """A transport may send tensors long after receiving them from the server."""
    copies: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        for message in (asked, reply):
            for group in message.groups.values():
                copies.append((group, {name: tensor.clone() for name, tensor in group.items()}))
        return [(site, reply)]

    Study(make_plan("fedavg", *SMALL), tmp_path / "run", script).run()
    assert len(copies) >= 12
    for group, before in copies:
        assert_equal(group, before)


# ---------------------------------------------------------------------------------------------------- the choice
def scores(*values: float | None, spread: float = 0.0) -> Script:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        task, number = task_and_round(asked)
        place = {"round": number - 1, "deliver": number}.get(task)
        if place is not None:
            value = values[place]
            reply.facts["validation"] = None if value is None else value + spread * (SITES.index(site) - 1)
        return [(site, reply)]

    return script


@pytest.mark.parametrize("rounds", [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)])
def test_equal_means_are_equal_in_every_order_of_sites(rounds: tuple[float, ...], tmp_path: Path) -> None:
    """In each round, the sites have the scores 0.1, 0.2 and 0.3 in another order; rounding errors of their sum must not
    select a later round.
    """

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        task, number = task_and_round(asked)
        if task in ("round", "deliver"):
            turn = number - (task == "round")
            reply.facts["validation"] = rounds[(SITES.index(site) * (1 if turn % 2 else 2) + turn) % 3]
        return [(site, reply)]

    summary = Study(make_plan("fedavg", *SMALL, "training.rounds=3"), tmp_path / "run", script).run()
    assert summary.selected.rounds == dict.fromkeys(SITES, 0)


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ((0.5, 0.7, 0.7, 0.6), 1),  # only a strictly higher score replaces the best score
        ((0.5, 0.6, 0.7, 0.8), 3),
        ((0.5, 0.4, 0.3, 0.2), 0),
        ((0.5, 0.5, 0.5, 0.5), 0),
        ((0.1, 0.2, 0.1, 0.3), 3),
        ((None, 0.2, None, 0.1), 1),
        ((None, None, None, None), 3),  # without scores, the server selects the last round
        ((0.2, 0.1, 0.15, 0.25), 3),
    ],
)
def test_the_best_round_is_chosen_by_the_mean_validation_score(
    values: tuple[float | None, ...], chosen: int, tmp_path: Path
) -> None:
    plan = make_plan("fedavg", *SMALL, "training.rounds=3")
    study = Study(plan, tmp_path / "run", scores(*values, spread=0.1))
    summary = study.run()
    assert summary.selected == Selection(by="mean", rounds=dict.fromkeys(SITES, chosen))
    given = {task_and_round(message): message.groups["model"] for _, message in study.transport.sent if message.groups}
    after = [given["round", 1], given["round", 2], given["round", 3], given["deliver", 3]]
    assert_equal(study.model("global/best"), after[chosen])
    assert_equal(study.model("global/last"), after[3])
    assert load_tensors(study.folder / "global" / "best.safetensors")[1]["round"] == chosen
    for site in SITES:
        assert_equal(study.model(f"sites/{site}/best"), after[chosen])
        assert_equal(study.model(f"sites/{site}/last"), after[3])
    if chosen == 3:
        # the sites already have the selected model, so the server does not send the model again
        assert ("test", 3) not in given
    else:
        assert_equal(given["test", 3], after[chosen])


def test_select_last_takes_the_last(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL, "model_selection.keep=last")
    study = Study(plan, tmp_path / "run", scores(0.9, 0.5, 0.1))
    assert study.run().selected.rounds == dict.fromkeys(SITES, 2)


def test_a_score_that_one_site_cannot_give_is_no_score(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        answers = scores(0.5, 0.9, 0.7)(site, asked, work)
        if site == A and task_and_round(asked) == ("round", 2) and isinstance(answers, list):
            answers[0][1].facts["validation"] = None
        return answers

    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run", script)
    assert study.run().selected.rounds == dict.fromkeys(SITES, 2)


# ---------------------------------------------------------------------------------------------------- the record
def test_the_summary_adds_up(tmp_path: Path) -> None:
    study = Study(make_plan("fedavg", *SMALL), tmp_path / "run")
    summary = study.run()
    assert summary.packages[ENGINE].model_dump() == facts_of(ENGINE)
    assert list(summary.packages) == list(study.plan.code)
    assert summary.study == "run"
    assert summary.agreed == Agreement(sites=SITES, minimum=3, when_missing="stop")
    size = sum(tensor.nbytes for tensor in undisturbed().values())
    tests = [summary.sites[site].test for site in SITES]
    for site in SITES:
        facts = summary.sites[site]
        assert facts.bytes_up == facts.bytes_down == 2 * size
        assert facts.cases == study.participants[site].participant.disclosure.cases
        assert len(facts.validation) == 3
    assert summary.mean_test == pytest.approx(sum(test["accuracy"] for test in tests) / 3)
    cases = [test["cases"] for test in tests]
    weighted = sum(test["accuracy"] * number for test, number in zip(tests, cases, strict=True)) / sum(cases)
    assert summary.pooled_test == pytest.approx(weighted)
    assert all(record.asked == SITES for record in study.rounds)
    assert json.loads((study.folder / "provenance.json").read_text())["plan_hash"] == study.plan.hash


def test_a_run_never_writes_over_another(tmp_path: Path) -> None:
    Study(make_plan("fedavg", *SMALL), tmp_path / "run").run()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "summary.json"}
    with pytest.raises(MedsiloError, match="run folder run.*choose another name") as caught:
        Study(make_plan("fedavg", *SMALL), tmp_path / "run").run()
    assert len(str(caught.value).splitlines()) == 1
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize("when_missing", ["stop", "continue"])
def test_a_study_that_nobody_had_to_train_for_leaves_its_name_free(when_missing: str, tmp_path: Path) -> None:
    rules = (f"participation.when_missing={when_missing}", "participation.minimum=2")

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return honest(site, asked, work) if site == A else LOST

    failed = Study(make_plan("fedbn", *SMALL, *rules), tmp_path / "run", script)
    with pytest.raises(ParticipationError, match="join: 1 of 3 sites answered"):
        failed.run()
    log = tmp_path / "run/nvflare.log"
    log.write_text("why")
    again = Study(make_plan("fedavg", *SMALL, "seed=1"), tmp_path / "run")
    assert again.run().finished and again.summary.method == "fedavg" and log.read_text() == "why"
    elsewhere = Study(make_plan("fedavg", *SMALL, "seed=1"), tmp_path / "elsewhere")
    elsewhere.run()
    assert again.summary.mean_test == elsewhere.summary.mean_test


@pytest.mark.parametrize("broken", [LOST, OSError()])
def test_a_study_that_a_site_had_to_train_for_does_not(broken: Missing | OSError, tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if task_and_round(asked) == ("join", 0) or site == A:
            return honest(site, asked, work)
        if isinstance(broken, OSError):
            raise broken
        return broken

    study = Study(make_plan("fedbn", *SMALL), tmp_path / "run", script)
    with pytest.raises((ParticipationError, OSError)):
        study.run()
    before, state = study.summary, tmp_path / "run/sites" / A / "state-1.safetensors"
    assert before.rounds.done == 0 and state.exists()
    with pytest.raises(MedsiloError, match="run folder run exists"):
        Study(make_plan("fedbn", *SMALL), tmp_path / "run").run()
    assert study.summary == before and state.exists() and study.record.load_checkpoint()
