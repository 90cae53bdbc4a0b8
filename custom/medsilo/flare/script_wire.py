"""Convert messages to and from models of NVFlare's Client API, which a user's training script receives and sends.

A model is a DXO of kind WEIGHTS, whose tensors have names of the form "group/tensor". The module wire.py converts the
messages of all studies that have no training script.
"""

from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable
from torch import Tensor

from medsilo.flare.wire import META, NOT_JOINED
from medsilo.runs.messages import StudyMessage


def as_model(message: StudyMessage) -> Shareable:
    tensors, meta = flat(message)
    if message.facts.get("task") == "join":
        tensors[NOT_JOINED] = torch.zeros(1)
    return DXO(DataKind.WEIGHTS, tensors, meta).to_shareable()


def flat(message: StudyMessage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a message's tensors under names like "group/tensor", and its other values as a model's `meta`."""
    tensors = {
        f"{group}/{name}": own.contiguous()  # NVFlare can't send a tensor that is not contiguous
        for group, groups in message.groups.items()
        for name, own in groups.items()
    }
    dtypes = {group: {name: str(own.dtype) for name, own in groups.items()} for group, groups in message.groups.items()}
    return tensors, {META: {"facts": message.facts, "dtypes": dtypes}}
