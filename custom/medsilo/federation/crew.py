"""The further processes that train for a site, each on a device of its own, as the site's first process leads them."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from socket import socket, socketpair
from threading import Event, Thread
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Subset

from medsilo.core.errors import Died, MedsiloError, Refused
from medsilo.core.tensors import Modules
from medsilo.course.phase import Phase
from medsilo.federation.process.deaths import how_it_died
from medsilo.federation.process.frames import receive, send
from medsilo.federation.trainer import Trainer
from medsilo.learning.private import losses_of_cases, mixes_cases
from medsilo.learning.team import ALONE, ProcessTeam, fingerprint
from medsilo.plan import Plan
from medsilo.runs.paths import TEAM
from medsilo.site.settings import SiteSettings

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
NOTICE = 10.0  # seconds until the system tells of a process that it is dead
PATIENCE = 60.0  # seconds that the first process has to miss a dead one by itself
SAME = 1e-3  # share by which a batch's loss may miss the mean of its cases' through rounding


def join_team(rank: int, settings: SiteSettings, meeting: str) -> ProcessTeam:
    """Meet the other processes, which share a file and talk over the loopback address alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    device = settings.compute(rank).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = settings.processes
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=distributed.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=settings.limits.round_minutes),
    )
    return ProcessTeam(distributed.group.WORLD, rank, size, device)


def limit_memory(settings: SiteSettings) -> None:
    """Let this process take its part of the memory that training may take: only what is written to counts."""
    limit = settings.most_memory // settings.processes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def why_alone(plan: Plan, modules: Modules, private: bool) -> str | None:
    """Return why a study's batches can't be shared out among processes; None where they can."""
    if private:
        return "a promise of privacy is counted for one process"
    if plan.algorithm.input_layer(modules) is not None:
        return "an input layer learns from whole batches (set algorithm.amplitude to null)"
    if plan.training.class_weights != "none" or plan.task.goal.unbounded:
        return "its loss over a batch is no mean over the batch's cases"
    kinds = filter(None, (mixes_cases(module) for module in modules.values()))
    if kind := next(kinds, None):
        return f"{kind} layers take statistics of whole batches (choose network.norm=instance)"
    return None


@dataclass
class CrewMember:
    """One further process."""

    rank: int
    device: str
    process: subprocess.Popen
    end: socket

    def __str__(self) -> str:
        return f"training process {self.rank + 1} on {self.device}"


class LeadingTrainer(Trainer):
    """A site's first process, which has a crew where batches are shared out."""

    shares_out = False
    crew: Crew | None = None

    def share_out(self) -> None:
        """Train on all the devices of the site's settings, in this process and further ones."""
        settings = self.place.settings
        if settings.processes == 1 or not self.place.trains:
            return
        why = why_alone(self.place.plan, self.state.modules, self.private is not None)
        if why and settings.devices != "auto":
            raise Refused(f"devices: batches of this plan can't be shared out, since {why}; or set devices: 1 there")
        if why:
            return
        for rank in range(settings.processes):
            settings.compute(rank)  # raises where there is no such device
        self.shares_out = True

    @contextmanager
    def together(self, number: int, phase: Phase) -> Iterator[None]:
        """Inside, this site's further processes train as this one does."""
        if not self.shares_out or not phase.trains:
            yield
            return
        crew = self.crew = self.crew or Crew(self)
        try:
            self.team = crew.begin(number)
            yield
            crew.finish()
        except Exception as error:
            self.crew, reason = None, crew.why(error)
            crew.close()
            raise reason from error
        finally:
            self.team = ALONE


