"""What a line of results keeps of a method's mechanism."""

from pathlib import Path

import numpy as np
from evidence.shown import like_layers
from safetensors.numpy import save_file


def test_clients_with_similar_labels_and_gating_layers_have_a_correlation_of_one(
    tmp_path: Path,
) -> None:
    """Every tensor counts alike, running statistics and a client that never trained not at all."""
    group = np.array([0, 0, 9, 1, 1, 2])
    private = tmp_path / "private.safetensors"
    tensors = {
        "__seen__": np.array([1, 1, 0, 1, 1, 1], np.uint8),
        "gate.linear.weight": np.tile(group[:, None, None], (1, 2, 3)).astype(np.float32),
        "gate.post.weight": 1e-4 * group[:, None].astype(np.float32),
        "gate.post.bias": np.ones((6, 2), np.float32),  # nobody's differs
        "gate.post.running_mean": 1e6 * np.random.default_rng(0).normal(size=(6, 2)),
    }
    save_file(tensors, private)
    labels = np.stack([10 - 5 * group, 5 * group], axis=1).clip(0)
    assert like_layers(private, labels) == 1
    assert like_layers(private, labels[:, :1] * 0 + 1) is None  # all have the same labels
    assert like_layers(private, None) is None
