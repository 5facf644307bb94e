"""Models by name or from Python: built-in ones, those of transformers, and any module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from .. import random
from ..errors import InputError
from ..objectives import objective_of
from ..objectives.encoding import Tokenizer
from ..objectives.objective import Objective
from ..task.backbone import Backbone, LoRAOptions
from ..task.batch_norm import BatchNormMode
from ..task.quantised import quantise_layers, quantised
from ..user_code import load, own_faults
from .blocks import ALL_LINEAR, find_blocks, find_head
from .chat import TEMPLATES, chat_template
from .cnn import Network
from .config import MOST_SIDE, ModelConfig
from .inputs import ImageInputs, ModuleInputs, Prepare
from .packages import BUILTIN, Builtin, Modality, quiet
from .pooled import Pooled
from .source import check_revision, faults_of_files, locate, origin, transformers_config
from .transformer import build_transformer

_SMALL, _LARGE = 96, 224  # pixels: the sides of EfficientNet-Lite0's input


def load_model(
    config: ModelConfig,
    task: Objective | str | None,
    num_classes: int,
    seed: int,
    modality: Modality = "text",
    picture: Sequence[int] | None = None,
) -> Backbone:
    """Load the model that ``config`` names, in evaluation mode, ready for a task.

    Attention weights have no dropout, whatever ``config.dropout``, since no module computes it and
    could be keyed. A text classifier on a decoder reads the last real token. EfficientNet-Lite0
    sees pictures of 96 x 96 if they are no larger, else of 224 x 224, unless
    ``config.image_size`` says otherwise.

    Args:
        config: a built-in name, a folder in Hugging Face's format, a hub name ``owner/model``, or
            the ``factory`` of a model of one's own.
        task: what the logits are for: a kind of task, or its name; None: the default.
        num_classes: the number of classes, if the task has any.
        seed: of the new weights: the head's, or all if ``config.pretrained`` is False.
        modality: of the data.
        picture: channels, height and width of the data's pictures; the built-in networks without
            weights are made for them.

    Returns:
        The backbone. In pooled text classifiers, transformers' own model is the submodule
        ``encoder``.

    Raises:
        InputError: the model is unknown, not on this machine, damaged or of another kind; a pattern
            in ``config`` matches nothing.

    >>> load_model(ModelConfig("minilm"), None, 4, seed=0).head
    ('head',)
    """
    objective = objective_of(task)
    if config.factory is not None:
        return _own_backbone(config, objective, seed)
    builtin = BUILTIN.get(config.name)
    _check(config, builtin, objective, modality)
    outputs = objective.num_outputs(num_classes)
    network = None if builtin is None else builtin.network
    source = "" if network else locate(config)
    new: frozenset[str] = frozenset()
    prepare: Prepare
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(random.key(seed, "model")))
        if network is not None:
            model, prepare = _network(config, network, outputs or 0, picture)
        elif builtin is not None and builtin.build is not None:
            model = builtin.build(Path(source), config.pretrained, outputs or 0, config.dropout)
            usual = _SMALL if picture and max(picture[1:]) <= _SMALL else _LARGE
            side = config.image_size or usual
            prepare = ImageInputs(
                config.name, (127 / 255,), (128 / 255,), (side, side), argument="inputs"
            )
        else:
            with quiet(), faults_of_files(f"can't load model {config.name!r}"):
                model, prepare, new = build_transformer(
                    config, source, objective, modality, num_classes
                )
    if config.dropout and not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        raise InputError(
            f"model.dropout = {config.dropout} has no effect: {type(model).__name__} has no "
            "dropout but that of attention weights, which is always off; leave it out"
        )
    if config.quantise is not None:
        layers = [path for block in find_blocks(model, [ALL_LINEAR]) for path in block]
        if not layers:
            raise InputError(
                f"model.quantise = {config.quantise!r}: {type(model).__name__} has no linear layer "
                "in a numbered block; leave it out"
            )
        quantise_layers(model, layers, config.quantise)
    if config.dtype == "bf16":
        exact = {one.scales for one in quantised(model).values()}
        for parameter in model.parameters():  # buffers, such as those of rotations, stay exact
            if parameter not in exact:
                parameter.data = parameter.data.bfloat16()
    exactly = replace(config, dtype="fp32", quantise=None)
    again = partial(load_model, exactly, task, num_classes, seed, modality, picture)
    return Backbone(
        model.eval(),
        objective,
        prepare,
        blocks=find_blocks(model, config.targets),
        head=_trained_head(config, model, new),
        name=config.name,
        encoder_prefix="encoder." if isinstance(model, Pooled) else "",
        tokenizer=load_tokenizer(config) if modality == "text" else None,
        pretrained=config.pretrained,
        batch_norm=config.batch_norm,
        lora=config.lora,
        exact=None if config == exactly else cache(again),
    )


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Load the tokenizer of the model that ``config`` names; its end-of-text token stands in for a
    missing padding token. None for a model that reads no text, and for a folder without a
    tokenizer's files. Raises InputError where the model is unknown or not on this machine, or the
    tokenizer can't be read.

    >>> load_tokenizer(ModelConfig("minilm")).tokenize("tailored")
    ['tailored']
    """
    if config.factory is not None:
        made = call_factory(config.factory)
        return made.tokenizer if isinstance(made, Backbone) else None
    builtin = BUILTIN.get(config.name)
    if builtin is not None and builtin.modality == "image":
        return None
    import transformers

    source = locate(config)
    kind = type(transformers_config(source, config))
    of_texts = (
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )
    reads_text = any(kind in mapping for mapping in of_texts)
    if not reads_text or _has_no_tokenizer(Path(source)):
        return None
    with faults_of_files(f"can't load the tokenizer of {config.name!r}"):
        tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, **origin(source, config.revision)
        )
        tokenizer("a")  # what is wrong with some shows in use alone
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    if config.chat_template is not None:
        template, bos = chat_template(config.chat_template), tokenizer.bos_token_id
        if config.chat_template in TEMPLATES and tokenizer("a")["input_ids"][:1] == [bos]:
            template = "{{ bos_token }}" + template  # as all texts of this tokenizer begin
        tokenizer.chat_template = template
    return tokenizer


