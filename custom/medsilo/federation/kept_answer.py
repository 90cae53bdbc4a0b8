"""The last answers of a site to each kind of request, on its disk: what left once leaves again as it was."""

import hashlib
import json
from pathlib import Path

from torch import Tensor

from medsilo.core.errors import reading
from medsilo.core.files import load_tensors, save_tensors
from medsilo.core.spill import bytes_of
from medsilo.core.tensors import Groups
from medsilo.runs.messages import Parcel
from medsilo.runs.paths import ANSWER_FILES

BETWEEN = "\x1f"  # a group's name and a tensor's


class KeptAnswers:
    """Answers in a site's folder of a study, each with the request that it answers and its attempt's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, request: Parcel, attempt: str, reply: Parcel) -> None:
        """Write an answer, in the place of the last one of its kind."""
        tensors = {
            f"{group}{BETWEEN}{name}": tensor for group, named in reply.groups.items() for name, tensor in named.items()
        }
        facts = {
            "request": digest_of(request),
            "attempt": attempt,
            "groups": list(reply.groups),
            "facts": reply.facts,
            "samples": reply.samples,
            "metrics": reply.metrics,
        }
        save_tensors(self._path(request), tensors, facts)

    def find(self, request: Parcel) -> tuple[str, Parcel] | None:
        """Return attempt and answer where this very request was answered last."""
        path = self._path(request)
        if not path.exists():
            return None
        with reading("this site's last answer"):
            tensors, facts = load_tensors(path)
            if facts["request"] != digest_of(request):
                return None
            groups: Groups = {group: {} for group in facts["groups"]}
            for key, tensor in tensors.items():
                group, _, name = key.partition(BETWEEN)
                groups[group][name] = tensor
            return facts["attempt"], Parcel(groups, facts["facts"], facts["samples"], facts["metrics"])

    def _path(self, request: Parcel) -> Path:
        return self.folder / ANSWER_FILES.replace("*", str(request.facts["task"]))


def digest_of(request: Parcel) -> str:
    """Return what stands for a request: another one has another digest."""
    found = hashlib.sha256(json.dumps(request.facts, sort_keys=True).encode())
    for group in sorted(request.groups):
        for name, tensor in sorted(request.groups[group].items()):
            found.update(f"{group}{BETWEEN}{name}{BETWEEN}{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(_content(tensor))
    return found.hexdigest()


def _content(tensor: Tensor) -> bytes:
    return bytes(bytes_of(tensor.detach().cpu().contiguous()))
