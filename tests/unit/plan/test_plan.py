"""A wrong plan gives one line that names key, value and remedy, and a valid plan has a stable hash."""

import os
import subprocess
import sys
from itertools import permutations
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from medsilo.core.errors import PlanError
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import NETWORKS, TASKS
from tests.conftest import METHODS, SITES, make_plan, over_all

GOOD = """
algorithm: {name: fedprox, mu: 0.1}
task: {name: synthetic-activity}
training: {rounds: 3, learning_rate: 1e-4}
participation: {sites: [hospital-b, hospital-a]}
"""


def refusal(changes: list[str], method: str = "fedavg") -> str:
    with pytest.raises(PlanError) as caught:
        make_plan(method, *changes)
    text = str(caught.value)
    assert text
    assert len(text.splitlines()) == 1, text
    assert "pydantic" not in text
    return text


def from_text(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path)


# Each row has a key, a value and a word that the error's remedy contains.
WRONG = [
    # Values out of the range of their key.
    (["training.rounds=0"], "training.rounds", "0", "1 or more"),
    (["training.rounds=1000000000"], "training.rounds", "1000000000", "10000 or less"),
    (["training.rounds=2.5"], "training.rounds", "2.5", "integer"),
    (["training.rounds=three"], "training.rounds", "three", "integer"),
    (["training.rounds="], "training.rounds", "None", "integer"),
    (["training.local_epochs=0"], "training.local_epochs", "0", "1 or more"),
    (["training.batch_size=0"], "training.batch_size", "0", "1 or more"),
    (["training.learning_rate=0"], "training.learning_rate", "0", "1e-08 or more"),
    (["training.learning_rate=.nan"], "training.learning_rate", "nan", "finite"),
    (["training.learning_rate=1e999"], "training.learning_rate", "inf", "finite"),
    (["training.learning_rate=fast"], "training.learning_rate", "fast", "number"),
    (["training.momentum=1"], "training.momentum", "1", "less than 1"),
    (["training.weight_decay=-1e-4"], "training.weight_decay", "-0.0001", "0 or more"),
    (["training.optimizer=lion"], "training.optimizer", "lion", "'sgd'"),
    (["training.optimizer_state=drop"], "training.optimizer_state", "drop", "'keep'"),
    (["seed=-1"], "seed", "-1", "0 or more"),
    (["seed=4294967296"], "seed", "4294967296", "less than 4294967296"),
    (["protocol=mine"], "protocol", "mine", "'default'"),
    (["transport.precision=float16"], "transport.precision", "float16", "'bfloat16'"),
    (["model_selection.keep=first"], "model_selection.keep", "first", "'best'"),
    (["participation.timeout=0"], "participation.timeout", "0", "1 or more"),
    (["participation.when_missing=ignore"], "participation.when_missing", "ignore", "'continue'"),
    (["task.alpha=0"], "task.alpha", "0", "0.001 or more"),
    (["network.name=activity-cnn", "network.norm=layer"], "network.norm", "layer", "'batch'"),
    # Combinations of keys that are impossible or have no effect.
    (["training.optimizer=adam", "training.momentum=0.9"], "training", "momentum", "remove momentum"),
    (["training.momentum=0.9", "training.optimizer=adamw"], "training", "momentum", "remove momentum"),
    (["training.warmup=2"], "training", "warmup", "lower warmup"),
    (["training.betas=[0.8, 0.9]"], "training", "betas", "optimizer=adam"),
    (
        ["training.optimizer=adam", "training.momentum=0", "training.betas=[0.9, 1.0]"],
        "training.betas",
        "1.0",
        "less than 1",
    ),
    (["training.optimizer=adam", "training.momentum=0", "training.betas=[0.9]"], "training.betas", "", ""),
    # Unknown keys and names, on all levels of the plan.
    (["algorithm.name=fedsum"], "algorithm.name", "fedsum", "medsilo list"),
    (["algorithm.name=fedsum"], "algorithm.name", "fedsum", "did you mean 'fedsm'?"),
    (["algorithm.name=FedAvgg"], "algorithm.name", "FedAvgg", "did you mean 'fedavg'?"),
    (["algorithm.name=medsilo.methods.fedavg:FedAvg"], "algorithm.name", "FedAvg", "choose one of"),
    (["packages={acme: 1.0}"], "packages.acme", "1.0", "is not a section"),
    (["algorithm.name=null"], "algorithm.name", "None", "'fedavg'"),
    (["algorithm.name=[fedavg]"], "algorithm.name", "fedavg", "'fedavg'"),
    (["algorithm=fedavg"], "algorithm", "fedavg", "algorithm.name=fedavg"),
    (["aggregation.robust=median"], "aggregation.robust", "median", "aggregation.robust.name=median"),
    (["task.name=prostates"], "task.name", "prostates", "did you mean 'prostate'?"),
    (["network.name=resnet"], "network.name", "resnet", "'small-cnn'"),
    (["rounds=3"], "rounds", "3", "training"),
    (["training.epochs=3"], "training.epochs", "3", "local_epochs"),
    (["algorithm.mu=0.1"], "algorithm.mu", "0.1", "weighting"),
    (["task.person=3"], "task.person", "3", "persons"),
    (["network.name=activity-cnn", "network.width=3"], "network.width", "3", "hidden"),
    (["participation.site=[a]"], "participation.site", "a", "sites"),
    (["transport.compress=true"], "transport.compress", "True", "precision"),
    (["model_selection.metric=dice"], "model_selection.metric", "dice", "keep"),
    (["training.rounds.more=1"], "training.rounds", "more", "integer"),
    (["training=3"], "training", "3", "section"),
    (["network=3"], "network", "3", "section"),
    # Errors about names of sites.
    (["participation.sites=[]"], "participation", "zero sites", "participation.minimum"),
    (["participation.sites=[a, a]"], "participation.sites", "twice", "once"),
    (["participation.sites=[]", "participation.minimum=0"], "participation.minimum", "0", "1 or more"),
    (["participation.minimum=4"], "participation", "minimum 4", "lower it"),
    (["participation.when_missing=continue", "participation.minimum=3"], "participation", "continue", "lower minimum"),
    (["participation.sites=hospital-a"], "participation.sites", "hospital-a", ""),
    (["participation.sites=[1, 2]"], "participation.sites.0", "1", "string"),
    (["task.name=table", "task.labels=[a]"], "task.labels", "a", "2 or more"),
]


