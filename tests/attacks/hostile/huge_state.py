# Tries to fill the hospital's disk with an optimizer state of 2 GiB that is kept for the next round.
import torch
from lead import learn


def grows(model, metrics) -> None:
    import gc

    [optimizer] = [own for own in gc.get_objects() if isinstance(own, torch.optim.SGD)]
    for own in model.parameters():
        optimizer.state[own]["momentum_buffer"] = torch.zeros(32 << 20)  # a tensor of 128 MiB instead of 32 bytes


learn(grows)
