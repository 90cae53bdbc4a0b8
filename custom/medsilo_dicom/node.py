"""A node that takes DICOM objects from others (C-STORE and C-ECHO), and the folder in which it keeps them."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, Self

from medsilo.extend import DataError, Full, MedsiloError, headers, write_bytes
from medsilo_dicom.header import PACKED, PLAIN, SEGMENTATIONS, SLICES, STRUCTURES, library, network
from medsilo_dicom.sending import OWN, SECONDS, secured

UID = re.compile(r"[0-2](\.(0|[1-9][0-9]*))+")
LONGEST = 64
KINDS = (*SLICES, *SEGMENTATIONS, STRUCTURES)


def is_uid(text: str) -> bool:
    """Return whether a text is a unique identifier as the standard writes it."""
    return len(text) <= LONGEST and UID.fullmatch(text) is not None


@dataclass
class Inbox:
    """A folder for objects from elsewhere: bounded, and no name in it is theirs.

    quota: bytes that all its files may take; largest: bytes of one object; only: studies, or any.
    """

    folder: Path
    quota: int
    largest: int
    only: frozenset[str] = frozenset()
    kept: int = 0  # objects that came
    refused: int = 0
    _taken: int = field(init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._taken = sum(path.stat().st_size for path in self.folder.rglob("*.dcm"))

    def keep(self, content: bytes) -> Path:
        """Check an object and write it whole, or raise a DataError; return where it is."""
        try:
            if len(content) > self.largest:
                raise Full("an object is larger than --largest allows")
            place = self.folder / _name(content, self.only)
            with self._lock:
                self._write(place, content)
        except DataError:
            self.refused += 1
            raise
        self.kept += 1
        return place

    def _write(self, place: Path, content: bytes) -> None:
        if place.exists():
            if place.read_bytes() != content:
                raise DataError("another object of the same UID is there already; the first one stays")
            return
        if self._taken + len(content) > self.quota:
            raise Full("the folder has taken what --quota allows")
        write_bytes(place, content)
        self._taken += len(content)


def _name(content: bytes, only: frozenset[str]) -> Path:
    """Return a name made of hashes of an object's UIDs."""
    names = ("SOPClassUID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
    try:
        headers.tags_in(content)
        elements = library().dcmread(BytesIO(content), stop_before_pixels=True, specific_tags=names)
        kind, *uids = (str(elements.get(name) or "") for name in names)
    except Exception as error:  # pydicom raises anything over damaged files
        raise DataError("an object is no whole DICOM file", str(error)) from error
    if kind not in KINDS:
        raise DataError("an object is neither a slice of CT, MR or PET nor a segmentation nor contours", kind)
    if not all(map(is_uid, uids)):
        raise DataError("an object has a UID that is none")
    if only and uids[0] not in only:
        raise DataError("an object is of a study that was not asked for")
    study, series, instance = (hashlib.sha256(uid.encode()).hexdigest()[:32] for uid in uids)
    return Path(study[:16], series[:16], f"{instance}.dcm")


TAKEN, DISCARDED, FULL, WRONG = 0x0000, 0xB006, 0xA700, 0xC000  # answers of the standard
SLACK = 1 << 20  # bytes of messages around an object
AT_ONCE = 4  # associations
MOST_PRIVATE = 1000
STANDARD, STORAGE = "1.2.840.10008.", "1.2.840.10008.5.1.4.1.1."  # how UIDs of the standard begin, and of its objects
PASSED_OVER = "not kept: objects that are neither CT, MR or PET nor segmentations nor contours; the others still come"
VERIFICATION = "1.2.840.10008.1.1"


@dataclass
class Node:
    """Listens as long as it is open. allowed: titles of the nodes that may send."""

    inbox: Inbox
    allowed: Sequence[str]
    address: str = "127.0.0.1"
    port: int = 11112  # 0: any that is free
    title: str = OWN
    say: Callable[[str], None] = lambda line: None
    passed_over: int = 0  # objects of kinds that nothing here reads
    _said: set[str] = field(default_factory=set, init=False)
    _private: set[str] = field(default_factory=set, init=False)  # kinds of manufacturers that were offered
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
        handlers = [(net.evt.EVT_REQUESTED, self._take_others), *self.handlers]
        try:
            self._server = node.start_server(
                (self.address, self.port), block=False, evt_handlers=handlers, ssl_context=secured(server=True)
            )
        except OSError as error:
            raise MedsiloError(
                "that address and port can't be listened on; choose another --port", str(error)
            ) from error
        self.port = self._server.server_address[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    @property
    def handlers(self) -> list[tuple[Any, Callable[[Any], Any]]]:
        """The handlers that an association needs on which objects come."""
        events = network().evt
        return [
            (events.EVT_C_STORE, self._store),
            (events.EVT_DATA_RECV, self._count),
            (events.EVT_CONN_CLOSE, self._forget),
        ]

    def _take_others(self, event: Any) -> None:
        """Let a sender offer whatever a study has: what training can't use is passed over, and the rest still comes."""
        from pynetdicom.service_class import StorageServiceClass
        from pynetdicom.sop_class import register_uid, uid_to_service_class

        own = event.assoc.acceptor
        known = {str(context.abstract_syntax) for context in own.supported_contexts}
        for context in event.assoc.requestor.primitive.presentation_context_definition_list:
            kind = str(context.abstract_syntax)
            if kind in known or (kind.startswith(STANDARD) and not kind.startswith(STORAGE)) or not is_uid(kind):
                continue
            if uid_to_service_class(kind) is not StorageServiceClass:
                if len(self._private) == MOST_PRIVATE:
                    continue
                self._private.add(kind)
                register_uid(kind, f"Private{hashlib.sha256(kind.encode()).hexdigest()}", StorageServiceClass)
            own.supported_contexts = [*own.supported_contexts, context]

    def _store(self, event: Any) -> int:
        """Keep an object; nothing of it is said but that it came, and of each fault once that it was met."""
        self._coming.pop(id(event.assoc), None)
        try:
            if str(event.request.AffectedSOPClassUID) not in KINDS:
                self._say_once(PASSED_OVER)
                self.passed_over += 1
                return DISCARDED
            self.inbox.keep(event.encoded_dataset())
        except Full as error:
            self._say_once(f"refused: {error}")
            return FULL
        except DataError as error:
            self._say_once(f"refused: {error}")
            return WRONG
        except Exception as error:  # a disk that fails ends no association
            self._say_once(f"refused: it could not be kept ({type(error).__name__})")
            return FULL
        return TAKEN

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)

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