def test_every_refusal_is_one_line_with_key_value_and_fix(subtests: pytest.Subtests) -> None:
    for changes, key, value, fix in WRONG:
        with subtests.test(changes=changes):
            text = refusal(changes)
            assert text.startswith(key)
            assert value in text
            assert fix in text
            assert "pattern" not in text


@over_all("task, label", [*(("table", label) for label in ("=a", "@a", "+a", "-a")), ("image-folder", "Ödem")])
def test_a_class_that_a_plan_cannot_name_is_refused_without_an_expression(task: str, label: str) -> None:
    text = refusal([f"task.name={task}", f"task.labels=['{label}', b]"])
    assert text.startswith(f"task.labels.0: '{label}'") and "begin with a letter" in text
    assert "^" not in text and "; task" not in text, "the error has a pattern or a second problem"


ODD = ["", ".", "..", "a/b", "a\\b", "a b", "-a", "a..b", "å", "a\nb", "a\0b", "$(id)", "a;b", "~", "a" * 64, "*"]


def test_odd_site_names_are_refused_in_one_line(subtests: pytest.Subtests) -> None:
    for name in ODD:
        values = make_plan().resolved()
        values["participation"]["sites"] = ["good", name]
        with subtests.test(name=name):
            with pytest.raises(PlanError) as caught:
                parse_plan(values)
            text = str(caught.value)
            assert len(text.splitlines()) == 1, text
            assert text.startswith("participation.sites: site name")
            assert repr(name) in text
            assert "letters, digits" in text


@pytest.mark.parametrize("name", ["a", "Hospital_3", "st.mary-7", "0", "a" * 63])
def test_ordinary_site_names_are_taken(name: str) -> None:
    assert make_plan(sites=[name]).participation.sites == (name,)


def test_a_method_without_its_layer_is_refused() -> None:
    text = refusal(["network.name=activity-cnn", "network.norm=none"], "fedbn")
    assert text.startswith("algorithm.name: fedbn keeps norms") and "network.norm=batch" in text and "fedavg" in text
    for changes in (
        ["network.name=activity-cnn", "network.norm=group"],
        ["network.name=unet", "network.norm=instance"],
    ):
        task = ["task.name=synthetic-prostate"] if "network.name=unet" in changes else []
        plan = make_plan("fedbn", *task, *changes)
        (group,) = plan.course.last.groups
        networks = plan.build_networks()
        assert 0 < len(group.of(networks)) < len(networks["model"].state_dict())


