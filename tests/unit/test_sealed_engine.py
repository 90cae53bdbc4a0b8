"""Sealed studies whose sites drop out, whose server starts again, and what is left on the server's disk."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from medsilo.core.errors import Aborted, MedsiloError, ParticipationError
from medsilo.core.files import load_tensors
from medsilo.federation.around import TrainingSite
from medsilo.federation.coordinator import Coordinator
from medsilo.plan import Plan
from medsilo.runs.messages import Parcel
from medsilo.runs.record import Record
from medsilo.site.settings import SiteSettings
from tests.conftest import make_plan
from tests.search import CHANCE, found_pieces, most_alike, pieces_of, strange_part
from tests.sites import site_of
from tests.unit.test_coordinator import LOST, SMALL, Answers, Script, Scripted, honest

HOSPITALS = ["a", "b", "c", "d"]
CPU = SiteSettings(device="cpu", smallest_average=1)
WIDE = [  # its last convolution has 460 800 weights: no stretch of so many numbers is alike by chance
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
RULES = [*SMALL, "training.learning_rate=0.001", "training.rounds=3", "tracking.select=last"]
GO_ON = ["participation.when_missing=continue", "participation.minimum=3"]
CLEAR = ["transport.sealing_clear=[statistics]"]


def plan_of(method: str, mode: str, *changes: str) -> Plan:
    clear = CLEAR if method.endswith("adafed") and mode != "none" else []
    return make_plan(method, *RULES, f"transport.sealing={mode}", *clear, *changes, sites=HOSPITALS)


def participants_of(plan: Plan, folder: Path) -> dict[str, TrainingSite]:
    return {site: site_of(plan, site, HOSPITALS, CPU, folder / "sites" / site) for site in HOSPITALS}


def lead(plan: Plan, folder: Path, script: Script = honest, resume: bool = False) -> Coordinator:
    """Run a study whose sites have processes of their own now."""
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


def at(task: str, number: int, does: Callable[[Callable[[], Parcel]], Answers], site: str = "d") -> Script:
    """A script that does something else to one site's answer to one task."""

    def script(who: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if who == site and (asked.facts["task"], asked.facts["round"]) == (task, number):
            return does(work)
        return honest(who, asked, work)

    return script


def never(work: Callable[[], Parcel]) -> Answers:
    return LOST


def too_late(work: Callable[[], Parcel]) -> Answers:
    work()
    return LOST


def stops(work: Callable[[], Parcel]) -> Answers:
    raise Aborted("the server was stopped")


# ------------------------------------------------------------------------------------------------ dropouts
@cache
def clear(method: str, how: str) -> Path:
    """A study in clear in which d is not in round 2: it did not begin it, or its answer was lost, or it is."""
    folder = Path(mkdtemp()) / "run"
    script = {"never": at("round", 2, never), "too late": at("round", 2, too_late), "there": honest}[how]
    lead(plan_of(method, "none", *GO_ON), folder, script)
    return folder


DROPOUTS = [
    ("offer", never, "never"),
    ("round", never, "never"),
    ("round", too_late, "too late"),
    ("confirm", never, "there"),
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
    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        lost = site in "cd" and asked.facts["task"] == "unmask" and asked.facts["round"] == 2
        return LOST if lost else honest(site, asked, work)

    with pytest.raises(ParticipationError, match="only 2 sites have helped to unmask in round 2; it takes 3"):
        lead(plan_of("fedavg", "pairwise", *GO_ON), tmp_path / "run", script)


# ------------------------------------------------------------------------------------------------ a server that lies
def forged(task: str, change: Callable[[dict[str, Any]], None], number: int = 2) -> Script:
    """A script that changes what the server asks of d."""

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        if site == "d" and (asked.facts["task"], asked.facts["round"]) == (task, number):
            change(asked.facts["sealing"])
        return honest(site, asked, work)

    return script


def drop_one(letters: dict[str, Any]) -> None:
    letters["request"]["sites"] = ["b", "c", "d"]
    letters["request"]["confirmations"].pop("a", None)


def swap(letters: dict[str, Any]) -> None:
    for own in letters.get("assembly", {"introductions": []})["introductions"][:1]:
        own["signing"] = "00" * 31 + "09"


LIES = [
    ("unmask", drop_one, 2, "second, different unmasking of round 2"),
    ("agree", swap, 0, "did not sign"),
]


@pytest.mark.parametrize("task, change, number, reason", LIES)
def test_a_server_that_lies_is_refused(
    task: str, change: Callable[[dict[str, Any]], None], number: int, reason: str, tmp_path: Path
) -> None:
    plan = plan_of("fedavg", "pairwise", *GO_ON)
    transport = Scripted(participants_of(plan, tmp_path / "run"), _catching(task, change, number, found := []))
    coordinator = Coordinator(plan, HOSPITALS, transport, Record(tmp_path / "run"), "scripted", settings=CPU)
    with suppress(MedsiloError):
        coordinator.run()
    assert re.search(reason, " ".join([*found, *transport.refusals]))


def _catching(task: str, change: Callable[[dict[str, Any]], None], number: int, found: list[str]) -> Script:
    """Forge what d is asked, and note what any site refuses."""
    lie = forged(task, change, number)

    def script(site: str, asked: Parcel, work: Callable[[], Parcel]) -> Answers:
        try:
            return lie(site, asked, work)
        except MedsiloError as error:
            found.append(str(error))
            return LOST

    return script


# ------------------------------------------------------------------------------------------------ starting again
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "adafed", "fedsm"])
def test_a_server_and_sites_that_start_again_end_with_the_same_models(method: str, tmp_path: Path) -> None:
    plan = plan_of(method, "pairwise")
    lead(plan, tmp_path / "whole")
    with pytest.raises(Aborted):
        lead(plan, tmp_path / "broken", at("round", 3, stops, site="b"))
    lead(plan, tmp_path / "broken", resume=True)
    mine, theirs = models(tmp_path / "whole"), models(tmp_path / "broken")
    for site in HOSPITALS:
        assert all(torch.equal(tensor, theirs[site][name]) for name, tensor in mine[site].items())


# ------------------------------------------------------------------------------------------------ what the server holds
@pytest.mark.slow
def test_the_servers_disk_holds_no_model_of_a_site(tmp_path: Path) -> None:
    """The largest weight that a site has at the end is nowhere on the server's disk, and it is there in clear."""
    for how in ("none", "pairwise"):
        folder = tmp_path / how
        plan = make_plan("f-adafed", "tracking.select=last", *WIDE, f"transport.sealing={how}", sites=HOSPITALS)
        lead(plan, folder)
        site = load_tensors(folder / "sites" / "a" / "last.safetensors")[0]
        name = max((n for n in site if n.endswith("weight")), key=lambda n: site[n].numel())
        initial = plan.build_networks()["model"].state_dict()[name]
        weight, before = (tensor.double().reshape(-1).numpy() for tensor in (site[name], initial))
        files = [path for path in folder.rglob("*") if path.is_file()]
        contents = [path.read_bytes() for path in files if "sites" not in path.relative_to(folder).parts]
        found = found_pieces(contents, {"a": pieces_of(weight, before)})
        alike = most_alike(contents, [strange_part(weight, before)], before)
        assert (found, alike > 3 * CHANCE) == (({"a"}, True) if how == "none" else (set(), False)), (how, alike)
        assert how == "none" or alike < CHANCE
