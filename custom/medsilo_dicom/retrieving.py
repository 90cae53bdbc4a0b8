"""Fetch studies from another node: C-FIND names their series, C-GET brings them, or C-MOVE where it knows no C-GET."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from medsilo.extend import MedsiloError
from medsilo_dicom.header import PACKED, PLAIN, library, network
from medsilo_dicom.node import KINDS, Node, is_uid
from medsilo_dicom.sending import address_of, associated

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
    """Fetch all series of some studies that training could use. node: ours, which keeps what comes."""
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