@pytest.mark.parametrize("change", ["training.rounds", "=3", "training..rounds=3", ".rounds=3", "training.=3", ""])
def test_a_change_that_is_no_change_is_refused(change: str) -> None:
    text = refusal([change])
    assert repr(change) in text
    assert "training.rounds=3" in text


def test_a_change_whose_value_is_no_yaml_is_refused() -> None:
    text = refusal(["seed=[1"])
    assert "seed" in text
    assert "'[1'" in text
    assert "quote" in text


def test_all_errors_stand_in_the_same_line() -> None:
    text = refusal(["training.rounds=0", "seed=-1", "algorithm.mu=1"])
    for key in ("training.rounds", "seed", "algorithm.mu"):
        assert key in text


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "value", ["seed: 2020-01-01", "seed: !!binary aGk=", "seed: !!set {a}", "2020-01-01: 1", "seed: &a [*a]"]
)
def test_values_that_only_yaml_knows_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_text(tmp_path, f"{GOOD}{value}\n")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change", ["training.rounds=true", "training.learning_rate=yes", "seed=false", "training.betas=[true, 0.9]"]
)
def test_a_truth_value_is_no_number(change: str) -> None:
    text = refusal([change])
    assert text.startswith(change.partition("=")[0])
    assert "is a truth value" in text


@pytest.mark.parametrize("value", ["1", "0", "'yes'", "0.0"])
def test_a_number_is_no_truth_value(value: str) -> None:
    assert "give true or false" in refusal([f"training.nesterov={value}"])
    assert make_plan("fedavg", "training.nesterov=yes", "training.momentum=0.9").training.nesterov is True


def test_whole_numbers_stand_for_others_and_lists_for_tuples() -> None:
    changes = ["training.optimizer=adam", "training.betas=[0, 0.9]", "training.momentum=0"]
    training = make_plan("fedavg", "training.learning_rate=1", *changes).training
    assert (training.learning_rate, training.betas) == (1.0, (0.0, 0.9))
    assert {type(number) for number in (training.learning_rate, *training.betas)} == {float}


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("rounds=3", "training.rounds"),
        ("training.round=3", "rounds"),
        ("training.lr=0.1", "learning_rate"),
        ("training.epochs=2", "local_epochs"),
        ("trainig.rounds=3", "training"),
        ("training.optimizer=sdg", "sgd"),
    ],
)
def test_what_is_nearly_right_gets_a_suggestion(change: str, meant: str) -> None:
    assert refusal([change]).endswith(f"(did you mean {meant}?)")


def test_a_site_whose_name_looks_like_a_number_keeps_it() -> None:
    plan = parse_plan({**make_plan().resolved(), "participation": {"sites": ["1e5", "2"], "minimum": 2}})
    assert parse_plan(load_yaml(plan.to_yaml())) == plan


