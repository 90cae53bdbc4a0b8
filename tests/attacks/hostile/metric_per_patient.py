# Tries to send each patient's score as a separate metric, whose name contains the patient's number.
from lead import learn


def lie(model, metrics) -> None:
    metrics.update({f"patient_{n}": n / 40 for n in range(40)})


learn(lie)
