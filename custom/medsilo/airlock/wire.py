"""Messages between a sandbox and the site's process over a socket pair: a JSON text, followed by raw numbers.

Neither the sandbox nor the site's process unpickles data. The site's process reads a message's head first, and then
accepts only tensors of the expected sizes. Thus a sandbox can't fill the memory of the site's process with a huge
tensor.
"""

import json
import math
import re
import select
import struct
from collections.abc import Callable, Iterable, Mapping
from socket import socket
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.mmap_store import TYPES, bytes_of
from medsilo.core.reused_memory import empty
from medsilo.core.section import Section
from medsilo.core.tensors import Groups

LENGTH = struct.Struct(">I")
LARGEST_HEAD = 8 << 20  # bytes of JSON
MOST_TENSORS, MOST_AXES = 100_000, 8
POLL = 0.1  # seconds between two calls of `look` while no byte arrives
CHUNK = 1 << 20  # bytes of a file that are read or written at once
# Pattern of the names of state files that a sandbox may send out, so that the next sandbox can continue the training
MAY_KEEP = re.compile(r"(?:(?:state-\d{1,8}|best|last)\.safetensors|supermodel/(?:\w{1,20}/)?\w[\w.-]{0,90})", re.ASCII)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
Name = Annotated[str, Field(min_length=1, max_length=300)]
Size = Annotated[int, Field(ge=0, le=1 << 40)]


class Form(Section):
    """The name, shape and type of a tensor whose values follow the head of a message."""

    group: Name
    name: Name
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[list[Size], Field(max_length=MOST_AXES)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Head(Section):
    """The JSON part of a message, which precedes the message's raw numbers."""

    kind: Literal["ask", "end", "answer", "lacks", "log", "keep", "begin", "book", "failed"]
    facts: dict[str, Any] = {}
    tensors: Annotated[list[Form], Field(max_length=MOST_TENSORS)] = []
    name: Annotated[str, Field(max_length=300)] = ""  # name of the logged number or of the file in this message
    value: float = 0.0
    step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    size: Size = 0  # size, in bytes, of the file that follows the message's head


class End:
    """One end of a socket pair; while this end waits for data, it regularly calls a function that can end the wait."""

    def __init__(self, pair: socket, look: Callable[[], None] = lambda: None) -> None:
        """Wrap a socket.

        Args:
            look: a function that is called while the socket waits, and that raises an error to end the wait
        """
        self.pair, self.look = pair, look
        self.bytes = 0
        pair.setblocking(False)

    def send(self, kind: str, groups: Groups | None = None, **head: Any) -> None:
        """Send a message and the message's tensors without copying the tensors."""
        own = {
            (group, name): t.detach().cpu().contiguous()
            for group, ts in (groups or {}).items()
            for name, t in ts.items()
        }
        forms = [
            {"group": group, "name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for (group, name), t in own.items()
        ]
        text = json.dumps({"kind": kind, "tensors": forms, **head}).encode()
        self.write(memoryview(LENGTH.pack(len(text)) + text))
        for tensor in own.values():
            self.write(bytes_of(tensor))

    def receive(self) -> Head:
        """Raises EOFError if the other end of the socket pair is closed, and Refused for invalid data."""
        (length,) = LENGTH.unpack(self.read(memoryview(bytearray(LENGTH.size))))
        if length > LARGEST_HEAD:
            raise Refused(
                f"the script's message begins with {length} bytes of text; at most {LARGEST_HEAD} are allowed"
            )
        text = self.read(memoryview(bytearray(length)))
        try:
            told = json.loads(bytes(text))
        except (ValueError, RecursionError) as error:
            raise Refused("the script's message is not valid JSON") from error
        return Head.received(told)

    def tensors(self, forms: Iterable[Form]) -> Groups:
        """Return the tensors that follow a message's head; the caller must have checked the names, shapes and types in
        the head.
        """
        groups: Groups = {}
        for form in forms:
            tensor = empty(form.shape, DTYPES[form.dtype])
            groups.setdefault(form.group, {})[form.name] = tensor
            self.read(bytes_of(tensor))
        return groups

    def read(self, memory: memoryview) -> memoryview:
        done = 0
        while done < len(memory):
            try:
                came = self.pair.recv_into(memory[done:])
            except BlockingIOError:
                self._wait(reads=True)
                continue
            if not came:
                raise EOFError
            done += came
        self.bytes += done
        return memory

    def write(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            try:
                done += self.pair.send(memory[done:])
            except BlockingIOError:
                self._wait(reads=False)

    def _wait(self, reads: bool) -> None:
        self.look()
        waits = select.poll()
        waits.register(self.pair, select.POLLIN if reads else select.POLLOUT)
        waits.poll(POLL * 1000)


def same_forms(forms: Iterable[Form], expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise Refused unless the received names, shapes and types describe exactly the expected tensors, each tensor
    once.
    """
    given: dict[tuple[str, str], Form] = {}
    for form in forms:
        if given.setdefault((form.group, form.name), form) is not form:
            raise Refused(f"the script sends {form.group}/{form.name} twice")
    wanted = {(group, name): like for group, own in expected.items() for name, like in own.items()}
    if odd := sorted(given.keys() ^ wanted.keys()):
        does = "the script sends" if odd[0] in given else "the script lacks"
        raise Refused(f"{does} {'/'.join(odd[0])}")
    for place, like in wanted.items():
        told = given[place].shape, given[place].dtype
        if told != (list(like.shape), str(like.dtype).removeprefix("torch.")):
            raise Refused(f"{'/'.join(place)} is {told[1]} {told[0]}, and not {like.dtype} {list(like.shape)}")
