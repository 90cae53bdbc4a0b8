"""Between NVFlare's real cells, an answer gets lost on its way from a relay to the server."""

import threading
from collections.abc import Iterator

import pytest
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.comm_config import VarName
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_streamer import reliable_retry_scheduler
from nvflare.fuel.utils.config_service import ConfigService

from medsilo.exchange.bounds import Bounds
from nvflare_reliability.chunking import RetryingRequests
from nvflare_reliability.timeouts import Timeouts
from tests.federation.test_gate import JOB, SMALL, Cells, answer_of
from tests.secure.consortium import wait_until
from tests.secure.relay import Line


@pytest.fixture
def cells() -> Iterator[Cells]:
    cells = Cells(Line())
    cells.gate.allow(Bounds(size=100_000_000))
    yield cells
    cells.stop()


@pytest.fixture
def behind_relay(cells: Cells) -> Iterator[Cell]:
    """Start a site that connects to the server through a relay, whose connection to the server a test can break."""
    own = f"tcp://127.0.0.1:{cells.relay.port}"
    before = cells.relay.down.passed
    relay = Cell("city", own, secure=False, credentials={}, create_internal_listener=True)
    CoreCell.ALL_CELLS.clear()
    relay.core_cell.start()
    near = relay.core_cell.get_internal_listener_url()
    site = Cell("city.hospital-b", None, secure=False, credentials={}, parent_url=near)
    CoreCell.ALL_CELLS.clear()
    site.core_cell.start()
    wait_until(lambda: cells.relay.down.passed > before and bool(site.core_cell.agents), 600, "the connections")
    yield site
    for cell in (site, relay):
        cell.core_cell.stop()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["the answer", "the reply"])
def test_an_answer_that_a_relays_far_line_lost_is_over_soon(
    cells: Cells, behind_relay: Cell, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay's connection to the server breaks; the site's connection to the relay stays open. Without medsilo,
    NVFlare would wait for the answer's timeout, five minutes in a job with a training script.
    """
    # Shorten the time for which NVFlare repeats an unacknowledged reply, which is a minute by default.
    again = {VarName.STREAMING_RETRY_WAIT: 0.2, VarName.STREAMING_RETRY_TIMEOUT: 1.0}
    monkeypatch.setattr(ConfigService, "_var_values", again)
    codes = list[str]()
    RetryingRequests(behind_relay, Timeouts(silence=120.0, again=2.0), sees_fetching=False)
    reads, may_reply = threading.Event(), threading.Event()

    def read(request: Message) -> Message:
        reads.set()
        may_reply.wait(60.0)
        return make_reply(ReturnCode.OK)

    cells.job.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="submit_update", cb=read)
    cells.gate.guard_server()

    def send() -> None:
        where = {"channel": CellChannel.SERVER_COMMAND, "topic": "submit_update", "target": JOB}
        reply = behind_relay.send_request(**where, request=new_cell_message({}, answer_of(SMALL)), timeout=300.0)
        codes.append(reply.get_header(MessageHeaderKey.RETURN_CODE))

    sending, before = threading.Thread(target=send, daemon=True), cells.relay.up.passed
    if lost == "the answer":
        cells.relay.hush()
    sending.start()
    wait_until(lambda: cells.relay.up.passed > before + 500, 60, "the answer")
    if lost == "the reply":
        assert reads.wait(60.0)
        sending.join(3 * 2.0 + 1)
        assert sending.is_alive()  # the server still reads the answer
        cells.relay.hush()
        may_reply.set()
        wait_until(lambda: not cells.gate.open and not reliable_retry_scheduler.tasks, 60, "the end of the reply")
    assert behind_relay.core_cell.agents and sending.is_alive()
    cells.relay.cut()
    cells.relay.speak()
    cells.relay.mend()
    sending.join(200.0)
    assert codes == [ReturnCode.TIMEOUT] and reads.is_set() == (lost == "the reply")
    may_reply.set()
    send()
    assert codes[1:] == [ReturnCode.OK]
