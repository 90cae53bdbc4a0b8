"""A site's state: networks and optimizers, and on its disk what the server won't send again."""

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
from medsilo.core.tensors import Groups, Modules, Tensors, is_finite
from medsilo.federation.checks import same_layout
from medsilo.learning.compute import Compute
from medsilo.mixing.forms import PullForm
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.own_files import Deed, SiteActivity
from medsilo.schedule.phase import Phase, places_of, views

COLUMNS = ("round", "phase", "samples", "train_loss", "validated_round", "validation", "validation_loss", "seconds")
KEPT = 2  # states before the last: a server that dies inside a round may ask for the round before, too
TENTH = 10  # rounds between older states, for a server that was restored from a backup


def is_kept(number: int, done: int) -> bool:
    """Return whether the state after a round stays when so many are done: the last ones, and then fewer and fewer.

    Of the hundred rounds before it is every tenth, of the thousand before these every hundredth, and so on.
    """
    age = done - number
    return age <= KEPT or number % max(TENTH, 10 ** (len(str(age)) - 1)) == 0


def kept_states(rounds: int) -> int:
    """Return how many states a site keeps at most in so many rounds."""
    return sum(is_kept(number, rounds) for number in range(1, rounds + 1))


class SiteState:
    """The networks after so many rounds; any process may take over from the folder."""

    def __init__(self, plan: Plan, site: str, folder: Path, compute: Compute) -> None:
        self.plan, self.algorithm, self.site, self.folder, self.compute = plan, plan.algorithm, site, folder, compute
        self.modules: Modules
        self.optimizers: dict[str, Optimizer]
        self.done: int  # the round after which this is the state; -1: in between
        self.best: float | None  # validation score of the model this site chose so far
        self.attempt = ""  # of the answer that is being made, where a ledger counts them
        self.counts: Callable[[str], bool] | None = None  # whether what an attempt wrote may be used
        self.begin()

    @property
    def model(self) -> nn.Module:
        """Return what is evaluated and kept: the network, behind the input layer if the plan has one."""
        return self.algorithm.whole(self.modules)

    def begin(self) -> None:
        """Be in the state before the first round, the same at every site."""
        settled = self.plan.network.settled
        self.modules = {name: settled(module, self.compute) for name, module in self.plan.build_networks().items()}
        self.make_optimizers()
        self.done = 0
        self.best = None

    def offload(self) -> None:
        """Let go of all networks: the next answer takes over from the folder."""
        held = [ref(parameter) for module in self.modules.values() for parameter in module.parameters()]
        self.modules, self.optimizers, self.done = {}, {}, -1
        if any(parameter() is not None for parameter in held):  # of a network that refers to itself, in a circle
            gc.collect()

    def reload(self) -> None:
        """Have networks again, if this state rests."""
        if not self.modules:
            self.begin()

    def make_optimizers(self) -> None:
        """Make new optimizers, without memory, for the networks that learn."""
        self.optimizers = {
            name: self.algorithm.make_optimizer(name, module, self.plan.training)
            for name, module in self.modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }

    def refuse_divergence(self, number: int) -> None:
        """Raise Refused after a diverged round: nothing of it is sent or kept, and the next begins before it."""
        for module in self.modules.values():
            for name, tensor in module.state_dict().items():
                if not is_finite(tensor):
                    raise Refused(f"{DIVERGED} in round {number}: {name} is NaN or infinite; lower the learning rate")

    # ------------------------------------------------------------------ tensors in and out
    def _check_numbers(self, groups: Groups, mine: Groups) -> None:
        """Raise Refused unless the server's tensors have the types of these, and finite numbers."""
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                like = mine[group][name].new_empty(0)
                if tensor.dtype not in (like.dtype, self.plan.transport.packed(like).dtype):
                    raise Refused(f"the server sends {group}/{name} as {tensor.dtype}, not {like.dtype}; ask the lead")
                if not is_finite(tensor):
                    raise Refused(f"the server sends NaN or infinity in {group}/{name}; ask the lead")

    @torch.no_grad()
    def take_over(self, groups: Groups, phase: Phase, makes_at_home: bool = False) -> None:
        """Put what arrived into the networks, in place: the optimizers keep hold of their parameters.

        makes_at_home: groups that a site can make by itself did not travel.
        """
        at_home = [own for own in phase.given if own.apply_locally and makes_at_home]
        mine = views([own for own in phase.given if own not in at_home], self.modules)
        once = {group.name for group in phase.once}  # may be left out: the site has it
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
        """Return copies of what travels: training may go on in the originals while these are still on their way."""
        sent = views(phase.sent, self.modules)
        return {
            group: {name: self._copy(tensor) for name, tensor in tensors.items()} for group, tensors in sent.items()
        }

    def _copy(self, tensor: Tensor) -> Tensor:
        packed = self.plan.transport.packed(tensor).cpu()
        return packed.clone() if packed.data_ptr() == tensor.data_ptr() else packed

    # ------------------------------------------------------------------ from round to round
    def restore_after(self, number: int, last: int) -> str | None:
        """Be in the state this site had after a round, also when this process is new or the server went back.

        A site that missed rounds goes on from the last it took part in, `last` by the server's word. Where that is not
        on the disk, it goes on from the nearest one, also a later one: so it is where a server was restored from a
        backup. Returns a warning that says which.
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
        instead = f"that after round {self.done}" if self.done else "the initial one"
        if ahead > number + KEPT:
            return (
                f"the server went back to round {number}, and the site had done {ahead}: of its own states it went on "
                f"from {instead}"
            )
        return (
            f"the site's own state after round {last} is not on its disk any more: it went on from {instead}; "
            "look after its output folder"
        )

    def _saved_rounds(self) -> list[int]:
        return [int(path.stem.removeprefix("state-")) for path in self.folder.glob(paths.STATE_FILES)]

    def _may_use(self, number: int) -> bool:
        if self.counts is None:
            return True
        with reading("this site's saved state"):
            return self.counts(load_facts(self._path(number)).get("attempt", ""))

    def _path(self, number: int) -> Path:
        return self.folder / paths.STATE_FILES.replace("*", str(number))

    def save(self) -> None:
        """Keep what the server won't send again: private tensors and optimizers."""
        phase = self.plan.course.phase_of(self.done + 1)
        forms = self.plan.sealed_forms(phase)  # of what a site moves from its own, the server has nothing to send
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
        save_tensors(self._path(self.done), tensors, {"best": self.best, **attempt, **self.besides()})
        for saved in self._saved_rounds():  # later ones are of rounds that a restored server knows nothing of
            if saved > self.done or not is_kept(saved, self.done):
                self._path(saved).unlink(missing_ok=True)

    def besides(self) -> dict[str, Any]:
        """Return what else is kept beside the tensors, in values that JSON can hold."""
        return {}

    def _load(self, number: int) -> None:
        with reading("this site's saved state"):
            tensors, facts = load_tensors(self._path(number))
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
        """Keep a model, by default as it is now, and the plan beside it, so that the hospital can use it by itself."""
        facts = {"round": rounds, "method": self.algorithm.name, "site": self.site, "plan_hash": self.plan.hash}
        save_tensors(self.folder / file, model or self.model.state_dict(), facts)
        write_text(self.folder / paths.PLAN, self.plan.to_yaml())

    def load_model(self, file: str) -> dict[str, Any]:
        """Take a model that was kept; returns the facts beside it."""
        with reading("this site's saved model"):
            tensors, facts = load_tensors(self.folder / file)
            self.model.load_state_dict(tensors)
            return {"round": int(facts["round"])} | facts

    def write_row(
        self, number: int, phase: str, samples: int, metrics: dict[str, float | None], seconds: float
    ) -> None:
        """Write one line a round into metrics.csv; a round that is repeated replaces its line."""
        path = self.folder / paths.METRICS
        with reading(f"{paths.METRICS} in this site's results"):
            rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8")))) if path.exists() else []
            rows = [{key: row[key] for key in COLUMNS} for row in rows if int(row["round"]) < number]
        row = {"round": number, "phase": phase, "samples": samples, "validated_round": number - 1}
        write_csv(path, [*rows, {**row, **metrics, "seconds": round(seconds, 3)}], COLUMNS)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an optimizer remembers, as "<parameter's index>/<key>"."""
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


PAUSE = 0.25  # seconds between two words; an answer that takes less is made without any


class StatusFile:
    """A site's progress with an answer: the work that goes on, and the share of its batches that is done."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, device: str = "") -> None:
        self._device = device
        self._file, self._clock = folder / paths.NOW, clock
        self._asked = ("", 0)
        self._deed: Deed = "starting"
        self._steps = self._made = 0
        self._told = clock()

    @contextmanager
    def answering(self, task: str, number: int) -> Iterator[None]:
        """Inside, a site makes its answer to this question; an error that ends it is told as a refusal."""
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
        if self._told != said:  # else whoever watches has seen nothing of this answer
            self._tell()

    def begin(self, deed: Deed, steps: int = 0) -> None:
        """Begin another kind of work. steps: the batches that it has, where that is known."""
        self._deed, self._steps, self._made = deed, steps, 0

    def step(self) -> None:
        """A batch begins."""
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
