"""Run a site's training process, which ends together with its parent process."""

import os
import resource
import sys
import traceback
from importlib import import_module
from queue import SimpleQueue
from socket import socket
from threading import Event, Thread
from typing import Any

from medsilo.core.errors import Aborted, ProcessDied
from medsilo.federation.process.isolated import receive, send
from medsilo.federation.refusals import details, is_out_of_memory, passes, public_reason
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_stack import TrainingSite, training_site
from medsilo.runs.messages import StudyMessage
from medsilo.site.settings import SiteSettings


class Worker:
    """Reads the parent process's messages from a socket, and answers the messages one by one."""

    def __init__(self, end: socket) -> None:
        self.end = end
        self.stopped = Event()
        self.work: SimpleQueue[tuple[dict[str, Any], Any]] = SimpleQueue()
        self.answering: TrainingSite | None = None

    def run(self) -> None:
        """Answer messages until memory runs out; then end the process, because the process's state may be corrupt."""
        Thread(target=self._listen, daemon=True).start()
        self.site = self.work.get()[0]
        settings = SiteSettings.model_validate(self.site["settings"])
        # The memory limit counts memory that was written to, but not memory that CUDA only reserves.
        limit = settings.most_memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        whole = True
        while whole:
            message, groups = self.work.get()
            try:
                reply = self._site().answer(StudyMessage(groups, message["facts"]), self._stop)
                send(self.end, {"facts": reply.facts}, reply.groups)
            except Aborted as error:
                send(self.end, {"aborted": str(error)})
            except Exception as error:
                died = isinstance(error, ProcessDied)
                whole = not died and not is_out_of_memory(error)
                said = {"reason": public_reason(error), "details": details(error), "whole": whole, "died": died}
                said["passes"] = passes(error)
                send(self.end, said)

    def _site(self) -> TrainingSite:
        if self.answering is None:
            module, _, name = self.site["kind"].rpartition(".")
            kind = getattr(import_module(module), name)
            self.answering = training_site(SiteContext.read(self.site), kind)
        return self.answering

    def _stop(self) -> None:
        if self.stopped.is_set():
            raise Aborted("the run was aborted")

    def _listen(self) -> None:
        """Read messages in a separate thread, so that a request to stop, or the end of the parent process,
        interrupts training.
        """
        while True:
            try:
                message, groups = receive(self.end)
            except (EOFError, OSError):
                os._exit(0)
            # After an incomplete read, the unread bytes of the message would be mistaken for the next message.
            except Exception:
                traceback.print_exc()
                os._exit(1)
            if message == {"stop": True}:
                self.stopped.set()
            else:
                self.stopped.clear()
                self.work.put((message, groups))


if __name__ == "__main__":
    Worker(socket(fileno=int(sys.argv[1]))).run()
