"""Test secure aggregation with sites that drop out and a server that restarts, and search for models on the server's
disk.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from tempfile import mkdtemp
from time import sleep

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError, Refused
from medsilo.core.files import load_tensors
from medsilo.exchange.channel import Missing
from medsilo.federation.site_stack import TrainingSite
from medsilo.plan import Plan
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import SiteSettings
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import make_plan, slow_but
from tests.search import CHANCE, found_pieces, most_alike, pieces_of, strange_part
from tests.sites import sites_of
from tests.unit.medsilo_server.test_coordinator import LOST, SMALL, Answers, Script, Scripted, honest

HOSPITALS = ["a", "b", "c", "d"]
CPU = SiteSettings(device="cpu", public_data=True)
WIDE = [  # a long sequence of 460 800 convolution weights, which resembles no other bytes by chance
    "task.name=synthetic-histology",
    "task.size=32",
    "task.patients=5",
    "task.patches=2",
    "network.name=small-cnn",
    "network.width=80",
    "training.rounds=2",
    "training.batch_size=8",
    "training.local_epochs=2",
    "training.learning_rate=0.1",
]
RULES = [*SMALL, "training.learning_rate=0.001", "training.rounds=3", "model_selection.keep=last"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]


def plan_of(method: str, mode: str, *changes: str) -> Plan:
    return make_plan(method, *RULES, f"secure_aggregation.mode={mode}", *changes, sites=HOSPITALS)


def participants_of(plan: Plan, folder: Path) -> dict[str, TrainingSite]:
    return sites_of(plan, folder, HOSPITALS, CPU)


def lead(plan: Plan, folder: Path, script: Script = honest, resume: bool = False) -> Coordinator:
    transport = Scripted(participants_of(plan, folder), script)
    coordinator = Coordinator(plan, HOSPITALS, transport, Record(folder), "scripted", settings=CPU)
    coordinator.run(resume)
    return coordinator


def models(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {site: load_tensors(folder / "sites" / site / "last.safetensors")[0] for site in HOSPITALS}


def furthest(one: Path, other: Path) -> float:
    mine, theirs = models(one), models(other)
    return max(
        float((mine[site][name].double() - theirs[site][name].double()).abs().max())
        for site in HOSPITALS
        for name in mine[site]
    )


def at(task: str, number: int, does: Callable[[Callable[[], StudyMessage]], Answers], site: str = "d") -> Script:
    def script(who: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if who == site and (asked.facts["task"], asked.facts["round"]) == (task, number):
            return does(work)
        return honest(who, asked, work)

    return script


def never(work: Callable[[], StudyMessage]) -> Answers:
    return LOST


def too_late(work: Callable[[], StudyMessage]) -> Answers:
    work()
    return LOST


def stops(work: Callable[[], StudyMessage]) -> Answers:
    raise Aborted("the server was stopped")


# ------------------------------------------------------------------------------------------------------------- dropouts
@cache
def clear(method: str, how: str) -> Path:
    folder = Path(mkdtemp()) / "run"
    script = {"never": at("round", 2, never), "too late": at("round", 2, too_late), "there": honest}[how]
    lead(plan_of(method, "none", *GO_ON), folder, script)
    return folder


DROPOUTS = [
    ("offer", never, "never"),
    ("round", never, "never"),
    ("round", too_late, "too late"),
    ("unmask", too_late, "there"),
]


@pytest.mark.slow
@pytest.mark.parametrize("task, does, how", DROPOUTS)
def test_a_site_that_drops_out_costs_nothing_but_itself(
    task: str, does: Callable[..., Answers], how: str, tmp_path: Path
) -> None:
    coordinator = lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", at(task, 2, does))
    assert furthest(tmp_path / "run", clear("fedavg", how)) <= 1e-6
    assert ("d" in coordinator.rounds[1].lost) == (how != "there")


def test_a_site_without_keys_is_not_in_the_study(tmp_path: Path) -> None:
    coordinator = lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", at("agree", 0, never))
    assert coordinator.rounds[2].answered == ["a", "b", "c"]
    assert "agreed on keys" in coordinator.rounds[2].refused["d"]


def test_too_few_to_open_a_sum_end_the_study_with_the_reason(tmp_path: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        lost = site in "cd" and asked.facts["task"] == "unmask" and asked.facts["round"] == 2
        return LOST if lost else honest(site, asked, work)

    with pytest.raises(ParticipationError, match="2 sites have helped .* round 2; it takes 3"):
        lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", script)


@pytest.mark.slow
def test_a_hospital_that_comes_late_is_in_the_next_sum(tmp_path: Path) -> None:
    """A hospital that was absent at the start joins in a later round, and the hospital's masks cancel in this round's
    sum.
    """

    def away(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        gone = site == "d" and asked.facts["round"] in (1, 2) and asked.facts["task"] != "join"
        return LOST if gone else honest(site, asked, work)

    for method in ("fedavg", "fedsm"):
        server = lead(plan_of(method, "pairwise", *GO_ON), tmp_path / method, away)
        assert [("d" in line.answered) for line in server.rounds] == [False, False, True], method


@pytest.mark.slow
def test_a_silent_hospital_s_features_still_count_for_fedsm_s_selector(tmp_path: Path) -> None:
    """FedSM's selector also uses features of a hospital that is absent in this round.

    The server computes each hospital's mean features from the opened sum, and reads no features of a single hospital.
    """

    def away(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        return LOST if site == "d" and asked.facts["round"] in (2, 3) else honest(site, asked, work)

    masked, open_ = (
        lead(plan_of("fedsm", how, *GO_ON), tmp_path / how, away).state.aggregators["sums"].current("a")
        for how in ("pairwise", "none")
    )
    assert torch.allclose(masked["present"], torch.full((4,), 0.25).double(), atol=1e-6)
    assert torch.allclose(masked["means"], open_["means"], atol=1e-5)
    assert torch.allclose(masked["products"].diagonal(), open_["products"].diagonal(), atol=5e-3)


# ------------------------------------------------------------------------------------------------ answers that are lost
def first_time(task: str, number: int, gone: Missing, works: bool) -> Script:
    lost: list[str] = []

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if site == "d" and not lost and (asked.facts["task"], asked.facts["round"]) == (task, number):
            lost.append(task)
            if works:
                work()
            return gone
        return honest(site, asked, work)

    return script


LETTERS = [("agree", 0), ("offer", 2), ("round", 2), ("unmask", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("works", [False, True], ids=["not made", "lost on its way"])
@pytest.mark.parametrize("task, number", slow_but([("round", 2)], LETTERS, ()))
def test_a_lost_answer_is_asked_for_again_where_the_plan_waits(
    task: str, number: int, works: bool, tmp_path: Path
) -> None:
    plan = plan_of("fedsm", "pairwise", "participation.when_missing=wait")
    coordinator = lead(plan, tmp_path / "run", first_time(task, number, LOST, works))
    assert furthest(tmp_path / "run", clear("fedsm", "there")) <= 1e-5
    assert coordinator.rounds[-1].answered == HOSPITALS


@pytest.mark.slow
def test_a_process_that_died_is_asked_once_more_where_the_plan_stops(tmp_path: Path) -> None:
    died = Missing("refused", "the training process died", passing=True)
    lead(plan_of("fedsm", "pairwise"), tmp_path / "run", first_time("round", 2, died, True))
    assert furthest(tmp_path / "run", clear("fedsm", "there")) <= 1e-5


@pytest.mark.slow
# the test does not lose a message of the unmasking phase, because any three sites can unmask the sum
@pytest.mark.parametrize("task, number", slow_but([("round", 2)], LETTERS[:3], ()))
def test_a_lost_answer_ends_a_study_that_stops_and_it_goes_on_from_there(
    task: str, number: int, tmp_path: Path
) -> None:
    with pytest.raises(ParticipationError, match="3 of 4 sites answered.* 4: d lost"):
        lead(plan_of("fedsm", "pairwise"), tmp_path / "run", first_time(task, number, LOST, True))
    lead(plan_of("fedsm", "pairwise"), tmp_path / "run", resume=True)
    assert furthest(tmp_path / "run", clear("fedsm", "there")) <= 1e-5


# ------------------------------------------------------------------------------------------------------------- restarts
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_a_server_and_sites_that_start_again_end_with_the_same_models(method: str, tmp_path: Path) -> None:
    plan = plan_of(method, "pairwise")
    lead(plan, tmp_path / "whole")
    with pytest.raises(Aborted):
        lead(plan, tmp_path / "broken", at("round", 3, stops, site="b"))
    lead(plan, tmp_path / "broken", resume=True)
    mine, theirs = models(tmp_path / "whole"), models(tmp_path / "broken")
    for site in HOSPITALS:
        assert all(torch.equal(tensor, theirs[site][name]) for name, tensor in mine[site].items())


def stopped_while_unmasking(folder: Path) -> None:
    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == ("d", "round", 2):
            return LOST
        if (site, asked.facts["task"], asked.facts["round"]) == ("c", "unmask", 2):
            work()
            raise Aborted("the server was stopped")
        return honest(site, asked, work)

    with pytest.raises(Aborted):
        lead(plan_of("fedavg", "pairwise", *GO_ON), folder, script)


def test_a_round_whose_sum_was_opened_is_repeated_with_the_same_hospitals(tmp_path: Path) -> None:
    """After a restart, the server repeats an opened round without site d, which was absent when the sum was opened.

    The difference of a sum with site d and a sum without site d would reveal site d's model.
    """
    stopped_while_unmasking(tmp_path / "run")
    coordinator = lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", resume=True)
    assert [line.answered for line in coordinator.rounds] == [HOSPITALS, ["a", "b", "c"], HOSPITALS]
    assert "whose sum was opened before" in coordinator.rounds[1].refused["d"]


def back_up(checkpoints: Path, folder: Path) -> None:
    """Copy the server's checkpoints as soon as the server has saved round 1; the server may delete an earlier
    checkpoint meanwhile.
    """
    while not (checkpoints / "round-1.safetensors").exists():
        sleep(0.01)
    folder.mkdir()
    for path in checkpoints.iterdir():
        with suppress(FileNotFoundError):
            copyfile(path, folder / path.name)


def test_rounds_that_a_restored_server_repeats_have_the_same_hospitals_as_before(tmp_path: Path) -> None:
    """The server is restored from a backup from before round 2, and repeats round 2 without site d, which was absent in
    round 2.
    """
    folder, backup = tmp_path / "run", tmp_path / "backup"

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        if (site, asked.facts["task"], asked.facts["round"]) == ("a", "offer", 2):
            back_up(folder / "checkpoints", backup)
        gone = (site, asked.facts["task"], asked.facts["round"]) == ("d", "round", 2)
        return LOST if gone else honest(site, asked, work)

    lead(plan_of("fedavg", "pairwise", *GO_ON), folder, script)
    rmtree(folder / "checkpoints")
    copytree(backup, folder / "checkpoints")
    coordinator = lead(plan_of("fedavg", "pairwise", *GO_ON), folder, resume=True)
    assert [line.answered for line in coordinator.rounds] == [HOSPITALS, ["a", "b", "c"], HOSPITALS]


def test_a_round_whose_sum_was_opened_is_not_opened_over_others(tmp_path: Path) -> None:
    stopped_while_unmasking(tmp_path / "run")

    def without_a(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        try:
            return LOST if site == "a" else honest(site, asked, work)
        except Refused as error:
            return Missing.refused(error)

    with pytest.raises(ParticipationError, match="1 sites have helped .* sum of round 2"):
        lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", without_a, resume=True)


def test_a_site_goes_on_with_no_keys_but_those_that_were_agreed_on_last(tmp_path: Path) -> None:
    plan = plan_of("fedavg", "pairwise")
    first, second = (Scripted(participants_of(plan, tmp_path / "run")) for _ in range(2))
    Coordinator(plan, HOSPITALS, first, Record(tmp_path / "run"), "scripted", settings=CPU).run()
    Coordinator(plan, HOSPITALS, second, Record(tmp_path / "run"), "scripted", settings=CPU).run(resume=True)
    for site, asked in first.sent:
        if asked.facts["task"] in ("offer", "unmask"):
            with pytest.raises(MedsiloError, match="lacks the keys of the server"):
                second.participants[site].answer(asked)


# ------------------------------------------------------------------------------------------------- models at the server
@pytest.mark.slow
def test_the_servers_disk_holds_no_model_of_a_site(tmp_path: Path) -> None:
    """In a study without secure aggregation, the search for models finds the weights of personal models.

    The test subtracts the published mean of all models from each searched model.
    """

    def led(how: str) -> tuple[list[bytes], Tensor, Tensor, Tensor]:
        folder = tmp_path / how
        plan = make_plan("fedsm", "model_selection.keep=last", *WIDE, f"secure_aggregation.mode={how}", sites=HOSPITALS)
        personal: dict[str, dict[str, Tensor]] = {}

        def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
            answer = work()
            if asked.facts["task"] == "deliver":
                networks = transport.participants[site].participant.state.modules
                personal[site] = {name: own.clone() for name, own in networks["model"].state_dict().items()}
            return [(site, answer)]

        transport = Scripted(participants_of(plan, folder), script)
        Coordinator(plan, HOSPITALS, transport, Record(folder), "scripted", settings=CPU).run()
        name = max((n for n in personal["a"] if n.endswith("weight")), key=lambda n: personal["a"][n].numel())
        files = [path for path in folder.rglob("*") if path.is_file()]
        contents = [path.read_bytes() for path in files if "sites" not in path.relative_to(folder).parts]
        mean = torch.stack([personal[site][name] for site in HOSPITALS]).mean(0)
        return contents, personal["a"][name], plan.build_networks()["model"].state_dict()[name], mean

    for how in ("none", "pairwise"):
        contents, *tensors = led(how)
        weight, before, known = (tensor.double().reshape(-1).numpy() for tensor in tensors)
        found = found_pieces(contents, {"a": pieces_of(weight, before)})
        alike = most_alike(contents, [strange_part(weight, before, known)], before)
        assert (found, alike > 3 * CHANCE) == (({"a"}, True) if how == "none" else (set(), False)), (how, alike)
        assert how == "none" or alike < CHANCE, alike
