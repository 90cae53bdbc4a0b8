"""Filters that a hospital names in its `local/privacy.json`: they hold for every job, whatever the job says."""

from collections.abc import Sequence

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from medsilo.errors import Refused


class OnlyTheseGroups(Filter):
    """Lets an answer out when every group of tensors in it is on the hospital's list; `leak-report` names groups.

    NVFlare turns the exception into a refusal, so nothing of such an answer leaves.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__()
        self.groups = frozenset(groups)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        answer = from_shareable(shareable)
        if answer.data_kind != DataKind.COLLECTION:
            raise Refused(f"an answer of kind {answer.data_kind} is none of medsilo's")
        if others := sorted(set(answer.data) - self.groups):
            raise Refused(f"this hospital does not let {', '.join(others)} out; its privacy.json lists what it does")
        return shareable
