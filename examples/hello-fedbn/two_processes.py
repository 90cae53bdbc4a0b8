"""A training script for several processes that train one model together; only rank 0 talks to the server.

In job.py, pass two arguments to the recipe of this script:

    launch_external_process=True,
    command="python3 -m torch.distributed.run --standalone --nproc_per_node 2",
"""

import torch
from model import Net, data_of
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import medsilo.client as flare


def main() -> None:
    distributed.init_process_group("gloo")
    flare.init()
    names = [flare.get_site_name() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(names)
    cases, _ = data_of(names[0])
    train_loader = DataLoader(cases, batch_size=15, sampler=DistributedSampler(cases))
    model, loss = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    flare.join(model, optimizer, train_loader)
    net = DistributedDataParallel(model)
    while True:
        running = [flare.is_running()]  # as in NVFlare, False on all ranks except rank 0
        distributed.broadcast_object_list(running)
        if not running[0]:
            break
        for own in model.state_dict().values():
            distributed.broadcast(own, 0)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss(net(images), labels).backward()
            optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict()))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
