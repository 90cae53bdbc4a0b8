"""A site's state survives a restart of the site's process.

If the server repeats a request, or if a study is resumed, the models equal the models of an uninterrupted study.
"""

import csv
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medsilo import cli
from medsilo.core.errors import DataError, MedsiloError, Refused
from medsilo.core.files import load_tensors
from medsilo.core.tensors import packed
from medsilo.federation.site_stack import TrainingSite
from medsilo.federation.site_state import COLUMNS
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.messages import VARYING, StudyMessage
from medsilo.runs.rounds import Round
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import Cases, SiteData
from medsilo_lab.testing import assert_equal, assert_same_run
from medsilo_server.record import Record
from tests import inprocess
from tests.conftest import SITES, SMALL, make_plan
from tests.sites import CPU, site_of, sites_of
from tests.unit.core.test_files import files_of_at_most

A = SITES[0]
# The tests of this file use the methods fedavg, apfl and scaffold. Tests in tests/unit/methods check for each method
# that the saved state is complete.
KINDS: list[tuple[str, list[str]]] = [("fedavg", []), ("apfl", ["algorithm.adaptive=true"]), ("scaffold", [])]
every_kind = pytest.mark.parametrize(("method", "changes"), KINDS, ids=lambda part: str(part)[:40])


def planned(method: str, changes: list[str], rounds: int = 4) -> Plan:
    return make_plan(method, *SMALL, f"training.rounds={rounds}", *changes)


def made(plan: Plan, folder: Path, data: SiteData | None = None) -> TrainingSite:
    return site_of(plan, A, SITES, CPU, folder, data)