class Crew:
    """Lives from the first training on, until one of it dies or an answer fails."""

    def __init__(self, trainer: Trainer) -> None:
        """trainer: the site in this process."""
        _check_loss(trainer)
        place = trainer.place
        self.trainer, self.settings, self.size = trainer, place.settings, place.settings.processes
        self.folder = (place.folder / TEAM).absolute()
        self.site: dict[str, Any] = {**place.told(), "meeting": str(self.folder / "meeting")}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.closing, self.noticed, self.found = Event(), Event(), Event()
        self.dead: CrewMember | None = None
        limit_memory(self.settings)
        self.members = [self._member(rank) for rank in range(1, self.size)]
        for member in self.members:
            Thread(target=self._watch, args=[member], daemon=True).start()
        self.team: ProcessTeam | None = None

    def begin(self, number: int) -> ProcessTeam:
        """Have all members train a round from this process's state, on its cases; returns the team."""
        if self.team is None:
            cases = {"cases": self.trainer.mark_of_cases()}
            for member in self.members:
                if self._word_of(member) != cases:
                    raise MedsiloError(f"{member} found other training cases than the first; did files change?")
            self.team = join_team(0, self.settings, self.site["meeting"])
        state, train = self.trainer.state, self.trainer.train
        chosen = train.indices if isinstance(train, Subset) and train is not self.trainer.data.train else None
        told = {"round": number, "chosen": chosen, "groups": state.numbers_of_optimizers()}
        for member in self.members:
            send(member.end, told, {"state": state.tensors()})
        return self.team

    def finish(self) -> None:
        """Wait for all members; raises MedsiloError unless they have the very same tensors."""
        own = fingerprint(self.trainer.state.tensors().values())
        for member in self.members:
            if self._word_of(member) != {"trained": own}:
                raise MedsiloError(f"{member} came to other weights than the first; set devices: 1 and report this")

    def why(self, error: Exception) -> Exception:
        """Return the reason of an error in training; of a member that died, since the others only miss it."""
        if isinstance(error, MedsiloError) or not self.found.wait(NOTICE) or self.dead is None:
            return error
        self.noticed.set()
        try:
            self._word_of(self.dead)
        except MedsiloError as told:
            return told
        except (EOFError, OSError):
            pass
        return Died(f"{self.dead} died {how_it_died(self.dead.process.returncode)}")

    def close(self) -> None:
        """End all members."""
        self.closing.set()
        for member in self.members:
            member.process.kill()
            member.process.wait()
            member.end.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _member(self, rank: int) -> CrewMember:
        ours, theirs = socketpair()
        command = [sys.executable, "-P", "-m", "medsilo.federation.process.crew_member", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        send(ours, {**self.site, "rank": rank})
        return CrewMember(rank, self.settings.device_of(rank), process, ours)

    def _word_of(self, member: CrewMember) -> dict[str, Any]:
        """Return what a member says; raises what it says that went wrong."""
        message, _ = receive(member.end)
        if "reason" in message:
            raise Refused(f"{member}: {message['reason']}", private=message["details"])
        return message

    def _watch(self, member: CrewMember) -> None:
        """Note that a member has died; end this process if it would wait for that member without end."""
        code = member.process.wait()
        if self.closing.is_set():
            return
        self.dead = member
        self.found.set()
        if not self.noticed.wait(PATIENCE) and not self.closing.is_set():
            print(f"{member} died {how_it_died(code)}", file=sys.stderr, flush=True)
            os._exit(1)


def _check_loss(trainer: Trainer) -> None:
    """Raise Refused if the loss of two cases isn't the mean of theirs, so that shares of a batch would be another's."""
    pieces = trainer.place.plan.task.pieces(trainer.data.train, 0)
    if len(trainer.data.train) < 2:  # type: ignore[arg-type]
        return
    inputs, targets = (
        torch.stack([torch.as_tensor(one) for one in column]) for column in zip(pieces[0], pieces[1], strict=True)
    )
    model, device = trainer.state.modules["model"], trainer.compute.device
    with torch.no_grad(), torch.random.fork_rng():
        output = trainer.place.plan.task.infer(model.eval(), inputs.to(device)).float()
    both, each = trainer.loss(output, targets.to(device)), losses_of_cases(output, targets.to(device), trainer.loss)
    if not torch.isclose(both, each.mean(), rtol=SAME, atol=SAME):
        raise Refused(
            "devices: the loss of a batch is no mean over its cases; set devices: 1 in the site's medsilo.yaml"
        )
