"""Run medsilo's methods as NVFlare recipes with a user's own training script.

The recipes have the arguments of NVFlare's `FedAvgRecipe`, and run in `SimEnv`, `PocEnv` and `ProdEnv`. The training
script must call `medsilo.client.join`.

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
from typing import Any, ClassVar, Literal, NoReturn

import torch
from nvflare.apis.filter import Filter
from nvflare.apis.job_def import ALL_SITES
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe as StockRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe import Run, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import check_unquoted, write_json
from medsilo.core.yaml_text import LARGEST_YAML
from medsilo.flare.airlock_executor import DESCRIBED, AirlockExecutor, ScriptStart, words_of
from medsilo.flare.script_process import ScriptProcess
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import TASK, TRAIN
from medsilo.runs import paths
from medsilo.runs.clean import is_finished
from medsilo_lab.engines.simulator_workspace import EARLIER, failure_in, keep_finished, studies_in
from medsilo_lab.script_plan import INITIAL, plan_of_script
from medsilo_server.flare.controller import MedsiloController
from nvflare_reliability.timeouts import limits

STOCK = signature(StockRecipe).parameters
RUNS = (
    *("train_args", "launch_external_process", "command", "launch_once", "launch_timeout", "shutdown_timeout"),
    *("client_memory_gc_rounds", "cuda_empty_cache"),
)
LARGEST_JOB = 4 << 20  # maximum bytes of a job that NVFlare's sites accept over HTTP
# matches imports of NVFlare's patch for Lightning, which cannot run medsilo's methods
LIGHTNINGS_PATCH = re.compile(r"nvflare\.(client|app_opt)(\.| +import +)lightning")
# EVALUATION matches a script's own evaluation code, and EVALUATION_MODE calls that may end training mode
EVALUATION = re.compile(r"\b(no_grad|inference_mode)\b")
EVALUATION_MODE = re.compile(r"\.eval\(|\.train\(False|mode=False|Trainer|Evaluator|eval_mode")
Tasks = list[str] | None
RENAMED = {"train_script": "script", "train_args": "script_args", "client_memory_gc_rounds": "memory_gc_rounds"}

INSTEAD = {  # argument of NVFlare's recipe that changes the server → what to use in medsilo instead
    "aggregator": 'take the recipe of another method, or plan={"aggregation": {"robust": {"name": "median"}}}; '
    "for a mean of your own see 'medsilo docs research/extend'",
}
ARGUMENTS = {  # key of the plan → argument of the recipe that sets this key
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


def _place_in_job(script: Path) -> str:
    if not script.is_absolute():
        return script.as_posix()
    above = [folder for own in sys.path if script.resolve().is_relative_to(folder := Path(own).resolve())]
    return (
        script.resolve()
        .relative_to(max(above, key=lambda own: len(own.parts), default=script.resolve().parent))
        .as_posix()
    )


class MethodRecipe(Recipe):
    """The base class of the recipes, which create jobs for methods.

    The page docs/research/methods.md describes the arguments of each method.

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
        seed: int | None = None,
        logs: Sequence[str] = (),
        plan: Mapping[str, Any] | None = None,
        airlock: bool = False,
        **more: Any,
    ) -> None:
        """Create the job of a study.

        Args:
            name: the name of the job; by default the name of the method
            model: the network that the script trains, or NVFlare's dictionary with its class path and arguments
            initial_ckpt: a file with the model's initial weights
            min_clients: the minimum number of sites in a round
            num_rounds: the number of rounds
            train_script: the path of the training script
            key_metric: the metric that selects the best model
            key_metric_mode: "max" if higher values are better, "min" if lower values are better
            sites: the names of the sites that take part; by default all connected sites
            input_shape: the shape of one input, [channels, ...], which HarmoFL needs
            seed: a seed for a reproducible study, with which each site seeds the script's random generators before
                every round; with patients' data, the seed also depends on a secret of the site
            logs: names of numbers that the script logs and the server's tracker receives, besides key_metric
            plan: further keys of the plan, such as {"participation": {"when_missing": "wait"}}
            airlock: True to run the script in an isolated process without network, which hospitals may require
            more: the method's own arguments, and NVFlare's arguments for running the script: train_args,
                launch_external_process, command, ...
        """
        if key_metric_mode not in ("min", "max", None):
            raise MedsiloError(f"key_metric_mode: {key_metric_mode!r} is unknown; give 'min' or 'max'")
        if name.endswith(EARLIER):
            raise MedsiloError(f"name: {name!r} is reserved for finished studies of another recipe; give another name")
        self.train_script, self._airlock = train_script, airlock
        self._runner = {name: more.pop(name, STOCK[name].default) for name in RUNS} | {"train_script": train_script}
        # NVFlare searches the attributes of a recipe for secrets, so the script's arguments are stored as attributes
        self.__dict__.update(self._runner)
        self._sites: dict[str, dict[str, Any]] = {}
        # If the names of the sites are known, the job contains no weights for the sites, because the server sends the
        # weights.
        self._names = list(sites)
        module = _module(model, initial_ckpt)
        self._has_statistics = any(isinstance(own, _BatchNorm) and own.track_running_stats for own in module.modules())
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
                logs=logs,
                further=plan,
            )
        except PlanError as error:
            raise PlanError(_by_arguments(str(error))) from None
        written = Path(self._files.name) / paths.PLAN
        written.write_text(self.plan.to_yaml(), "utf-8")
        if (size := written.stat().st_size) > LARGEST_YAML:
            raise MedsiloError(
                f"model: the plan of this model has {size} bytes, more than {LARGEST_YAML}; "
                "give a model with fewer layers"
            )
        job = FedJob(name=name or self.algorithm, min_clients=min_clients)
        job.set_app_packages(["medsilo", "medsilo_script", "medsilo_server", "nvflare_reliability"])
        job.to_server(MedsiloController())
        patience = timeouts_of(self.plan)
        job.to_server({"server": {"task_request_interval": 0.1}, **limits(patience, "server")})
        for file in (written, written.with_name(INITIAL)):
            job.add_file_to_server(str(file), app_folder_type="config")
        super().__init__(job)

    def process_env(self, env: ExecEnv) -> None:
        """Move the finished study of an earlier run out of the workspace, because NVFlare's simulator empties the
        workspace.
        """
        least, sites = self.plan.participation.required, getattr(env, "num_clients", None)
        if sites and least > sites:
            raise MedsiloError(
                f"min_clients: {least} is more than the {sites} clients of {type(env).__name__}; lower min_clients"
            )
        if isinstance(env, SimEnv) and (kept := keep_finished(self._workspace(env))):
            print(f"medsilo: the finished study of the earlier run is now in {kept}")

    def run(self, env: ExecEnv, *args: Any, **more: Any) -> Run:
        """Run the recipe in an NVFlare environment.

        In the simulator, the last printed line contains the path of the study. If the study fails, the error states the
        reason.

        Args:
            env: the environment
            args: further positional arguments of NVFlare's `run`
            more: further keyword arguments of NVFlare's `run`
        """
        if not isinstance(env, SimEnv):
            clients = getattr(env, "clients", None) or range(1, (getattr(env, "num_clients", None) or 0) + 1)
            self._names = self._names or [client if isinstance(client, str) else f"site-{client}" for client in clients]
            if not self._names and (size := sum(self.plan.network.files.values())) > LARGEST_JOB:
                print(
                    f"medsilo: NVFlare's sites take no job of {size >> 20} MB over http; then name them in sites=[...]"
                )
            return super().run(env, *args, **more)
        self._names = []
        workspace = self._workspace(env)
        check_unquoted(workspace, "choose another workspace_root")
        check_unquoted(sys.executable, "install medsilo elsewhere")
        try:
            ended = super().run(env, *args, **more)
        except RuntimeError as error:  # NVFlare's own error contains only a return code
            joins = "medsilo" in Path(self.train_script).read_text()
            hint = "" if joins else f"; {self.train_script} does not join, as by medsilo.client in place of nvflare's"
            raise MedsiloError(f"{failure_in(workspace) or error}{hint}; logs: {workspace}") from error
        for study in studies_in(workspace)[-1:]:
            if not is_finished(study):  # NVFlare itself raises no error for a failed study
                raise MedsiloError(f"{failure_in(workspace) or 'the study did not finish'}; logs: {workspace}")
            print(f"medsilo: finished; for the page of this study, type: medsilo report {study}")
        return ended

    @property
    def framework(self) -> NoReturn:
        """Reject NVFlare's cross-site evaluation, because medsilo's sites do not receive each other's models.

        NVFlare's cross-site evaluation reads the attribute `framework`.
        """
        raise MedsiloError(
            "add_cross_site_evaluation: medsilo's sites do not get each other's models; call join with evaluate= and "
            "test=, so that each site scores its final model"
        )

    def _validate_before_use(self) -> None:
        script = Path(self.train_script)
        if not script.is_file():
            return
        text = script.read_text("utf-8", errors="replace")
        if self._has_statistics and EVALUATION.search(text) and not EVALUATION_MODE.search(text):
            print(
                f"medsilo: warning: {script.name} never calls model.eval(), so batch norm learns from the images of an "
                "evaluation; call model.eval() before an evaluation and model.train() before training"
            )
        if LIGHTNINGS_PATCH.search(text):
            raise MedsiloError(
                f"train_script: {script.name} has NVFlare's patch of Lightning's trainer, which cannot run "
                "medsilo's methods; use one trainer for each of flare.networks(), as in examples/lightning"
            )

    def add_client_input_filter(self, filter: Filter, tasks: Tasks = None, clients: list[str] | None = None) -> None:
        """Add a filter to the messages that the script receives in each round."""
        super().add_client_input_filter(filter, _tasks_there(tasks), clients)

    def add_client_output_filter(self, filter: Filter, tasks: Tasks = None, clients: list[str] | None = None) -> None:
        """Add a filter to the messages that the script sends in each round."""
        super().add_client_output_filter(filter, _tasks_there(tasks), clients)

    def add_server_output_filter(self, filter: Filter, tasks: Tasks = None) -> None:
        """Add a filter to the messages that the server sends in each round."""
        super().add_server_output_filter(filter, _tasks_there(tasks))

    def add_server_input_filter(self, filter: Filter, tasks: Tasks = None) -> None:
        """Add a filter to the messages that the server receives in each round."""
        super().add_server_input_filter(filter, _tasks_there(tasks))

    def enable_log_streaming(self, *file_names: str) -> None:
        """Reject the streaming of logs, because a script may print data that must not leave the site."""
        raise MedsiloError(
            "enable_log_streaming: a site's log contains the script's printed output, which must stay at the site; log "
            "numbers by flare.log, and name them in logs=[...]"
        )

    def _workspace(self, env: SimEnv) -> Path:
        return Path(env.workspace_root).resolve() / self._job.name

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        """Store the arguments in which single sites differ, such as `train_args`. NVFlare's `set_per_site_config`
        passes these arguments.
        """
        for site, given in config.items():
            if odd := sorted(given.keys() - self._runner.keys()):
                raise MedsiloError(f"per-site config of {site}: {odd[0]} must be the same at all sites")
            self._sites[site] = given

    def _prepare_client_apps(self) -> None:
        names = self._sites or self._names
        if names:  # without code in the server's app, NVFlare accepts only classes in NVFlare's own list
            self._job.add_file_to_server(self.train_script)
        for site in names or (ALL_SITES,):
            given = self._runner | self._sites.get(site, {})
            script = Path(given["train_script"])
            # a script with an absolute path may be missing here, because only the sites need the script
            if not script.is_absolute() and not script.is_file():
                raise MedsiloError(
                    f"train_script: {script} is not in the folder {Path.cwd().name}; give the path of a file"
                )
            runner = {RENAMED.get(name, name): value for name, value in given.items()}
            if self._airlock:
                self._prepare_room(runner, site)
            else:
                runs = ScriptRunner(**runner, server_expected_format=ExchangeFormat.PYTORCH)
                self._job.to(runs, site)
                self._job.to(ScriptProcess(), site)
            self._job.to(limits(timeouts_of(self.plan), "site"), site)
            # a job for unknown sites has one app for all sites, and the app must also contain the initial weights
            for name in (paths.PLAN, INITIAL) if site == ALL_SITES else (paths.PLAN,):
                self._job.add_file_to(str(Path(self._files.name) / name), site, app_folder_type="config")

    def _prepare_room(self, runner: Mapping[str, Any], site: str) -> None:
        """Change a site's app so that the script runs in an airlock, an isolated process without network."""
        command = runner["command"] if runner["launch_external_process"] else ["python3", "-u"]
        start = ScriptStart(
            file=_place_in_job(Path(runner["script"])),
            arguments=words_of(runner["script_args"]),
            command=words_of(command),
        )
        described = Path(self._files.name) / site / DESCRIBED
        write_json(described, start.model_dump(mode="json"))
        self._job.add_file_to(str(described), site, app_folder_type="config")
        self._job.to(runner["script"], site)
        self._job.to(AirlockExecutor(), site)


