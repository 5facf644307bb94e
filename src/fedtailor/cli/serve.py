"""``fedtailor serve``: answer OpenAI's clients with a run's language models."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, say
from .options import add_trained, add_which, whole

if TYPE_CHECKING:
    from ..serving.models import Models


def add(parser: argparse.ArgumentParser) -> None:
    add_trained(parser)
    add_which(parser)
    add_endpoint(parser)


def command(options: argparse.Namespace) -> None:
    from ..runs.trained import open_trained
    from ..serving.models import Models

    trained = open_trained(options.run, options.method, options.seed, which=options.which)
    serve_until_stopped(Models.of_run(trained), options.run, options)


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Take the address, the key and the limits of an endpoint."""
    what = "default: 127.0.0.1, which this machine alone can reach; another needs a key"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=what)
    what = "default: 8000; 0: a free one"
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help=what)
    parser.add_argument(
        "--key", help="what requests must bear; better in FEDTAILOR_SERVE_KEY in the environment"
    )
    for name, default, most, what in (
        ("--max-tokens", 512, 100_000, "of an answer"),
        ("--batch", 8, 256, "requests that are answered together at most"),
        ("--waiting", 32, 10_000, "requests that wait at most; more are refused"),
    ):
        says = f"{what}; default: {default}"
        parser.add_argument(name, type=whole(1, most), default=default, metavar="N", help=says)


def serve_until_stopped(models: Models, source: Path, options: argparse.Namespace) -> None:
    """Serve models of ``source`` as the options of `add_endpoint` say. Raises InputError where they
    write no texts."""
    from ..serving.server import KEY, ModelServer

    backbone = models.opened.task.backbone
    if not backbone.objective.writes or backbone.tokenizer is None:
        raise InputError(
            f"{source} has models for {backbone.objective.name!r}, which write no texts; use "
            "fedtailor predict"
        )
    key = options.key or os.environ.get(KEY)
    limits = {"most": options.max_tokens, "together": options.batch, "waiting": options.waiting}
    with ModelServer(models, options.host, options.port, key=key, **limits) as server:
        few = ", ".join(models.names[:5]) + (", ..." if len(models.names) > 5 else "")
        print(f"{server.url}v1 serves {few}; Ctrl-C ends it", flush=True)
        if not server.is_local:
            say("the key and the texts travel in the clear; put a proxy with TLS in front")
        server.serve_forever()
