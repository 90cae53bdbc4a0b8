"""Filter the answers of all jobs at a hospital if the hospital's `local/privacy.json` names this filter.

If the filter raises an error, NVFlare sends a rejection without tensors instead of the answer. The audit logs of the
hospital and of the server contain the reason of the rejection.
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
    """Lets an answer pass only if the hospital's list contains every tensor group of the answer.

    An answer that is a rejection always passes the filter. `medsilo disclosure` lists the tensor groups that a job
    sends.
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
                raise Refused(f"medsilo knows no answer of kind {answer.data_kind}")
            if others := sorted({name.partition("/")[0] for name in answer.data} - self.groups):
                raise Refused(f"this hospital does not send {', '.join(others)}; its privacy.json lists what may leave")
        except Refused as error:
            add_job_audit_event(fl_ctx, msg=f"medsilo refused: {error}")
            raise
        return shareable
