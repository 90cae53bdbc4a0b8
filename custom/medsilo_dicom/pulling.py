"""Fetch series from a DICOMweb server (QIDO-RS and WADO-RS)."""

import os
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from medsilo.extend import DataError, Full, MedsiloError
from medsilo_dicom.inbox import Inbox, is_uid

TOKEN = "MEDSILO_DICOMWEB_TOKEN"  # the environment variable with the server's bearer token, if it wants one
MODALITIES = ("CT", "MR", "PT", "SEG", "RTSTRUCT")
SECONDS = 60  # that an answer may take


def pull(url: str, studies: Sequence[str], inbox: Inbox, say: Callable[[str], None]) -> None:
    """Fetch all series of some studies that training could use."""
    client = _client(url)
    try:
        for number, study in enumerate(studies, 1):
            for series in _series(client, study):
                for one in client.iter_series(study, series):
                    _keep(one, inbox, say)
            say(f"study {number} of {len(studies)}: {inbox.kept} objects kept so far, {inbox.refused} refused")
    except MedsiloError:
        raise
    except Exception as error:  # the client raises what its HTTP library and pydicom raise
        told = f"the DICOMweb server failed or does not answer ({type(error).__name__}); correct --from"
        raise MedsiloError(told, private=str(error)) from error


def _client(url: str) -> Any:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise MedsiloError("--from is no address of a DICOMweb server; write https://HOST/PATH")
    try:
        from dicomweb_client.api import DICOMwebClient
    except ImportError as error:
        raise MedsiloError("DICOM needs more packages; install medsilo[dicom]") from error
    token = os.environ.get(TOKEN)
    client = DICOMwebClient(url, headers={"Authorization": f"Bearer {token}"} if token else None)
    client.set_http_retry_params(retry=False)
    return client


def asked_for(studies: Sequence[str], listed: Path | None) -> list[str]:
    """Return the studies of the options and of a list, a line each."""
    try:
        lines = listed.read_text("utf-8-sig").split() if listed else []
    except (OSError, ValueError) as error:
        raise MedsiloError("--studies is no list of studies; write a StudyInstanceUID in each line") from error
    found = list(dict.fromkeys([*studies, *lines]))
    if wrong := [uid for uid in found if not is_uid(uid)]:
        raise MedsiloError("a study is no StudyInstanceUID; write numbers and dots", private=wrong[0])
    return found


def _series(client: Any, study: str) -> Iterator[str]:
    """Yield the series of a study that could be of use, as the server names them."""
    for found in client.search_for_series(study, fields=["Modality"]):
        kind, uid = (str((found.get(tag, {}).get("Value") or [""])[0]) for tag in ("00080060", "0020000E"))
        if kind in MODALITIES and is_uid(uid):
            yield uid


def _keep(one: Any, inbox: Inbox, say: Callable[[str], None]) -> None:
    content = BytesIO()
    try:
        one.save_as(content, enforce_file_format=True)
        inbox.keep(content.getvalue())
    except Full:
        raise
    except (DataError, AttributeError, ValueError) as error:
        say(f"refused: {error if isinstance(error, DataError) else 'an object is no whole DICOM file'}")
