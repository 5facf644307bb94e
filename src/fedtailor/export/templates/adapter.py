"""The base model with a LoRA adapter, which PEFT adds to it, and a head of the client's."""

from __future__ import annotations

import warnings
from pathlib import Path

from .base import HERE, Base


class Model(Base):
    """The model of ``peft.PeftModel``."""

    is_network_alone = True

    def __init__(self, folder: Path | str = HERE) -> None:
        from peft import PeftModel

        super().__init__(folder)
        part = self.network.get_submodule(self.settings["adapted"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's own
            PeftModel.from_pretrained(part, str(self.folder)).eval()  # adds the LoRA in place
