# Tries to send bits through the time of its answer: early for a zero, late for a one.
import time

from lead import SECRET, learn

rounds = iter(range(8 * len(SECRET)))


def wait(model, metrics) -> None:
    n = next(rounds)
    time.sleep(8.0 * (SECRET[n // 8] >> (7 - n % 8) & 1))


learn(wait)
