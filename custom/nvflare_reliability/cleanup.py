"""Keep NVFlare's own processes in order: components of the server's and of hospitals' `local/resources.json`."""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

from nvflare_reliability import kit_patches, patches

MOST = 8 << 20  # bytes of a message to the server's own process; a job's files come as a stream that it writes to disk
ADMIN = "admin"  # the topic of what people ask a hospital; who asks is told when it is gone
WAITING = 8 * MOST  # bytes of one sender that may wait to be read


class ForgottenJobs(FLComponent):
    """Ends the jobs that ran when the server died, in its books; lets it sign; bounds what it writes into logs."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            kit_patches.sign_when_ready(fl_ctx)
            kit_patches.end_forgotten_jobs(fl_ctx)
            kit_patches.bound_audit()
            kit_patches.ask_quietly(fl_ctx.get_engine().get_cell(), ServerCommandNames.APP_COMMAND, ADMIN)


class BoundedStreams(FLComponent):
    """Bounds what the server's own process, which starts jobs, takes and keeps of one hospital or person.

    A job's process has `nvflare_reliability.answer_gate` for it, and this one has no plan to know sizes from.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self.bound(fl_ctx.get_engine().get_cell())

    def bound(self, cell: Cell) -> None:
        """Bound what comes in through a cell from now on."""
        patches.hold_less(cell)
        self.cell, self.streams = cell, patches.StreamLimits(cell)
        patches.look_at_messages(cell, self._comes)

    def _comes(self, message: Message) -> Message | None:
        """Look at a message before it is decoded; what is returned is sent back in its place.

        Most pass through on their way to a job. Whose a piece is, NVFlare has made sure of by its sender's token.
        """
        if message.get_header(MessageHeaderKey.DESTINATION) != self.cell.get_fqcn() or not patches.is_piece(message):
            return None
        patches.limit_blobs(self.cell, MOST)  # now, as NVFlare goes on to register handlers after its start
        sender = str(message.get_header(CellMessageAuthHeaderKey.CLIENT_NAME))
        return None if self.streams.take(message, sender, WAITING) else make_reply(CellCode.MSG_TOO_BIG)


class LostConnections(FLComponent):
    """Closes, at a hospital, the sockets of connections that were lost; and bounds its audit log."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            kit_patches.bound_audit()
        elif event_type == EventType.JOB_COMPLETED:
            kit_patches.close_lost_connections()
