# Tries to send bits by the time of the script's answer: an early answer for a zero, a late answer for a one.
import time

from lead import SECRET, learn

rounds = iter(range(8 * len(SECRET)))


def wait(model, metrics) -> None:
    n = next(rounds)
    time.sleep(8.0 * (SECRET[n // 8] >> (7 - n % 8) & 1))


learn(wait)
