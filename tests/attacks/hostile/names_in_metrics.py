# Tries to send patients' names as the names and values of scores.
from lead import SECRET, door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        if "facts" in head:
            head["facts"] = {**head["facts"], SECRET.decode(): 1.0, "validation": {SECRET.decode(): 1.0}}
        honest(kind, groups, **head)

    own.send = send
    metrics[SECRET.decode()] = 1.0


learn(lie)
