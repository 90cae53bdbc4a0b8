"""The training script, with NVFlare's Client API."""

import argparse

import nvflare.client as flare
import torch
from model import Net, data_of
from torch import nn
from torch.utils.data import DataLoader


def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs
    flare.init()
    train_set, test_set = data_of(flare.get_site_name())
    train_loader = DataLoader(train_set, batch_size=30, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)
    model, loss = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    while flare.is_running():
        input_model = flare.receive()
        model.load_state_dict(input_model.params)
        accuracy = evaluate(model, test_loader)
        print(f"round {input_model.current_round + 1} of {input_model.total_rounds}: {accuracy:.2f} before training")
        for _ in range(epochs):
            for images, labels in train_loader:
                optimizer.zero_grad()
                loss(model(images), labels).backward()
                optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": accuracy}))


if __name__ == "__main__":
    main()
