# Tries to crash the hospital's process with a score of 4,000 digits.
from lead import door, learn


def lie(model, metrics) -> None:
    own = door()
    honest = own.send

    def send(kind, groups=None, **head):
        if "facts" in head:
            head["facts"] |= {"validation": 10**4000, "train_loss": 10**4000}
        honest(kind, groups, **head)

    own.send = send


learn(lie)
