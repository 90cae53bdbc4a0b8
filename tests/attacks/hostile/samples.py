# Tries to send an arbitrary number as the script's count of patients.
from lead import door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        if "samples" in head.get("facts", {}):
            head["facts"]["samples"] = 1234
        honest(kind, groups, **head)

    own.send = send


learn(lie, samples=1960)
