"""FedAvg with Flower's simulation engine (Ray): one actor a CPU."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {  # read on import
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",  # on a busy machine 30 seconds are too few
}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

from . import cnn

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's round."""
    model = cnn.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), cnn.LR)
    for x, y in cnn.batches(int(context.node_config["partition-id"])):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": cnn.EXAMPLES}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def main() -> None:
    """Run as the driver says."""
    options = cnn.options()
    watch, model = cnn.Stopwatch(), cnn.network()
    server_app = ServerApp()

    def ended(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number > 0:  # 0: before the first round
            watch.round_ended()
        return MetricRecord()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=options.cohort / cnn.CLIENTS,
            fraction_evaluate=0.0,
            min_available_nodes=cnn.CLIENTS,
        )
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(grid, arrays, num_rounds=options.rounds, evaluate_fn=ended)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    resources: Any = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=cnn.CLIENTS,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": options.workers, "include_dashboard": False},
        },
    )
    cnn.report(options.out, watch.ends, list(model.parameters()), "flwr")


if __name__ == "__main__":
    main()
