"""A training script that predicts mortality after brain injury; each site is one study of the table."""

import argparse
from pathlib import Path

import torch
from model import Net, patients_of, studies
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import medsilo.client as flare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, required=True)
    table = parser.parse_args().table
    torch.set_num_threads(1)
    flare.init()
    study = studies(table)[int(flare.get_site_name().rpartition("-")[2]) - 1]
    train_set, validation_set, test_set = patients_of(table, study)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    model, loss = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def evaluate(net: nn.Module, patients: TensorDataset = validation_set) -> dict[str, float]:
        rows, deaths = patients.tensors
        return {"auc": roc_auc_score(deaths, net(rows).softmax(1)[:, 1])}

    flare.join(model, optimizer, loader, evaluate=evaluate, test=lambda net: evaluate(net, test_set))
    while flare.is_running():
        flare.receive()
        for net, step in flare.networks():
            net.train()
            for rows, deaths in loader:
                step.zero_grad()
                loss(net(rows), deaths).backward()
                step.step()
        flare.send()


if __name__ == "__main__":
    main()
