"""A MONAI training script that works with HarmoFL and with FedSM."""

import torch
from model import images_of, unet
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot
from torch import nn

import medsilo.client as flare


def main() -> None:
    flare.init()
    cases = images_of(flare.get_site_name())
    train_loader = DataLoader(Dataset(cases[:20]), batch_size=8, shuffle=True)
    validation_loader = DataLoader(Dataset(cases[20:30]), batch_size=5)
    test_loader = DataLoader(Dataset(cases[30:]), batch_size=5)
    model, loss = unet(), DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def evaluate(net: nn.Module, loader: DataLoader = validation_loader) -> dict[str, float]:
        dice = DiceMetric(include_background=False)
        for batch in loader:
            found = one_hot(net(batch["image"]).argmax(1, keepdim=True), 2)
            dice(found, one_hot(batch["label"], 2))
        return {"dice": dice.aggregate().item()}

    def train_one_epoch(net: nn.Module, step: torch.optim.Optimizer) -> None:
        for batch in train_loader:
            step.zero_grad()
            loss(net(batch["image"]), batch["label"]).backward()
            step.step()

    flare.join(
        model,
        optimizer,
        train_loader,
        evaluate=evaluate,
        test=lambda net: evaluate(net, test_loader),
        validation=validation_loader,
        loss=loss,
    )
    while flare.is_running():
        flare.receive()
        for net, step in flare.networks():  # HarmoFL has one network; FedSM has a global and a personal network
            net.train()
            train_one_epoch(net, step)
        flare.send()


if __name__ == "__main__":
    main()
