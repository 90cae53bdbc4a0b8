"""medsilo's methods in a training script of your own, beside NVFlare's Client API.

Your loop stays yours. Four lines change: `join` takes the place of `flare.init()`, and the site's `is_running`,
`receive` and `send` those of `flare`. What a method sends, keeps at home and does at each step comes with the job.

    from medsilo.client import join

    site = join(model, optimizer, train_loader)
    while site.is_running():
        site.receive()                              # the model's weights are in place
        accuracy = evaluate(model, test_loader)
        for net, optimizer in site.networks():      # one for most methods; two for Ditto and FedSM
            train_one_epoch(net, optimizer, train_loader)
        site.send({"accuracy": accuracy})
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nvflare.client as flare
from torch import nn
from torch.optim import Optimizer

from medsilo.core import weight_cache
from medsilo.core.errors import MedsiloError
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare.wire import flat, unflat
from medsilo.learning.compute import LossFunction
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.runs.messages import StudyMessage
from medsilo.script.network import ScriptNetwork
from medsilo.script.site import Batch, Data, Evaluate, Metrics, ScriptSite, usual_batch

__all__ = ["Site", "join", "super_model"]


class Site:
    """This site in a study, as its training script sees it. `join` makes one.

    >>> site = join(model, optimizer, loader)
    >>> while site.is_running():
    ...     arrived = site.receive()
    ...     train(model, optimizer)
    ...     site.send({"accuracy": 0.5})
    """

    def __init__(self, inner: ScriptSite) -> None:
        self._inner = inner
        self._waiting: flare.FLModel | None = None

    @property
    def round(self) -> int:
        """The round that is trained now, from 1.

        >>> site.is_running(), site.round
        (True, 1)
        """
        return self._inner.asked.round if self._inner.asked else 0

    @property
    def optimizer(self) -> Optimizer:
        """Your optimizer, with the method's step around it. Step it with a closure, which HarmoFL needs, or without.

        >>> site.is_running()
        True
        >>> inputs, targets = loader[0]
        >>> def closure():
        ...     site.optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(inputs), targets)
        ...     loss.backward()
        ...     return loss
        >>> loss = site.optimizer.step(closure)
        """
        return self._inner.optimizer

    def is_running(self) -> bool:
        """Wait for a round to train; False when the study is over.

        >>> while site.is_running():
        ...     train(model, optimizer)
        ...     site.send()
        >>> site.is_running()
        False
        """
        self._waiting = None
        while flare.is_running():
            model = flare.receive()
            if model is None:
                return False
            answer = self._inner.ask(unflat(model.params or {}, model.meta or {}))
            if answer is None:
                model.current_round, model.total_rounds = self.round - 1, self._inner.plan.rounds  # NVFlare's, from 0
                model.params = self._inner.weights()
                self._waiting = model
                return True
            self._send(answer)
        return False

    def receive(self) -> flare.FLModel:
        """Return what came, with its number of the round; its weights are in the model already.

        Its `params` are a copy of the model's weights as they arrived, together with what stays at this site.

        >>> site.is_running()
        True
        >>> arrived = site.receive()
        >>> arrived.current_round, arrived.total_rounds  # from 0, as in NVFlare
        (0, 2)
        >>> model.load_state_dict(arrived.params)  # as other scripts do; needless here
        <All keys matched successfully>
        """
        if self._waiting is None:
            raise MedsiloError("receive: no round has come; write while site.is_running()")
        return self._waiting

    def networks(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        """Yield each network to train in this round, and the optimizer to step it with.

        >>> site.is_running()
        True
        >>> for net, optimizer in site.networks():  # two for Ditto and FedSM
        ...     train(net, optimizer)
        >>> site.send()
        """
        return self._inner.networks()

    def send(self, metrics: Metrics | float | None = None) -> None:
        """Send what the method sends, now that the round is trained.

        metrics: of the model as it arrived, before it was trained, as in NVFlare; the recipe's `key_metric` among them.

        >>> site.is_running()
        True
        >>> accuracy = evaluate(model)
        >>> train(model, optimizer)
        >>> site.send({"accuracy": accuracy})
        """
        self._send(self._inner.finish(metrics))

    def _send(self, answer: StudyMessage) -> None:
        tensors, meta = flat(answer)
        told = answer.facts.get("validation")
        flare.send(flare.FLModel(params=tensors, metrics=None if told is None else {"validation": told}, meta=meta))


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
    samples: int | None = None,
    batch: Batch = usual_batch,
) -> Site:
    """Join the study of this job with a model, its optimizer and the loader of its training batches.

    Put the model on its device first. The rest is for some methods and some scripts:

    - evaluate: takes a network, returns its metrics on validation data. Then every model is scored, also the last.
    - test: the same on test data, by which nothing was chosen. It is called once, with the model that was chosen.
    - validation: batches with labels, by which FedSM finds its threshold.
    - loss: of (output, target), for MOON, APFL and pFedMe, whose objective is more than a loss.
    - scheduler: kept with the optimizer's state, should the script start anew.
    - samples: training cases, if the loader does not say.
    - batch: takes a batch apart; by default (inputs, targets), or MONAI's "image" and "label".

    >>> site = join(model, optimizer, loader, evaluate=evaluate)
    >>> site.is_running()
    True
    """
    try:
        name = flare.get_site_name()
    except RuntimeError:  # the script has not called it
        flare.init()
        name = flare.get_site_name()
    folder = _app_folder()
    plan = load_plan(folder / "config" / paths.PLAN)
    weight_cache.look_in(folder / "config")
    output = folder.parents[1] / "medsilo"  # beside NVFlare's folders of jobs, which go with the job
    data = Data(loader, validation, samples, batch, loss)
    inner = ScriptSite(plan, name, output, model, optimizer, data, evaluate, test, scheduler)
    return Site(inner)


def super_model(folder: Path | str, model: nn.Module) -> SuperModel:
    """Return FedSM's super model of a run, which answers as one network does.

    folder: `supermodel` of the run, or of a site. model: a network of the script's kind, with any weights.

    >>> model = super_model("study/supermodel", model)
    >>> model(inputs).shape == (len(inputs), classes)
    True
    """
    plan = load_plan(Path(folder) / paths.PLAN)
    if not isinstance(plan.network, ScriptNetwork):
        return SuperModel.load(Path(folder), plan)
    with plan.network.standing_for(model):
        return SuperModel.load(Path(folder), plan).eval()


def _app_folder() -> Path:
    """Return the job's app at this site: its `custom` folder has the script, its `config` folder the plan."""
    for place in map(Path, sys.path):
        if place.name == "custom" and (place.parent / "config" / paths.PLAN).is_file():
            return place.resolve().parent
    raise MedsiloError("join: this job has no plan; make it with a recipe of medsilo.recipes")
