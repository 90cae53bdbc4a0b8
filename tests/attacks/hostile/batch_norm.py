# Tries to send a patient's name in the batch-norm buffers, which are not trained by gradients.
import torch
from lead import SECRET, learn


def hide(model, metrics) -> None:
    model[1].running_mean.view(torch.int32)[:6] = torch.tensor(
        [0x3F000000 | int.from_bytes(SECRET[3 * n : 3 * n + 3], "big") & 0x7FFFFF for n in range(6)], dtype=torch.int32
    )
    model[1].num_batches_tracked.fill_(int.from_bytes(SECRET[:7], "big"))


learn(hide)
