"""Use medsilo's methods in a training script for NVFlare's Client API, by changing two lines of the script.

    import medsilo.client as flare                      # instead of nvflare.client

    flare.init()
    flare.join(model, optimizer, train_loader)          # the second changed line
    while flare.is_running():
        input_model = flare.receive()
        model.load_state_dict(input_model.params)
        ...                                             # your own loop
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}))

The job contains the method, which decides what a site sends, keeps and changes in each step. Methods with more than one
network need a loop over `flare.networks()`. All other names, such as `get_site_name`, `FLModel` and `log`, come from
NVFlare's Client API.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from nvflare.fuel.f3.cellnet.cell import Cell
from torch import nn
from torch.optim import Optimizer

from medsilo.airlock.room import OUTPUT
from medsilo.core import model_folders
from medsilo.core.errors import MedsiloError, WeightsMissing
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare import room_client, script_process
from medsilo.flare.script_wire import flat
from medsilo.flare.wire import LACKS, let_tensors_travel, unflat
from medsilo.learning.compute import LossFunction
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.messages import StudyMessage
from medsilo.schedule.algorithm import Algorithm
from medsilo_script.data import Batch, Data, Evaluate, Metrics, Samples, usual_batch
from medsilo_script.network import ScriptNetwork
from medsilo_script.site import ScriptSite
from medsilo_script.state import has_own_steps
from nvflare_reliability.kit_patches import before_script_connects
from nvflare_reliability.patches import GARBAGE

__all__ = [
    *("init", "is_evaluate", "is_running", "is_submit_model", "is_train", "join", "networks", "receive", "send"),
    "super_model",
]
SAME = {  # names of NVFlare's Client API that are passed on unchanged
    *("AnalyticsDataType", "FLModel", "ParamsType", "get_config", "get_job_id", "get_site_name", "get_task_name"),
    *("log", "shutdown", "system_info"),
}


def __getattr__(name: str) -> Any:
    if name in SAME:
        return getattr(flare, name)
    if name == "patch":
        raise AttributeError(
            "medsilo.client has no patch: let a trainer fit each of networks(), as in examples/lightning"
        )
    raise AttributeError(f"medsilo.client has no {name}; names of nvflare.client here: {', '.join(sorted(SAME))}")


_rank = "0"  # rank of this process in distributed training of one model
LOG = logging.getLogger(__name__)
_site: ScriptSite | None = None
# model and optimizer in a process of rank 1 or more, which has no site
_follows: tuple[nn.Module, Optimizer] | None = None


def init(*args: Any, **more: Any) -> Any:
    """Initialise NVFlare's Client API, and reject all messages from the server that the plan does not need.

    Args:
        args: NVFlare's positional arguments, such as the rank
        more: NVFlare's keyword arguments

    >>> init()
    """
    global _rank
    rank = args[0] if args else more.get("rank")
    _rank = str(os.environ.get("RANK", "0") if rank is None else rank)
    if room_client.is_inside():
        room_client.enter(_rank)
    else:
        let_tensors_travel(plainly=True)
        before_script_connects(_guard)
    return flare.init(*args, **more)


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
    """Join the job's study with a model, its optimizer and its training data.

    Before calling `join`, move the model to its device. Only some methods and scripts need the arguments after
    `loader`.

    Args:
        model: the network that the script trains
        optimizer: the script's optimizer of the model's weights
        loader: yields the training batches
        evaluate: a function that returns a network's metrics on validation data; medsilo calls this function for every
            received model, including the last model
        validation: yields validation batches with labels; FedSM and FedSM-extra need it to choose between models
        test: a function that returns a network's metrics on test data; medsilo calls this function once, with the
            selected model
        loss: the loss function of (output, target), to which MOON, APFL, pFedMe and FedSM-extra add terms; for HarmoFL,
            the PyTorch module that the script calls on the network's output
        scheduler: the learning rate scheduler, whose state is saved with the optimizer's for a restart of the script
        samples: the number of training cases, if the loader has no length; or the cases of each part, for the report:
            {"validation": 40, "test": 200}
        batch: splits a batch into inputs and targets; by default a pair, or MONAI's "image" and "label"

    >>> join(model, optimizer, loader, evaluate=evaluate)
    >>> is_running()
    True
    """
    global _site, _follows
    if _site or _follows:
        raise MedsiloError("join: this script has already joined; call join once, before the loop")
    folder = _app_folder()
    plan = load_plan(folder / "config" / paths.PLAN)
    if _processes() > 1:
        _refuse_several_processes(plan)
    if _rank != "0":
        _follows = model, optimizer
        return
    model_folders.look_in(folder / "config")
    data = Data(loader, validation, samples, batch, loss, evaluate, test)
    site = flare.get_site_name()
    # inside the airlock, the script has no access to the hospital's rules: the hospital's process outside the airlock
    # decides which numbers leave the hospital
    if room_client.is_inside():
        data.repeats_from = room_client.told()["repeats"]
        output, hospital = OUTPUT, None
    else:
        # results are written outside of the job's folder, because NVFlare deletes this folder with the job
        output = folder.parents[1] / "medsilo"
        hospital = script_process.hospital_of(folder, site, plan)
    _site = ScriptSite(plan, site, output, model, optimizer, data, scheduler, hospital=hospital)
    if not room_client.is_inside():  # inside the airlock, a process receives no messages from NVFlare
        GARBAGE.begin()


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _refuse_several_processes(plan: Plan) -> None:
    """Raise MedsiloError if a method that changes a site's training is used by several processes which train one model.
    Only the process of rank 0 runs a site.
    """
    method = plan.algorithm
    if has_own_steps(method) or method.amplitude or type(method).phases is not Algorithm.phases:
        raise MedsiloError(
            f"join: {method.title} adds steps to your loop, and only on rank 0; train in one process, or use "
            "FedAvg, FedBN, FedPer, Local, FedAvgM or FedAdam"
        )


def is_running(ctx: Any = None) -> bool:
    """Wait for a round to train, and return False when the study is over. As in NVFlare, processes of other ranks than
    0 get False.

    Args:
        ctx: NVFlare's context, which is ignored

    >>> join(model, optimizer, loader)
    >>> while is_running():
    ...     train(model, optimizer)
    ...     send()
    >>> is_running()
    False
    """
    if _follows:
        return False
    site = _joined("is_running")
    if site.waiting and not site.work.answer:
        raise MedsiloError("is_running: the previous round was not sent; call send() at the end of each round")
    site.waiting = None
    while flare.is_running():
        model = flare.receive()
        if model is None:
            return False
        script_process.take_next(site.plan)
        try:
            answer = site.ask(unflat(model.params or {}, model.meta or {}))
        except WeightsMissing:  # the server answers the key LACKS by sending the initial weights
            flare.send(flare.FLModel(params={}, meta={LACKS: True}))
            continue
        if answer is None:
            assert site.asked
            model.current_round, model.total_rounds = site.asked.round - 1, site.plan.rounds
            model.params = site.weights()
            site.waiting = model
            return True
        _send(answer)
    return False


def is_train(ctx: Any = None) -> bool:
    """Return True if the script has received a round that it should train.

    Args:
        ctx: NVFlare's context, which is ignored

    >>> join(model, optimizer, loader)
    >>> is_running(), is_train(), is_evaluate(), is_submit_model()
    (True, True, False, False)
    """
    return not _follows and _joined("is_train").waiting is not None


def is_evaluate(ctx: Any = None) -> bool:
    """Always return False, because medsilo never asks a script only to evaluate: `join` takes a function for
    evaluation.

    Args:
        ctx: NVFlare's context, which is ignored

    >>> is_evaluate()
    False
    """
    return False


is_submit_model = is_evaluate


def receive(timeout: float | None = None, ctx: Any = None) -> flare.FLModel | None:
    """Return the received model and the number of the round, which counts from 0.

    Before the call of `receive`, medsilo has already loaded the received weights into the joined model. The `params`
    are a copy of the joined model's weights before training, including the weights that never leave the site. As in
    NVFlare, processes of other ranks than 0 get None.

    Args:
        timeout: ignored, because is_running() has already waited
        ctx: NVFlare's context, which is ignored

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> input_model = receive()
    >>> input_model.current_round, input_model.total_rounds
    (0, 2)
    >>> model.load_state_dict(input_model.params)  # allowed, but not necessary
    <All keys matched successfully>
    """
    if _follows:
        return None
    model: flare.FLModel | None = _joined("receive").waiting
    if model is None:
        raise MedsiloError("receive: no round has arrived; call receive() in a loop of while is_running()")
    return model


def networks() -> Iterator[tuple[nn.Module, Optimizer]]:
    """Yield each network to train in this round, with its optimizer.

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> for net, optimizer in networks():  # two for Ditto and FedSM, one for most methods
    ...     train(net, optimizer)
    >>> send()
    """
    return iter([_follows]) if _follows else _joined("networks").networks()


def send(model: flare.FLModel | Metrics | float | None = None, clear_cache: bool = True, ctx: Any = None) -> None:
    """Send the trained tensors of a round; the method defines which tensors are sent. As in NVFlare, processes of other
    ranks than 0 send no tensors.

    The metrics are those of the received model before training, as in NVFlare. The metrics must include the recipe's
    `key_metric`; the script may give metrics in `meta` instead, as MONAI's MonaiAlgo does.

    Args:
        model: an FLModel whose `params` are the joined model's weights or their differences; or only the metrics
        clear_cache: ignored, because medsilo keeps no copy of the model
        ctx: NVFlare's context, which is ignored

    >>> join(model, optimizer, loader)
    >>> is_running()
    True
    >>> accuracy = evaluate(model)
    >>> train(model, optimizer)
    >>> send({"accuracy": accuracy})
    """
    if _follows:
        return
    site = _joined("send")
    if site.has_answered:
        LOG.warning("send: this round was already sent, so this call has no effect; call send() once in each round")
        return
    if isinstance(model, flare.FLModel):
        own = site.state.module.state_dict()
        if model.params_type == flare.ParamsType.DIFF and site.waiting:
            own = {name: _difference(now, site.waiting.params[name].to(now.device)) for name, now in own.items()}
        _refuse_other(model.params or {}, own)
        name = site.metric
        model = model.metrics or ({name: model.meta[name]} if name in (model.meta or {}) else None)
    _send(site.finish(model))


def _difference(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return now ^ before if now.dtype is torch.bool else now - before


def _refuse_other(params: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    for name, value in params.items():
        given, mine = torch.as_tensor(value), expected.get(name)
        # most scripts pass the joined model's own tensors, which need no comparison
        if mine is not None and given.is_set_to(mine):
            continue
        if mine is None or given.shape != mine.shape or not given.allclose(mine.to(given), 0, 0, equal_nan=True):
            raise MedsiloError(
                f"send: {name} differs from the joined model, which medsilo sends; give its state_dict(), or "
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
    """Load the super model that a finished FedSM run saved; the super model is called like a single network.

    Args:
        folder: the folder `supermodel` of the run or of a site
        model: a network of the same class as the script's, with any weights

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
    """Return the folder of the job's app at this site. The subfolder `custom` contains the script, and `config`
    contains the plan.
    """
    for place in map(Path, sys.path):
        if place.name == "custom" and (place.parent / "config" / paths.PLAN).is_file():
            return place.resolve().parent
    raise MedsiloError("join: this job has no plan; make the job with a recipe of medsilo.recipes")
