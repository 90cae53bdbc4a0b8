# Tries to send patients' names in a tensor whose name is not in the plan.
import torch
from lead import SECRET, door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        for group in (groups or {}).values():
            group[SECRET.decode()] = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
        honest(kind, groups, **head)

    own.send = send


learn(lie)
