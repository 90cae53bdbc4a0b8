"""Send DICOM objects to another node (C-STORE), over connections on which both sides show a certificate."""

import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medsilo.extend import MedsiloError
from medsilo_dicom.header import library, network

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
