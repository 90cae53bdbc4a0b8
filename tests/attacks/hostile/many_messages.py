# Tries to flood the hospital with 10,000 messages, or to send more than one answer in a round.
from lead import door, learn


def drown(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        for _ in range(10_000):
            honest(kind, groups, **head)

    own.send = send


learn(drown)
