"""Recipes for NVFlare: medsilo's methods with a training script of your own.

They take the arguments of NVFlare's own `FedAvgRecipe` and run in `SimEnv`, `PocEnv` and `ProdEnv`. The script joins
with `medsilo.client.join`.

    from nvflare.recipe import SimEnv
    from medsilo.recipes import FedBNRecipe

    recipe = FedBNRecipe(name="hello", model=Net(), min_clients=3, num_rounds=5, train_script="client.py")
    recipe.execute(SimEnv(num_clients=3))
"""

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
from nvflare.apis.job_def import ALL_SITES
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe as StockRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe import Run, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe
from torch import nn

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import check_unquoted
from medsilo.core.yaml_text import LARGEST_YAML
from medsilo.flare.controller import MedsiloController
from medsilo.flare.script_process import ScriptProcess
from medsilo.flare.simulator_workspace import EARLIER, failure_in, keep_finished, studies_in
from medsilo.flare.timeouts import timeouts_of
from medsilo.runs import paths
from medsilo.runs.clean import is_finished
from medsilo.script.study import INITIAL, plan_of_script
from nvflare_reliability.timeouts import limits

STOCK = signature(StockRecipe).parameters
RUNS = (  # those that say how the script runs
    *("train_args", "launch_external_process", "command", "launch_once", "launch_timeout", "shutdown_timeout"),
    *("client_memory_gc_rounds", "cuda_empty_cache"),
)
LARGEST_JOB = 4 << 20  # bytes that a site of NVFlare's takes over http
# By NVFlare, in its runner of scripts.
RENAMED = {"train_script": "script", "train_args": "script_args", "client_memory_gc_rounds": "memory_gc_rounds"}

ARGUMENTS = {  # of a recipe, by what plans call them
    "algorithm.name: ": "",
    "algorithm.": "",
    "training.rounds": "num_rounds",
    "participation.minimum": "min_clients",
    "participation.sites": "sites",
    "task.metric": "key_metric",
    "task.size": "input_shape=(channels, height, width)",
    "network.norm=batch": "nn.BatchNorm2d behind each convolution",
    "network.name=mlp for a table": "two linear layers for a table",
    "=null": "=None",
}


