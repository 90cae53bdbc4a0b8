"""Filters that a hospital names in its `local/privacy.json`: they hold for every job, whatever the job says.

Each works on chosen groups of tensors, in any dtype; `medsilo leak-report` names a job's groups. NVFlare turns what
they raise into a refusal, so nothing of such an answer leaves, and both audit logs have the reason or the fact.
"""

import secrets
from abc import abstractmethod
from collections.abc import Sequence

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.federation.sealed.what import WORDS
from medsilo.flare.wire import META


class _AnswerFilter(Filter):
    """The base of all filters: refusals pass, an answer is one of medsilo's, what is done is in the audit log."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__()
        self.groups = frozenset(groups)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        try:
            answer = from_shareable(shareable)
            if answer.data_kind != DataKind.COLLECTION or META not in answer.meta:
                raise Refused(f"an answer of kind {answer.data_kind} is none of medsilo's")
            self.look_at(answer)
        except Refused as error:
            add_job_audit_event(fl_ctx, msg=f"medsilo refused: {error}")
            raise
        if chosen := sorted(self.groups & set(answer.data)):
            add_job_audit_event(fl_ctx, msg=f"applied {type(self).__name__} to {', '.join(chosen)}")
        return answer.update_shareable(shareable)

    @abstractmethod
    def look_at(self, answer: DXO) -> None:
        """Change the chosen groups' values, which NVFlare and nobody else holds; raises Refused to hold all back."""


class _TensorFilter(_AnswerFilter):
    """Changes tensor by tensor."""

    def look_at(self, answer: DXO) -> None:
        for group in self.groups & set(answer.data):
            member = answer.data[group]
            if any(name.startswith(WORDS) for name in member.data):
                raise Refused(
                    f"{group} is sealed, so {type(self).__name__} of this hospital's privacy.json can't change it; "
                    "take it out there, or set transport.sealing=none"
                )
            member.data = {
                name: self.change(tensor) if tensor.is_floating_point() else tensor
                for name, tensor in member.data.items()
            }

    @abstractmethod
    def change(self, tensor: Tensor) -> Tensor:
        """Return what leaves instead of a tensor of floating point numbers."""


class OnlyTheseGroups(_AnswerFilter):
    """Lets an answer out when every group of tensors in it is on the hospital's list."""

    def look_at(self, answer: DXO) -> None:
        if others := sorted(set(answer.data) - self.groups):
            raise Refused(f"this hospital does not let {', '.join(others)} out; its privacy.json lists what it does")


class EnoughCases(_AnswerFilter):
    """Holds an answer back when one of these groups in it was learned from fewer training cases than `least`."""

    def __init__(self, groups: Sequence[str], least: int) -> None:
        super().__init__(groups)
        self.least = least

    def look_at(self, answer: DXO) -> None:
        cases = answer.meta[META]["facts"].get("samples")
        few = sorted(self.groups & set(answer.data))
        if few and not (isinstance(cases, int) and cases >= self.least):
            raise Refused(f"this hospital lets {', '.join(few)} out only over {self.least} cases or more")


class Clipped(_TensorFilter):
    """Brings each tensor's outliers, which may be one case's own, back to the given percentile of its magnitudes."""

    def __init__(self, groups: Sequence[str], percentile: float) -> None:
        super().__init__(groups)
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile {percentile!r} is not above 0 and at most 100")
        self.percentile = percentile

    def change(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        rank = max(1, round(self.percentile / 100 * tensor.numel()))
        limit = float(tensor.float().abs().flatten().kthvalue(rank).values)
        return tensor.clamp(-limit, limit)


class Noisy(_TensorFilter):
    """Adds Gaussian noise of `relative` times each tensor's standard deviation, new and secret in every answer.

    So no run can be repeated to the digit. It blurs single cases; this is not a proof of differential privacy, which
    would need a bound on what one case can change. `least` is what values are raised to that must not fall below it: 0
    for amplitudes and variances.
    """

    def __init__(
        self,
        groups: Sequence[str],
        relative: float,
        least: float | None = None,
    ) -> None:
        super().__init__(groups)
        if not relative > 0:
            raise ValueError(f"relative {relative!r} is not above 0")
        self.relative, self.least = relative, least

    def change(self, tensor: Tensor) -> Tensor:
        values = tensor.float()
        chance = torch.Generator().manual_seed(secrets.randbits(63))
        noise = torch.randn(values.shape, generator=chance)
        noisy = values + self.relative * values.std(correction=0) * noise
        return (noisy if self.least is None else noisy.clamp(min=self.least)).to(tensor.dtype)
