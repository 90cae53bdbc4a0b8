"""The code in docs/research/extend.md adds a method, a task and a network; medsilo rejects faulty packages."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from medsilo import extend, registry
from medsilo.cli import main
from medsilo.core import package
from medsilo.core.errors import MedsiloError, PlanError, Refused
from medsilo.exchange.channel import Outgoing, Receive
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.learning.compute import Compute
from medsilo.learning.loop import batches
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings
from medsilo_lab.engines import inprocess, simulator
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.commands import joined
from tests.conftest import SITES, make_plan
from tests.outside.curves import Curves
from tests.outside.group_noise import GroupNoise
from tests.sites import sites_of

PAGE = Path(__file__).parents[3] / "docs/research/extend.md"
NAME = "acme-gait"
CPU = Compute()
GAIT = [f"task.name={NAME}", "training.rounds=2"]


def files_of_page() -> dict[str, str]:
    return dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M))


def commands_of_page() -> list[list[str]]:
    return [line.split() for line in re.findall(r"^medsilo (?:run|list).*$", joined(PAGE.read_text("utf-8")), re.M)]


def build(folder: Path, place: Path, **changed: str) -> Path:
    for name, text in {**files_of_page(), "acme_gait/__init__.py": "", **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(place), str(folder)], check=True)
    return place


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    def forget() -> None:
        package.facts_of.cache_clear()
        registry._installed.cache_clear()
        registry._entries.cache_clear()  # another test may have used a folder with this name
        for module in [name for name in sys.modules if name.partition(".")[0] == "acme_gait"]:
            del sys.modules[module]

    def see(place: Path) -> None:
        forget()
        monkeypatch.syspath_prepend(place)
        known = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(place), known])))

    yield see
    monkeypatch.undo()
    forget()


@pytest.fixture
def acme(installed: Path, seen: Callable[[Path], None]) -> Path:
    seen(installed)
    return installed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for site in SITES:
        patients = np.repeat(np.arange(10), 6)
        labels = patients % 2
        windows = random.normal(0, 1, (60, 3, 40)).astype(np.float32) + labels[:, None, None]
        (folder / site).mkdir()
        np.savez(folder / site / "gait.npz", windows=windows, labels=labels, patients=patients)
    return folder


def a_distribution(place: Path, name: str, entries: str, **modules: str) -> Path:
    """Install a package without a list of its files, as some installers do."""
    info = place / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for module, text in modules.items():
        (place / f"{module}.py").write_text(text)
    return place


# ---------------------------------------------------------------------------------------------------- the page


@pytest.mark.slow
def test_the_pages_commands_run_and_both_engines_agree(
    acme: Path, data: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(root / "jobs")
    (tmp_path / "data").symlink_to(data)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(acme), str(root / "custom")]))
    assert len(commands_of_page()) == 4
    for _, *arguments in commands_of_page():
        assert main([*arguments, *(["--device", "cpu"] if arguments[0] == "run" else [])]) == 0
    assert NAME in capsys.readouterr().out
    lg_fedavg = yaml.safe_load((tmp_path / "runs/lg-fedavg/plan.yaml").read_text())
    assert lg_fedavg["algorithm"]["layers"] == 1 and lg_fedavg["packages"] == {NAME: package.facts_of(NAME)}
    one, other = (tmp_path / "runs" / name for name in ("gait", "same"))
    plans = [yaml.safe_load((run / "plan.yaml").read_text()) for run in (one, other)]
    assert plans[0] == plans[1]
    assert plans[0]["packages"] == {NAME: package.facts_of(NAME)}
    assert plans[0]["network"] == {"name": "gait-net", "width": 16}
    for site in SITES:
        tensors = [load_file(run / "sites" / site / "best.safetensors") for run in (one, other)]
        assert all(value.equal(tensors[1][name]) for name, value in tensors[0].items())


@pytest.mark.slow
def test_the_page_s_method_passes_the_page_s_test(acme: Path, tmp_path: Path, root: Path) -> None:
    """A mistake in the method or in the test's list of kept tensors makes a test fail."""
    right = files_of_page()["tests/test_lg_fedavg.py"]
    wrong = right.replace('"model/0.", ', "")
    assert wrong != right
    assert re.fullmatch(r"1[0-9] passed.*", outcome_of(right, acme, tmp_path, root))
    assert re.fullmatch(r"1 failed.*", outcome_of(wrong, acme, tmp_path, root, "-k", "what_stays"))


