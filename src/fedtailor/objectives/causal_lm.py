"""Causal language modelling: each token of a text is predicted from those before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from .encoding import Example, Tokenizer, Values, encodings, filler, with_end
from .exported import ExportedModel
from .objective import IGNORED, Tensor
from .writing import Ids, Writing, following


class Exported(ExportedModel):
    """What an exported model says; see `ExportedModel`."""

    generates = True
    is_network_alone = False  # whether the network alone computes the logits

    def say(self, given: str) -> str:
        """Return the text, continued."""
        return self.generate(given)

    def say_all(self, texts: Sequence[str]) -> str:
        """Return a line for each text, continued."""
        return "\n".join(" ".join(self.generate(text).split("\n")) for text in texts)

    @property
    def cuts(self) -> bool:
        """Whether only the beginning of a long text is read."""
        return not self.about.get("chat")

    def generate(self, text: str, tokens: int = 32) -> str:
        """Continue ``text`` by at most so many tokens, each time the most probable one, and by no
        more than the model reads. Raises OSError where a conversation is longer, or is none."""
        ids = self.prompt(text)
        said = ids.shape[1] if self.about.get("chat") else 0  # tokens that are not repeated
        positions = self.about["inputs"].get("positions")  # the model's; None: no limit
        room = tokens if positions is None else min(tokens, positions - ids.shape[1])
        if room < 1 and said:
            from errno import EINVAL

            reason = f"a conversation of {said} tokens, and the model reads {positions}"
            raise OSError(EINVAL, reason, text[:60])
        of_transformers = self.about["inputs"]["kind"] == "text"  # the network's class
        if self.is_network_alone and of_transformers and room > 0:
            ids = self._with_cache(ids, room)
        else:
            ids = self._without_cache(ids, room)
        return str(self.tokenizer.decode(ids[0, said:], skip_special_tokens=True))

    def _without_cache(self, ids: Tensor, room: int) -> Tensor:
        """``ids``, continued, each time from all tokens anew."""
        import torch

        for _ in range(room):
            logits = self.logits({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            following = logits[:, -1].argmax(-1)
            if int(following) in self.about["ends"]:
                break
            ids = torch.cat([ids, following[:, None]], 1)
        return ids

    def _with_cache(self, ids: Tensor, room: int) -> Tensor:
        """``ids``, continued by transformers, which keeps the keys and values of all tokens."""
        from transformers import GenerationConfig

        self.network.generation_config = GenerationConfig()  # the base model's own may sample
        longer: Tensor = self.network.generate(
            ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=room, do_sample=False,
            use_cache=True, eos_token_id=self.about["ends"] or None, pad_token_id=0,
        )  # fmt: skip
        return longer[:, :-1] if int(longer[0, -1]) in self.about["ends"] else longer

    def prompt(self, text: str) -> Tensor:
        """Return the tokens to go on from; a chat model's user says the text, unless it is a list
        of messages in JSON."""
        found: Any = self.batch([text])
        if self.about.get("chat"):
            turns = self._turns(text)
            while len(turns) > 1 and turns[-1]["role"] == "assistant":  # what it is to say itself
                turns.pop()
            found = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        ids: Tensor = found["input_ids"]
        return ids

    def conversation(self, column: str, row: Mapping[str, str]) -> str:
        """Return the text of a row's ``column`` as messages in JSON, in the words of the client's
        template if it has one, with the row's system prompt and context."""
        import json
        from errno import EINVAL

        template = self.about["chat"].get("template")
        used = self.about["columns"] if template else [column]
        if absent := [name for name in used if name not in row]:
            raise OSError(
                EINVAL, f"it has no column {absent[0]!r}, but {', '.join(row)}", "the table"
            )
        system, context = (
            [row[name] for name in self.about["chat"][part] if row.get(name) and name not in used]
            for part in ("system", "context")
        )
        text = template.format_map(row) if template else row[column] or ""
        turns = self._turns(text)
        if context and turns == [{"role": "user", "content": text}]:
            turns[0]["content"] = f"{text}\n\n{context[0]}"
        if system and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": system[0]})
        return json.dumps(turns)

    def _turns(self, text: str) -> list[dict[str, str]]:
        import ast
        import json
        from contextlib import suppress
        from errno import EINVAL

        turns: Any = None
        for read in (json.loads, ast.literal_eval) if text.lstrip()[:1] == "[" else ():
            with suppress(ValueError, SyntaxError, RecursionError):
                turns = turns or read(text)
        if not isinstance(turns, list) or not all(isinstance(one, dict) for one in turns or [0]):
            return [{"role": "user", "content": text}]
        if not all(isinstance(one.get(name), str) for one in turns for name in ("role", "content")):
            raise OSError(EINVAL, "each message has a role and a content, both texts", text[:60])
        return turns


class CausalLM(Writing):
    """The texts are inputs and targets; the end of a text is one of its tokens."""

    name = "causal-lm"
    meaning = "a language model, trained on the texts alone"
    generates = True
    packs = True
    target = ""
    auto_classes: ClassVar[Mapping[str, str]] = {"text": "AutoModelForCausalLM"}
    peft_task = "CAUSAL_LM"
    exported = Exported

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each text with its end, the tokenizer's end-of-text token, once.

        A text that is truncated has none: it did not end there. There are no tokens of a text of
        blanks alone, or without a token to predict.
        """
        added = tokenizer.num_special_tokens_to_add()
        for text, encoding in zip(values, encodings(values, tokenizer, None), strict=True):
            ids = encoding.ids
            is_blank = not text.strip() or len(ids) <= added
            ids = with_end(ids, tokenizer)
            is_cut = len(ids) > max_length
            yield Example([] if is_blank or len(ids) < 2 else ids[:max_length], is_cut)

    def encode_prompts(
        self, values: Values, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each text without the end that some tokenizers add, since a model
        goes on from it."""
        for encoding in encodings(values, tokenizer, None):
            ids = encoding.ids
            if ids and ids[-1] == tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
                del ids[-1]
            yield Example(ids[:max_length] or [filler(tokenizer)], len(ids) > max_length)

    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the token after each, of those that are real."""
        return following(batch["input_ids"].where(batch["attention_mask"].bool(), IGNORED))

    def exercise(self, ids: Ids, targets: Ids | None) -> tuple[Ids, Ids]:
        """Return the first half of a text, and the rest."""
        half = (len(ids) + 1) // 2
        return ids[:half], ids[half:]
