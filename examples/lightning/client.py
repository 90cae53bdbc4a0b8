"""A training script in which Lightning's trainer trains each network of the federated method."""

import lightning
import torch
from model import Net, data_of
from torch.utils.data import DataLoader

import medsilo.client as flare


def main() -> None:
    flare.init()
    train_set, test_set = data_of(flare.get_site_name())
    loader = DataLoader(train_set, batch_size=20, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows, labels = test_set.tensors

    flare.join(model, optimizer, loader, evaluate=lambda net: (net(rows).argmax(1) == labels).float().mean().item())
    while flare.is_running():
        flare.receive()
        for net, step in flare.networks():
            net.configure_optimizers = lambda step=step: step  # Lightning uses the federated method's optimizer
            trainer = lightning.Trainer(
                max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
            )
            trainer.fit(net, loader)
        flare.send()


if __name__ == "__main__":
    main()
