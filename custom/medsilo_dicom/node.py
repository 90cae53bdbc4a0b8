"""DICOM between nodes: what sends objects (C-STORE), takes them from others and keeps them, and fetches studies.

Connections are such that both sides show a certificate, where the environment names a folder with one.
"""

import hashlib
import os
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Self

from medsilo.extend import DataError, MedsiloError, Scan, files
from medsilo_dicom.header import PACKED, PLAIN, SEGMENTATIONS, SLICES, STRUCTURES, library, network

FOLDER = "MEDSILO_DICOM_TLS"  # the environment variable with the folder of the three files
CERTIFICATE, KEY, AUTHORITY = "own.crt", "own.key", "ca.crt"


def secured(server: bool = False) -> ssl.SSLContext | None:
    """Return what encrypts a connection, or None where no folder is named."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    folder = Path(named)
    try:
        purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=str(folder / AUTHORITY))
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        told = f"{FOLDER} names no folder with {CERTIFICATE}, {KEY} and {AUTHORITY} that belong together; correct it"
        raise MedsiloError(told, private=str(error)) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # nodes are known by titles: whom the authority has signed is let in
    context.verify_mode = ssl.CERT_REQUIRED
    return context


OWN = "MEDSILO"  # how this node calls itself
TITLE = r"[A-Za-z0-9_][A-Za-z0-9_ .-]{0,15}"
ADDRESS = re.compile(rf"({TITLE})@(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):(\d{{1,5}})")
SECONDS = 60  # that an answer may take


def address_of(text: str) -> tuple[str, str, int]:
    """Return the title, the host and the port of title@host:port."""
    match = ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise MedsiloError(f"{text!r} is no DICOM node; write it as TITLE@HOST:PORT, for example PACS@10.0.0.5:104")
    return match[1], match[2].strip("[]"), int(match[3])


def associated(own: Any, node: str, option: str, **more: Any) -> Any:
    """Return an association of our own node with another, encrypted where the environment says how."""
    title, host, port = address_of(node)
    own.acse_timeout = own.dimse_timeout = own.network_timeout = SECONDS
    context = secured()
    association = own.associate(host, port, ae_title=title, tls_args=(context, None) if context else None, **more)
    if not association.is_established:
        told = f"the DICOM node does not answer or refuses this one; correct {option}, or allow {own.ae_title} there"
        raise MedsiloError(told)
    return association


def send(files: Sequence[Path], node: str) -> int:
    """Send files to a node; return how many it did not take."""
    read = library().dcmread
    objects = [read(path) for path in files]
    sender = network().AE(ae_title=OWN)
    for kind in sorted({str(one.SOPClassUID) for one in objects}):
        sender.add_requested_context(kind)
    association = associated(sender, node, "--send")
    try:
        return sum(not _stored(association, one) for one in objects)
    finally:
        association.release()


def _stored(association: Any, one: Any) -> bool:
    try:
        status = association.send_c_store(one)
    except (RuntimeError, ValueError):  # the connection broke, or the node takes no such objects
        return False
    return "Status" in status and status.Status >> 12 in (0x0, 0xB)  # 0xBxxx: taken, with a warning


UID = re.compile(r"[0-2](\.(0|[1-9][0-9]*))+")
LONGEST = 64
TOO_LARGE, NO_ROOM = "an object is larger than --largest allows", "the folder has taken what --quota allows"
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
                raise DataError(TOO_LARGE)
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
            raise DataError(NO_ROOM)
        files.write_bytes(place, content)
        self._taken += len(content)


def _name(content: bytes, only: frozenset[str]) -> Path:
    """Return a name made of hashes of an object's UIDs."""
    names = ("SOPClassUID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
    try:
        Scan.dicom_tags(content)
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
    """Takes objects (C-STORE and C-ECHO) as long as it is open. allowed: titles of the nodes that may send."""

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
        except DataError as error:
            self._say_once(f"refused: {error}")
            return FULL if str(error) in (TOO_LARGE, NO_ROOM) else WRONG
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


FIND, MOVE, GET = (f"1.2.840.10008.5.1.4.1.2.2.{number}" for number in (1, 2, 3))  # of the study's root
MOST = 10_000  # answers to one question
GOING_ON = (0xFF00, 0xFF01)
MODALITIES = ("CT", "MR", "PT", "SEG", "RTSTRUCT")


def listed_in(file: Path) -> list[str]:
    """Return the studies of a list, a line each."""
    try:
        found = list(dict.fromkeys(file.read_text("utf-8-sig").split()))
    except (OSError, ValueError) as error:
        raise MedsiloError("--studies is no list of studies; write a StudyInstanceUID in each line") from error
    if wrong := [uid for uid in found if not is_uid(uid)]:
        raise MedsiloError("a study is no StudyInstanceUID; write numbers and dots", private=wrong[0])
    return found


def retrieve(source: str, studies: Sequence[str], node: Node) -> None:
    """Fetch all series of some studies that training could use. node: ours, which keeps what comes.

    C-FIND names the series, C-GET brings them, or C-MOVE where the other node knows no C-GET.
    """
    net = network()
    asker = net.AE(ae_title=node.title)
    roles = [net.build_role(kind, scp_role=True) for kind in KINDS]
    for kind in (FIND, MOVE, GET):
        asker.add_requested_context(kind)
    for kind in KINDS:
        asker.add_requested_context(kind, [*PLAIN, *PACKED])
    association = associated(asker, source, "--from", ext_neg=roles, evt_handlers=node.handlers)
    try:
        accepted = {str(context.abstract_syntax) for context in association.accepted_contexts}
        if FIND not in accepted or not accepted & {GET, MOVE}:
            raise MedsiloError("the DICOM node answers no C-FIND, or neither C-GET nor C-MOVE; allow them there")
        if GET in accepted:
            _fetch(association, studies, node, lambda wanted: association.send_c_get(wanted, GET))
        else:  # the other node opens a connection to ours, which it has to know by its title
            node.allowed = [address_of(source)[0]]
            with node:
                _fetch(association, studies, node, lambda wanted: association.send_c_move(wanted, node.title, MOVE))
    finally:
        association.release()


def _fetch(association: Any, studies: Sequence[str], node: Node, ask: Any) -> None:
    for number, study in enumerate(studies, 1):
        for series in _series(association, study):
            wanted = _question(study, SeriesInstanceUID=series)
            *_, (status, _) = [(None, None), *islice(ask(wanted), MOST)]
            code = status.get("Status") if status else None
            if code != 0:
                node.inbox.refused += 1
                told = "did not come whole" if code is not None and code >> 12 == 0xB else "was not sent"
                node.say(
                    f"a series {told} (answer {'none' if code is None else hex(code)}); is {node.title} known there?"
                )
        node.say(
            f"study {number} of {len(studies)}: {node.inbox.kept} objects kept so far, {node.inbox.refused} refused"
        )


def _series(association: Any, study: str) -> Iterator[str]:
    """Yield the series of a study that could be of use, as the node names them."""
    found = list(islice(association.send_c_find(_question(study, SeriesInstanceUID="", Modality=""), FIND), MOST))
    if not found or found[-1][0].get("Status") != 0:
        raise MedsiloError("the DICOM node answers no C-FIND for a study's series; correct --from, or allow it there")
    for status, answer in found:
        if status.Status in GOING_ON and answer is not None:
            uid = str(answer.get("SeriesInstanceUID") or "")
            if str(answer.get("Modality") or "") in MODALITIES and is_uid(uid):
                yield uid


def _question(study: str, **more: str) -> Any:
    question = library().Dataset()
    question.QueryRetrieveLevel, question.StudyInstanceUID = "SERIES", study
    for name, value in more.items():
        setattr(question, name, value)
    return question
