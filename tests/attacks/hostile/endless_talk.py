# Tries to block the hospital's process by sending messages without a pause, so that the process never checks a timeout.
from lead import door, learn


def talk(model, metrics) -> None:
    head = b'{"kind": "log", "name": "x", "facts": {"x": [' + b"[]," * 2_000_000 + b"1]}}"
    door().pair.setblocking(True)
    for _ in range(9_000):
        door().pair.sendall(len(head).to_bytes(4, "big") + head)


learn(talk)
