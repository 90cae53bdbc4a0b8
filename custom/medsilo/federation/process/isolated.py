"""Run a participant in a separate process, and start a new process if that process dies.

The processes exchange JSON and raw tensors over a socket, without pickle.
"""

import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from socket import socket, socketpair
from typing import Any

import torch

from medsilo.core.errors import Aborted, MedsiloError, ProcessDied, Refused, TemporaryRefusal
from medsilo.core.files import make_folder
from medsilo.core.mmap_store import bytes_of
from medsilo.core.tensors import Groups
from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.site_context import SiteContext
from medsilo.learning.compute import Stop
from medsilo.runs.messages import StudyMessage
from medsilo.runs.paths import WORKER_LOG

LENGTH = struct.Struct(">Q")


def send(end: socket, message: dict[str, Any], groups: Groups | None = None) -> None:
    """Send a message and the message's tensors; a contiguous tensor in CPU memory is sent without a copy."""
    groups = {group: {name: t.detach().cpu() for name, t in own.items()} for group, own in (groups or {}).items()}
    layout = {
        group: [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()]
        for group, own in groups.items()
    }
    head = json.dumps([message, layout]).encode()
    end.sendall(LENGTH.pack(len(head)) + head)
    for own in groups.values():
        for tensor in own.values():
            end.sendall(bytes_of(tensor.contiguous()))


def receive(end: socket) -> tuple[dict[str, Any], Groups]:
    """Return the next message and the message's tensors; raises EOFError if the other process has ended."""
    (length,) = LENGTH.unpack(_fill(end, memoryview(bytearray(LENGTH.size))))
    message, layout = json.loads(bytes(_fill(end, memoryview(bytearray(length)))))
    groups: Groups = {}
    for group, own in layout.items():
        groups[group] = {}
        for name, dtype, shape in own:
            tensor = groups[group][name] = torch.empty(shape, dtype=getattr(torch, dtype))
            _fill(end, bytes_of(tensor))
    return message, groups


def _fill(end: socket, memory: memoryview) -> memoryview:
    read = 0
    while read < len(memory):
        count = end.recv_into(memory[read:])
        if count == 0:
            raise EOFError
        read += count
    return memory


POLL = 0.2  # seconds between checks for a request to stop
STOP_LIMIT = 10.0  # seconds after which a process that ignores a request to stop is killed
STALL = 60.0  # time limit, in seconds, for the process to read or write a message
WHY: dict[signal.Signals | None, str] = {
    signal.SIGKILL: "the system does that when memory runs out; lower training.batch_size or free memory there"
}
UNKNOWN = f"the site's own {WORKER_LOG}, beside its results, may say why"
log = logging.getLogger(__name__)


class IsolatedParticipant:
    """Passes all messages of a study to a participant in a separate process, which answers the messages.

    If the process dies, a new process continues from the state that the site saved on disk.
    """

    def __init__(
        self,
        context: SiteContext,
        kind: Callable[..., Participant] = participant_of,
        tell: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Create this object without starting the separate process yet.

        Args:
            tell: a function that gets the reason if the process dies between two messages
        """
        self.site = {**context.to_facts(), "kind": f"{kind.__module__}.{kind.__qualname__}"}
        self.folder, self.settings, self.tell = context.folder, context.settings, tell
        self.process: subprocess.Popen | None = None
        self.end: socket

    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        """Send a message to the separate process, and return the answer.

        Args:
            stop: a function that is called often, and raises an error to end the work
        """
        process = self._running()
        try:
            send(self.end, {"facts": message.facts}, message.groups)
            reply, groups = self._reply(process, stop)
        except (EOFError, OSError) as error:
            raise ProcessDied(self._death(process)) from error
        if "aborted" in reply:
            raise Aborted(reply["aborted"])
        if "reason" in reply:
            if not reply["whole"]:
                self._renew()
            if reply["died"]:
                raise ProcessDied(reply["reason"], private=reply["details"])
            if reply["passes"]:
                raise TemporaryRefusal(reply["reason"], private=reply["details"])
            raise Refused(reply["reason"], private=reply["details"])
        return StudyMessage(groups, reply["facts"])

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.end.close()
            self.process = None

    def _running(self) -> subprocess.Popen:
        if self.process is None:
            self._renew()
        elif self.process.poll() is not None:
            self.tell(self._death(self.process))
        assert self.process
        return self.process

    def _renew(self) -> None:
        self.close()
        self.end, theirs = socketpair()
        self.end.settimeout(STALL)
        make_folder(self.folder)
        # The new process imports modules from the Python path of this process, but not from the current folder (-P).
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "medsilo.federation.process.worker", str(theirs.fileno())]
        with theirs, (self.folder / WORKER_LOG).open("a") as said:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        send(self.end, self.site)
        log.info("training goes on in process %d", self.process.pid)

    def _reply(self, process: subprocess.Popen, stop: Stop) -> tuple[dict[str, Any], Groups]:
        try:
            while not select.select([self.end], [], [], POLL)[0]:
                stop()
                if process.poll() is not None:
                    raise EOFError
        except MedsiloError:
            send(self.end, {"stop": True})
            if select.select([self.end], [], [], STOP_LIMIT)[0]:
                receive(self.end)
            else:
                self._renew()
            raise
        return receive(self.end)

    def _death(self, process: subprocess.Popen) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_LIMIT)
        code = process.poll()  # the process's exit code, or None if the process still runs but does not answer
        self._renew()
        died_of = signal.Signals(-code) if code and code < 0 else None
        how = died_of.name if died_of else "it stalled" if code is None else f"exit code {code}"
        what_now = f"{WHY.get(died_of, UNKNOWN)}; a new one goes on from the site's saved state"
        reason = f"the training process died ({how}): {what_now}"
        log.warning(reason)
        return reason
