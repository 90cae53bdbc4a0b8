"""Convert messages to models of NVFlare's Client API, for a user's own training script.

A model is a DXO of kind WEIGHTS with names "group/tensor"; wire.py converts the messages of other studies.
"""

from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable
from torch import Tensor

from medsilo.flare.wire import META, NOT_JOINED
from medsilo.runs.messages import StudyMessage


def as_model(parcel: StudyMessage) -> Shareable:
    """Return a message as NVFlare's Shareable for a training script."""
    tensors, meta = flat(parcel)
    if parcel.facts.get("task") == "join":
        tensors[NOT_JOINED] = torch.zeros(1)
    return DXO(DataKind.WEIGHTS, tensors, meta).to_shareable()


def flat(parcel: StudyMessage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a message's tensors by "group/name", and its facts as a model's meta."""
    tensors = {
        f"{group}/{name}": own.contiguous()  # NVFlare can't send other memory formats
        for group, groups in parcel.groups.items()
        for name, own in groups.items()
    }
    dtypes = {group: {name: str(own.dtype) for name, own in groups.items()} for group, groups in parcel.groups.items()}
    return tensors, {META: {"facts": parcel.facts, "dtypes": dtypes}}
