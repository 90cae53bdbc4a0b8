"""Compare the example policies with NVFlare's own code that reads policies."""

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.security.security import FLAuthorizer

from medsilo import cli
from medsilo.core.errors import Refused
from medsilo.core.yaml_text import load_yaml
from medsilo.flare.filters import OnlyTheseGroups
from medsilo.flare.wire import refusal, to_parcel, to_shareable
from medsilo.runs.messages import StudyMessage
from medsilo.site.policy import HARMLESS, Policy, ways_around
from medsilo.site.settings import PrivacyRequirements, SiteSettings, make_settings
from medsilo.tasks.sources import DataSource
from medsilo_lab.jobs import CONTROLLER
from tests.conftest import over_all

EXAMPLES = ["strict-hospital", "teaching-hospital"]
EXECUTOR = "medsilo.flare.executor.MedsiloExecutor"
WIDGET = "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_file_is_read_and_explained(example: str, root: Path) -> None:
    folder = root / "site_configs" / example
    SiteSettings.read(folder)
    explained = (folder / "README.md").read_text()
    files = sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    assert "resources.json" in files and "authorization.json" in files
    for name in files:
        assert f"**{name}**" in explained
        for key in json.loads((folder / name).read_text()):
            assert key in (
                *explained.replace("`", " ").replace(":", " ").split(),
                "format_version",
                "permissions",
                "scopes",
            )


def test_the_commented_example_is_read_and_has_every_key(root: Path) -> None:
    folder = root / "site_configs/example"
    SiteSettings.read(folder)
    text = (folder / "medsilo.yaml").read_text()
    assert [name for name in SiteSettings.model_fields if not re.search(rf"^#? ?{name}:", text, re.MULTILINE)] == []
    of_a_set = {"data_set", "lineage"}  # keys in the file of a data set, and not in medsilo.yaml
    inner = [*(DataSource.model_fields.keys() - of_a_set), *PrivacyRequirements.model_fields]
    assert [name for name in inner if not re.search(rf"^# [# ]+{name}:", text, re.MULTILINE)] == []
    assert make_settings(load_yaml(text), "medsilo.yaml") == SiteSettings(), "the values are the defaults"


def test_what_the_commented_example_shows_is_read_as_it_stands_there(root: Path) -> None:
    text = (root / "site_configs/example/medsilo.yaml").read_text()
    section = text.partition("\n# data:\n")[2].partition("\n# output")[0]
    lines = [line.removeprefix("# ").removeprefix("  # ") for line in f"# data:\n{section}".splitlines()]
    keys = [line for line in lines if re.match(r"(  )?[a-z_]+: ?|data:$", re.sub(r"^ {2,}", "  ", line))]
    values = load_yaml("\n".join(re.sub(r"^ *(?=[a-z_]+:)", "" if line == "data:" else "  ", line) for line in keys))
    DataSource.model_validate(values["data"])
    demands = text.partition("\n# privacy: ")[2].partition("\n# Patients")[0].splitlines()[1:]
    PrivacyRequirements.model_validate(load_yaml("\n".join(line.removeprefix("#   ") for line in demands)))


@pytest.mark.parametrize(
    ("path", "strict", "teaching"),
    [
        (EXECUTOR, True, True),
        ("medsilo.flare.filters.OnlyTheseGroups", True, True),
        ("medsilo_server.flare.controller.MedsiloController", False, False),
        ("medsilo.flare.executor.MedsiloExecutorX", False, False),
        ("medsilo.flare.filters.add_job_audit_event", False, False),
        ("medsilo.flare.workspace.write_text", False, False),
        ("nvflare.app_common.logging.job_log_streamer.JobLogStreamer", False, True),
        ("nvflare.app_common.widgets.metric_relay.MetricRelay", False, False),
        (WIDGET, False, False),
        ("nvflare.app_common.np.np_trainer.NPTrainer", False, False),
        ("subprocess.Popen", False, False),
        (f"{EXECUTOR};os", False, False),
        ("../medsilo.flare.executor.MedsiloExecutor", False, False),
    ],
)
def test_classes_that_a_job_may_name(path: str, strict: bool, teaching: bool, root: Path, tmp_path: Path) -> None:
    for example, allowed in (("strict-hospital", strict), ("teaching-hospital", teaching)):
        kit = tmp_path / example
        shutil.copytree(root / "site_configs" / example, kit / "local")
        (kit / "startup").mkdir()
        authorizer = ComponentPathAuthorizer()
        if allowed:
            authorizer.authorize_component_config({"path": path}, workspace=Workspace(str(kit)))
        else:
            with pytest.raises(UnsafeComponentError):
                authorizer.authorize_component_config({"path": path}, workspace=Workspace(str(kit)))


def test_our_classes_are_where_the_lists_say() -> None:
    for path in (CONTROLLER, EXECUTOR, *HARMLESS):
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_example_lists_more_than_single_classes(example: str, root: Path) -> None:
    """All examples require approvals, because no list of allowed classes limits the code of an approved plan."""
    folder = root / "site_configs" / example
    assert not [*ways_around(folder)] and SiteSettings.read(folder).approval == "required"


@over_all(
    "listed, found",
    [
        ([EXECUTOR, *HARMLESS], False),
        (None, True),
        ([EXECUTOR, "*"], True),
        ([EXECUTOR, WIDGET], True),
        (["nvflare"], True),
        (["medsilo.flare"], True),
        (["medsilo.flare._Hidden"], False),
    ],
)
def test_a_list_of_classes_that_reach_files_is_found(listed: list[str] | None, found: bool, tmp_path: Path) -> None:
    (tmp_path / "resources.json").write_text(json.dumps({"x": 1} if listed is None else {"class_allow_list": listed}))
    assert bool(ways_around(tmp_path)) is found
    (tmp_path / "resources.json").write_text(
        json.dumps({"class_list_enforcement_mode": "warn", "class_allow_list": []})
    )
    assert len(ways_around(tmp_path)) == 1


