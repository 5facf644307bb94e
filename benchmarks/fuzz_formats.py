"""Files and folders of other formats: SQuAD's and LEAF's JSON, CoNLL, pictures by class. They are
tables or refused in a line; of a CoNLL file that is whole, each word is where it was."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from fedtailor.data.survey import survey
from fedtailor.data.tables import local_table
from fedtailor.errors import InputError

from .mutations import Attempt, Change, RefusedError, cut, flipped, mutated, read

_ANSWERED = {"id": "a", "question": "who?", "answers": [{"text": "Ada", "answer_start": 0}]}
_SQUAD = {
    "version": "v2.0",
    "data": [
        {"title": "Rome", "paragraphs": [{"context": "Ada wrote.", "qas": [
            _ANSWERED, {"id": "b", "question": "why?", "answers": [], "is_impossible": True},
        ]}]},
        {"title": "Oslo", "paragraphs": [{"context": "Ada.", "qas": [_ANSWERED]}]},
    ],
}  # fmt: skip
_LEAF = {"users": ["ann", "bob"], "user_data": {
    "ann": {"x": [["hi", "ho"], ["he", "ha"]], "y": [0, 1]},
    "bob": {"x": [["hi", "Bo", "."]], "y": [["O", "B-PER", "O"]]},
}}  # fmt: skip
_BY_USER = {
    "ann": [{"text": "hi", "pair": ["a", "b"], "answers": {"text": [], "answer_start": []}}],
    "bob": [{"text": "ho", "pair": ["c"], "answers": {"answer_start": [1], "text": ["o"]}}],
}
_WORDS = ("EU", "#", "#tag", "a\u00a0b", "\u2028", "NA", "-", "é", "\x00", "1")
_PARTS = ("train", "test", "val", "cat", "dog", "x", ".hidden", "ä", "a b", "a\x1b[2J", "Cat")


Written = tuple[Path, Change, list[list[str]] | None]  # None: it may be damaged


def formats(folder: Path) -> Attempt:
    """Read a file or a folder as a table, and look for the columns of a task in it."""
    import datasets  # noqa: F401  # so that no mutation waits for it

    def attempt(rng: random.Random) -> Change:
        path, change, right = rng.choice((_json, _json, _conll, _pictures))(rng, folder)

        def look() -> None:
            found.append(local_table(str(path)))
            with suppress(InputError):  # of a kind of task that is told by its columns
                survey(str(path)).roles(None, None, None)

        found: list[Any] = []
        try:
            read(look)
        except RefusedError:
            if right is not None:
                raise AssertionError(f"a whole file was refused: {path.read_bytes()!r}") from None
            raise
        if right is not None and found[0]["tokens"][:] != right:
            raise AssertionError(f"{right} became {found[0]['tokens'][:]}")
        return change

    return attempt


def _json(rng: random.Random, folder: Path) -> Written:
    content = json.dumps(rng.choice([_SQUAD, _SQUAD, _LEAF, _BY_USER])).encode()
    content, change = mutated(rng, content, ".json")
    (folder / "a.json").write_bytes(content)
    return folder / "a.json", change, None


def _conll(rng: random.Random, folder: Path) -> Written:
    """Sentences in any of the ways to write them; half of the files are damaged."""
    path = folder / f"a{rng.choice(['.conll', '.bio', '.txt'])}"
    sentences = [[rng.choice(_WORDS) for _ in range(rng.randint(1, 4))] for _ in range(6)]
    middle, between = rng.choice([[], ["_", "NN"]]), rng.choice(["\t", " ", "  "])
    head = rng.choice(["", "# id 1\n", "-DOCSTART- -X- O\n\n", "\n"])
    tags = ["O", *(rng.choice(["O", "B-X", "I-X"]) for _ in range(30))]
    text = "\n\n".join(
        head + "\n".join(between.join([word, *middle, tags[n]]) for n, word in enumerate(words))
        for words in sentences
    )
    content = text.replace("\n", rng.choice(["\n", "\r\n"])).encode(
        rng.choice(["utf-8", "utf-8-sig"])
    )
    damage = rng.choice([None, cut, flipped])
    content, change = (content, Change(path.suffix)) if damage is None else damage(rng, content)
    path.write_bytes(content)

    return path, change, sentences if damage is None else None


def _pictures(rng: random.Random, folder: Path) -> Written:
    """A folder of pictures, of other files and of empty folders, at any depth."""
    root = folder / "pictures"
    shutil.rmtree(root, ignore_errors=True)
    depth = rng.choice([1, 2, 2, 3])
    for number in range(rng.randint(1, 12)):
        depth = rng.randint(0, 4) if rng.random() < 0.05 else depth
        place = root.joinpath(*(rng.choice(_PARTS) for _ in range(depth)))
        place.mkdir(parents=True, exist_ok=True)
        name = rng.choice(
            ["{}.png", "{}.png", "{}.png", "{}.PNG", "{}.txt", "._{}.png", "\udcff{}.png"]
        )
        if rng.random() < 0.9 and not (file := place / name.format(number)).is_dir():
            Image.new("L", (2, 2)).save(file, "PNG")
    return root, Change(f"depth {depth}"), None
