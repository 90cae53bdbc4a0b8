"""Keep a site's networks and optimizers, and save them without the tensors that the server will send again."""

import csv
import gc
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import DIVERGED, Refused, reading
from medsilo.core.files import load_facts, load_tensors, save_tensors, write_csv, write_passing, write_text
from medsilo.core.parent_watch import most_held
from medsilo.core.reused_memory import copied
from medsilo.core.tensors import Groups, Modules, Tensors, is_finite, packed
from medsilo.exchange.checks import same_layout
from medsilo.learning.compute import Compute
from medsilo.mixing.mean_forms import PullForm
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.messages import SiteWarning
from medsilo.runs.own_files import Deed, SiteActivity
from medsilo.schedule.phase import Phase, places_of, views

COLUMNS = ("round", "phase", "samples", "train_loss", "validated_round", "validation", "validation_loss", "seconds")
# number of latest states that a site always keeps, because a server that died during a round may repeat the previous
# round
KEPT = 2
# Of older rounds, the site keeps at most one state in this number of rounds, in case the server is restored from a
# backup.
TENTH = 10


def is_kept(number: int, done: int) -> bool:
    """True if a site keeps the saved state of round `number` once round `done` is over.

    A site keeps the latest states, every tenth state of the last hundred rounds, every hundredth state of the last
    thousand rounds, and so on.
    """
    age = done - number
    return age <= KEPT or number % max(TENTH, 10 ** (len(str(age)) - 1)) == 0


def kept_states(rounds: int) -> int:
    return sum(is_kept(number, rounds) for number in range(1, rounds + 1))