class Server:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        shared = views(plan.course.phase_of(1).given, plan.build_networks())
        self.groups = {
            group: {name: packed(tensor, plan.transport.precision) for name, tensor in tensors.items()}
            for group, tensors in shared.items()
        }

    def ask(self, task: str, number: int, groups: dict | None = None, selected: int | None = None) -> StudyMessage:
        facts = {"task": task, "round": number, "study": "s", "plan": self.plan.hash, "sites": SITES}
        given = {} if task == "join" else self.groups if groups is None else groups
        return StudyMessage(given, {**facts, "selected": selected})

    def take(self, reply: StudyMessage) -> None:
        self.groups = {
            group: {name: tensor * 0.9 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
            for group, tensors in reply.groups.items()
        }


def content(reply: StudyMessage) -> dict[str, Any]:
    return {key: value for key, value in reply.facts.items() if key not in VARYING}


def assert_same_reply(one: StudyMessage, other: StudyMessage) -> None:
    assert content(one) == content(other)
    assert one.groups.keys() == other.groups.keys()
    for group in one.groups:
        assert_equal(one.groups[group], other.groups[group])


def tensors_and_facts(folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    return {path.name: load_tensors(path) for path in folder.glob("*.safetensors")}


def assert_same_folder(one: Path, other: Path) -> None:
    mine, theirs = tensors_and_facts(one), tensors_and_facts(other)
    assert mine.keys() == theirs.keys()
    for name, (tensors, facts) in mine.items():
        assert facts == theirs[name][1], name
        assert_equal(tensors, theirs[name][0])


# ------------------------------------------------------------------------------------------------------ away, or killed
@every_kind
def test_a_site_that_missed_rounds_goes_on_from_its_last(method: str, changes: list[str], tmp_path: Path) -> None:
    """A site that missed rounds continues from its saved state, even in a new process."""
    plan = planned(method, changes, rounds=6)
    server, sites = Server(plan), [made(plan, tmp_path / name) for name in "ab"]
    for number in (1, 2):
        asked = server.ask("round", number)
        replies = [site.answer(asked) for site in sites]
        server.take(replies[0])
    asked = server.ask("round", 5)
    reply = sites[0].answer(asked)
    assert_same_reply(reply, made(plan, tmp_path / "b").answer(asked))
    # a site that missed a round needs the missed results in the next request that the site receives
    if method == "harmofl":
        with pytest.raises(Refused, match="lost the amplitude"):
            made(plan, tmp_path / "fresh").answer(asked)
        return
    fresh = made(plan, tmp_path / "fresh").answer(asked)
    keeps_optimizer = (
        plan.training.optimizer_state == "keep" and method != "fednova"
    )  # with a reset, the optimizer's momentum starts at zero
    keeps = method in ("fedbn", "silobn", "fedper", "local") or keeps_optimizer or changes
    same = all(torch.equal(t, fresh.groups[g][n]) for g, group in reply.groups.items() for n, t in group.items())
    assert same == (not keeps) or method == "local"
    if method == "local":
        assert fresh.facts["validation_loss"] != reply.facts["validation_loss"]


@every_kind
@pytest.mark.parametrize("after", [1, 2, 6])
def test_a_crash_inside_a_round_leaves_no_trace(method: str, changes: list[str], after: int, tmp_path: Path) -> None:
    """A site that stops during validation or training gives the same answer when the server repeats the round."""
    plan = planned(method, [*changes, "training.batch_size=4"])
    server, steady = Server(plan), made(plan, tmp_path / "steady")
    same, rebuilt = made(plan, tmp_path / "same"), made(plan, tmp_path / "rebuilt")
    for number in (1, 2, 3):
        asked = server.ask("round", number)
        for site in (same, rebuilt):
            left = [after]

            def stop(left: list[int] = left) -> None:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                site.answer(asked, stop)
        rebuilt = made(plan, tmp_path / "rebuilt")
        reply = steady.answer(asked)
        assert_same_reply(reply, same.answer(asked))
        assert_same_reply(reply, rebuilt.answer(asked))
        server.take(reply)
    for site in (steady, same, rebuilt):
        site.answer(server.ask("deliver", 3))
    assert_same_folder(tmp_path / "steady", tmp_path / "same")
    assert_same_folder(tmp_path / "steady", tmp_path / "rebuilt")


def test_a_diverged_round_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    plan = planned("fedbn", [])
    server, site, other = Server(plan), made(plan, tmp_path / "a"), made(plan, tmp_path / "b")
    for one in (site, other):
        one.answer(server.ask("round", 1))
    before = tensors_and_facts(tmp_path / "a").keys()
    for value, words in ((1e38, "training diverged in round 2"), (torch.nan, "the server sends NaN")):
        bad = {"model": {name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
                         for name, tensor in server.groups["model"].items()}}  # fmt: skip
        with pytest.raises(Refused, match=words):
            site.answer(server.ask("round", 2, groups=bad))
    assert tensors_and_facts(tmp_path / "a").keys() == before
    assert_same_reply(site.answer(server.ask("round", 2)), other.answer(server.ask("round", 2)))


def test_only_what_the_server_will_not_send_again_is_kept(tmp_path: Path) -> None:
    expected = {
        "fedavg": set(),
        "fedprox": set(),
        "fedbn": {"0.1", "1.1"},
        "fedper": {"6"},
        "local": {"0.0", "0.1", "1.0", "1.1", "4", "6"},
    }
    for method, layers in expected.items():
        plan = planned(method, [])
        made(plan, tmp_path / method).answer(Server(plan).ask("round", 1))
        tensors, _ = load_tensors(tmp_path / method / "state-1.safetensors")
        assert {name.split("/")[2].rpartition(".")[0] for name in tensors if name.startswith("module/")} == layers
        assert any(name.startswith("optimizer/model/") for name in tensors)
        plan = planned(method, ["training.optimizer_state=reset"])
        made(plan, tmp_path / f"{method}-reset").answer(Server(plan).ask("round", 1))
        tensors, _ = load_tensors(tmp_path / f"{method}-reset" / "state-1.safetensors")
        assert not any(name.startswith("optimizer/") for name in tensors)


@pytest.mark.parametrize("wrong", ["missing", "surplus", "shape", "group"])
def test_a_payload_that_does_not_fit_is_refused(wrong: str, tmp_path: Path) -> None:
    """A site rejects a message that lacks tensors or has additional tensors, for example because of an NVFlare
    filter.
    """
    plan = planned("fedavg", [])
    server = Server(plan)
    groups = {"model": dict(server.groups["model"])}
    if wrong == "missing":
        del groups["model"]["6.weight"]
    elif wrong == "surplus":
        groups["model"]["extra"] = torch.ones(1)
    elif wrong == "shape":
        groups["model"]["6.weight"] = torch.zeros(1)
    else:
        groups = {}
    with pytest.raises(MedsiloError):
        made(plan, tmp_path).answer(server.ask("round", 1, groups=groups))


# --------------------------------------------------------------------------------------------------------- stored state
def score_of(plan: Plan, path: Path, part: Cases) -> float:
    model = plan.algorithm.whole(plan.build_networks())
    model.load_state_dict(load_tensors(path)[0])
    with torch.no_grad():
        return float((model.eval()(part.inputs).argmax(1) == part.targets).float().mean())


@every_kind
def test_the_best_model_has_the_score_that_was_recorded(method: str, changes: list[str], tmp_path: Path) -> None:
    plan = planned(method, changes, rounds=3)
    summary = inprocess.run(plan, folder=tmp_path / "run").summary
    for site in SITES:
        facts = summary.sites[site]
        data = plan.task.load(site, SITES, plan.seed, None)
        best = tmp_path / "run" / "sites" / site / "best.safetensors"
        chosen = summary.selected.rounds[site]
        assert load_tensors(best)[1]["round"] == chosen
        assert score_of(plan, best, data.validation) == pytest.approx(facts.validation[chosen])
        assert score_of(plan, best, data.test) == pytest.approx(facts.test["accuracy"])
        if summary.selected.by == "site":
            assert chosen == facts.validation.index(max(facts.validation))
        last = tmp_path / "run" / "sites" / site / "last.safetensors"
        assert score_of(plan, last, data.validation) == pytest.approx(facts.validation[-1])


def test_metrics_csv_has_a_line_for_every_round(tmp_path: Path) -> None:
    plan = planned("fedbn", [], rounds=3)
    run = inprocess.run(plan, folder=tmp_path / "run")
    for site in SITES:
        with (tmp_path / "run" / "sites" / site / "metrics.csv").open() as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        assert tuple(reader.fieldnames) == COLUMNS
        assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
        assert [row["phase"] for row in rows] == ["train", "train", "train", "deliver"]
        assert [row["validated_round"] for row in rows] == ["0", "1", "2", "3"]
        facts = run.summary.sites[site]
        assert [float(row["validation"]) for row in rows] == facts.validation
        for row, record in zip(rows, run.history, strict=False):
            line = record.sites[site]
            assert int(row["samples"]) == line.samples == facts.cases["train"]
            assert float(row["train_loss"]) == line.train_loss
            assert float(row["validation_loss"]) == line.validation_loss
        assert rows[-1]["train_loss"] == ""


def test_a_missed_round_has_no_line(tmp_path: Path) -> None:
    plan = planned("fedavg", [])
    server, site = Server(plan), made(plan, tmp_path)
    for number in (1, 3):
        site.answer(server.ask("round", number))
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "3"]


def test_the_selected_model_that_the_server_sends_is_tested(tmp_path: Path) -> None:
    plan = planned("fedavg", [])
    server, site = Server(plan), made(plan, tmp_path)
    first = server.groups
    reply = site.answer(server.ask("round", 1))
    server.take(reply)
    site.answer(server.ask("deliver", 1))
    reply = site.answer(server.ask("test", 1, groups=first, selected=0))
    assert reply.facts["selected"] == 0
    assert_equal(load_tensors(tmp_path / "best.safetensors")[0], first["model"])
    assert load_tensors(tmp_path / "best.safetensors")[1]["round"] == 0
    part = site.participant.data.test
    model = plan.build_networks()["model"].eval()
    with torch.no_grad():
        output = model(part.inputs)
    assert reply.facts["test"] == pytest.approx(float((output.argmax(1) == part.targets).float().mean()))
    assert reply.facts["test_loss"] == pytest.approx(float(functional.cross_entropy(output, part.targets)), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_an_empty_split_is_refused(part: str, tmp_path: Path) -> None:
    plan = planned("fedavg", [])
    data = plan.task.load(A, SITES, 0, None)
    parts = {name: getattr(data, name) for name in ("train", "validation", "test")}
    parts[part] = Cases(torch.empty(0, 9, 32), torch.empty(0, dtype=torch.long), [])
    with pytest.raises(DataError, match=f"the {part} part of task synthetic-activity has no cases") as caught:
        made(plan, tmp_path, SiteData(**parts))
    assert "check its split" in str(caught.value)


def test_an_absent_data_folder_is_told_without_its_path(tmp_path: Path) -> None:
    secret = tmp_path / "patients-of-ward-7"
    (tmp_path / "a-file").touch()
    for folder, remedy in ((secret, "correct 'data' in this site's medsilo.yaml"), (tmp_path / "a-file", "data.table")):
        with pytest.raises(DataError) as caught:
            site_of(planned("fedavg", []), A, SITES, SiteSettings(device="cpu", data=folder), tmp_path / "out")
        text = str(caught.value)
        assert remedy in text
        assert str(tmp_path) not in text
        assert folder.name not in text
        assert caught.value.private == str(folder)
        assert len(text.splitlines()) == 1


def test_a_damaged_state_is_refused_and_not_forgotten(tmp_path: Path) -> None:
    plan = planned("fedbn", [])
    server = Server(plan)
    made(plan, tmp_path).answer(server.ask("round", 1))
    (tmp_path / "state-1.safetensors").write_bytes(b"damaged")
    with pytest.raises(MedsiloError, match=r"state-1\.safetensors cannot be read .* damaged"):
        made(plan, tmp_path).answer(server.ask("round", 2))


# --------------------------------------------------------------------------------------------------------------- resume
def stop_after(number: int) -> Callable[[Round], None]:
    def on_round(record: Round) -> None:
        if record.round == number:
            raise KeyboardInterrupt

    return on_round


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], Path]:
    folders: dict[str, Path] = {}

    def of(plan: Plan) -> Path:
        if plan.hash not in folders:
            folders[plan.hash] = tmp_path_factory.mktemp("whole") / "run"
            inprocess.run(plan, folder=folders[plan.hash])
        return folders[plan.hash]

    return of


