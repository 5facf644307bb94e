"""The base model of an exported model: its architecture, what it reads, and its predictions."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from errno import EINVAL
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ...data.pixels import opened, pixels
from ...models.linear import linearise
from ...models.pooled import Pooled
from .answers import Exported

HERE = Path(__file__).parent

Tensors = dict[str, Tensor]
Batch = dict[str, Tensor]


class Base(Exported):
    """An exported model, read from its folder; `logits` is its forward pass. ``about`` is the
    content of ``export.json``, ``network`` the base model, ``tensors`` are those that the forward
    pass uses beside the network's own."""

    def __init__(self, folder: Path | str = HERE) -> None:
        self.folder = Path(folder)
        self.about: dict[str, Any] = json.loads((self.folder / "export.json").read_text())
        self.settings: dict[str, Any] = self.about["settings"]
        self.network = build(self.folder, self.about["network"]).eval().requires_grad_(False)
        file = self.about["tensors"]
        tensors: Tensors = load_file(self.folder / file) if file else {}
        assign(self.network, {n: value for n, value in tensors.items() if "/" not in n})
        self.tensors = {n: value for n, value in tensors.items() if "/" in n}
        self.num_ids = sys.maxsize  # tokens that the network has embeddings of
        self.tokenizer: Any = None
        if (self.folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
            reads: Any = getattr(self.network, "encoder", self.network)
            if hasattr(reads, "get_input_embeddings"):
                self.num_ids = len(reads.get_input_embeddings().weight)

    def logits(self, batch: Batch) -> Tensor:
        """Compute the logits ``[b, classes]``, or ``[b, L, vocabulary]`` of a language model: those
        of the network, unless a form says otherwise.

        ``batch`` has ``input_ids`` and ``attention_mask`` ``[b, L]``, or ``[b, S, L]`` where an
        example is S sequences; or ``pixel_values`` ``[b, C, H, W]`` from 0 to 1.
        """
        return self.forward(batch)

    def part(self, name: str) -> Tensors:
        """Return the tensors whose name begins with ``name/``, under the rest of their name."""
        start = f"{name}/"
        return {n[len(start) :]: value for n, value in self.tensors.items() if n.startswith(start)}

    def forward(self, batch: Batch, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the network, with ``tensors`` in the place of its own."""
        output = functional_call(self.network, dict(tensors or {}), (), self.inputs(batch))
        if hasattr(output, "start_logits"):
            output = torch.stack((output.start_logits, output.end_logits), -1)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        sizes = batch["input_ids"].shape[:-1] if "input_ids" in batch else logits.shape[:1]
        return logits.float().reshape(*sizes, *logits.shape[1:])

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the network's forward."""
        about = self.about["inputs"]
        if about["kind"] == "text":
            names = ("input_ids", "token_type_ids", "attention_mask", "decoder_input_ids")
            found = {n: batch[n].flatten(0, -2).long() for n in names if n in batch}
            pooled = isinstance(self.network, Pooled)
            return found | ({"real": found["attention_mask"]} if pooled else {})
        if about["kind"] == "module":
            allowed = about["arguments"]
            unread = {"labels", "weight"}
            if allowed is not None and "token_type_ids" not in allowed:
                unread.add("token_type_ids")
            named = {n: v for n, v in batch.items() if n not in unread}
            if "input_ids" in named:  # an example may be several sequences
                named = {n: value.flatten(0, -2) for n, value in named.items()}
            arguments = named if allowed is None or set(named) <= set(allowed) else allowed[:1]
            return dict(zip(arguments, named.values(), strict=True))
        x = resized(batch["pixel_values"], about["size"]).expand(-1, about["channels"], -1, -1)
        mean, std = (x.new_tensor(about[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        return {about["argument"]: (x - mean) / std, **about["options"]}

    def batch(self, inputs: Sequence[Any]) -> Batch:
        """Return the batch of several texts, pairs of texts, or files with pictures."""
        if self.about["modality"] == "image":
            return {"pixel_values": torch.cat([self._picture(path) for path in inputs])}
        read = [self._read(text) for text in inputs]
        longest = max(len(ids) for ids, _, _ in read)
        pad = self.tokenizer.pad_token_id or 0
        batch = {
            "input_ids": [ids + [pad] * (longest - len(ids)) for ids, _, _ in read],
            "attention_mask": [[i < len(ids) for i in range(longest)] for ids, _, _ in read],
        }
        if self.about.get("pair") and "token_type_ids" in self.tokenizer.model_input_names:
            batch["token_type_ids"] = [t + [0] * (longest - len(t)) for _, t, _ in read]
        return {name: torch.tensor(rows) for name, rows in batch.items()}

    def _read(self, text: Any) -> tuple[list[int], list[int], bool]:
        """The tokens of a text, a pair of texts or words, which of a pair's texts each is of, and
        whether there are more."""
        length, prompts = self.about["max_length"], self.generates
        is_pair = bool(self.about.get("pair"))
        encoded = self.tokenizer(
            *(text if is_pair else [text]), truncation=not prompts, max_length=length,
            verbose=False, is_split_into_words=isinstance(text, list) and not is_pair,
        )  # fmt: skip
        ids: list[int] = encoded["input_ids"]
        (encoding,) = encoded.encodings
        ends = ids[-1:] == [self.tokenizer.eos_token_id] and encoding.special_tokens_mask[-1]
        if prompts and ends:
            del ids[-1]  # some tokenizers end each text; this one goes on
        is_cut = len(ids) > length or bool(encoding.overflowing)
        ids = ids[:length] or [next(iter(self.tokenizer.all_special_ids), 0)]
        if max(ids) >= self.num_ids:
            reason = f"it has the token {max(ids)}, and the model knows 0 to {self.num_ids - 1}"
            raise OSError(EINVAL, reason, str(text))
        return ids, encoding.type_ids[: len(ids)], is_cut

    def _say_cut(self, texts: Sequence[Any]) -> None:
        if not getattr(self, "cuts", True):
            return
        read = getattr(self, "apart", lambda text: text)
        if count := sum(self._read(read(text))[2] for text in texts):
            most = self.about["max_length"]
            print(
                f"{count} of {len(texts)} texts are longer than {most} tokens: only their first "
                f"{most} are read",
                file=sys.stderr,
            )

    def _picture(self, path: str) -> Tensor:
        channels, *size = self.about["picture"]
        try:
            values = pixels(opened(Path(path), path), channels, path)
        except ValueError as error:
            raise OSError(EINVAL, str(error), path) from None
        x = torch.from_numpy(values.copy())[None]
        return resized(x.float(), size).round().clamp(0, 255) / 255  # of bytes, as in training

    @torch.no_grad()
    def outputs(self, inputs: Sequence[str]) -> list[Tensor]:
        """Return the logits of each text or file with a picture. Inputs of similar length share a
        batch, as when the model was evaluated."""
        order = list(range(len(inputs)))
        if self.tokenizer is not None:
            order.sort(key=lambda i: len(self._read(inputs[i])[0]))
        size = self.about["batch_size"]
        rows: dict[int, Tensor] = {}
        for start in range(0, len(order), size):
            some = order[start : start + size]
            logits = self.logits(self.batch([inputs[i] for i in some]))
            rows |= dict(zip(some, logits, strict=True))
        return [rows[i] for i in range(len(inputs))]

    def answer(self, given: str) -> str:
        """Return what the model says of a text or of a file with a picture; of a .txt or .csv file:
        a line for each of its texts. How many texts were too long is said on stderr. Raises OSError
        where a file is missing, or is none that the model reads."""
        if self.tokenizer is not None and _names_a_file(given):
            columns, joined = self.about["columns"], None
            if chat := self.about.get("chat"):
                columns, joined = [*columns, *chat["prompt"]], getattr(self, "conversation", None)
            texts = _read_texts(Path(given), columns, self.about.get("pair"), joined)
            self._say_cut(texts)
            return self.say_all(texts)
        if pair := self.about.get("pair"):
            wanted = "a .csv file with the columns " + " and ".join(map(repr, pair))
            raise OSError(EINVAL, f"the model reads pairs of texts; give {wanted}", given)
        if self.tokenizer is not None:
            self._say_cut([given])
        return self.say(given)


class _Pair(tuple[str, ...]):
    """Two texts that are one input."""

    def __str__(self) -> str:
        return " | ".join(self)


def _read_texts(
    file: Path,
    columns: Sequence[str],
    pair: Sequence[str] | None,
    joined: Callable[[str, Mapping[str, str]], str] | None,
) -> list[Any]:
    """The texts of a .txt file, one a line, or of a .csv file: those of the first of ``columns``
    that it has, or of both columns of a ``pair``; ``joined`` makes one of that column and a row.
    Raises OSError where it is missing, or is none that can be read."""
    if file.suffix not in (".txt", ".csv", ".tsv"):
        allowed = "give a text, a .txt file with one text a line, or a .csv file"
        if pair:
            allowed = f"give a .csv file with the columns {pair[0]!r} and {pair[1]!r}"
        raise OSError(EINVAL, allowed, str(file))
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise OSError(EINVAL, "it is not UTF-8 text", str(file)) from None
    if file.suffix == ".txt" and not pair:
        return content.removesuffix("\n").split("\n")
    separator = max(",;\t", key=re.sub(r'"[^"]*"', "", content.partition("\n")[0]).count)
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter=separator)
    names, rows = reader.fieldnames or [], list(reader)
    if not rows:
        raise OSError(EINVAL, "it has no rows", str(file))
    if pair:
        if absent := [name for name in pair if name not in names]:
            wrong = f"it has no column {absent[0]!r}, but {', '.join(names)}"
            raise OSError(EINVAL, wrong, str(file))
        return [_Pair(row[name] or "" for name in pair) for row in rows]
    column = next((name for name in columns if name in names), None)
    if column is None:
        wanted = " or ".join(map(repr, columns))
        raise OSError(EINVAL, f"it has no column {wanted}, but {', '.join(names)}", str(file))
    return [joined(column, row) if joined else row[column] or "" for row in rows]


def _names_a_file(given: str) -> bool:
    """Whether ``given`` is a file, or can only be meant as one."""
    try:
        is_there = Path(given).is_file()
    except OSError:  # a text is too long for a name
        return False
    return is_there or (given.endswith((".txt", ".csv", ".tsv", ".jsonl")) and " " not in given)


def build(folder: Path, about: Mapping[str, Any]) -> nn.Module:
    """Return the network that ``about`` describes, with its weights if they are stored."""
    source = folder / about["source"] if about["source"] else folder
    if (about["source"] or "").startswith("../") and not source.is_dir():
        raise FileNotFoundError(
            f"{source.resolve()} is missing: it holds the base model that several folders share; "
            "keep it beside this folder, or change 'source' in export.json"
        )
    network: nn.Module
    if about["kind"] == "transformers":
        return _transformer(str(source) if source.is_dir() else about["source"], about)
    if about["kind"] == "built-in":
        from ...models.cnn import cnn, lenet, resnet9

        make = {"cnn": cnn, "lenet": lenet, "resnet9": resnet9}[about["name"]]
        network = make(tuple(about["picture"]), about["outputs"], about["width"])
    elif about["kind"] == "efficientnet":
        from efficientnet_lite_pytorch import EfficientNet

        network = EfficientNet.from_name(
            "efficientnet-lite0", image_size=None, num_classes=about["outputs"]
        )
    elif about["kind"] == "pickled":
        network = _unpickled(folder, about["code"])
    else:
        made = getattr(_code(folder / about["file"]), about["function"])()
        network = made if isinstance(made, nn.Module) else made.model
    if about["weights"]:
        assign(network, load_file(source / "model.safetensors"))
    return network


def assign(network: nn.Module, tensors: Tensors) -> None:
    """Give the network's tensors of these names new values, of any shape."""
    known: Tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, value in tensors.items():
        known[name].data = value


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return the pictures ``[b, C, H, W]`` in another height and width."""
    if tuple(x.shape[2:]) == tuple(size):
        return x
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=False, antialias=True)


def _transformer(source: str, about: Mapping[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {}
    if about["auto_class"].endswith("Classification"):
        options["num_labels"] = about["outputs"]
    config = transformers.AutoConfig.from_pretrained(source, **options)
    kind = getattr(transformers, about["auto_class"])
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if about["weights"]:
        model: Any = kind.from_pretrained(
            source, config=config, ignore_mismatched_sizes=True, **options
        )
    else:
        model = kind.from_config(config, **options)
    linearise(model)
    if about["pooling"]:
        head = nn.Linear(model.config.hidden_size, about["outputs"], about["head_bias"])
        model = Pooled(model, head, about["pooling"])
    result: nn.Module = model
    return result


def _unpickled(folder: Path, code: Mapping[str, str]) -> nn.Module:
    """Return the module of ``network.pt``; ``code`` has the files of its classes, by the names of
    the Python modules in which they were defined."""
    for name, file in code.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            sys.modules.setdefault(parent, ModuleType(parent))
        for key, value in vars(_code(folder / file)).items():
            sys.modules[name].__dict__.setdefault(key, value)
    structure: nn.Module = torch.load(folder / "network.pt", weights_only=False)
    return structure.to_empty(device="cpu")


def _code(file: Path) -> ModuleType:
    """Run a Python file, which may import others of its folder, and return it as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(code)
    finally:
        sys.path.remove(str(file.parent))
    return code