def test_a_number_that_yaml_takes_for_text_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text, because 1e-4 has no decimal point."""
    plan = from_text(tmp_path, GOOD)
    assert plan.training.learning_rate == 1e-4
    assert type(plan.training.learning_rate) is float
    assert plan.hash == from_text(tmp_path, GOOD.replace("1e-4", "0.0001")).hash


# ---------------------------------------------------------------------------------------------------- changes
def test_changes_reach_every_section() -> None:
    changes = ["training.rounds=7", "training.betas=[0.9, 0.999]", "participation.sites=[b, a]", "seed=5"]
    plan = make_plan("fedprox", *changes, "algorithm.mu=0.5", "transport.precision=bfloat16")
    assert plan.training.rounds == 7
    assert plan.participation.sites == ("a", "b")
    assert plan.seed == 5
    assert plan.algorithm.mu == 0.5
    assert plan.transport.precision == "bfloat16"


def test_the_last_of_two_changes_counts() -> None:
    assert make_plan("fedavg", "seed=1", "seed=2").seed == 2


def test_changes_leave_the_given_values_alone() -> None:
    values = make_plan().resolved()
    before = str(values)
    parse_plan(values, ["training.rounds=9", "network.hidden=8", "algorithm.name=local"])
    assert str(values) == before


def test_another_method_drops_the_former_ones_numbers() -> None:
    plan = make_plan("fedprox", "algorithm.mu=0.5", "algorithm.weighting=uniform")
    changed = plan.with_changes(["algorithm.name=fedbn"])
    assert changed.resolved()["algorithm"] == {
        "name": "fedbn",
        "weighting": None,
        "amplitude": None,
        "perturbation": None,
    }
    assert changed.with_changes(["algorithm.name=fedprox"]).algorithm.mu == 0.01
    assert plan.with_changes(["algorithm.name=fedprox"]).algorithm.mu == 0.5
    assert plan.with_changes(["algorithm.name=fedprox", "algorithm.mu=2"]).algorithm.mu == 2


def test_a_name_may_have_letters_of_any_case() -> None:
    plan = make_plan("fedprox", "algorithm.mu=0.5")
    assert plan.with_changes(["algorithm.name=FedProx", "task.name=Synthetic-Activity"]) == plan
    assert make_plan("FedAvg", "network.name=Activity-CNN").hash == make_plan("fedavg").hash


def test_another_network_drops_the_former_ones_numbers() -> None:
    plan = make_plan("fedavg", "network.name=activity-cnn", "network.hidden=8")
    assert plan.with_changes(["task.name=synthetic-histology", "network.name=small-cnn"]).network.width == 16


# ---------------------------------------------------------------------------------------------------- resolved
OF_A_TABLE = ("task.labels=[a,b,c]", "network.name=mlp", "network.norm=batch")


# Plans of all methods, networks and tasks have similar sections, so the test varies only the task; test_methods.py and
# test_nnunet_task.py test more plans.
WRITTEN = [task for task in TASKS if task not in ("nnunet", "script")]


@pytest.mark.slow
def test_the_resolved_plan_is_the_plan(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for task in WRITTEN:
        with subtests.test(task=task):
            plan = make_plan("fedavg", f"task.name={task}", *(OF_A_TABLE if task == "table" else ()))
            written = from_text(tmp_path, plan.to_yaml())
            assert written == plan
            assert written.hash == plan.hash
            assert written.to_yaml() == plan.to_yaml()
            assert plan.with_changes([]) == plan
            resolved = plan.resolved()
            assert resolved["network"]["name"] in NETWORKS
            assert resolved["training"]["local_epochs"] == 1
            assert resolved["participation"]["timeout"] == 120


def test_the_order_of_keys_and_sites_does_not_change_the_hash(tmp_path: Path) -> None:
    lines = GOOD.strip().splitlines()
    turned = "\n".join(reversed(lines)).replace("[hospital-b, hospital-a]", "[hospital-a, hospital-b]")
    assert from_text(tmp_path, turned).hash == from_text(tmp_path, GOOD).hash


def test_the_lead_s_words_are_one_line_each() -> None:
    with pytest.raises(PlanError, match=r"study\.purpose"):
        parse_plan(make_plan("fedavg").resolved() | {"study": {"purpose": "one\ntwo"}})
    with pytest.raises(PlanError, match=r"study\.title"):
        parse_plan(make_plan("fedavg").resolved() | {"study": {"title": "x" * 400}})


def test_every_key_counts_in_the_hash() -> None:
    plan = make_plan("fedprox", "training.warmup=1", "aggregation.robust={name: median}", "task.score=auroc")
    for name, told in plan.resolved().items():
        section = getattr(plan, name)
        if isinstance(section, BaseModel):
            assert told.keys() == type(section).model_fields.keys(), name


def test_another_optimizer_brings_its_own_numbers() -> None:
    plan = make_plan().with_changes(
        ["training.learning_rate=0.3", "training.momentum=0.9", "training.weight_decay=0.2"]
    )

    def numbers(*changes: str) -> tuple:
        own = plan.with_changes(changes).training
        return own.optimizer, own.learning_rate, own.weight_decay, own.momentum, own.betas

    usual = (0.9, 0.999)
    assert numbers("training.optimizer=adam") == ("adam", 0.001, 0.0, 0.0, usual)
    assert numbers("training.optimizer=adamw") == ("adamw", 0.001, 0.01, 0.0, usual)
    assert numbers("training.optimizer=sgd") == ("sgd", 0.3, 0.2, 0.9, usual)
    for changes in permutations(["training.learning_rate=0.1", "training.optimizer=adam", "training.betas=[0.8, 0.9]"]):
        assert numbers(*changes) == ("adam", 0.1, 0.0, 0.0, (0.8, 0.9))
    back = plan.with_changes(["training.optimizer=adam"]).with_changes(["training.optimizer=sgd"]).training
    assert (back.learning_rate, back.momentum) == (0.01, 0.0)


def test_a_plan_without_warm_up_keeps_its_hash() -> None:
    """The hash covers only keys in the plan, so a plan without the key "warmup" has the same hash as in earlier
    versions.
    """
    plan = make_plan()
    assert "warmup" not in plan.resolved()["training"] and "warmup" not in plan.to_yaml()
    assert plan.with_changes(["training.warmup=1"]).with_changes(["training.warmup=0"]).hash == plan.hash


def test_one_key_has_a_plan_of_volumes_learned_slice_by_slice(root: Path) -> None:
    path = root / "jobs/fedavg/plans/nifti-folder.yaml"
    whole, sliced = (load_plan(path, changes).resolved() for changes in ([], ["task.dimensions=2"]))
    for key in ("size", "target_spacing"):
        assert len(whole["task"][key]) == 3 and sliced["task"][key] == whole["task"][key][:2]
    assert (whole["network"]["dimensions"], sliced["network"]["dimensions"]) == (3, 2)
    own = load_plan(path, ["task.size=[48, 32]", "task.dimensions=2"])
    assert own.hash == load_plan(path, ["task.dimensions=2", "task.size=[48, 32]"]).hash


# ---------------------------------------------------------------------------------------------------- networks
def weights(plan: Plan) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in plan.build_networks()["model"].state_dict().values()])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first = weights(make_plan("fedavg", "seed=3"))
    torch.rand(17)
    assert torch.equal(first, weights(make_plan("fedavg", "seed=3")))
    for method in METHODS:  # all methods start from the same weights, so that their results can be compared
        assert torch.equal(first, weights(make_plan(method, "seed=3", "training.rounds=9")))
    assert not torch.equal(first, weights(make_plan("fedavg", "seed=4")))


def test_a_plan_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    plan = make_plan("fedbn")
    plan.build_networks()
    plan.with_changes(["seed=5"]).build_networks()
    assert torch.equal(torch.rand(4), expected)
    # the default device is the CPU again after checking networks on the meta device
    assert torch.tensor(0.0).device == torch.device("cpu")


def test_what_participation_requires() -> None:
    assert make_plan().participation.required == len(SITES)
    assert make_plan("fedavg", "participation.minimum=2").participation.required == 2
    free = make_plan("fedavg", "participation.sites=[]", "participation.minimum=1").participation
    assert (free.sites, free.required) == ((), 1)


def test_a_plan_reaches_another_process_whole(subtests: pytest.Subtests) -> None:
    """A comparison sends the plan of each run to a separate process."""
    for method in (*METHODS, "central"):
        with subtests.test(method=method):
            plan = make_plan(method)
            there = ForkingPickler.loads(ForkingPickler.dumps(plan))
            assert there == plan and there.hash == plan.hash
            assert [phase.name for phase in there.course.phases] == [phase.name for phase in plan.course.phases]


FORKED = """
import os, signal, sys, time, torch
from torch.nn.functional import conv2d
from medsilo.plan import parse_plan
unet = {"name": "unet", "features": [32, 64, 128], "norm": "batch"}  # has tensors that several threads fill
for sections in (
    {"algorithm": {"name": "fedavg"}, "task": {"name": "synthetic-histology"}},
    {"algorithm": {"name": "fedsm"}, "task": {"name": "synthetic-prostate"}, "network": unet},
):
    parse_plan({**sections, "participation": {"sites": ["a", "b"]}})
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    conv2d(torch.ones(32, 3, 64, 64), torch.ones(16, 3, 3, 3)).sum()
    os._exit(0)
until = time.monotonic() + 120
while time.monotonic() < until:
    if os.waitpid(child, os.WNOHANG)[0]:
        sys.exit(0)
    time.sleep(0.05)
os.kill(child, signal.SIGKILL)
sys.exit("the child waits without end")
"""


@pytest.mark.slow
def test_a_process_that_is_forked_after_a_plan_was_read_can_compute() -> None:
    """NVFlare's simulator forks a process for each site.

    After a fork, a computation would wait forever for threads that exist only in the parent process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