class MethodRecipe(Recipe):
    """A job of one method. Subclasses name it; `method` has its numbers, as docs/research/methods.md shows them.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> recipe = FedProxRecipe(model=net, min_clients=3, train_script="client.py", mu=0.1)
    >>> recipe.plan.algorithm.mu, recipe.plan.participation.required
    (0.1, 3)
    """

    algorithm: ClassVar[str]
    numbers: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        *,
        name: str = "",
        model: nn.Module | Mapping[str, Any],
        initial_ckpt: str | None = None,
        min_clients: int,
        num_rounds: int = 2,
        train_script: str,
        key_metric: str = "accuracy",
        key_metric_mode: Literal["min", "max"] | None = None,
        sites: Sequence[str] = (),
        input_shape: Sequence[int] | None = None,
        seed: int = 0,
        plan: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """sites: names of those that take part; by default all that are connected. input_shape: of one input,
        [channels, ...]; HarmoFL needs it. plan: further keys of the plan, such as {"participation": {"when_missing":
        "wait"}}. more: the method's own numbers, and how the script runs, as NVFlare's recipe has it: train_args,
        launch_external_process, command, ...
        """
        if key_metric_mode not in ("min", "max", None):
            raise MedsiloError(f"key_metric_mode: {key_metric_mode!r} is unknown; give 'min' or 'max'")
        if name.endswith(EARLIER):
            raise MedsiloError(f"name: {name!r} is where finished studies of another recipe are kept; give another")
        self.train_script = train_script
        self._runner = {name: more.pop(name, STOCK[name].default) for name in RUNS} | {"train_script": train_script}
        self.__dict__.update(self._runner)  # where NVFlare looks for secrets
        self._sites: dict[str, dict[str, Any]] = {}
        self._names = list(sites)  # to each its own job, where they are known: the server sends them the weights
        module = _module(model, initial_ckpt)
        self._files = TemporaryDirectory(prefix="medsilo-recipe-")
        try:
            self.plan = plan_of_script(
                module,
                Path(self._files.name),
                {"name": self.algorithm, **self.numbers, **_numbers(more)},
                rounds=num_rounds,
                minimum=min_clients,
                sites=sites,
                metric=key_metric,
                lower_is_better=key_metric_mode == "min",
                input_shape=input_shape,
                seed=seed,
                further=plan,
            )
        except PlanError as error:
            raise PlanError(_by_arguments(str(error))) from None
        written = Path(self._files.name) / paths.PLAN
        written.write_text(self.plan.to_yaml(), "utf-8")
        if (size := written.stat().st_size) > LARGEST_YAML:
            raise MedsiloError(f"model: its plan has {size} bytes, of at most {LARGEST_YAML}; give one of fewer layers")
        job = FedJob(name=name or self.algorithm, min_clients=min_clients)
        job.set_app_packages(["medsilo", "nvflare_reliability"])
        job.to_server(MedsiloController())
        patience = timeouts_of(self.plan)
        job.to_server({"server": {"task_request_interval": 0.1}, **limits(patience, "server")})
        for file in (written, written.with_name(INITIAL)):
            job.add_file_to_server(str(file), app_folder_type="config")
        super().__init__(job)

    def process_env(self, env: ExecEnv) -> None:
        """Keep the finished study of an earlier run, whose workspace NVFlare's simulator empties."""
        least, sites = self.plan.participation.required, getattr(env, "num_clients", None)
        if sites and least > sites:
            raise MedsiloError(f"min_clients: {least} is more than the {sites} of {type(env).__name__}; lower it")
        if isinstance(env, SimEnv) and (kept := keep_finished(self._workspace(env))):
            print(f"medsilo: the finished study of the earlier run is now in {kept}")

    def run(self, env: ExecEnv, *given: Any, **more: Any) -> Run:
        """Run the recipe. The simulator's last line is where the study is, or why it failed."""
        if not isinstance(env, SimEnv):
            clients = getattr(env, "clients", None) or range(1, (getattr(env, "num_clients", None) or 0) + 1)
            self._names = self._names or [own if isinstance(own, str) else f"site-{own}" for own in clients]
            if not self._names and (size := sum(self.plan.network.files.values())) > LARGEST_JOB:
                print(
                    f"medsilo: NVFlare's sites take no job of {size >> 20} MB over http; then name them in sites=[...]"
                )
            return super().run(env, *given, **more)
        self._names = []
        workspace = self._workspace(env)
        check_unquoted(workspace, "choose another workspace_root")
        check_unquoted(sys.executable, "install medsilo elsewhere")
        try:
            ended = super().run(env, *given, **more)
        except RuntimeError as error:  # which names NVFlare's return code alone
            joins = "medsilo" in Path(self.train_script).read_text()
            hint = "" if joins else f"; {self.train_script} does not join, as by medsilo.client in place of nvflare's"
            raise MedsiloError(f"{failure_in(workspace) or error}{hint}; logs: {workspace}") from error
        for study in studies_in(workspace)[-1:]:
            if not is_finished(study):  # which NVFlare does not tell
                raise MedsiloError(f"{failure_in(workspace) or 'the study did not finish'}; logs: {workspace}")
            print(f"medsilo: finished; for the page of this study, type: medsilo report {study}")
        return ended

    def _workspace(self, env: SimEnv) -> Path:
        return Path(env.workspace_root).resolve() / self._job.name

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        """Take what NVFlare's `set_per_site_config` gives each site, such as its own `train_args`."""
        for site, given in config.items():
            if odd := sorted(given.keys() - self._runner.keys()):
                raise MedsiloError(f"per-site config of {site}: {odd[0]} must be the same at all sites")
            self._sites[site] = given

    def _prepare_client_apps(self) -> None:
        names = self._sites or self._names
        if names:  # a server's app without code of its own is held to NVFlare's list of classes
            self._job.add_file_to_server(self.train_script)
        for site in names or (ALL_SITES,):
            given = self._runner | self._sites.get(site, {})
            runner = {RENAMED.get(name, name): value for name, value in given.items()}
            script = ScriptRunner(**runner, server_expected_format=ExchangeFormat.PYTORCH)
            for part in (script, ScriptProcess(), limits(timeouts_of(self.plan), "site")):
                self._job.to(part, site)
            # To all sites goes what the server has.
            for name in (paths.PLAN, INITIAL) if site == ALL_SITES else (paths.PLAN,):
                self._job.add_file_to(str(Path(self._files.name) / name), site, app_folder_type="config")


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method's own numbers. Other arguments of NVFlare's recipe may have that recipe's defaults.

    >>> _numbers({"mu": 0.1, "patience": None})
    {'mu': 0.1}
    """
    for name, value in given.items():
        if name in STOCK and value != STOCK[name].default:
            raise MedsiloError(f"{name}: the method decides this, not NVFlare's FedAvg at the server; leave it out")
    return {name: value for name, value in given.items() if name not in STOCK}


def _by_arguments(text: str) -> str:
    """Return what is wrong with a plan as the user of a recipe writes it.

    >>> _by_arguments("algorithm.mu: -1 is too small; give 0.0 or more")
    'mu: -1 is too small; give 0.0 or more'
    >>> _by_arguments("when_missing: unknown key (did you mean participation.when_missing?)")
    'when_missing: unknown key (did you mean plan={"participation": {"when_missing": ...}}?)'
    """
    for key, argument in ARGUMENTS.items():
        text = text.replace(key, argument)
    return re.sub(r"\(did you mean (\w+)\.(\w+)\?\)", r'(did you mean plan={"\1": {"\2": ...}}?)', text)


def _module(model: nn.Module | Mapping[str, Any], checkpoint: str | None) -> nn.Module:
    """Return the model with its initial weights."""
    if isinstance(model, Mapping):
        named = str(model.get("class_path", model.get("path", "")))
        path, _, kind = named.rpartition(".")
        try:
            model = getattr(import_module(path), kind)(**model.get("args", {}))
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            told = f"model: class_path {named!r} can't be made ({error}); give a class that can be imported"
            raise MedsiloError(told) from error
    if not isinstance(model, nn.Module):
        raise MedsiloError(f"model: a {type(model).__name__} is no torch module; give one, or its class_path and args")
    if checkpoint:
        try:
            model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))  # noqa: TID251
        except Exception as error:  # whatever is in the file
            told = f"initial_ckpt: {Path(checkpoint).name} can't be loaded ({type(error).__name__})"
            raise MedsiloError(f"{told}; give a file here with a state dict of this model") from error
    return model


EXAMPLE = """{title} with a training script of your own.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> recipe = {title}Recipe(model=net, min_clients=2, train_script="client.py", {more})
    >>> recipe.plan.algorithm.name, recipe.plan.training.rounds
    ('{method}', 5)
    """


def _recipe(method: str, title: str, more: str = "num_rounds=5", **numbers: Any) -> type[MethodRecipe]:
    """Return the recipe of a method. numbers: its own that differ from those of a plan. more: for the example."""
    told = EXAMPLE.format(title=title, method=method, more=more)
    facts = {"algorithm": method, "numbers": numbers, "__doc__": told}
    return type(f"{title}Recipe", (MethodRecipe,), {**facts, "__module__": __name__, "__signature__": _shown()})


def _shown() -> Signature:
    """Return the arguments of a recipe as help() and notebooks show them."""
    *own, more = signature(MethodRecipe).parameters.values()
    return Signature([*own, *(STOCK[name].replace(kind=Parameter.KEYWORD_ONLY) for name in RUNS), more])


FedAvgRecipe = _recipe("fedavg", "FedAvg")
FedProxRecipe = _recipe("fedprox", "FedProx")
FedBNRecipe = _recipe("fedbn", "FedBN")
FedPerRecipe = _recipe("fedper", "FedPer")
LocalRecipe = _recipe("local", "Local")
ScaffoldRecipe = _recipe("scaffold", "Scaffold")
FedNovaRecipe = _recipe("fednova", "FedNova")
FedDynRecipe = _recipe("feddyn", "FedDyn")
FedAvgMRecipe = _recipe("fedavgm", "FedAvgM")
FedAdamRecipe = _recipe("fedadam", "FedAdam")
FedYogiRecipe = _recipe("fedyogi", "FedYogi")
FedAdagradRecipe = _recipe("fedadagrad", "FedAdagrad")
MoonRecipe = _recipe("moon", "Moon")
DittoRecipe = _recipe("ditto", "Ditto")
APFLRecipe = _recipe("apfl", "APFL")
PFedMeRecipe = _recipe("pfedme", "PFedMe")
HarmoFLRecipe = _recipe("harmofl", "HarmoFL", "num_rounds=5, input_shape=(1, 8, 8)")
AdaFedRecipe = _recipe("adafed", "AdaFed", pretraining={"source": "initial"})
DAdaFedRecipe = _recipe("d-adafed", "DAdaFed", pretraining={"source": "initial"})
FAdaFedRecipe = _recipe("f-adafed", "FAdaFed")
FedSMRecipe = _recipe("fedsm", "FedSM")
FedSMExtraRecipe = _recipe("fedsm-extra", "FedSMExtra")
