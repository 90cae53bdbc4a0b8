"""Define NVFlare components for the parent processes of the server and of hospitals.

The components limit connections and logs, and end old jobs. The file `local/resources.json` of a startup kit lists the
kit's components.
"""

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

# Maximum bytes of a message to the server's parent process. A job's files may be larger, because NVFlare streams them
# to the disk.
MOST = 8 << 20
ADMIN = "admin"
WAITING = 8 * MOST  # maximum bytes of a sender's messages that have arrived but have not been read yet


class ForgottenJobs(FLComponent):
    """Ends the jobs that ran when the server crashed, and the jobs that were aborted while they started.

    The component also repairs the signing of the server's messages, and limits the size of the server's logs. The
    component gives hospitals more time to accept or reject a job.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            kit_patches.sign_when_ready(fl_ctx)
            kit_patches.end_forgotten_jobs(fl_ctx)
            kit_patches.keep_aborted(fl_ctx)
            kit_patches.bound_audit()
            cell = fl_ctx.get_engine().get_cell()
            kit_patches.ask_quietly(cell, ServerCommandNames.APP_COMMAND, ADMIN)
            kit_patches.wait_for_deployment(cell)


class BoundedStreams(FLComponent):
    """Limits the messages that each hospital or user sends to the server's parent process.

    The component also limits the duration of TLS handshakes. The limits are constants, because the parent process has
    no plan. In a job's process, `nvflare_reliability.answer_gate` limits messages to the sizes that the plan needs.
    """

    def __init__(self) -> None:
        super().__init__()
        kit_patches.shake_hands_apart()  # the patch must be in place before the first connection

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self.bound(fl_ctx.get_engine().get_cell())

    def bound(self, cell: Cell) -> None:
        patches.hold_less(cell)
        self.cell, self.streams = cell, patches.StreamLimits(cell)
        patches.look_at_messages(cell, self._comes)

    def _comes(self, message: Message) -> Message | None:
        """Inspect a message before NVFlare decodes the message. If the result is not None, the result is sent as a
        reply.

        Most messages are addressed to a job's process, and the parent process only forwards these messages. NVFlare has
        already verified the sender of a message by the sender's token.
        """
        if message.get_header(MessageHeaderKey.DESTINATION) != self.cell.get_fqcn() or not patches.is_piece(message):
            return None
        # the limit is set again at each message, because NVFlare may have registered handlers since the last message
        patches.limit_blobs(self.cell, MOST)
        sender = str(message.get_header(CellMessageAuthHeaderKey.CLIENT_NAME))
        return None if self.streams.take(message, sender, WAITING) else make_reply(CellCode.MSG_TOO_BIG)


class LostConnections(FLComponent):
    """Closes the sockets of lost or failed connections at a hospital, and limits the size of the audit log."""

    def __init__(self) -> None:
        super().__init__()
        patches.connect_in_time()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            kit_patches.bound_audit()
        elif event_type == EventType.JOB_COMPLETED:
            kit_patches.close_lost_connections()