class SiteState:
    """A site's networks and optimizers after a round, which another process can restore from the site's folder."""

    def __init__(self, plan: Plan, site: str, folder: Path, compute: Compute) -> None:
        self.plan, self.algorithm, self.site, self.folder, self.compute = plan, plan.algorithm, site, folder, compute
        self.modules: Modules
        self.optimizers: dict[str, Optimizer]
        self.done: int  # the networks have the state after this round; -1 while a round changes the networks
        self.best: float | None  # validation score of the site's best model so far
        # if a privacy ledger charges answers: the identifier of the site's present attempt at an answer
        self.attempt = ""
        # returns True if the site may use the state that was saved in the given attempt
        self.counts: Callable[[str], bool] | None = None
        self.begin()

    @property
    def model(self) -> nn.Module:
        """The module that is evaluated and saved: the network, preceded by the input layer if the plan has an input
        layer.
        """
        return self.algorithm.whole(self.modules)

    def begin(self) -> None:
        """Set the state that all sites have in common before the first round."""
        settled = self.plan.network.settled
        self.modules = {name: settled(module, self.compute) for name, module in self.plan.build_networks().items()}
        self.make_optimizers()
        self.done = 0
        self.best = None

    def offload(self) -> None:
        """Free the memory of the networks; for the next answer, the site restores the networks from its folder."""
        held = [ref(parameter) for module in self.modules.values() for parameter in module.parameters()]
        self.modules, self.optimizers, self.done = {}, {}, -1
        # only the garbage collector frees the memory of networks with circular references
        if any(parameter() is not None for parameter in held):
            gc.collect()

    def reload(self) -> None:
        """If the memory of the networks was freed, create the networks again."""
        if not self.modules:
            self.begin()

    def make_optimizers(self) -> None:
        """For the networks with trainable parameters, make new optimizers with empty state."""
        self.optimizers = {
            name: self.algorithm.make_optimizer(name, module, self.plan.training)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }

    def refuse_divergence(self, number: int) -> None:
        """Raise Refused if training diverged, so that the site neither sends nor saves the networks of the round."""
        for module in self.modules.values():
            for name, tensor in module.state_dict().items():
                if not is_finite(tensor):
                    raise Refused(f"{DIVERGED} in round {number}: {name} is NaN or infinite; lower the learning rate")

    # ------------------------------------------------------------------ tensors in and out
    def _check_numbers(self, groups: Groups, mine: Groups) -> None:
        """Raise Refused unless the server's tensors have the expected types and finite numbers."""
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                like = mine[group][name].new_empty(0)
                if tensor.dtype not in (like.dtype, packed(like, self.plan.transport.precision).dtype):
                    raise Refused(f"the server sends {group}/{name} as {tensor.dtype}, not {like.dtype}; ask the lead")
                if not is_finite(tensor):
                    raise Refused(f"the server sends NaN or infinity in {group}/{name}; ask the lead")

    @torch.no_grad()
    def take_over(self, groups: Groups, phase: Phase, makes_at_home: bool = False) -> None:
        """Load the received tensors into the networks in place, because optimizers refer to the networks' parameters.

        Args:
            makes_at_home: whether the site computes some groups itself, because the server did not send them
        """
        at_home = [own for own in phase.given if own.apply_locally and makes_at_home]
        mine = views([own for own in phase.given if own not in at_home], self.modules)
        once = {group.name for group in phase.once}  # the server may leave out a tensor group that the site already has
        same_layout(groups, {name: mine[name] for name in mine if name not in once or name in groups})
        self._check_numbers(groups, mine)
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                mine[group][name].copy_(tensor)
        for own in at_home:
            assert own.apply_locally
            trains = self.plan.participation.sites
            own.apply_locally(self.modules, trains.index(self.site) if self.site in trains else None)
        for own in phase.given:
            own.arrived(self.modules, own.name in groups)

    def sent(self, phase: Phase) -> Groups:
        """Return copies of the tensors to send, so that training may change the originals while the site sends the
        copies.
        """
        sent = views(phase.sent, self.modules)
        return {
            group: {name: self._copy(tensor) for name, tensor in tensors.items()} for group, tensors in sent.items()
        }

    def _copy(self, tensor: Tensor) -> Tensor:
        own = packed(tensor, self.plan.transport.precision)
        return copied(own) if own is tensor else own.cpu()

    # ------------------------------------------------------------------ from round to round
    def restore_after(self, number: int, last: int) -> SiteWarning | None:
        """Restore this site's state after round `number`. The function works in a new process, too, and after the
        server was restored from a backup.

        A site that missed rounds continues from round `last`: according to the server, the last round in which the site
        took part. If no state of the round was saved, the site continues from the saved state of the nearest round,
        which may be a later round. Returns a warning if the restored state is not the state of the expected round.
        """
        if self.done == number:
            return None
        self.begin()
        saved = [saved for saved in self._saved_rounds() if self._may_use(saved)]
        if fitting := [own for own in saved if last <= own <= number]:
            self._load(max(fitting))
        elif last and saved:
            self._load(min(saved, key=lambda own: (abs(own - last), own)))
        ahead = max(saved, default=0)
        if self.done >= last and ahead <= number + KEPT:
            return None
        if ahead > number + KEPT:
            return SiteWarning(kind="server back", numbers=(number, ahead, self.done))
        return SiteWarning(kind="state lost", numbers=(last, self.done))

    def _saved_rounds(self) -> list[int]:
        return [int(path.stem.removeprefix("state-")) for path in self.folder.glob(paths.STATE_FILES)]

    def _may_use(self, number: int) -> bool:
        if self.counts is None:
            return True
        with reading("this site's saved state"):
            return self.counts(load_facts(self.state_file(number)).get("attempt", ""))

    def state_file(self, number: int) -> Path:
        return self.folder / paths.STATE_FILES.replace("*", str(number))

    def save(self) -> None:
        """Save the optimizers, and those tensors of the networks that the server will not send again."""
        phase = self.plan.course.phase_of(self.done + 1)
        # For a PullForm, the server does not send the tensor group, because each site moves its own tensors towards the
        # mean of the other sites.
        forms = self.plan.sealed_forms(phase)
        every_round = [
            group
            for group in phase.groups
            if group.travels == "both" and not isinstance(forms.get(group.name), PullForm)
        ]
        sent = {place for tensors in views(every_round, self.modules).values() for place in places_of(tensors.values())}
        tensors = {
            f"module/{module}/{name}": tensor
            for module, network in self.modules.items()
            if module not in self.algorithm.made_anew
            for name, tensor in network.state_dict().items()
            if tensor.data_ptr() not in sent
        }
        if self.plan.training.optimizer_state == "keep":
            for name, optimizer in self.optimizers.items():
                tensors |= {f"optimizer/{name}/{key}": tensor for key, tensor in _optimizer_tensors(optimizer).items()}
        attempt = {"attempt": self.attempt} if self.attempt else {}
        save_tensors(self.state_file(self.done), tensors, {"best": self.best, **attempt, **self.besides()})
        # Delete saved states of rounds after the requested round; they exist if the server was restored from a backup,
        # and does not know them.
        for saved in self._saved_rounds():
            if saved > self.done or not is_kept(saved, self.done):
                self.state_file(saved).unlink(missing_ok=True)

    def besides(self) -> dict[str, Any]:
        """Return the parts of a method's state that are not tensors, as JSON values; the site saves them in the same
        file as the tensors.
        """
        return {}

    def _load(self, number: int) -> None:
        with reading("this site's saved state"):
            tensors, facts = load_tensors(self.state_file(number))
            self._put(tensors)
            self.best = None if facts["best"] is None else float(facts["best"])
        self.done = number

    def _put(self, tensors: Tensors) -> None:
        for module, network in self.modules.items():
            network.load_state_dict(_under(tensors, f"module/{module}/"), strict=False)
        for name, optimizer in self.optimizers.items():
            _restore_optimizer(optimizer, _under(tensors, f"optimizer/{name}/"))

    # ------------------------------------------------------------------ for the hospital
    def save_model(self, file: str, rounds: int, model: Tensors | None = None) -> None:
        """Save a model (by default, the present model) together with the plan, so that the hospital can use the
        model.
        """
        facts = {"round": rounds, "method": self.algorithm.name, "site": self.site, "plan_hash": self.plan.hash}
        save_tensors(self.folder / file, model or self.model.state_dict(), facts)
        write_text(self.folder / paths.PLAN, self.plan.to_yaml())

    def load_model(self, file: str) -> dict[str, Any]:
        """Load a saved model into the networks, and return the other values of the model's file, such as the model's
        round.
        """
        with reading("this site's saved model"):
            tensors, facts = load_tensors(self.folder / file)
            self.model.load_state_dict(tensors)
            return {"round": int(facts["round"])} | facts

    def write_row(
        self, number: int, phase: str, samples: int, metrics: dict[str, float | None], seconds: float
    ) -> None:
        """Write a line for a round into metrics.csv; if a round is repeated, its new line replaces the old line and all
        later lines.
        """
        path = self.folder / paths.METRICS
        with reading(f"{paths.METRICS} in this site's results"):
            rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8")))) if path.exists() else []
            rows = [{key: row[key] for key in COLUMNS} for row in rows if int(row["round"]) < number]
        row = {"round": number, "phase": phase, "samples": samples, "validated_round": number - 1}
        write_csv(path, [*rows, {**row, **metrics, "seconds": round(seconds, 3)}], COLUMNS)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors in the optimizer's state. Each key has the form "<parameter's index>/<key>"."""
    return {
        f"{index}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for index, memory in optimizer.state_dict()["state"].items()
        for key, value in memory.items()
        if value is not None
    }