def _tasks_there(tasks: Tasks) -> list[str]:
    """Return the tasks to which a filter applies, and raise MedsiloError if the job lacks one of these tasks.

    >>> _tasks_there(["validate"])
    Traceback (most recent call last):
    medsilo.core.errors.MedsiloError: tasks: this job has no 'validate'; give ["train"], the task of its rounds
    """
    if odd := sorted({*(tasks or ())} - {TRAIN, TASK}):
        raise MedsiloError(f'tasks: this job has no {odd[0]!r}; give ["{TRAIN}"], the task of its rounds')
    return tasks or [TRAIN]


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method, and raise MedsiloError for arguments that change NVFlare's server.

    >>> _numbers({"mu": 0.1, "patience": None})
    {'mu': 0.1}
    """
    for name, value in values.items():
        if name in STOCK and value != STOCK[name].default:
            instead = INSTEAD.get(name, "leave it out")
            raise MedsiloError(f"{name}: the method decides this, not NVFlare's FedAvg at the server; {instead}")
    return {name: value for name, value in values.items() if name not in STOCK}


def _by_arguments(text: str) -> str:
    """Replace the plan's keys in an error message by the recipe's arguments.

    >>> _by_arguments("algorithm.mu: -1 is too small; give 0.0 or more")
    'mu: -1 is too small; give 0.0 or more'
    >>> _by_arguments("when_missing: unknown key (did you mean participation.when_missing?)")
    'when_missing: unknown key (did you mean plan={"participation": {"when_missing": ...}}?)'
    """
    for key, argument in ARGUMENTS.items():
        text = text.replace(key, argument)
    return re.sub(r"\(did you mean (\w+)\.(\w+)\?\)", r'(did you mean plan={"\1": {"\2": ...}}?)', text)


def _module(model: nn.Module | Mapping[str, Any], checkpoint: str | None) -> nn.Module:
    """Return the model with its initial weights. If the model is given by a class path, create the model."""
    if isinstance(model, Mapping):
        named = str(model.get("class_path", model.get("path", "")))
        path, _, kind = named.rpartition(".")
        try:
            model = getattr(import_module(path), kind)(**model.get("args", {}))
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            told = f"model: class_path {named!r} can't be made ({error}); give a class that can be imported"
            raise MedsiloError(told) from error
    if not isinstance(model, nn.Module):
        raise MedsiloError(
            f"model: a {type(model).__name__} is not a PyTorch module; give a module, or its class_path and args"
        )
    if checkpoint:
        try:
            model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))  # noqa: TID251
        except Exception as error:  # loading a damaged file can raise any error
            told = f"initial_ckpt: {Path(checkpoint).name} can't be loaded ({type(error).__name__})"
            raise MedsiloError(f"{told}; give a file on this machine with a state dict of this model") from error
    return model


EXAMPLE = """{title} with a training script of your own.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> recipe = {title}Recipe(model=net, min_clients=2, train_script="client.py", {more})
    >>> recipe.plan.algorithm.name, recipe.plan.training.rounds
    ('{method}', 5)
    """


def _recipe(method: str, title: str, more: str = "num_rounds=5", **numbers: Any) -> type[MethodRecipe]:
    """Create the recipe class of a method.

    Args:
        more: The arguments in the example of the recipe's docstring.
        numbers: The arguments of the method whose defaults differ from the defaults of a plan.
    """
    told = EXAMPLE.format(title=title, method=method, more=more)
    facts = {"algorithm": method, "numbers": numbers, "__doc__": told}
    return type(f"{title}Recipe", (MethodRecipe,), {**facts, "__module__": __name__, "__signature__": _shown()})


def _shown() -> Signature:
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
