"""A parcel as a user's own training script gets it: a model of NVFlare's Client API.

It is one DXO of kind WEIGHTS with names "group/tensor"; wire.py has the parcels of all other studies.
"""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable
from torch import Tensor

from medsilo.core.errors import Lacks, Refused
from medsilo.core.text import plain
from medsilo.flare.wire import LACKS, META, as_sent
from medsilo.runs.messages import StudyMessage
from nvflare_reliability.chunking import MARK, in_one, in_pieces
from nvflare_reliability.errors import Rejected
from nvflare_reliability.timeouts import PIECE


def as_model(parcel: StudyMessage) -> Shareable:
    """Wrap a parcel for a training script."""
    return DXO(DataKind.WEIGHTS, *flat(parcel)).to_shareable()


def flat(parcel: StudyMessage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a parcel's tensors by "group/name", in pieces that NVFlare's http driver takes (4 MiB), and its meta."""
    tensors = {f"{group}/{name}": own for group, groups in parcel.groups.items() for name, own in groups.items()}
    dtypes = {group: {name: str(own.dtype) for name, own in groups.items()} for group, groups in parcel.groups.items()}
    return in_pieces(tensors, PIECE), {META: {"facts": parcel.facts, "dtypes": dtypes}}


def unflat(tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> StudyMessage:
    """Return the parcel of a model that came to a script, or from one; raises Refused where it is none."""
    try:
        if LACKS in meta:
            raise Lacks(plain(str(meta[LACKS])))
        content = meta[META]
        groups: dict[str, dict[str, Any]] = {str(group): {} for group in content["dtypes"]}
        for name, value in tensors.items():
            group, _, own = name.partition("/")
            groups[group][own] = as_sent(value, content["dtypes"][group][own.rsplit(MARK, 2)[0]])
        return StudyMessage({group: in_one(own) for group, own in groups.items()}, dict(content["facts"]))
    except Rejected as error:
        raise Refused(str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"the answer is not a message of medsilo ({type(error).__name__})") from error