@pytest.mark.slow
def test_the_page_s_network_and_task_pass_the_page_s_tests(acme: Path, tmp_path: Path, root: Path) -> None:
    right = files_of_page()["tests/test_gait.py"]
    assert re.fullmatch(r"1[0-9] passed.*", outcome_of(right, acme, tmp_path, root))
    wrong = right.replace("np.random.default_rng(0)", "np.random.default_rng()").replace("return folder", "return None")
    assert re.search(r"\d failed", outcome_of(wrong, acme, tmp_path, root, "-k", "TestGait and read_twice"))


def outcome_of(text: str, acme: Path, folder: Path, root: Path, *chosen: str) -> str:
    (folder / "test_page.py").write_text(text, "utf-8")
    pytest_of = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    paths = os.pathsep.join([str(acme), str(root / "custom")])
    done = subprocess.run(
        [*pytest_of, *chosen, str(folder)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1]


def further_examples() -> dict[str, str]:
    blocks = re.findall(r"^```python\n(    .*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    return {text.split("(")[0].removeprefix("    def "): text for text in blocks}


@pytest.mark.slow
def test_the_pages_further_examples_do_what_it_says(
    acme: Path, data: Path, tmp_path: Path, seen: Callable[[Path], None]
) -> None:
    """The test inserts each example unchanged into the class that docs/research/extend.md names."""
    examples, files = further_examples(), files_of_page()
    assert examples.keys() == {"train_round", "private", "across_patients", "cases_in"}
    method = ["training.batch_size=8", *GAIT]
    plain = inprocess.run(
        make_plan("local", "algorithm.name=lg-fedavg", *method), folder=tmp_path / "plain", settings=at(data)
    )
    lg_fedavg, task = "acme_gait/lg_fedavg.py", "acme_gait/task.py"
    changed = {
        lg_fedavg: "\n".join([files[lg_fedavg], examples["train_round"], examples["private"]]),
        task: "\n".join([files[task], examples["across_patients"]]),
    }
    seen(build(tmp_path / "source", tmp_path / "place", **changed))
    for name in [name for name in sys.modules if name.startswith("acme_gait")]:
        del sys.modules[name]
    plan = make_plan("local", "algorithm.name=lg-fedavg", *method)
    assert plan.task.across_patients() == "" and plan.algorithm.privacy_mechanism([]).networks == ("model",)
    half = inprocess.run(plan, folder=tmp_path / "half", settings=at(data))
    for site in SITES:
        one, other = (load_file(run.folder / "sites" / site / "last.safetensors") for run in (plain, half))
        assert any(not torch.equal(one[name], other[name]) for name in one)
    own: dict[str, Any] = {"Curves": Curves, "Tensor": torch.Tensor, "torch": torch, "Path": Path}
    exec(f"class Steps(Curves):\n{examples['cases_in']}", own)
    (tmp_path / "walk.txt").write_text("1\n2.5\n")
    assert own["Steps"]().cases_in((tmp_path / "walk.txt",)).tolist() == [[1.0, 2.5]]


def test_the_pages_yaml_is_read(root: Path) -> None:
    layers, packages = (
        yaml.safe_load(text)
        for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
        if "hash" not in text
    )
    (noise,) = layers["layers"]
    assert GroupNoise.model_validate(noise).noise == noise["noise"]
    assert make_settings(packages, "medsilo.yaml").packages == (NAME,)


def test_the_page_s_use_of_a_predictor_is_one() -> None:
    (written,) = re.findall(r"`(use: ClassVar.*?)`", PAGE.read_text("utf-8"))
    own: dict[str, Any] = {"ClassVar": ClassVar, **{name: getattr(extend, name) for name in extend.__all__}}
    exec(f"class Own:\n    {written}", own)
    assert own["Own"].use.predictor == "name"


def at(data: Path) -> SiteSettings:
    return make_settings({**ALL_MINE, "data": data, "device": "cpu", "packages": ["*"]}, "test")


# ---------------------------------------------------------------------------------------------------- LG-FedAvg
def round_by_hand(plan: Plan, model: nn.Module, site: str, cases: Dataset, number: int) -> None:
    """Train a site's model for one round in plain PyTorch."""
    model.train()
    order = generator_for(plan.seed, site, "shuffle", number, 0)
    for inputs, targets in batches(cases, plan.training.batch_size, CPU, order):
        gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= plan.training.learning_rate * gradient


@pytest.mark.slow
def test_lg_fedavg_shares_its_last_layer_and_no_body_travels(acme: Path, data: Path, tmp_path: Path) -> None:
    plan = make_plan("lg-fedavg", *GAIT, "training.momentum=0")
    settings = SiteSettings(device="cpu", data=data, packages=[NAME])  # type: ignore[arg-type]
    sites = sites_of(plan, tmp_path, settings=settings)
    travelled: set[str] = set()

    class Listening(Loop):
        def ask(self, names: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Any:
            def hear(site: str, reply: StudyMessage) -> None:
                travelled.update(*reply.groups.values())
                receive(site, reply)

            return super().ask(names, outgoing, hear, timeout)

    Coordinator(plan, SITES, Listening(sites), Record(tmp_path), "in-process").run()
    head = {"5.weight", "5.bias"}
    assert travelled == head
    models = {site: plan.build_networks()["model"] for site in SITES}
    for number in (1, 2):
        for site, model in models.items():
            round_by_hand(plan, model, site, sites[site].participant.data.train, number)
        states = [model.state_dict() for model in models.values()]
        for name in head:  # all sites have equal numbers of cases, so all weights in the mean are equal
            mean = sum(state[name] for state in states) / len(states)
            for state in states:
                state[name].copy_(mean)
    for site, model in models.items():
        ends = load_file(tmp_path / "sites" / site / "last.safetensors")
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(ends[name], tensor)
    one, other = (models[site].state_dict() for site in SITES[:2])
    assert not torch.allclose(one["0.weight"], other["0.weight"])


# ---------------------------------------------------------------------------------------------------- who allows it
def test_nothing_of_a_package_is_imported_before_it_is_allowed(acme: Path) -> None:
    values = {**make_plan().resolved(), "task": {"name": "ACME-gait"}, "network": None}
    with pytest.raises(PlanError, match="package acme-gait.*'packages'"):
        parse_plan(values, allowed=["another"])
    with pytest.raises(PlanError, match="does not allow package"):
        parse_plan({**values, "task": {"name": "synthetic-activity"}, "network": {"name": "gait-net"}}, allowed=())
    assert NAME in registry.TASKS and registry.TASKS.package_of(NAME) == NAME
    assert package.facts_of(NAME)["version"] == "1.0"
    assert "acme_gait" not in sys.modules
    assert parse_plan(values, allowed=["Acme_Gait"]).task.name == NAME


@pytest.mark.slow
def test_the_simulator_refuses_what_its_settings_do_not_name(acme: Path, data: Path, tmp_path: Path) -> None:
    plan = make_plan("fedavg", *GAIT)
    with pytest.raises(MedsiloError, match="does not allow package acme-gait"):
        simulator.run(plan, tmp_path / "run", SiteSettings(device="cpu", data=data))  # type: ignore[arg-type]


def asked_to_join(plan: Plan, folder: Path, settings: str, site: str = SITES[0], **facts: Any) -> StudyMessage:
    kit = Workspace(str(folder), site_name=site)
    config = Path(kit.get_app_config_dir("job"))
    config.mkdir(parents=True, exist_ok=True)
    (config / "plan.yaml").write_text(plan.to_yaml())
    (folder / "local" / "medsilo.yaml").write_text(f"device: cpu\nmemory_limit: 0\n{settings}")
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, kit)
    context.set_prop(ReservedKey.RUN_NUM, "job")
    context.set_prop(ReservedKey.IDENTITY_NAME, site)
    told = {"task": "join", "round": 0, "study": "study", "plan": plan.hash, "sites": SITES, "packages": plan.code}
    answer = MedsiloExecutor().execute("medsilo", to_shareable(StudyMessage(facts=told | facts)), context, Signal())
    return to_parcel(answer)


def test_a_site_refuses_a_package_that_its_settings_do_not_name(
    acme: Path, seen: Callable[[Path], None], data: Path, tmp_path: Path
) -> None:
    plan = make_plan("fedavg", *GAIT)
    seen(acme)
    for place in ("startup", "local"):
        (tmp_path / "kit" / place).mkdir(parents=True)
    with pytest.raises(Refused, match=r"package acme-gait.*medsilo\.yaml"):
        asked_to_join(plan, tmp_path / "kit", f"data: {data}\n")
    assert "acme_gait" not in sys.modules
    reply = asked_to_join(plan, tmp_path / "kit", f"data: {data}\npackages: [acme-gait]\n")
    assert reply.facts["packages"] == plan.code and plan.code[NAME] == package.facts_of(NAME)
    without = {name: facts for name, facts in plan.code.items() if name != NAME}
    with pytest.raises(Refused, match=r"runs acme-gait 1\.0 .*, the server"):
        asked_to_join(plan, tmp_path / "kit", f"data: {data}\npackages: [acme-gait]\n", packages=without)


@pytest.mark.slow
def test_the_check_of_a_site_asks_its_settings(acme: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plan.yaml").write_text(make_plan("fedavg", *GAIT).to_yaml())
    for settings, code in (("", 2), ("packages: [acme-gait]\n", 1)):
        (tmp_path / "medsilo.yaml").write_text("device: cpu\n" + settings)
        options = ["--plan", str(tmp_path / "plan.yaml"), "--site", SITES[0], "--settings", str(tmp_path)]
        assert main(["check", *options, "--private", str(tmp_path / "private.txt")]) == code
        assert ("does not allow package" in capsys.readouterr().err) == (code == 2)


# ---------------------------------------------------------------------------------------------------- which package
@pytest.mark.slow
def test_another_version_or_other_files_are_refused(acme: Path, seen: Callable[[Path], None], tmp_path: Path) -> None:
    plan = make_plan("fedavg", *GAIT)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert plan.with_changes(["seed=3"]).packages == plan.packages
    back = plan.with_changes(["task.name=synthetic-activity"])
    whole = ["task.persons=40", "task.windows=80"]
    assert back.packages == {} and back.hash == make_plan("fedavg", "training.rounds=2", *whole).hash
    newer = {"pyproject.toml": files_of_page()["pyproject.toml"].replace('"1.0"', '"1.1"')}
    edited = {"acme_gait/task.py": files_of_page()["acme_gait/task.py"] + "\n"}
    for number, (changed, words) in enumerate([(newer, r"1\.1 \("), (edited, r"1\.0 \(")]):
        seen(build(tmp_path / f"source-{number}", tmp_path / f"place-{number}", **changed))
        with pytest.raises(PlanError, match=rf"packages\.acme-gait: {words}.*the plan needs 1\.0 \("):
            load_plan(tmp_path / "plan.yaml")
        assert make_plan("fedavg", *GAIT).hash != plan.hash


@pytest.mark.slow
def test_a_package_that_is_not_installed_is_named(acme: Path, tmp_path: Path, seen: Any) -> None:
    values = make_plan("fedavg", *GAIT).resolved()
    sys.path.remove(str(acme))
    with pytest.raises(PlanError, match=r"task\.name: 'acme-gait'.*: package acme-gait"):
        parse_plan(values)
    values.pop("packages")
    with pytest.raises(PlanError, match=r"task\.name: 'acme-gait'.*; choose"):
        parse_plan(values)


def test_the_hash_does_not_depend_on_how_it_is_installed(
    acme: Path, seen: Callable[[Path], None], tmp_path: Path
) -> None:
    facts = package.facts_of(NAME)
    editable = shutil.copytree(acme, tmp_path / "editable")
    (info,) = editable.glob("*.dist-info")
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    (editable / "acme_gait/__pycache__").mkdir(exist_ok=True)
    (editable / "acme_gait/__pycache__/x.cpython-311.pyc").write_bytes(b"x")
    seen(editable)
    assert package.facts_of(NAME) == facts
    (info / "direct_url.json").unlink()
    (info / "RECORD").unlink()
    package.facts_of.cache_clear()
    assert package.facts_of(NAME) == facts
    (editable / "acme_gait/more.py").write_text("")
    package.facts_of.cache_clear()
    assert package.facts_of(NAME) != facts


def test_a_file_that_is_gone_is_an_error(acme: Path, seen: Callable[[Path], None], tmp_path: Path) -> None:
    place = shutil.copytree(acme, tmp_path / "place")
    (place / "acme_gait/network.py").unlink()
    seen(place)
    with pytest.raises(MedsiloError, match="package acme-gait.* install"):
        make_plan("fedavg", *GAIT)


# ---------------------------------------------------------------------------------------------------- bad packages
NETWORK = """
from typing import Literal
from medsilo.models.network import Network

class N(Network):
    name: Literal["n"] = "n"
"""
HOOKS = """
from typing import Literal
from medsilo.extend import Algorithm, Group

class N(Algorithm):
    title, paper = "N", "N 2026"
    name: Literal["n"] = "n"

    def groups(self):
        return (Group("model", self.top),)

    def top(self, modules):
        return dict(modules["model"].named_parameters())

    def train_rounds(self, bench):
        return bench.train()
"""
BAD = [
    ("fedavg = bad:N", "", "medsilo.methods", "algorithm.name=fedavg", "in two packages, medsilo and bad-one; rename"),
    (
        "n = bad:N",
        "raise OSError('x')",
        "medsilo.networks",
        "network.name=n",
        "bad-one: 'n' can't be loaded (OSE",
    ),
    ("n = bad:N", "import no.such", "medsilo.networks", "network.name=n", "(the module no is missing); install the"),
    ("n = bad:N", "", "medsilo.networks", "network.name=n", "can't be loaded (AttributeError); install the"),
    ("n = bad:N", "N = 3", "medsilo.networks", "network.name=n", "'n' is not a Network; derive it from medsilo.models"),
    ("n = bad:N", NETWORK, "medsilo.methods", "algorithm.name=n", "'n' is not a Algorithm; derive it"),
    ("m = bad:N", NETWORK, "medsilo.networks", "network.name=m", "has another name; write name: Literal"),
    ("n = bad:N", HOOKS, "medsilo.methods", "algorithm.name=n", "N defines train_rounds, which nobody calls; did you"),
    ("n/m = bad:N", NETWORK, "medsilo.networks", "network.name=n/m", "has odd characters"),
    ("n = medsilo.models.architectures:UNet", NETWORK, "medsilo.networks", "network.name=n", "has another name"),
]


@pytest.mark.parametrize(("entry", "module", "group", "change", "words"), BAD, ids=lambda part: str(part)[:30])
def test_a_bad_package_is_one_line(
    seen: Callable[[Path], None], tmp_path: Path, entry: str, module: str, group: str, change: str, words: str
) -> None:
    sys.modules.pop("bad", None)
    seen(a_distribution(tmp_path, "bad-one", f"[{group}]\n{entry}\n", bad=module))
    with pytest.raises(PlanError) as caught:
        make_plan("fedavg", change)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
    make_plan("fedprox")  # tasks and networks that the package does not change still work


def test_a_name_in_two_packages_is_refused(acme: Path, seen: Callable[[Path], None], tmp_path: Path) -> None:
    seen(a_distribution(tmp_path, "other-gait", f"[medsilo.tasks]\n{NAME} = other:Gait\n"))
    with pytest.raises(PlanError, match="'acme-gait'.*other-gait and acme-gait"):
        make_plan("fedavg", *GAIT)


def test_a_class_that_comes_from_elsewhere_is_refused(acme: Path, seen: Callable[[Path], None], tmp_path: Path) -> None:
    """The hash covers a package's installed files, so medsilo rejects a class from any other file."""
    place = shutil.copytree(acme / "acme_gait", tmp_path / "acme_gait").parent
    sys.path.insert(0, str(place))
    try:
        with pytest.raises(PlanError, match="'acme-gait' is imported.*remove other copies"):
            make_plan("fedavg", *GAIT)
    finally:
        sys.path.remove(str(place))


@pytest.mark.slow
def test_a_tasks_own_network_is_listed_too(seen: Callable[[Path], None], tmp_path: Path) -> None:
    entries = files_of_page()["pyproject.toml"]
    cut = entries[: entries.index('[project.entry-points."medsilo.networks"]')]
    seen(
        build(
            tmp_path / "source",
            tmp_path / "place",
            **{"pyproject.toml": cut + '[tool.setuptools]\npackages = ["acme_gait"]\n'},
        )
    )
    with pytest.raises(PlanError, match="network 'gait-net'"):
        make_plan("fedavg", *GAIT)


# ---------------------------------------------------------------------------------------------------- the registry
@pytest.mark.parametrize("table", registry.TABLES.values(), ids=registry.TABLES)
def test_every_name_of_ours_leads_to_its_class(table: registry.Registry) -> None:
    assert [name for name in table if name in table.builtin] == list(table.builtin)
    for name, found in table.items():
        assert found.model_fields["name"].default == name
        assert table.package_of(name) is None
        assert table.spelled(name.upper()) == name
