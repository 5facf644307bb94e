"""Instructions: a decoder reads a conversation, and learns the turns of the assistant alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, brief, listed
from .causal_lm import CausalLM
from .cells import is_blank, parsed, rows_of, usual_column, written
from .encoding import Example, Tokenizer, Values
from .objective import IGNORED, Roles, Tensor
from .writing import Ids, following

_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_WHOLE = ("messages", "conversations", "conversation")  # usual names of a column of messages
PROMPT = ("instruction", "prompt", "question")  # and of the columns of one turn
_CONTEXT = ("input", "context")
_ANSWER = ("output", "response", "completion", "answer")
SYSTEM = "system"
_WORD = "Zq9"  # that no template has

Turns = list[dict[str, str]]
"""The messages of a conversation, each with its ``role`` and ``content``."""


class Instruct(CausalLM):
    """An input is a conversation, as JSON, or the words of a user. The tokenizer's chat template
    turns it into a text; the targets are the tokens of the assistant's turns, with their ends."""

    name = "instruct"
    meaning = "conversations, of which the assistant's turns are learned"
    input_names = ("conversation",)
    joins_columns = True
    target = "tokens"
    nothing_learned = "in which the assistant says nothing"

    def joined(
        self, columns: Sequence[str], text: str | None, second: str | None, answer: str | None
    ) -> tuple[str, ...]:
        """Return which columns a conversation is made of, by usual names where none is given: that
        of messages, perhaps after one of system prompts; or system prompt, prompt, context and
        answer."""

        def usual(name: str | None, names: Sequence[str]) -> str:
            return name or usual_column(names, columns) or ""

        is_parts = text in PROMPT or usual(None, _ANSWER)
        is_whole = text in (None, *_WHOLE) or not is_parts
        system = usual(None, (SYSTEM,))
        if is_whole and not (second or answer) and (whole := usual(text, _WHOLE)):
            return (system, whole) if system else (whole,)
        prompt, context = usual(text, PROMPT), usual(second, _CONTEXT)
        context = "" if context == prompt else context
        return system, prompt, context, usual(answer, _ANSWER)

    def conversations(self, columns: Sequence[Sequence[Any] | None]) -> list[str]:
        """Return the rows of the columns that `joined` names as JSON; None for one that is absent.
        Raises InputError where a row is no conversation."""
        if len(columns) < 3:
            cells, systems = columns[-1] or (), columns[0] if columns[1:] else None
            found = [turns_of("" if is_blank(cell) else cell, n) for n, cell in enumerate(cells, 1)]
            for turns, system in zip(found, systems or (), strict=False):
                if turns[0]["role"] != SYSTEM and not is_blank(system):
                    turns.insert(0, {"role": SYSTEM, "content": str(system)})
            return list(map(written, found))
        return [written(of_cells(cells, row)) for row, cells in enumerate(rows_of(columns), 1)]

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return a column of messages, or an instruction and its answer, by their usual names."""
        for name in _WHOLE:
            first = next((cell for cell in columns.get(name, ()) if cell), None)
            if isinstance(first, list) and isinstance(first[0], dict):
                return {"text": name}
        prompt = usual_column(("instruction", "prompt"), columns)
        context, label = (usual_column(usual, columns) for usual in (_CONTEXT, _ANSWER))
        if prompt is None or label is None:
            return {}
        pair: Roles = {} if context is None else {"text_pair": context}
        return {"text": prompt, **pair, "label": label}

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each conversation, and as labels those that are learned. Of one that
        is too long the last turn stays, and as much before it as there is room for; there are none
        of one in which the assistant says nothing. ``targets`` say which row of its source each is.
        Raises InputError where the assistant says nothing in any, or the template refuses one."""
        roles: set[str] = set()
        for row, value in zip(targets or range(1, len(values) + 1), values, strict=True):
            turns = turns_of(value, row)
            roles |= {turn["role"] for turn in turns}
            ids, learned = _tokens(turns, tokenizer, row)
            at = np.flatnonzero(learned)
            if not len(at) or not any(map(_says, turns)):
                yield Example([])
                continue
            last = at[np.flatnonzero(np.diff(at, prepend=-2) > 1)[-1]]  # where its last turn begins
            start = max(0, min(last - 1, at[-1] + 1 - max_length))
            end = min(at[-1] + 1, start + max_length)
            labels = [i if ok else IGNORED for i, ok in zip(ids, learned, strict=True)]
            yield Example(ids[start:end], bool(end - start <= at[-1]), None, labels[start:end])
        if len(values) and "assistant" not in roles:
            raise InputError(
                f"the assistant says nothing in any conversation; roles: {listed(sorted(roles))}; "
                f"allowed for it: assistant, {listed(sorted(_ROLES.keys() - {'human'}))}"
            )

    def encode_prompts(
        self, values: Values, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the tokens of each conversation up to its last answer, which the model is to give;
        of one that is too long the last ones."""
        for row, value in enumerate(values, 1):
            turns = turns_of(value, row)
            while len(turns) > 1 and turns[-1]["role"] == "assistant":
                turns.pop()
            text = rendered(turns, tokenizer, row, prompt=True)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            yield Example(ids[-max_length:], len(ids) > max_length)

    def summary(self, targets: Sequence[NDArray[np.int64]], classes: Sequence[str]) -> str:
        """Return how much of the texts is learned."""
        learned = sum(int((one != IGNORED).sum()) for one in targets)
        share = 100 * learned / sum(map(len, targets))
        return f"{share:.1f} % of the tokens are the assistant's"

    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the token after each, of those that are learned."""
        return following(batch["labels"])

    def exercise(self, ids: Ids, targets: Ids | None) -> tuple[Ids, Ids]:
        """Return a conversation up to the last answer, and that answer."""
        learned = np.array(targets) != IGNORED
        end = int(np.flatnonzero(learned)[-1]) + 1
        start = end - int(np.append(learned[:end][::-1], False).argmin())
        start = max(1, start)  # something must stand before
        return ids[:start], ids[start:end]

    def described(self) -> dict[str, Any]:
        columns = {"system": (SYSTEM,), "prompt": (*PROMPT, *_WHOLE), "context": _CONTEXT}
        return {"chat": columns}

    def turn_ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special token with which the chat template ends an answer."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _WORD}]
        try:
            after = rendered(turns, tokenizer, 1).rpartition(_WORD)[2]
        except InputError:  # it has no template, or not for these
            return frozenset()
        first: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        return frozenset(token for token in first if token in tokenizer.added_tokens_decoder)


def turns_of(value: Any, row: int = 1) -> Turns:
    """Return the messages of a conversation: a list of them, the same as JSON or Python writes it,
    or a user's words. Raises InputError at anything else.

    >>> turns_of("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    if isinstance(value, str):
        if not (found := messages_in(value)):
            return [{"role": "user", "content": value}]
        value = found
    if isinstance(value, dict):
        raise InputError(
            f"row {row} is one message, {brief(value, 60)}; a conversation is a list of messages, "
            "and several are a list of such lists"
        )
    turns = []
    for message in value if isinstance(value, list | tuple) and len(value) else [value]:
        one = message if isinstance(message, dict) else {}
        role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(
                f"row {row} has {brief(message, 60)} as a message of a conversation; each "
                "needs a role and a content (or from and value), both texts"
            )
        name = role.strip().lower()
        turns.append({"role": _ROLES.get(name, name), "content": content})
    return turns


def messages_in(text: str) -> list[Any]:
    """The messages that a text has as JSON or as Python writes them; none where it has others."""
    found = parsed(text)
    is_list = isinstance(found, list) and all(isinstance(one, dict) for one in found)
    return list(found) if is_list else []


def of_cells(cells: Sequence[Any], row: int) -> Turns:
    """Return the messages of a system prompt, a prompt, its context and an answer. Each may be a
    list of messages itself, or of texts, of which the first counts."""
    turns: Turns = []
    for cell, role in zip(cells, (SYSTEM, "user", "context", "assistant"), strict=True):
        if isinstance(cell, list | tuple) and cell and all(isinstance(one, str) for one in cell):
            cell = cell[0]
        if role == "user" and isinstance(cell, str):
            cell = messages_in(cell) or cell
        text = "" if cell is None or cell != cell else str(cell)
        if isinstance(cell, list | tuple | dict):
            turns += turns_of(cell, row)
        elif role == "context" and text and turns and turns[-1]["role"] == "user":
            turns[-1]["content"] = "\n\n".join(filter(None, (turns[-1]["content"], text)))
        elif text or role == "user":
            turns.append({"role": "user" if role == "context" else role, "content": text})
    return turns


def _says(turn: Mapping[str, str]) -> bool:
    """Whether the assistant says something there."""
    return turn["role"] == "assistant" and not is_blank(turn["content"])


def _tokens(turns: Turns, tokenizer: Tokenizer, row: int) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and which of them the assistant says.

    A template may mark them; else they are what its text has more with a turn than with the
    beginning of that turn, but for blanks behind a special token.
    """
    template = _template(tokenizer)
    if "{% generation" in template.replace("{%-", "{%"):
        marked = _applied(
            turns, tokenizer, row, return_dict=True, return_assistant_tokens_mask=True
        )
        return marked["input_ids"], [bool(one) for one in marked["assistant_masks"]]
    text = rendered(turns, tokenizer, row)
    ends = tuple(one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
    spans = []
    for number, turn in enumerate(turns):
        if _says(turn):
            after = rendered(turns[: number + 1], tokenizer, row)
            if number:
                before = rendered(turns[:number], tokenizer, row, prompt=True)
            else:  # templates refuse an empty conversation: what stands before its first words
                before = after[: max(0, after.find(turn["content"]))]
            if not (text.startswith(after) and after.startswith(before)):
                raise InputError(
                    "the chat template writes earlier turns otherwise once others follow; give "
                    "model.chat_template, one that marks the answers with {% generation %}"
                )
            said = after.rstrip()  # a line end behind a turn's own end is no answer's
            spans.append((len(before), len(said if said.endswith(ends) else after)))
    whole = tokenizer(text, add_special_tokens=False, verbose=False).encodings[0]
    starts = [start for start, _ in whole.offsets]
    return whole.ids, [any(a <= start < b for a, b in spans) for start in starts]


def rendered(turns: Turns, tokenizer: Tokenizer, row: int, *, prompt: bool = False) -> str:
    """Return the text of a conversation; of a ``prompt`` with the beginning of an answer. Raises
    InputError where the chat template refuses it."""
    return str(_applied(turns, tokenizer, row, tokenize=False, add_generation_prompt=prompt))


def _applied(turns: Turns, tokenizer: Tokenizer, row: int, **options: Any) -> Any:
    """What the chat template makes of a conversation."""
    from jinja2.exceptions import TemplateError

    template = _template(tokenizer)
    try:
        return tokenizer.apply_chat_template(turns, chat_template=template, **options)
    except (TemplateError, TypeError, ValueError) as error:
        said = " and ".join(turn["role"] for turn in turns)
        raise InputError(
            f"the chat template refuses row {row}, turns of {brief(said, 80)}: {error}"
        ) from None


def _template(tokenizer: Tokenizer) -> str:
    try:
        return str(tokenizer.get_chat_template())  # the default of several
    except ValueError:
        raise InputError(
            "the tokenizer has no chat template, by which a conversation becomes a text; name one: "
            "model.chat_template = 'alpaca'"
        ) from None
