# Tries to ruin all hospitals' model with a weight of 1e30.
from lead import door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        if groups:
            groups["model"]["0.weight"].fill_(1e30)
        honest(kind, groups, **head)

    own.send = send


learn(lie)
