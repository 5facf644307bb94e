"""Experiment trackers: what a run has committed, for TensorBoard, MLflow, W&B and Trackio.

A tracker reads the run directory, as the report does, so a run's numbers don't depend on it. Every
method with a seed is one run of the tracker, every round one of its steps.
"""

TRACKERS = {  # by package, in whose module here is the class
    "tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB", "trackio": "Trackio"
}  # fmt: skip