def test_a_finished_study_that_is_resumed_is_the_same(tmp_path: Path, whole: Callable[[Plan], Path]) -> None:
    plan = planned("fedper", [])
    inprocess.run(plan, folder=tmp_path / "run")
    inprocess.run(plan, folder=tmp_path / "run", resume=True)
    assert_same_run(whole(plan), tmp_path / "run")


def test_a_run_in_process_is_resumed_by_command(
    tmp_path: Path, whole: Callable[[Plan], Path], capsys: pytest.CaptureFixture
) -> None:
    plan, folder = planned("fedadam", []), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        inprocess.run(plan, folder=folder, on_round=stop_after(3))
    assert cli.main(["resume", str(folder), "--device", "cpu"]) == 0
    (folder / "report.html").unlink()
    assert_same_run(whole(plan), folder)
    capsys.readouterr()
    assert cli.main(["resume", str(folder)]) == 1
    assert "run is finished" in capsys.readouterr().err


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    plan = planned("fedavg", [])
    with pytest.raises(MedsiloError, match="run absent has.*start it again"):
        inprocess.run(plan, folder=tmp_path / "absent", resume=True)
    inprocess.run(plan, folder=tmp_path / "run")
    other = plan.with_changes(["seed=1"])
    with pytest.raises(MedsiloError, match=r"another.*the plan\.yaml"):
        inprocess.run(other, folder=tmp_path / "run", resume=True)
    central = make_plan("central", *SMALL)
    with pytest.raises(MedsiloError, match="central training can't be resumed"):
        inprocess.run(central, folder=tmp_path / "run", resume=True)


