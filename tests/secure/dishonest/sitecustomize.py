"""Change a hospital's code through PYTHONPATH, so that the hospital sends hostile answers.

The variable MEDSILO_LIES has the path of a JSON file that maps each request ("join", "round 3", ...) to the name of a
hostile answer.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GARBAGE = "garbage"


def surplus(reply: Any) -> None:
    import torch

    next(iter(reply.groups.values()))["surplus"] = torch.zeros(int(os.environ["MEDSILO_SURPLUS"]) // 4)


def nan_cases(reply: Any) -> None:
    reply.facts["cases"] = dict.fromkeys(("train", "validation", "test"), float("nan"))


LIES: dict[str, Callable[[Any], Any]] = {
    "surplus": surplus,
    "no cases": lambda reply: reply.facts.update(cases={"x": 1}, classes={"x": None}),
    "cases NaN": nan_cases,
    "many values": lambda reply: reply.facts.update(packages={str(number): {} for number in range(200_000)}),
    "negative": lambda reply: reply.facts["cases"].update(train=-5),
    "huge test": lambda reply: reply.facts.update(test=1e308),
    "no test cases": lambda reply: reply.facts["cases"].update(test=None),
    "accuracy 7.5": lambda reply: reply.facts.update(validation=7.5),
    "many samples": lambda reply: reply.facts.update(samples=10**9),
}


def tell_lies() -> None:
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
    from nvflare.private.fed.client import communicator

    from medsilo.flare.executor import MedsiloExecutor
    from medsilo.flare.wire import refusal, to_parcel, to_shareable

    honest = MedsiloExecutor.execute
    whole = {
        "long text": lambda: refusal("x" * 30_000_000),
        "unsafe job": lambda: make_reply(ReturnCode.UNSAFE_JOB),
        GARBAGE: lambda: make_reply(ReturnCode.OK, {GARBAGE: True}),
    }

    def command(name: str, fl_ctx: Any) -> None:
        cell = fl_ctx.get_engine().get_cell()
        ask = {"channel": "server_command", "target": f"server.{fl_ctx.get_job_id()}", "topic": name, "timeout": 1.0}
        for sender in (cell, cell.core_cell):
            sender.send_request(request=new_cell_message({}, Shareable()), **ask)

    def execute(self: Any, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Shareable:
        facts = to_parcel(shareable).facts
        asked = f"round {facts['round']}" if facts["task"] == "round" else facts["task"]
        what = json.loads(Path(os.environ["MEDSILO_LIES"]).read_text()).get(asked, "")
        answer = honest(self, task_name, shareable, fl_ctx, abort_signal)
        if what in whole:
            return whole[what]()
        if what.startswith("command "):
            command(what.removeprefix("command "), fl_ctx)
        if what in LIES:
            reply = to_parcel(answer)
            LIES[what](reply)
            return to_shareable(reply)
        return answer

    def packed(headers: dict, payload: Any = None) -> Message:
        if isinstance(payload, Shareable) and payload.get_header(GARBAGE):
            return Message({**headers, StreamHeaderKey.PAYLOAD_ENCODING: "fobs"}, os.urandom(5_000))
        return new_cell_message(headers, payload)

    MedsiloExecutor.execute = execute
    communicator.new_cell_message = packed


if "MEDSILO_LIES" in os.environ and any("worker_process" in word for word in sys.orig_argv):
    tell_lies()
