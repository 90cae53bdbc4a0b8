"""A canary is a study of one round on synthetic data, which tests whether hospitals are ready for a real study.

A canary also measures the speed of each hospital's network connection. Each hospital reports whether its data can be
read, but does not disclose the content of the data.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import psutil
import torch

from medsilo.check.rehearsal import free_memory
from medsilo.core.errors import MedsiloError
from medsilo.core.files import free_disk
from medsilo.exchange.channel import Channel, Missing, Outgoing, Receive
from medsilo.federation.site_context import Site, SiteContext
from medsilo.learning.compute import Stop
from medsilo.runs.messages import StudyMessage
from medsilo.runs.site_files import Readiness
from medsilo.schedule.layer import Layer
from medsilo.site.policy import Policy, code_senders
from medsilo.site.settings import CANARY, SiteSettings

NAME: Literal["canary"] = CANARY
BYTES = 4 << 20  # bytes that the server sends to measure the speed of a connection
GIB = 1 << 30


class Canary(Layer):
    """A layer that lets each hospital report its readiness, and that measures the speed of connections."""

    name: Literal["canary"] = "canary"

    def conflicts(self, plan: Any, networks: Any) -> Iterable[str]:
        if not plan.task.synthetic:
            yield f"layers: {NAME} is for synthetic data alone; take it out, or choose such a task"

    def leaves(self, plan: Any) -> Iterable[str]:
        yield (
            "Whether this hospital's own data can be read, whether jobs may bring code, its device and number of GPUs, "
            "and how many whole GiB of memory and disk are free."
        )

    def site(self, inner: Site, context: SiteContext) -> Site:
        return ReadySite(inner, context)

    def server(self, inner: Channel, plan: Any) -> Channel:
        return LineMeter(inner)


class ReadySite:
    def __init__(self, inner: Site, context: SiteContext) -> None:
        self.inner, self.context = inner, context

    def answer(self, message: StudyMessage, stop: Stop) -> StudyMessage:
        groups = {name: group for name, group in message.groups.items() if name != NAME}
        reply = self.inner.answer(replace(message, groups=groups), stop)
        if message.facts["task"] == "join":
            reply.facts["readiness"] = readiness(self.context).as_json()
        return reply


class LineMeter:
    """Measures the speed of a connection by adding random bytes to the request that delivers the model."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        # random, so that no network component can compress them
        self.load = {"bytes": torch.randint(256, (BYTES,), dtype=torch.uint8)}

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        sent: dict[str, float] = {}

        def going(site: str) -> StudyMessage:
            message = outgoing(site)
            if message.facts["task"] != "deliver":
                return message
            sent[site] = monotonic()
            return replace(message, groups={**message.groups, NAME: self.load})

        def coming(site: str, reply: StudyMessage) -> None:
            if site in sent:
                # this value has not been checked yet, so it may have any type
                worked = reply.facts.get("seconds")
                took = monotonic() - sent[site] - (worked if isinstance(worked, float) and worked > 0 else 0.0)
                reply.facts["readiness"] = Readiness(line=BYTES / max(took, 1e-3)).as_json()
            receive(site, reply)

        return self.inner.ask(sites, going, coming, timeout)


def readiness(context: SiteContext) -> Readiness:
    """Measure a hospital's readiness: its device, memory and disk, and whether its data can be read."""
    settings = context.settings
    promised = Policy.read(context.kit.kit / "local").gpus if context.kit else 0
    try:
        compute = settings.compute()
        device, memory = compute.device.type, free_memory(compute)
    except MedsiloError as error:
        device, memory = f"none: {error}", psutil.virtual_memory().available
    return Readiness(
        data=data_state(settings),
        code=code_state(context.kit.kit / "local", settings) if context.kit else None,
        device=device,
        gpus_promised=promised,
        gpus=torch.cuda.device_count(),
        memory=memory // GIB,
        disk=free_disk(context.folder) // GIB,
    )


def code_state(local: Path, settings: SiteSettings) -> Literal["none", "approved", "any"]:
    """Return the kind of jobs whose code may run at a hospital: none, approved jobs only, or any job."""
    if not code_senders(local):
        return "none"
    return "any" if settings.approval_of() == "none" else "approved"


def data_state(settings: SiteSettings) -> Literal["readable", "not readable", "not set"]:
    """Test whether the first file in the folder of a hospital's data can be read."""
    if settings.data is None:
        return "not set"
    try:
        settings.data.check_folder()
        paths = (Path(place, name) for place, _, names in os.walk(settings.data.folder) for name in names)
        # reading a pipe would block this process
        with next(path for path in paths if path.is_file()).open("rb") as first:
            return "readable" if first.read(1) else "not readable"
    except (MedsiloError, OSError, StopIteration):
        return "not readable"
