"""Messages between two processes of one site: JSON and raw tensors over a socket. Nothing is pickled."""

import json
import struct
from socket import socket
from typing import Any

import torch
from torch import Tensor

from medsilo.core.tensors import Groups

LENGTH = struct.Struct(">Q")


def send(end: socket, message: dict[str, Any], groups: Groups | None = None) -> None:
    """Send a message and named groups of tensors; no tensor is copied on its way into the socket."""
    groups = {group: {name: t.detach().cpu() for name, t in own.items()} for group, own in (groups or {}).items()}
    layout = {
        group: [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()]
        for group, own in groups.items()
    }
    head = json.dumps([message, layout]).encode()
    end.sendall(LENGTH.pack(len(head)) + head)
    for own in groups.values():
        for tensor in own.values():
            end.sendall(_bytes(tensor.contiguous()))


def receive(end: socket) -> tuple[dict[str, Any], Groups]:
    """The next message and its tensors; raises EOFError when the other process is gone."""
    (length,) = LENGTH.unpack(_fill(end, memoryview(bytearray(LENGTH.size))))
    message, layout = json.loads(bytes(_fill(end, memoryview(bytearray(length)))))
    groups: Groups = {}
    for group, own in layout.items():
        groups[group] = {}
        for name, dtype, shape in own:
            tensor = groups[group][name] = torch.empty(shape, dtype=getattr(torch, dtype))
            _fill(end, _bytes(tensor))
    return message, groups


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(end: socket, memory: memoryview) -> memoryview:
    read = 0
    while read < len(memory):
        count = end.recv_into(memory[read:])
        if count == 0:
            raise EOFError
        read += count
    return memory
