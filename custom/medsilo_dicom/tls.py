"""Encrypted connections between DICOM nodes, on which both sides show a certificate of the hospital's own authority."""

import os
import ssl
from pathlib import Path

from medsilo.extend import MedsiloError

FOLDER = "MEDSILO_DICOM_TLS"  # the environment variable with the folder of the three files
OWN, KEY, AUTHORITY = "own.crt", "own.key", "ca.crt"


def secured(server: bool = False) -> ssl.SSLContext | None:
    """Return what encrypts a connection, or None where no folder is named."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    folder = Path(named)
    try:
        purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=str(folder / AUTHORITY))
        context.load_cert_chain(folder / OWN, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        told = f"{FOLDER} names no folder with {OWN}, {KEY} and {AUTHORITY} that belong together; correct it"
        raise MedsiloError(told, private=str(error)) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # nodes are known by titles: whom the authority has signed is let in
    context.verify_mode = ssl.CERT_REQUIRED
    return context
