"""FedAvg with pfl-research's simulated backend, in one process or in its own worker processes.

Several workers are started as its guide to distributed simulations says: the same script with
PFL_WORKER_RANK and PFL_WORKER_ADDRESSES set. Metrics are switched off, as in our own contender.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from argparse import Namespace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import cnn


def main() -> None:
    """Run as the driver says."""
    options = cnn.options()
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    others = _start_others(options.workers) if "PFL_WORKER_RANK" not in os.environ else []
    watch, model = _run(options)
    if others or options.workers == 1:
        cnn.report(options.out, watch.ends, list(model.parameters()), "pfl")
    for process in others:
        process.wait()


def _start_others(workers: int) -> list[subprocess.Popen[bytes]]:
    """All workers but the first, which is this process."""
    if workers == 1:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # torch.distributed uses the first address only
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"localhost:{port}"] * workers)
    command = [sys.executable, "-m", "benchmarks.peers.pfl", *sys.argv[1:]]
    others = [
        subprocess.Popen(command, env=os.environ | {"PFL_WORKER_RANK": str(rank)})
        for rank in range(1, workers)
    ]
    os.environ["PFL_WORKER_RANK"] = "0"
    return others


def _run(options: Namespace) -> tuple[cnn.Stopwatch, nn.Module]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)  # noqa: NPY002  # pfl draws cohorts from it, the same on all workers
    torch.manual_seed(0)

    def loss(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(x), y)

    def metrics(self: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"none": Weighted(0, 1)}

    class Round(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            watch.round_ended()
            return False, Metrics()

    watch, network = cnn.Stopwatch(), cnn.network()
    network.loss, network.metrics = MethodType(loss, network), MethodType(metrics, network)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if options.precision == "bf16" else None,
    )
    users = FederatedDataset(
        make_dataset_fn=lambda user: Dataset(cnn.client(user), user_id=str(user)),
        user_sampler=lambda: np.random.randint(cnn.CLIENTS),  # noqa: NPY002
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=options.rounds + 1,
            train_cohort_size=options.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=cnn.LR, local_batch_size=cnn.BATCH
        ),
        callbacks=[Round()],
    )
    return watch, network


if __name__ == "__main__":
    main()