@pytest.mark.parametrize(
    ("example", "role", "right", "allowed"),
    [
        ("strict-hospital", "lead", "submit_job", True),
        *[("strict-hospital", role, "byoc", False) for role in ("project_admin", "org_admin", "lead", "member")],
        ("strict-hospital", "lead", "shell_commands", False),
        ("strict-hospital", "project_admin", "shell_commands", False),
        *[("teaching-hospital", role, "byoc", False) for role in ("project_admin", "org_admin", "lead", "member")],
        *[(example, "member", "submit_job", False) for example in EXAMPLES],
    ],
)
def test_rights_by_role(example: str, role: str, right: str, allowed: bool, root: Path) -> None:
    policy = json.loads((root / "site_configs" / example / "authorization.json").read_text())
    person = Person("somebody@clinic.org", "clinic", role)
    asked = AuthzContext(user=person, submitter=person, right=right)
    assert FLAuthorizer("hospital", policy).authorize(asked)[0] is allowed


@over_all(
    "rights, sends",
    [("any", True), (["o:site"], True), ({"BYOC ": "any"}, True), ("none", False), ({"view": "any"}, False)],
)
def test_whoever_nvflare_lets_send_code_is_found(rights: Any, sends: bool, tmp_path: Path) -> None:
    policy = {"format_version": "1.0", "permissions": {"lead": rights}}
    (tmp_path / "authorization.json").write_text(json.dumps(policy))
    person = Person("somebody@clinic.org", "clinic", "lead")
    allowed = FLAuthorizer("clinic", policy).authorize(AuthzContext(user=person, submitter=person, right="byoc"))[0]
    assert allowed is sends and bool(ways_around(tmp_path)) is sends
    # NVFlare reads its default file if authorization.json is missing
    (tmp_path / "authorization.json").rename(tmp_path / "authorization.json.default")
    assert bool(ways_around(tmp_path)) is sends


def test_nvflare_s_default_file_holds_where_a_hospital_has_none_of_its_own(tmp_path: Path) -> None:
    cards: list[dict[str, Any]] = [{"num_of_gpus": 2}, {}, {"num_of_gpus": 4, "ignore_host": True}]
    components = [{"args": args} for args in cards]
    values = {"class_allow_list": [], "components": components, "allow_log_streaming": False}
    (tmp_path / "resources.json.default").write_text(json.dumps(values))
    policy = Policy.read(tmp_path)
    assert (policy.starts, policy.streams_logs, policy.gpus) == (False, False, 2)
    (tmp_path / "resources.json").write_text(json.dumps({"class_allow_list": ["*"]}))
    policy = Policy.read(tmp_path)
    assert (policy.starts, policy.streams_logs, policy.gpus) == (True, True, 0)


def test_disclosure_tells_the_filters(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    examples = root / "site_configs"
    settings = "device: cpu\n"

    def told(local: Path) -> list[str]:
        (local / "medsilo.yaml").write_text(settings)
        arguments = ["disclosure", str(root / "jobs/harmofl"), "--settings", str(local)]
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        return out.splitlines() if code == 0 else err.splitlines()

    (tmp_path / "local").mkdir()
    assert told(tmp_path / "local")[-1].startswith("No privacy.json")
    shutil.copy(examples / "strict-hospital/privacy.json", tmp_path / "local")
    assert told(tmp_path / "local")[-2:] == [
        "privacy.json, scope strict, does to every answer:",
        '  OnlyTheseGroups {"groups": ["model"]}',
    ]
    (tmp_path / "local/privacy.json").write_text("[]")
    (line,) = told(tmp_path / "local")
    assert "privacy.json is not a JSON object" in line


def test_only_listed_groups_leave(root: Path) -> None:
    policy = json.loads((root / "site_configs/strict-hospital/privacy.json").read_text())
    (scope,) = policy["scopes"]
    assert policy["default_scope"] == scope["name"]
    (entry,) = scope["task_result_filters"]
    assert entry["path"] == f"{OnlyTheseGroups.__module__}.{OnlyTheseGroups.__name__}"
    keep = OnlyTheseGroups(**entry["args"])
    told = Policy.read(root / "site_configs/strict-hospital")
    assert told.lets_out("model") and not told.lets_out("amplitude")
    weights = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}

    def passed(*groups: str) -> StudyMessage:
        return to_parcel(
            keep.process(to_shareable(StudyMessage(dict.fromkeys(groups, weights), {"samples": 3})), FLContext())
        )

    assert torch.equal(passed("model").groups["model"]["w"], weights["w"])
    assert passed().groups == {}
    for groups in (["amplitude"], ["model", "amplitude"], ["Model"]):
        with pytest.raises(Refused, match="does not send"):
            passed(*groups)
    with pytest.raises(Refused, match="WEIGHTS"):
        keep.process(DXO(DataKind.WEIGHTS, data=weights).to_shareable(), FLContext())
    answer = refusal("no data")
    assert keep.process(answer, FLContext()) is answer


def test_the_server_learns_that_a_filter_held_an_answer_back() -> None:
    answer = Shareable()
    answer.set_return_code(ReturnCode.TASK_RESULT_FILTER_ERROR)
    with pytest.raises(Refused, match="a privacy filter.*the answer back"):
        to_parcel(answer)
