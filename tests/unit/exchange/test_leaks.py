"""The disclosure report agrees with the values that a site sends, and with the site's privacy policy."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from medsilo import cli
from medsilo.check.disclosure import describe
from medsilo.core.errors import MedsiloError
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.plan import parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo.site.policy import EXECUTOR, Policy
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.sites import sites_of
from tests.unit.federation.test_protection import STUDY

EXAMPLES = Path(__file__).resolve().parents[3] / "site_configs"
SMALL = ["training.rounds=3", "task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8"]


class Listening(Loop):
    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        def hear(site: str, reply: StudyMessage) -> None:
            self.heard.append(reply)
            receive(site, reply)

        return super().ask(sites, outgoing, hear, timeout)

    heard: list[StudyMessage]


@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_it_names_all_that_is_told_beside_tensors(method: str, tmp_path: Path) -> None:
    """The disclosure report names each value in an answer.

    Developers who add a value to an answer must also add the value to the report and to this test.
    """
    plan, settings = make_plan(method, *SMALL), SiteSettings(device="cpu")
    loop = Listening(sites_of(plan, tmp_path, settings=settings))
    loop.heard = []
    Coordinator(plan, SITES, loop, Record(tmp_path), "in-process").run()
    text = "\n".join(describe(plan, settings))
    names = {
        "cases": "numbers of training, validation and test cases",
        "patients": "and of their patients",
        "seconds": "seconds",
        "memory": "the memory that training took",
        "packages": "version and hash of medsilo",
        "suppressed": "fewer than" if settings.least(True) > 1 else "score",
        "shares": "whether this site shares its personal model",
        "classes": "cases of each class",
        "machine": "versions of Python, NVFlare, torch, numpy and MONAI",
        "absent": "data.unannotated",
        "warnings": "Warnings: one of a few kinds",
        "counts": "counts that add up",
        **({"outcome": "how often each model was chosen"} if method == "fedsm" else {}),
    }
    told = {name for reply in loop.heard for name, value in reply.facts.items() if value is not None}
    scores = {"train_loss", "validation", "validation_loss", "test", "test_loss", "samples", "selected"}
    assert told - {"task", "round", "study"} == set(names) | scores
    of_outcome = {name for reply in loop.heard for name in reply.facts.get("outcome") or {}}
    assert of_outcome == ({"chosen", "sums"} if method == "fedsm" else set())
    assert all(words in text for words in names.values())
    counts = {name for reply in loop.heard for name in reply.facts.get("counts", {})}
    assert counts == set(plan.task.goal.layout) and all(f"  {name}: " in text for name in counts)


def test_it_follows_the_sites_policy() -> None:
    plan = make_plan("harmofl", *SMALL)
    strict, teaching = (Policy.read(EXAMPLES / f"{kind}-hospital") for kind in ("strict", "teaching"))
    settings = SiteSettings(min_patients_per_metric=9)
    lines = describe(plan, settings, strict)
    groups = [line for line in lines if line.endswith("REFUSED by privacy.json")]
    assert len(groups) == 1 and "amplitude" in groups[0]
    assert sum(" model " in line and line.endswith("leaves") for line in lines) == 2
    text = "\n".join(lines)
    assert "unless they are fewer than 9" in text
    assert "covers 9 images and patients" in text
    assert "stays (allow_log_streaming is false" in text and "privacy.json, scope strict" in text
    open_ = "\n".join(describe(plan, settings, teaching))
    assert "REFUSED" not in open_ and "streamed to the server" in open_


@pytest.mark.parametrize(
    ("resources", "starts"),
    [
        ({"class_allow_list": ["nvflare.app_common.np.np_trainer.NPTrainer"]}, False),
        ({"class_allow_list": ["medsilo.flare."]}, True),
        ({"class_allow_list": [EXECUTOR]}, True),
        ({"class_allow_list": ["medsilo.flare.executor"]}, True),
        ({"class_allow_list": ["medsilo.flare.exec"]}, False),
        ({"class_allow_list": ["*"]}, True),
        ({"class_allow_list": ["medsilo.flare.exec"], "class_list_enforcement_mode": "warn"}, True),
        ({"format_version": 2}, False),
    ],
)
def test_nvflare_agrees_on_who_may_start(resources: dict, starts: bool, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "startup").mkdir()
    (tmp_path / "local/resources.json").write_text(json.dumps(resources))
    assert Policy.read(tmp_path / "local").starts is starts
    authorizer, workspace = ComponentPathAuthorizer(), Workspace(str(tmp_path))
    with nullcontext() if starts else pytest.raises(UnsafeComponentError):
        authorizer.authorize_component_config({"path": EXECUTOR}, workspace=workspace)


def test_a_folder_of_settings_that_is_not_there_is_no_folder_of_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job = str(EXAMPLES.parent / "jobs/fedavg")
    assert cli.main(["disclosure", job, "--settings", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["disclosure", job, "--settings", str(tmp_path / "lokal")]) == 1
    assert "no such folder of settings" in capsys.readouterr().err


def test_the_scope_decides_on_filters(tmp_path: Path) -> None:
    scopes = '{"scopes": [{"name": "a"}, {"name": "b", "task_result_filters": [{"name": "X"}]}], "default_scope": "a"}'
    # without privacy.json, a hospital has no NVFlare privacy policy
    assert Policy.read(tmp_path).starts and Policy.read(tmp_path).filters == ()
    (tmp_path / "privacy.json").write_text(scopes)
    assert Policy.read(tmp_path).filters == () and Policy.read(tmp_path, "b").filters == (("X", {}),)
    # the filter changes weights, but does not stop the model from leaving
    assert Policy.read(tmp_path, "b").lets_out("model")
    (tmp_path / "privacy.json").write_text("[")
    with pytest.raises(MedsiloError, match=r"privacy\.json cannot be read"):
        Policy.read(tmp_path)


def test_it_says_how_coarsely_numbers_of_patients_leave() -> None:
    plan = parse_plan(STUDY, ["training.rounds=4"])
    text = "\n".join(describe(plan, SiteSettings()))
    assert "(0.2 with 10, 0.05 with 50, 0.01 with 200 patients" in text
    assert "multiples of 5" in text and "task.shares is not used" in text
    assert "6 of 2000 over validation cases, 1 of 100" in text
    assert "by tenths of them: 10 numbers" in text
    assert "validation cases, one of 9 numbers" in text
    assert "together" not in "\n".join(describe(plan, SiteSettings(public_data=True)))
    assert "together" not in "\n".join(describe(make_plan("fedavg", *SMALL), SiteSettings()))
