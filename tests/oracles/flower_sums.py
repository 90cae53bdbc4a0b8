"""Flower's SecAgg+ alone, without its network: prints the weighted mean of models that clients mask.

It runs in an environment with Flower and nothing of medsilo, whose packages Flower would change (`make flower`). It
reads {"models": {client: [numbers]}, "cases": {client: number}, "gone": [clients], "threshold": number} and prints a
list of numbers, or null where the sum does not open. Clients that are gone deal keys and then send no masked model.
"""

import json
import sys
from collections.abc import Iterable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Error
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    ArrayRecord,
    Code,
    ConfigRecord,
    Context,
    FitIns,
    FitRes,
    Message,
    RecordDict,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common import recorddict_compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.supercore.task_identity import TaskIdentity

COLLECT = 3  # the third question asks for masked models


def own_context(node: int) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


class Clients:
    """What answers the workflow in place of Flower's network."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.models = {int(client): np.array(model) for client, model in told["models"].items()}
        self.cases = {int(client): number for client, number in told["cases"].items()}
        self.gone, self.question = set(told["gone"]), 0
        self.contexts = {client: own_context(client) for client in self.models}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        self.question += 1
        return [self._answer(deepcopy(message)) for message in messages]  # as over a network

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id
        if self.question >= COLLECT and client in self.gone:
            return Message(Error(0, "gone"), reply_to=message)
        return secaggplus_mod(message, self.contexts[client], self._train)

    def _train(self, message: Message, context: Context) -> Message:
        client = context.node_id
        model = ndarrays_to_parameters([self.models[client]])
        trained = FitRes(Status(Code.OK, ""), model, self.cases[client], {})
        return Message(recorddict_compat.fitres_to_recorddict(trained, False), reply_to=message)


class Once:
    """A strategy that asks all clients once and keeps what the workflow opened."""

    def __init__(self, clients: Iterable[int]) -> None:
        self.proxies = [SimpleNamespace(node_id=client) for client in clients]
        self.opened: list[float] | None = None

    def configure_fit(self, number: int, parameters: Any, manager: Any) -> list[tuple[Any, FitIns]]:
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(self, number: int, results: list[tuple[Any, FitRes]], failures: Any) -> tuple[None, dict]:
        self.opened = parameters_to_ndarrays(results[0][1].parameters)[0].tolist()
        return None, {}


def opened(told: dict[str, Any]) -> list[float] | None:
    """Return the mean that the workflow opens; None where too few clients are left."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    clients = Clients(told)
    strategy = Once(clients.models)
    context = LegacyContext(own_context(0), strategy=strategy)
    context.state.config_records["config"] = ConfigRecord({"current_round": 1})
    context.state.array_records["parameters"] = ArrayRecord([np.zeros(1)])
    heaviest = float(max(clients.cases.values()))
    SecAggPlusWorkflow(1.0, told["threshold"], max_weight=heaviest)(clients, context)
    return strategy.opened


if __name__ == "__main__":
    json.dump(opened(json.load(sys.stdin)), sys.stdout)