def test_a_torn_line_of_rounds_is_forgotten(tmp_path: Path, whole: Callable[[Plan], Path]) -> None:
    plan = planned("fedavg", [])
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        inprocess.run(plan, folder=folder, on_round=stop_after(3))
    text = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(text[:-20])
    inprocess.run(plan, folder=folder, resume=True)
    assert_same_run(whole(plan), folder)


# ---------------------------------------------------------------------------------------------------------- a full disk
def test_a_checkpoint_that_does_not_fit_costs_only_its_round(tmp_path: Path, whole: Callable[[Plan], Path]) -> None:
    """From round 2 on, the disk has space for the sites' files, but not for the server's checkpoint."""
    plan = planned("fedavg", ["training.optimizer_state=reset"])
    folder = tmp_path / "run"
    size = (whole(plan) / "checkpoints" / "round-4.safetensors").stat().st_size

    def on_round(record: Round) -> None:
        if record.round == 2:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, limits[1]))

    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(MedsiloError) as caught:
        inprocess.run(plan, folder=folder, on_round=on_round)
    text = str(caught.value)
    assert text.startswith("round-2.safetensors could not be written: ")
    assert "free space or choose another output folder" in text
    assert len(text.splitlines()) == 1
    assert [path.name for path in Record(folder).checkpoints.glob("round-*")] == ["round-1.safetensors"]
    assert Record(folder).load_checkpoint()[1]["round"] == 1
    summary = Record(folder).summary()
    assert (summary.status, summary.reason) == ("failed", text)
    inprocess.run(plan, folder=folder, resume=True)
    assert_same_run(whole(plan), folder)


