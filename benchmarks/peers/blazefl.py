"""FedAvg with BlazeFL's pools, of threads or of processes that share memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch import Tensor, nn

from . import cnn


class Model:
    """What makes the trainers' models."""

    def select_model(self, name: str) -> nn.Module:
        return cnn.network()


class Batches(list[tuple[Tensor, Tensor]]):
    """A client's batches, as a data loader."""

    dataset = None


class Data:
    """What trainers ask for batches."""

    def get_dataloader(
        self, type_: Any, cid: int, batch_size: int, generator: torch.Generator
    ) -> Batches:
        return Batches(cnn.batches(cid))

    def set_dataset(self, type_: Any, cid: int, dataset: None) -> None:
        return None


def main() -> None:
    """Run as the driver says."""
    options = cnn.options()
    torch.manual_seed(0)
    watch, data, model = cnn.Stopwatch(), Data(), Model()
    common = {"model_selector": model, "model_name": "cnn", "dataset": data, "device": "cpu"}
    handler = FedAvgBaseServerHandler(
        **common,
        global_round=options.rounds,
        num_clients=cnn.CLIENTS,
        sample_ratio=options.cohort / cnn.CLIENTS,
        batch_size=cnn.BATCH,
        seed=0,
    )
    common |= {
        "num_clients": cnn.CLIENTS,
        "epochs": 1,
        "batch_size": cnn.BATCH,
        "lr": cnn.LR,
        "seed": 0,
        "num_parallels": options.workers,
    }
    with TemporaryDirectory() as folder:
        if options.mode == "threads":
            trainer = FedAvgThreadPoolClientTrainer(**common)
        else:
            trainer = FedAvgProcessPoolClientTrainer(
                **common,
                share_dir=Path(folder),
                state_dir=Path(folder),
                ipc_mode=IPCMode.SHARED_MEMORY,
            )
        while not handler.if_stop():
            clients = handler.sample_clients()
            trainer.local_process(handler.downlink_package(), clients)
            for package in trainer.uplink_package():
                handler.load(package)
            watch.round_ended()
    cnn.report(options.out, watch.ends, list(handler.model.parameters()), "blazefl")


if __name__ == "__main__":
    main()