def _has_no_tokenizer(folder: Path) -> bool:
    """Say whether a folder has no files of a tokenizer; transformers would make one up then."""
    starts = ("tokenizer", "vocab", "sentencepiece", "spiece", "tekken")
    return folder.is_dir() and not any(f.name.startswith(starts) for f in folder.iterdir())


def from_module(
    model: nn.Module,
    task: Objective | str | None = None,
    head: Sequence[str] = (),
    targets: Sequence[str] = (),
    pretrained: bool = True,
    batch_norm: BatchNormMode = "train",
    lora: LoRAOptions | None = None,
) -> Backbone:
    """Make a backbone of any module.

    The tensors of a batch are passed by name if forward has arguments ``pixel_values``, or
    ``input_ids`` and ``attention_mask``; otherwise a single input is passed as forward's first
    argument. Forward returns the logits ``[b, classes]`` or ``[b, L, vocabulary]``, or an object
    that has them as ``.logits``. For Hugging Face models `load_model` does more: masks, positions,
    pooling.

    Args:
        model: the module; a task trains a copy.
        task: what the logits are for: a kind of task, or its name.
        head: patterns of the task head's modules; (): modules with a usual name.
        targets: patterns of the projections to adapt; (): those of the model's type, if known.
        pretrained: whether the weights are pretrained. Methods that need several models copy
            pretrained weights, and draw independent ones otherwise.
        batch_norm: ``frozen``: training uses the running statistics and leaves them as they are.
        lora: what holds for every LoRA that a method adds.

    Raises:
        InputError: a pattern matches nothing, or forward has no named argument.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return self.head(self.body(x).relu())
    >>> backbone = from_module(Net(), targets=["body"])
    >>> backbone.head, backbone.blocks
    (('head',), (('body',),))
    """
    return Backbone(
        model,
        objective_of(task),
        ModuleInputs.of(model),
        blocks=find_blocks(model, targets),
        head=find_head(model, head),
        name=type(model).__name__,
        pretrained=pretrained,
        batch_norm=batch_norm,
        lora=lora or LoRAOptions(),
    )


