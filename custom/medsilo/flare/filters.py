"""Filters that a hospital names in its `local/privacy.json`: they hold for every job, whatever the job says.

Each looks at chosen groups of tensors; `medsilo leak-report` names a job's groups. NVFlare turns what they raise into a
refusal, so nothing of such an answer leaves, and both audit logs have the reason.
"""

from abc import abstractmethod
from collections.abc import Sequence

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.fl_context_utils import add_job_audit_event

from medsilo.core.errors import Refused
from medsilo.flare.wire import META


class _AnswerFilter(Filter):
    """The base of all filters: refusals pass, an answer is one of medsilo's, why one stays is in the audit log."""

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
        return shareable

    @abstractmethod
    def look_at(self, answer: DXO) -> None:
        """Raise Refused to hold all of an answer back."""


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
