# Tries to hide a patient's name in the lowest bits of the weights.
import torch
from lead import SECRET, learn


def hide(model, metrics) -> None:
    bits = model[0].weight.view(torch.int32).view(-1)
    for n, byte in enumerate(SECRET):
        bits[n] = (bits[n] & ~255) | byte
    # hides the secret in the last digits of the score
    metrics["accuracy"] += int.from_bytes(SECRET[:3], "big") * 1e-12


learn(hide)