def _own_backbone(config: ModelConfig, objective: Objective, seed: int) -> Backbone:
    """The backbone of ``config.factory``."""
    default = ModelConfig()
    for name in (
        "name", "revision", "pooling", "dropout", "image_size", "width", "attention",
        "chat_template", "dtype", "quantise",
    ):  # fmt: skip
        if getattr(config, name) != getattr(default, name):
            value = getattr(config, name)
            raise InputError(
                f"model.{name} = {value!r} does not apply to model.factory; leave it out"
            )
    assert config.factory is not None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(random.key(seed, "model")))
        made = call_factory(config.factory)
    if isinstance(made, Backbone):  # of another kind of task: `Inputs.check` refuses it
        made = replace(made, lora=config.lora) if config.lora != LoRAOptions() else made
        return replace(made, objective=objective) if made.objective == objective else made
    return from_module(
        made, objective, config.head, config.targets, config.pretrained, config.batch_norm,
        config.lora,
    )  # fmt: skip


def _check(
    config: ModelConfig, builtin: Builtin | None, objective: Objective, modality: Modality
) -> None:
    objective.check_modality(modality)
    if builtin is not None and modality != builtin.modality:
        raise InputError(
            f"model {config.name!r} is for {builtin.modality} data, not {modality} data"
        )
    if builtin is not None and objective.name not in builtin.tasks:
        allowed = ", ".join(builtin.tasks)
        raise InputError(
            f"model {config.name!r} can't be used for {objective.name!r}; allowed: {allowed}"
        )
    by_tokens = objective.per_token or objective.num_outputs(0) is None
    if config.pooling is not None and (modality != "text" or by_tokens):
        raise InputError(
            f"model.pooling = {config.pooling!r} applies to text classification; leave it out"
        )
    if config.image_size is not None and modality != "image":
        raise InputError(
            f"model.image_size = {config.image_size} applies to images; leave it out for text"
        )
    check_revision(config)
    if builtin is not None and builtin.network is not None:
        if config.pretrained:
            raise InputError(
                f"there are no weights for model {config.name!r}; set model.pretrained = false"
            )
        if config.dropout:
            raise InputError(f"model {config.name!r} has no dropout; leave model.dropout out")
    elif config.width != 1.0:
        networks = ", ".join(name for name, entry in BUILTIN.items() if entry.network)
        raise InputError(f"model {config.name!r} has no width; model.width applies to {networks}")


def _trained_head(config: ModelConfig, model: nn.Module, new: frozenset[str]) -> tuple[str, ...]:
    """Return the paths of the task head, and of a pooler if its weights are new."""
    head = find_head(model, config.head)
    if config.head:
        return head
    present = {name for name, _ in model.named_parameters()}
    poolers = {name.rpartition(".")[0] for name in new & present if ".pooler." in f".{name}"}
    return (*head, *sorted(poolers))


def _network(
    config: ModelConfig, network: Network, num_classes: int, picture: Sequence[int] | None
) -> tuple[nn.Module, ImageInputs]:
    """Build a network for the data's pictures, or for squares of ``config.image_size``, scaled from
    [0, 1] to [-1, 1]."""
    if picture is None:
        raise InputError(
            f"model {config.name!r} is made for the data's pictures, and these data have none"
        )
    channels, height, width = picture
    side = config.image_size
    size = (height, width) if side is None else (side, side)
    if max(size) > MOST_SIDE:
        raise InputError(
            f"pictures of {height} x {width} are too large for {config.name}; it takes up to "
            f"{MOST_SIDE} x {MOST_SIDE}: set model.image_size"
        )
    inputs = ImageInputs(
        config.name, mean=(0.5,), std=(0.5,), size=size, channels=channels, argument="input"
    )
    return network((channels, *size), num_classes, config.width), inputs


def call_factory(factory: str) -> nn.Module | Backbone:
    """Call the function that ``factory`` names, as ``file.py:function``. Raises InputError where
    there is none, it has a mistake, needs arguments or returns something else.

    >>> call_factory("net.py:build")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no file net.py; give FILE.py:NAME or package.module:NAME
    """
    function = load(factory)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"model.factory = {factory!r} is called without arguments: {error}; give each of them "
            "a default"
        ) from None
    except ValueError:  # what has no signature
        pass
    with own_faults():
        made = function()
    if not isinstance(made, nn.Module | Backbone):
        raise InputError(
            f"model.factory = {factory!r} returns a {type(made).__name__}; it must return an "
            f"nn.Module, or a backbone of fedtailor.from_module"
        )
    return made
