"""A parcel as NVFlare carries it: a DXO collection with one WEIGHTS member per group.

So NVFlare's own filters (a site's privacy policies, quantisation) see every tensor; facts travel as meta.
"""

from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from torch import Tensor

from medsilo.core import optional
from medsilo.core.errors import Lacks, MedsiloError, Passing, Refused
from medsilo.core.mmap_store import TYPES, Spill
from medsilo.core.text import plain
from medsilo.runs.messages import StudyMessage
from nvflare_reliability.chunking import ChunkedTensors, PlainArrays, PlainTensors
from nvflare_reliability.errors import Rejected
from nvflare_reliability.patches import send_tensors_by

META = "medsilo"
TASK = "medsilo"  # the name of every task
SENT_AS = {str(dtype): dtype for dtype in TYPES}  # types that tensors may travel as
REFUSAL, PASSES, LACKS = "medsilo.refusal", "medsilo.passes", "medsilo.lacks"


class _ArrivalFile(Spill):
    """The nameless file of tensors that arrive."""

    def append(self, tensor: Tensor) -> int:
        try:
            return super().append(tensor)
        except MedsiloError as error:
            raise Rejected(str(error), error.private) from error


def let_tensors_travel(to_files: bool = False, plainly: bool = False) -> None:
    """Have NVFlare send this process's tensors as they are, in pieces.

    to_files: whether those that arrive here lie in nameless files, since many may be on their way at once. plainly: by
    NVFlare's own decomposer, which a training script's process knows.
    """
    ChunkedTensors.store = _ArrivalFile if to_files else None
    send_tensors_by(PlainTensors if plainly else ChunkedTensors)
    send_tensors_by(PlainArrays)


def to_shareable(parcel: StudyMessage) -> Shareable:
    """Wrap a parcel. Tensors are referenced and not copied; dicts are new, since filters change them in place."""
    groups = {group: DXO(DataKind.WEIGHTS, data=dict(tensors)) for group, tensors in parcel.groups.items()}
    dtypes = {group: {name: str(tensor.dtype) for name, tensor in parcel.groups[group].items()} for group in groups}
    meta = {META: {"facts": parcel.facts, "dtypes": dtypes}}
    return DXO(DataKind.COLLECTION, data=groups, meta=meta).to_shareable()


ENDS = {  # what NVFlare answers for a site whose code did not
    ReturnCode.TASK_RESULT_FILTER_ERROR: "a privacy filter of the site held the answer back",
    ReturnCode.TASK_ABORTED: "the site's training stopped before it sent an answer",
    ReturnCode.EXECUTION_EXCEPTION: "the site answered EXECUTION_EXCEPTION: its training ended without an answer",
}


def to_parcel(shareable: Shareable) -> StudyMessage:
    """Unwrap what came over the wire; raises Refused for a refusal or for something that is no parcel."""
    code = shareable.get_return_code(ReturnCode.OK)
    if code != ReturnCode.OK:
        reason = ENDS.get(code, f"the site answered {code}")
        told = shareable.get_header(REFUSAL)
        reason = plain(told if isinstance(told, str) and told else f"{reason}; its own log says why")
        if shareable.get_header(PASSES) is True:
            raise Passing(reason)
        if shareable.get_header(LACKS) is True:
            raise Lacks(reason)
        raise Refused(reason)
    try:
        collection = from_shareable(shareable)
        if collection.data_kind == DataKind.WEIGHTS:
            return optional.unflat(collection.data, collection.meta)
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


def as_sent(value: Any, dtype: str) -> Any:
    """Some of NVFlare's filters turn tensors into numpy arrays, counts into fractions, and values into half of their
    bytes: that is undone here. What is no tensor, or no number of its type, is refused later, by name."""
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
    """Make of an answer one that was refused."""
    reply.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    reply.set_header(REFUSAL, reason)


def refusal(reason: str, passes: bool = False, lacks: bool = False) -> Shareable:
    """A site's answer when it could not do the work."""
    reply = Shareable()
    refuse(reply, reason)
    reply.set_header(PASSES, passes)
    reply.set_header(LACKS, lacks)
    return reply