def _restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


PAUSE = 0.25  # seconds between two progress reports; an answer that takes less time is not reported


class StatusFile:
    """Writes a site's progress on an answer to a file: the kind of work, and the fraction of the work that is
    finished.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, device: str = "") -> None:
        self._device = device
        self._file, self._clock = folder / paths.NOW, clock
        self._asked = ("", 0)
        self._deed: Deed = "starting"
        self._steps = self._made = 0
        self._told = clock()

    @contextmanager
    def answering(self, task: str, number: int) -> Iterator[None]:
        """Within the context, report the progress on a request. Turn an error in the context into a rejection of the
        request.
        """
        self._asked, self._told = (task, number), self._clock()
        said = self._told
        self._deed, self._steps = "starting", 0
        try:
            yield
        except Exception:
            self.begin("refused")
            self._tell()
            raise
        if task == "test":
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            return
        self.begin("sending")
        # A short answer reported no progress, so its end is not reported either.
        if self._told != said:
            self._tell()

    def begin(self, deed: Deed, steps: int = 0) -> None:
        """Report that the site begins another kind of work on the request.

        Args:
            steps: the number of batches of this work, if known
        """
        self._deed, self._steps, self._made = deed, steps, 0

    def step(self) -> None:
        """Count a batch of the present work, and report the progress if the last report is old enough."""
        if self._clock() - self._told >= PAUSE:
            self._tell()
        self._made += 1

    def _tell(self) -> None:
        self._told = self._clock()
        share = min(self._made / self._steps, 1.0) if self._steps else None
        task, number = self._asked
        told = SiteActivity(
            task=task,
            round=number,
            at=time.time(),
            deed=self._deed,
            share=share,
            memory=float(most_held()),
            device=self._device,
        )
        write_passing(self._file, told.as_json())
