"""NVFlare's Client API with medsilo's methods: a training script of your own changes by two lines.

    import medsilo.client as flare                      # in place of nvflare.client

    flare.init()
    flare.join(model, optimizer, train_loader)          # the other line
    while flare.is_running():
        input_model = flare.receive()
        model.load_state_dict(input_model.params)
        ...                                             # your own loop
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}))

What a method sends, keeps at home and does at each step comes with the job. Methods with further networks need
`flare.networks()` around your loop. What is not here is NVFlare's own: `get_site_name`, `FLModel`, `log`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from nvflare.fuel.f3.cellnet.cell import Cell
from torch import nn
from torch.optim import Optimizer

from medsilo.core import model_folders
from medsilo.core.errors import Lacks, MedsiloError
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare import script_process
from medsilo.flare.script_wire import flat, unflat
from medsilo.flare.wire import LACKS, let_tensors_travel
from medsilo.learning.compute import LossFunction
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.runs.messages import StudyMessage
from medsilo.script.data import Batch, Data, Evaluate, Metrics, Samples, usual_batch
from medsilo.script.network import ScriptNetwork
from medsilo.script.site import ScriptSite
from nvflare_reliability.kit_patches import before_script_connects

__all__ = [
    *("init", "is_evaluate", "is_running", "is_submit_model", "is_train", "join", "networks", "receive", "send"),
    "super_model",
]
SAME = {  # of NVFlare's, which need no change
    *("AnalyticsDataType", "FLModel", "ParamsType", "get_config", "get_job_id", "get_site_name", "get_task_name"),
    *("log", "shutdown", "system_info"),
}


def __getattr__(name: str) -> Any:
    if name in SAME:
        return getattr(flare, name)
    raise AttributeError(f"medsilo.client has no {name}; of nvflare.client it has {', '.join(sorted(SAME))}")


_site: ScriptSite | None = None  # that this process's script trains


def init(*given: Any, **more: Any) -> Any:
    """Begin as NVFlare does. From here on the server may send what the plan needs, and no more.

    >>> init()
    """
    let_tensors_travel(plainly=True)
    before_script_connects(_guard)
    return flare.init(*given, **more)


def _guard(cell: Cell) -> None:
    script_process.guard(cell, _app_folder() / "config" / paths.PLAN)


def join(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    *,
    evaluate: Evaluate | None = None,
    test: Evaluate | None = None,
    validation: Iterable[Any] | None = None,
    loss: LossFunction | None = None,
    scheduler: Any = None,
    samples: Samples = None,
    batch: Batch = usual_batch,
) -> None:
    """Join the study of this job with a model, its optimizer and the loader of its training batches.

    Put the model on its device first. The rest is for some methods and some scripts:

    - evaluate: takes a network, returns its metrics on validation data. Then every model is scored, also the last.
    - test: the same on test data, by which nothing was chosen. It is called once, with the model that was chosen.
    - validation: batches with labels; FedSM finds its threshold by them, and FedSM-extra counts its choices.
    - loss: of (output, target), for MOON, APFL, pFedMe and FedSM-extra, whose objective is more than a loss. HarmoFL
      takes the torch module that your loop calls on the network's output.
    - scheduler: kept with the optimizer's state, should the script start anew.
    - samples: training cases, if the loader does not say; or cases by part, for the report: {"validation": 40,
      "test": 200}.
    - batch: takes a batch apart; by default (inputs, targets), or MONAI's "image" and "label".

    >>> join(model, optimizer, loader, evaluate=evaluate)
    >>> is_running()
    True
    """
    global _site
    folder = _app_folder()
    plan = load_plan(folder / "config" / paths.PLAN)
    model_folders.look_in(folder / "config")
    output = folder.parents[1] / "medsilo"  # beside NVFlare's folders of jobs, which go with the job
    data = Data(loader, validation, samples, batch, loss, evaluate, test)
    _site = ScriptSite(plan, flare.get_site_name(), output, model, optimizer, data, scheduler)


def is_running() -> bool:
    """Wait for a round to train; False when the study is over.

    >>> join(model, optimizer, loader)
    >>> while is_running():
    ...     train(model, optimizer)
    ...     send()
    >>> is_running()
    False
    """
    site = _joined("is_running")
    if site.waiting and not site.work.answer:
        raise MedsiloError("is_running: the round before was not sent; call send() at the end of each round")
    site.waiting = None
    while flare.is_running():
        model = flare.receive()
        if model is None:
            return False
        script_process.take_next(site.plan)
        try:
            answer = site.ask(unflat(model.params or {}, model.meta or {}))
        except Lacks as error:  # the server sends it
            flare.send(flare.FLModel(params={}, meta={LACKS: str(error)}))
            continue
        if answer is None:
            assert site.asked
            model.current_round, model.total_rounds = site.asked.round - 1, site.plan.rounds
            model.params = site.weights()
            site.waiting = model
            return True
        _send(answer)
    return False


def is_train() -> bool:
    """Return whether a round to train has come.

    >>> join(model, optimizer, loader)
    >>> is_running(), is_train(), is_evaluate(), is_submit_model()
    (True, True, False, False)
    """
    return _joined("is_train").waiting is not None


def is_evaluate() -> bool:
    """Return False: `join` is given how to evaluate, and medsilo keeps each site's best model itself."""
    return False


