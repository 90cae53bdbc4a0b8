"""Convert messages to and from NVFlare's DXO collections.

A collection contains one DXO of kind WEIGHTS for each tensor group. Because tensors are in DXOs, NVFlare's filters,
such as a site's privacy policies, can process every tensor. The `meta` of the collection contains the message's facts.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused, TemporaryRefusal, WeightsMissing
from medsilo.core.mmap_store import TYPES, Spill
from medsilo.core.text import plain
from medsilo.runs.messages import StudyMessage
from nvflare_reliability.chunking import ChunkedTensors, PlainArrays, PlainTensors
from nvflare_reliability.errors import Rejected
from nvflare_reliability.patches import send_tensors_by

META = "medsilo"
TASK = "medsilo"  # the name of all NVFlare tasks except the rounds of a training script
# the name of a script's training rounds in NVFlare; the filters of NVFlare's recipes and examples expect this name
TRAIN = "train"
SENT_AS = {str(dtype): dtype for dtype in TYPES}  # the types of tensors that a message may contain
REFUSAL, PASSES, LACKS = "medsilo.refusal", "medsilo.passes", "medsilo.lacks"


LACKING = "a pre-trained file that the network begins with is not here"
# The name of a tensor that only the first message of a study contains. If a script uses NVFlare's client and not
# medsilo's, it fails with an error that contains the tensor's name, NOT_JOINED. If NOT_JOINED did not make the script
# fail, NVFlare's patch of Lightning's trainer would receive the same message forever.
NOT_JOINED = (
    "this script has not joined: use medsilo.client in place of nvflare's (with medsilo-lab: medsilo docs "
    "research/own-script)"
)


class _ArrivalFile(Spill):
    """A temporary file that has no name, and that stores received tensors."""

    def append(self, tensor: Tensor) -> int:
        try:
            return super().append(tensor)
        except MedsiloError as error:
            raise Rejected(str(error), error.private) from error


def let_tensors_travel(to_files: bool = False, plainly: bool = False) -> None:
    """Make NVFlare send the tensors of this process unchanged, each tensor in several pieces.

    Args:
        to_files: Whether to store arriving tensors in temporary files, because many tensors may arrive at once.
        plainly: Whether to send tensors by NVFlare's own decomposer, which a training script's process knows.
    """
    ChunkedTensors.store = _ArrivalFile if to_files else None
    send_tensors_by(PlainTensors if plainly else ChunkedTensors)
    send_tensors_by(PlainArrays)


def to_shareable(message: StudyMessage) -> Shareable:
    """Convert a message to NVFlare's Shareable.

    The tensors are not copied. The mappings from names to tensors are copied, because filters change these mappings in
    place.
    """
    groups = {group: DXO(DataKind.WEIGHTS, data=dict(tensors)) for group, tensors in message.groups.items()}
    dtypes = {group: {name: str(tensor.dtype) for name, tensor in message.groups[group].items()} for group in groups}
    meta = {META: {"facts": message.facts, "dtypes": dtypes}}
    return DXO(DataKind.COLLECTION, data=groups, meta=meta).to_shareable()


ENDS = {  # the meaning of NVFlare's return codes in answers that NVFlare itself made
    ReturnCode.TASK_RESULT_FILTER_ERROR: "a privacy filter of the site held the answer back",
    ReturnCode.TASK_ABORTED: "the site's training stopped before it sent an answer",
    ReturnCode.EXECUTION_EXCEPTION: "the site answered EXECUTION_EXCEPTION: its training ended without an answer",
}


def to_parcel(shareable: Shareable, of_script: bool = False) -> StudyMessage:
    """Convert NVFlare's Shareable to a message. Raises Refused if the Shareable is a rejection, or is invalid.

    A rejection by medsilo's executor states a reason. NVFlare's own rejections, for example because of a full disk,
    state no reason. If NVFlare itself rejected the request, the function raises TemporaryRefusal, because a repeated
    request may succeed.

    Args:
        of_script: Whether a training script has answered. If the script raised an exception, a repeated request can't
            succeed, because the exception has ended the script.
    """
    code = shareable.get_return_code(ReturnCode.OK)
    if code != ReturnCode.OK:
        reason = ENDS.get(code, f"the site answered {code}")
        told = shareable.get_header(REFUSAL)
        reason = plain(told if isinstance(told, str) and told else f"{reason}; its own log says why")
        of_nvflare = code == ReturnCode.EXECUTION_EXCEPTION and told is None and not of_script
        if shareable.get_header(PASSES) is True or of_nvflare:
            raise TemporaryRefusal(reason)
        if shareable.get_header(LACKS) is True:
            raise WeightsMissing(reason)
        raise Refused(reason)
    try:
        collection = from_shareable(shareable)
        if collection.data_kind == DataKind.WEIGHTS:
            return unflat(collection.data, collection.meta)
        if collection.data_kind != DataKind.COLLECTION:
            raise ValueError(collection.data_kind)
        content, members = collection.meta[META], collection.data.items()
        groups = {
            group: {name: as_sent(value, content["dtypes"][group][name]) for name, value in member.data.items()}
            for group, member in members
        }
        return StudyMessage(groups, dict(content["facts"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"the answer is not a message of medsilo ({type(error).__name__})") from error


def unflat(tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> StudyMessage:
    """Return the message that a model of NVFlare's Client API contains, or raise Refused if the model contains no valid
    message.
    """
    try:
        if LACKS in meta:
            raise WeightsMissing(LACKING)  # the error's message must not contain text from the script
        content = meta[META]
        groups: dict[str, dict[str, Any]] = {str(group): {} for group in content["dtypes"]}
        for name, value in tensors.items():
            if name == NOT_JOINED:
                continue
            group, _, own = name.partition("/")
            groups[group][own] = as_sent(value, content["dtypes"][group][own])
        return StudyMessage(groups, dict(content["facts"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"the answer is not a message of medsilo ({type(error).__name__})") from error


def as_sent(value: Any, dtype: str) -> Any:
    """Convert a received value to the type of tensor that the site sent before filters converted it.

    Some of NVFlare's filters convert tensors to numpy arrays, to floating-point numbers or to half precision. A value
    that can't be converted is returned unchanged; a later check rejects the value.

    Args:
        dtype: The name of the tensor type.
    """
    tensor = torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
    if not isinstance(tensor, Tensor) or str(tensor.dtype) == dtype or str(tensor.dtype) not in SENT_AS:
        return tensor
    sent = SENT_AS[dtype]
    if sent.is_floating_point:
        return tensor.to(sent)
    counts = tensor.round() if tensor.is_floating_point() else tensor
    whole = counts.to(sent)
    return whole if whole.to(counts.dtype).equal(counts) else tensor


def refuse(reply: Shareable, reason: str) -> None:
    """Turn a site's reply into a rejection that states a reason."""
    reply.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(REFUSAL, reason)


def refusal(reason: str, passes: bool = False, lacks: bool = False) -> Shareable:
    """Return a reply with which a site rejects a request.

    Args:
        passes: Whether the reason is temporary.
        lacks: Whether the reason is a missing file of initial weights.
    """
    reply = Shareable()
    refuse(reply, reason)
    reply.set_header(PASSES, passes)
    reply.set_header(LACKS, lacks)
    return reply
