"""A node that takes DICOM objects from others (C-STORE and C-ECHO)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from medsilo.extend import DataError, Full, MedsiloError
from medsilo_dicom.header import PACKED, PLAIN
from medsilo_dicom.inbox import KINDS, Inbox
from medsilo_dicom.sending import OWN, SECONDS, network

TAKEN, FULL, WRONG = 0x0000, 0xA700, 0xC000  # answers of the standard
SLACK = 1 << 20  # bytes of messages around an object
AT_ONCE = 4  # associations
VERIFICATION = "1.2.840.10008.1.1"


def _say_nothing(line: str) -> None:
    """Take a line and show it nowhere."""


@dataclass
class Node:
    """Listens as long as it is open. allowed: titles of the nodes that may send."""

    inbox: Inbox
    allowed: Sequence[str]
    address: str = "127.0.0.1"
    port: int = 11112  # 0: any that is free
    title: str = OWN
    say: Callable[[str], None] = _say_nothing
    _server: Any = field(default=None, init=False)
    _coming: Counter[int] = field(default_factory=Counter, init=False)  # bytes of what an association sends just now
    _ended: set[int] = field(default_factory=set, init=False)  # associations that sent too much

    def __enter__(self) -> Self:
        if not self.allowed:
            raise MedsiloError("say which nodes may send; give their AE titles with --allow")
        net = network()
        node = net.AE(ae_title=self.title)
        node.require_calling_aet = list(self.allowed)
        node.require_called_aet = True
        node.maximum_associations = AT_ONCE
        node.acse_timeout = node.dimse_timeout = node.network_timeout = SECONDS
        node.add_supported_context(VERIFICATION)
        for kind in KINDS:
            node.add_supported_context(kind, [*PLAIN, *PACKED])
        handlers = [
            (net.evt.EVT_C_STORE, self._store),
            (net.evt.EVT_DATA_RECV, self._count),
            (net.evt.EVT_CONN_CLOSE, self._forget),
        ]
        try:
            self._server = node.start_server((self.address, self.port), block=False, evt_handlers=handlers)
        except OSError as error:
            raise MedsiloError(
                "that address and port can't be listened on; choose another --port", str(error)
            ) from error
        self.port = self._server.server_address[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _store(self, event: Any) -> int:
        """Keep an object; nothing of it is said but that it came."""
        self._coming.pop(id(event.assoc), None)
        try:
            self.inbox.keep(event.encoded_dataset())
        except Full as error:
            self.say(f"refused: {error}")
            return FULL
        except DataError as error:
            self.say(f"refused: {error}")
            return WRONG
        except Exception as error:  # a disk that fails ends no association
            self.say(f"refused: it could not be kept ({type(error).__name__})")
            return FULL
        return TAKEN

    def _count(self, event: Any) -> None:
        """End an association that sends more than any object may have, before it fills the memory."""
        key = id(event.assoc)
        self._coming[key] += len(event.data)
        if self._coming[key] > self.inbox.largest + SLACK and key not in self._ended:
            self._ended.add(key)
            self.inbox.refused += 1
            self.say("refused: an object is larger than --largest allows; its sender was cut off")
            event.assoc.dul.socket.close()  # an abort would be read only after what is still coming

    def _forget(self, event: Any) -> None:
        self._coming.pop(id(event.assoc), None)
        self._ended.discard(id(event.assoc))