is_submit_model = is_evaluate


def receive() -> flare.FLModel:
    """Return what came, with its number of the round, from 0; its weights are in the model already.

    Its `params` are a copy of the model's weights as they arrived, together with what stays at this site.

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> input_model = receive()
    >>> input_model.current_round, input_model.total_rounds
    (0, 2)
    >>> model.load_state_dict(input_model.params)  # as other scripts do; needless here
    <All keys matched successfully>
    """
    model: flare.FLModel | None = _joined("receive").waiting
    if model is None:
        raise MedsiloError("receive: no round has come; write while is_running()")
    return model


def networks() -> Iterator[tuple[nn.Module, Optimizer]]:
    """Yield each network to train in this round, and the optimizer to step it with.

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> for net, optimizer in networks():  # two for Ditto and FedSM, one for most methods
    ...     train(net, optimizer)
    >>> send()
    """
    return _joined("networks").networks()


def send(model: flare.FLModel | Metrics | float | None = None) -> None:
    """Send what the method sends, now that the round is trained.

    model: NVFlare's, or its metrics alone. They are of the model as it arrived, before it was trained, as in NVFlare;
    the recipe's `key_metric` is among them. Its `params` must be those of the model that joined, or their differences.

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> accuracy = evaluate(model)
    >>> train(model, optimizer)
    >>> send({"accuracy": accuracy})
    """
    site = _joined("send")
    if isinstance(model, flare.FLModel):
        own = site.state.module.state_dict()
        if model.params_type == flare.ParamsType.DIFF and site.waiting:
            own = {name: _difference(now, site.waiting.params[name].to(now.device)) for name, now in own.items()}
        _refuse_other(model.params or {}, own)
        model = model.metrics
    _send(site.finish(model))


def _difference(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return now ^ before if now.dtype is torch.bool else now - before


def _refuse_other(params: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
    """Raise MedsiloError for tensors of another model than that which joined."""
    for name, value in params.items():
        given, mine = torch.as_tensor(value), own.get(name)
        if mine is not None and given.is_set_to(mine):  # the model's own tensor, as most scripts give it
            continue
        if mine is None or given.shape != mine.shape or not given.allclose(mine.to(given), 0, 0, equal_nan=True):
            raise MedsiloError(
                f"send: {name} is not that of the model that joined, which medsilo sends; give its state_dict(), or "
                "the metrics alone"
            )


def _joined(name: str) -> ScriptSite:
    if _site is None:
        raise MedsiloError(f"{name}: this script has not joined; call join(model, optimizer, loader) first")
    return _site


def _send(answer: StudyMessage) -> None:
    tensors, meta = flat(answer)
    told = answer.facts.get("validation")
    flare.send(flare.FLModel(params=tensors, metrics=None if told is None else {"validation": told}, meta=meta))


def super_model(folder: Path | str, model: nn.Module) -> SuperModel:
    """Return FedSM's super model of a run, which answers as one network does.

    folder: `supermodel` of the run, or of a site. model: a network of the script's kind, with any weights.

    >>> model = super_model("study/supermodel", model)
    >>> model(inputs).shape == (len(inputs), classes)
    True
    """
    plan = load_plan(Path(folder) / paths.PLAN)
    if isinstance(plan.network, ScriptNetwork):
        plan.network.make_by(model)
    model_folders.look_in(Path(folder) / model_folders.FOLDER)
    return SuperModel.load(Path(folder), plan)


def _app_folder() -> Path:
    """Return the job's app at this site: its `custom` folder has the script, its `config` folder the plan."""
    for place in map(Path, sys.path):
        if place.name == "custom" and (place.parent / "config" / paths.PLAN).is_file():
            return place.resolve().parent
    raise MedsiloError("join: this job has no plan; make it with a recipe of medsilo.recipes")
