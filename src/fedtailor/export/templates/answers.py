"""What the model says: in an export, the code of its kind of task."""

from ...objectives.classification import Exported

__all__ = ["Exported"]