# ----------------------------------------------------------------------------------------------------------- in process
def test_a_plan_that_names_nobody_has_hospitals_here(tmp_path: Path) -> None:
    nameless = make_plan("fedsm-extra", *SMALL, "participation.sites=[]", "participation.minimum=2")
    inprocess.run(nameless, folder=tmp_path / "run")
    two = make_plan("fedsm-extra", *SMALL, sites=SITES[:2])
    assert load_plan(tmp_path / "run" / paths.PLAN) == two
    inprocess.run(two, folder=tmp_path / "named")
    assert_same_run(tmp_path / "named", tmp_path / "run")


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_learning_rate_at_which_training_diverges_ends_with_the_remedy(method: str, tmp_path: Path) -> None:
    plan = planned(method, ["training.learning_rate=1000", "training.rounds=30"])
    with pytest.raises(MedsiloError, match=r"diverged in round .*; lower the learning rate"):
        inprocess.run(plan, folder=tmp_path / "run")
    assert Record(tmp_path / "run").summary().status == "failed"


def test_waiting_in_one_process_does_not_train_again_and_again(tmp_path: Path) -> None:
    """In one process, a site's rejection ends the study at once, because a repetition would have the same result."""
    changes = ["training.learning_rate=1000", "training.rounds=30", "participation.when_missing=wait"]
    plan = planned("local", [*changes, "participation.retry_timeout=6"])
    asked: list[str] = []

    class Counting(inprocess.Loop):
        def ask(self, sites, outgoing, receive, timeout):  # type: ignore[no-untyped-def]
            asked.append(",".join(sites))
            return super().ask(sites, outgoing, receive, timeout)

    from medsilo_server.coordinator import Coordinator

    participants = sites_of(plan, tmp_path / "run")
    with pytest.raises(MedsiloError, match="diverged"):
        Coordinator(plan, SITES, Counting(participants), Record(tmp_path / "run"), "in-process").run()
    assert len(asked) <= 1 + Record(tmp_path / "run").summary().rounds.done + 3
