"""FedAvg with FedLab's standalone pipeline and serial trainer."""

from __future__ import annotations

import torch
from torch import library

# FedLab imports torchvision, whose registry build finds none of its operators beside a CPU build of
# torch and stops at those that it describes further; none is used here
for name in ("nms", "qnms"):
    library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from torch import Tensor  # noqa: E402

from . import cnn  # noqa: E402


class Data:
    """What the trainer asks for batches."""

    def get_dataloader(self, client: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        return cnn.batches(client)


class Pipeline(StandalonePipeline):
    """One that notes when rounds end."""

    watch = cnn.Stopwatch()

    def evaluate(self) -> None:
        self.watch.round_ended()


def main() -> None:
    """Run as the driver says."""
    options = cnn.options()
    torch.manual_seed(0)
    handler = SyncServerHandler(cnn.network(), options.rounds, options.cohort / cnn.CLIENTS)
    trainer = SGDSerialClientTrainer(cnn.network(), cnn.CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=1, batch_size=cnn.BATCH, lr=cnn.LR)
    pipeline = Pipeline(handler, trainer)
    pipeline.main()
    cnn.report(options.out, pipeline.watch.ends, list(handler.model.parameters()), "fedlab")


if __name__ == "__main__":
    main()
