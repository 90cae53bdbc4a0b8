# Tries to crash the hospital's process with a message head of 100,000 nested levels.

from lead import door, learn


def fall(model, metrics) -> None:
    head = b'{"kind": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001
    door().pair.setblocking(True)
    door().pair.sendall(len(head).to_bytes(4, "big") + head)


learn(fall)
