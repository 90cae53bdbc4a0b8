# Tries to send data through NVFlare's own functions, which bypass medsilo.
import contextlib

import nvflare.client as plain
from lead import SECRET, learn, tries


def past(model, metrics) -> None:
    name = SECRET.decode()
    secret = plain.FLModel(params={"secret": SECRET}, metrics={name: 1.0}, meta={"name": name})
    tries("send", lambda: plain.send(secret))
    tries("its context", lambda: plain.api.default_context.api.send(secret))
    tries(
        "a pipe",
        lambda: (
            __import__("nvflare.fuel.utils.pipe.cell_pipe", fromlist=["x"])
            .CellPipe("active", "t", "s", "grpc://127.0.0.1:8002")
            .open("x")
        ),
    )
    with contextlib.suppress(Exception):
        plain.log(name, 1.0, "METRIC")
        plain.init()


learn(past)
