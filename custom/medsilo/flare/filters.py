"""The filter that a hospital names in its `local/privacy.json`: it holds for every job, whatever the job says.

NVFlare turns what it raises into a refusal, so nothing of such an answer leaves, and both audit logs have the reason.
"""

from collections.abc import Sequence

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.fl_context_utils import add_job_audit_event

from medsilo.core.errors import Refused
from medsilo.flare.wire import META


class OnlyTheseGroups(Filter):
    """Lets an answer out when every group of tensors in it is on the hospital's list; refusals pass.

    `medsilo disclosure` names a job's groups.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__()
        self.groups = frozenset(groups)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        try:
            answer = from_shareable(shareable)
            if answer.data_kind not in (DataKind.COLLECTION, DataKind.WEIGHTS) or META not in answer.meta:
                raise Refused(f"medsilo has no answer of kind {answer.data_kind}")
            if others := sorted({name.partition("/")[0] for name in answer.data} - self.groups):
                raise Refused(
                    f"this hospital does not let {', '.join(others)} out; its privacy.json lists what it does"
                )
        except Refused as error:
            add_job_audit_event(fl_ctx, msg=f"medsilo refused: {error}")
            raise
        return shareable
