"""``fedtailor predict``: use a model of a finished run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, announce, brief, naming, say
from ..store.format import as_json
from .options import add_flag, add_trained, add_which, check_place, whole

if TYPE_CHECKING:
    from ..inference.model import PersonalModel


def add(parser: argparse.ArgumentParser) -> None:
    add_trained(parser)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--client", help="a client's name or number; default: the global model")
    what = "each row with the model of the client that its column names (the run's data.client)"
    add_flag(whose, "--by-client", what)
    add_which(parser)
    what = "a table; txt; a picture or a folder of pictures; -: a text a line from stdin"
    parser.add_argument("--input", required=True, metavar="FILE", help=what)
    parser.add_argument("--text", metavar="COLUMN", help="the column of texts; default: the run's")
    what = "columns of the input that the output has, too, such as an id"
    parser.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help=what)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: stdout")
    add_flag(parser, "--json", "one JSON object a line, not csv")
    what = "of a language model's text"
    parser.add_argument("--max-new-tokens", type=whole(1), default=32, metavar="N", help=what)


def command(options: argparse.Namespace) -> None:
    from ..export.scores import ModelScores
    from ..inference import rows as tables
    from ..inference.model import count_trained_on, load_model, predict_by_client
    from ..runs.trained import open_trained

    if options.out is not None:
        if options.out.resolve() == Path(options.input).resolve():
            raise InputError(f"--out {options.out} is the input itself; name another file")
        check_place(options.out)
    which, most = options.which, options.max_new_tokens
    if options.by_client:
        trained = open_trained(options.run, options.method, options.seed, which=which)
    else:
        model = load_model(options.run, options.method, options.client, options.seed, which=which)
        trained = model.trained
    data, images = trained.experiment.data, trained.data["modality"] == "image"
    pair = trained.data.get("pair") or ()
    rows = tables.read_rows(options.input, data, images=images, text=options.text, pair=pair)
    classes, by_client = trained.data["classes"], options.by_client
    objective = trained.task.backbone.objective
    own = objective.column_names(classes) | ({"client"} if by_client else set())
    tables.check_kept(rows, options.keep, options.input, own)
    names = trained.data.get("names")
    clients = tables.clients_of(rows, options.input, data, names) if by_client else None
    as_read = sys.stdout.isatty() and not (options.json or options.keep or options.out)
    streams = objective.writes and clients is None and as_read
    if streams:
        results = _streamed(model, rows.inputs, most)
    elif clients is None:
        results = model.predict(rows.inputs, max_new_tokens=most)
    else:
        results = predict_by_client(trained, rows.inputs, clients, max_new_tokens=most)
    right = ""
    if rows.labels is not None and objective.has_classes:
        right = tables.accuracy(results, rows.labels, classes)
        numbers = tables.class_numbers(rows.labels, classes)
        if seen := count_trained_on(trained, rows.inputs, numbers):
            many = "1 of them was a training row" if seen == 1 else f"{seen} were training rows"
            right += f"; {many}, so this says little of new ones"
    objects = tables.as_objects(rows, results, objective, clients, options.keep)
    between = " " if objective.reads_words else "|"
    if not streams:
        _write(
            map(as_json, objects) if options.json else tables.as_csv(objects, between), options.out
        )
    if options.client is None and not options.by_client:
        say("note: this is the global model; --client names a client's own")
    whose = [options.client] if clients is None else list(dict.fromkeys(clients))
    if doubts := ModelScores.read(trained).doubts(whose):
        announce(doubts)
    if options.client is not None and (others := tables.of_others(rows, options.client, names)):
        announce(others)
    if empty := tables.empty_texts(rows):
        announce(empty)
    if right:
        say(right)


def _streamed(model: PersonalModel, inputs: Sequence[Any], most: int) -> list[Any]:
    """Print each input and what the model writes, piece by piece; return the texts."""
    texts = []
    for value in inputs:
        print(f"> {brief(value, 70)}")
        texts += model.predict([value], max_new_tokens=most, say=partial(print, end="", flush=True))
        print("\n")
    return texts


def _write(lines: Iterable[str], out: Path | None) -> None:
    if out is None:
        for line in lines:
            print(line)
    else:
        with naming(out):
            out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
