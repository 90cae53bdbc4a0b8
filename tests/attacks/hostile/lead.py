"""Provide an honest training loop for the hostile scripts, and a helper that runs an attack."""

from collections.abc import Callable
from typing import Any

SECRET = b"Miller, born 1961, positive"


def tries(what: str, does: Callable[[], Any]) -> None:
    try:
        print("GOT", what, repr(does())[:200], flush=True)
    except BaseException as error:
        print("held", what, type(error).__name__, str(error)[:80], flush=True)


def learn(does: Callable[[Any, dict[str, Any]], None] = lambda model, metrics: None, samples: int = 40) -> None:
    """Train honestly, and call `does` with the network and the scores before each answer."""
    import torch
    from torch import nn

    import medsilo.client as flare

    flare.init()
    torch.manual_seed(0)
    inputs = torch.randn(samples, 4)
    batches = [(inputs[n : n + 10], (inputs[n : n + 10].sum(1) > 0).long()) for n in range(0, samples, 10)]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flare.join(model, optimizer, batches)
    while flare.is_running():
        model.load_state_dict(flare.receive().params)
        metrics = {"accuracy": sum((model(x).argmax(1) == y).sum().item() for x, y in batches) / samples}
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            does(model, metrics)
        flare.send(flare.FLModel(params=model.state_dict(), metrics=metrics))


def door() -> Any:
    """Return the socket that leads out of the sandbox, for scripts that bypass medsilo's protocol code."""
    from nvflare.client.api_spec import CLIENT_API_KEY
    from nvflare.fuel.data_event.data_bus import DataBus

    return DataBus().get_data(CLIENT_API_KEY).end
