# Tries to exhaust the hospital's memory with two messages: one claims a size of 2 GiB, and the other has this size.
import struct

from lead import door, learn


def large(model, metrics) -> None:
    form = b'{"group": "model", "name": "0.bias", "dtype": "float32", "shape": [536870912]}'
    head = b'{"kind": "answer", "facts": {"task": "round"}, "tensors": [' + form + b"]}"
    door().pair.setblocking(True)
    door().pair.sendall(struct.pack(">I", len(head)) + head)
    block = bytes(1 << 20)
    for _ in range(2048):
        door().pair.sendall(block)
    print("GOT 2 GiB taken in", flush=True)


learn(large)
