"""Causal language modelling: each token of a text is predicted from those before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .objective import Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class Exported(ABC):
    """What an exported model says. This code goes into the export: it imports nothing from here."""

    generates = True
    about: dict[str, Any]
    tokenizer: Any

    def say(self, given: str) -> str:
        """Return the text, continued."""
        return self.generate(given)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return each text, continued."""
        return "\n".join(map(self.generate, texts))

    def generate(self, text: str, tokens: int = 40) -> str:
        """Continue ``text`` by at most so many tokens, each time the most probable one.

        The result is no longer than what the model reads.
        """
        import torch

        ids = self.batch([text])["input_ids"]
        positions = self.about["inputs"].get("positions")  # the model's; None: no limit
        room = tokens if positions is None else min(tokens, positions - ids.shape[1])
        for _ in range(room):
            logits = self.logits({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            following = logits[:, -1].argmax(-1)
            if int(following) in self.about["ends"]:
                break
            ids = torch.cat([ids, following[:, None]], 1)
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True))

    @abstractmethod
    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of each token."""

    @abstractmethod
    def batch(self, inputs: Sequence[str]) -> dict[str, Tensor]:
        """Return the tokens of texts."""


class CausalLM(Objective):
    """The texts are inputs and targets; the end of a text is one of its tokens."""

    name = "causal-lm"
    per_token = True
    generates = True
    auto_classes: ClassVar[Mapping[str, str]] = {"text": "AutoModelForCausalLM"}
    peft_task = "CAUSAL_LM"
    exported = Exported

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) of the real tokens but the first, and which
        of them are the most probable ones."""
        from torch.nn import functional as F

        targets, real = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
        logits = logits[:, :-1]
        flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = flat.view(targets.shape) * real
        hits = (logits.argmax(-1) == targets) * ~loss.isnan() * real
        return Scores(loss.sum(1), hits.sum(1), real.sum(1))

    def columns(self, answer: str) -> dict[str, Any]:
        """Return the text."""
        return {"text": answer}

    def column_names(self, classes: Sequence[str]) -> set[str]:
        return {"text"}
