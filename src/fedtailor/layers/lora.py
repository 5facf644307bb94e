"""LoRA: adapters B A of low rank in a model, and their factors in states and uploads.

A is ``[r, d_in]`` and B ``[d_out, r]``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le, MinLen
from torch import Tensor, nn
from torch.nn import functional as F

from .. import random
from ..errors import InputError
from ..params import Params, strip_prefix
from ..task.backbone import Backbone, LoRAOptions
from ..task.surgery import replace
from ..task.task import Task
from .masks import pack_bits, unpack_bits
from .parts import projections, require_blocks
from .per_client import entries_of

Rank = Annotated[int, Gt(0), Le(4096)]
Alpha = Annotated[float, Gt(0), Le(1e6)]

Ranks = Rank | Annotated[tuple[Rank, ...], MinLen(1)]  # one for all clients, or several in turn

Branch = tuple[Tensor, Tensor, float | Tensor]
"""A ``[r, d_in]``, B ``[d_out, r]`` and the weight of their product: a number, a scalar tensor, or
``[..., 1]`` for a weight that depends on the input."""

A_SUFFIX, B_SUFFIX = ".lora_A.default.weight", ".lora_B.default.weight"  # PEFT's names
M_SUFFIX = ".lora_magnitude_vector.default.weight"


def check_rank(backbone: Backbone, rank: int) -> None:
    """Raise InputError if ``rank`` exceeds a dimension of a layer that is to be adapted."""
    require_blocks(backbone)
    for path in projections(backbone):
        layer = backbone.model.get_submodule(path)
        if not isinstance(layer, nn.Linear):
            raise InputError(f"{path} is a {type(layer).__name__}; only nn.Linear can be adapted")
        limit = min(layer.in_features, layer.out_features)
        if rank > limit:
            raise InputError(
                f"rank {rank} is larger than the layer {path} "
                f"({layer.out_features} x {layer.in_features}); allowed: 1 to {limit}"
            )


class LoRALayer(nn.Module):
    """A linear layer with LoRA of some form: its ``scaling`` and its ``dropout``."""

    def __init__(self, rank: int, lora_alpha: float, options: LoRAOptions | None) -> None:
        super().__init__()
        options = options or LoRAOptions()
        self.scaling = options.scaling(rank, lora_alpha)
        self.dropout = nn.Dropout(options.dropout)


def has_lora(model: nn.Module) -> bool:
    """Whether a method has added LoRA to the model."""
    return any(isinstance(module, LoRALayer) for module in model.modules())


class LoRALinear(LoRALayer):
    """``W x + b + s B A x``; the factors have PEFT's names.

    With DoRA (arXiv 2402.09353, section 4.3), ``m (W + s B A) x / ||W + s B A|| + b``, where
    m ``[d_out]`` is trained, and the norms, those of the rows, are constants to the gradient.
    """

    def __init__(
        self, base: nn.Linear, rank: int, lora_alpha: float, options: LoRAOptions | None = None
    ) -> None:
        super().__init__(rank, lora_alpha, options)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()
        if options and options.dora:
            self.lora_magnitude_vector["default"] = _Magnitude(base.weight)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A ``[r, d_in]`` and B ``[d_out, r]``."""
        A: Any = self.lora_A["default"]
        B: Any = self.lora_B["default"]
        return A.weight, B.weight

    def forward(self, x: Tensor) -> Tensor:
        A, B = self.factors
        dropped = self.dropout(x)
        down = F.linear(dropped, A.to(x.dtype)) * self.scaling
        update = F.linear(down, B.to(down.dtype))
        y: Tensor = self.base_layer(x)
        for magnitude in self.lora_magnitude_vector.values():  # one with DoRA, or none
            W = self.base_layer.weight
            m: Any = magnitude.weight
            ratio = dora_ratio(m, W, A, self.scaling * B).to(x.dtype)
            y = y + (ratio - 1) * F.linear(dropped, W)
            update = ratio * update
        return y + update


class _Magnitude(nn.Module):
    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(W.detach().norm(dim=1))


def dora_ratio(m: Tensor, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """DoRA's factors of the rows, ``m / ||W + B A||`` ``[d_out]``, from m ``[d_out]``, W
    ``[d_out, d_in]`` and LoRA's A and B, any scaling inside B.

    >>> A, B = torch.zeros(1, 2), torch.zeros(1, 1)
    >>> dora_ratio(torch.tensor([10.0]), torch.tensor([[3.0, 4.0]]), A, B)
    tensor([2.])
    """
    norms: Tensor = (W + B @ A).detach().norm(dim=1)
    return torch.where(norms > 0, m / norms, 1.0)  # a row of zeros has no direction


def add_lora(backbone: Backbone, rank: int, lora_alpha: float) -> None:
    """Add LoRA to the backbone's projections, in place; A starts at N(0, 1 / rank), B at 0. Raises
    InputError as `adapt_projections` does, but for DoRA."""
    layers = []

    def adapted(base: nn.Linear, _: int) -> nn.Module:
        layers.append(layer := LoRALinear(base, rank, lora_alpha, backbone.lora))
        nn.init.kaiming_uniform_(layer.factors[0])  # PEFT's layer draws it twice
        return layer

    adapt_projections(backbone, rank, adapted, dora=True)
    for A, B in (layer.factors for layer in layers):
        nn.init.normal_(A, std=rank**-0.5)
        nn.init.zeros_(B)


def adapt_projections(
    backbone: Backbone,
    rank: int,
    adapted: Callable[[nn.Linear, int], nn.Module],
    dora: bool = False,
) -> None:
    """Replace every projection by ``adapted(projection, number of its block)``, in place. Raises
    InputError where no recognised block, or a projection that can't have LoRA of this rank; or
    where LoRA is to be DoRA, and ``dora`` doesn't allow it."""
    if not dora:
        refuse_dora(backbone)
    check_rank(backbone, rank)
    for index, block in enumerate(backbone.blocks):
        for path in block:
            base = backbone.model.get_submodule(path)
            assert isinstance(base, nn.Linear)
            replace(backbone.model, path, adapted(base, index))


def refuse_dora(backbone: Backbone) -> None:
    """Raise InputError where LoRA is to be DoRA, which the method has no form of."""
    if backbone.lora.dora:
        raise InputError("its LoRA has no form with DoRA; leave model.lora.dora out")


def branches(x: Tensor, *terms: Branch, scaling: float = 1.0) -> Tensor:
    """``scaling * sum_i w_i B_i A_i x`` for terms (A_i, B_i, w_i), as one pair of products.

    Args:
        x: inputs ``[..., d_in]``.
        terms: the branches, each with its weight.
        scaling: LoRA's s, common to all of them.

    Returns:
        ``[..., d_out]``.

    >>> A, B = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [3.0]])
    >>> branches(torch.tensor([[2.0, 5.0]]), (A, B, 1.0), (A, B, 0.5), scaling=10.0)
    tensor([[30., 90.]])
    """
    down = F.linear(x, torch.cat([A for A, _, _ in terms]))
    if scaling != 1 or any(isinstance(w, Tensor) or w != 1 for _, _, w in terms):
        down = down * (scaling * _component_weights(terms))
    return F.linear(down, torch.cat([B for _, B, _ in terms], 1))


def fuse(*terms: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of ``sum_i w_i B_i A_i``: A ``[R, d_in]``, B ``[d_out, R]`` and the weight of
    each of the R components, ``[R]`` or ``[..., R]``.

    >>> A, B = torch.ones(1, 2), torch.ones(3, 1)
    >>> A, B, weight = fuse((A, B, 1.0), (A, B, torch.tensor(0.5)))
    >>> A.shape, B.shape, weight
    (torch.Size([2, 2]), torch.Size([3, 2]), tensor([1.0000, 0.5000]))
    """
    A, B = torch.cat([A for A, _, _ in terms]), torch.cat([B for _, B, _ in terms], 1)
    return A, B, _component_weights(terms)


def _component_weights(terms: Sequence[Branch]) -> Tensor:
    """Each branch's weight as often as its rank says, ``[..., R]``."""
    weights = [
        w.expand(*w.shape[:-1], len(A)) if isinstance(w, Tensor) else torch.full_like(A[:, 0], w)
        for A, _, w in terms
    ]
    return torch.cat(weights, -1)


def lora_pairs(state: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by projection, from PEFT's names."""
    paths = [name.removesuffix(A_SUFFIX) for name in state if name.endswith(A_SUFFIX)]
    return {path: (state[path + A_SUFFIX], state[path + B_SUFFIX]) for path in paths}


def lora_factors(task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """The LoRA of `add_lora` in the task's model: A ``[r, d_in]``, and B ``[d_out, r]`` times the
    scaling, by projection.

    If ``state`` lacks one of the factors, it is the frozen one in the model. If it lacks both, the
    projection is left out.
    """
    frozen = {name: p.detach() for name, p in task.model.named_parameters() if ".lora_" in name}
    whole = {name: state.get(name, value) for name, value in frozen.items()}
    factors = {}
    for path, (A, B) in lora_pairs(whole).items():
        if any(name.startswith(f"{path}.lora_") for name in state):
            layer: Any = task.model.get_submodule(path)
            factors[path] = A, layer.scaling * B
    return factors


def base_params(task: Task, state: Params) -> Params:
    """The tensors of ``state`` that belong to the task's model as it was before the method adapted
    it, under the names that they had there."""
    model = task.original.model
    names = {n for tensors in (model.named_parameters(), model.named_buffers()) for n, _ in tensors}
    # an adapted layer is inside the one that took its place
    plain = {n: n.replace(".base_layer.", ".").replace(".base.", ".") for n in state}
    before = {n: n if n in names else plain[n] for n in state}
    return {before[name]: value for name, value in state.items() if before[name] in names}


def without_lora(task: Task, state: Params, prefix: str = "") -> Params:
    """The same as `base_params`, with the LoRA of ``state`` added to the projections' weights.

    ``prefix`` stands before the names of the model's tensors in ``state``; others are left out.
    """
    plain = base_params(task, strip_prefix(state, prefix))
    magnitudes = lora_magnitudes(task, state)
    for path, (A, B) in lora_factors(task, state).items():
        if path.startswith(prefix):
            name = f"{path.removeprefix(prefix)}.weight"
            layer: Any = task.original.model.get_submodule(path.removeprefix(prefix))
            start = plain.get(name, layer.weight.detach())  # of a quantised layer, too
            plain[name] = with_lora(start, A, B, magnitudes.get(path))
    return plain


def with_lora(W: Tensor, A: Tensor, B: Tensor, m: Tensor | None = None) -> Tensor:
    """A weight ``[d_out, d_in]`` with LoRA in it, any scaling inside B, and with DoRA's m if there
    is one, ``[d_out]``."""
    merged = W + B @ A
    return merged if m is None else dora_ratio(m, W, A, B)[:, None] * merged


def lora_magnitudes(task: Task, state: Params) -> Params:
    """DoRA's m ``[d_out]`` by projection; none without DoRA. As in `lora_factors`, one that
    ``state`` lacks is the frozen one in the model."""
    frozen = {n: p.detach() for n, p in task.model.named_parameters() if n.endswith(M_SUFFIX)}
    return {n.removesuffix(M_SUFFIX): state.get(n, value) for n, value in frozen.items()}


def lora_names(names: Iterable[str]) -> list[tuple[str, str]]:
    """The names of A and B of every projection, in PEFT's naming, sorted.

    >>> lora_names(["q.lora_A.default.weight", "q.lora_B.default.weight", "head.bias"])
    [('q.lora_A.default.weight', 'q.lora_B.default.weight')]
    """
    paths = sorted(name.removesuffix(A_SUFFIX) for name in names if name.endswith(A_SUFFIX))
    return [(path + A_SUFFIX, path + B_SUFFIX) for path in paths]


def max_rank(ranks: Ranks) -> int:
    """The largest of all clients' ranks.

    >>> max_rank((2, 8)), max_rank(4)
    (8, 4)
    """
    return max(entries_of(ranks))


def initial_factor(key: Tensor, like: Tensor, rank: Tensor) -> Tensor:
    """A drawn from N(0, 1 / rank), with zeros in the components from ``rank`` on.

    Training leaves a component that is zero in A and in B as it is, so that a client's LoRA keeps
    its own rank inside tensors that have the largest client's. ``like`` is ``[r, d_in]``, ``rank``
    a scalar.
    """
    r, d_in = like.shape
    used = torch.arange(r, device=key.device)[:, None] < rank
    return torch.where(used, random.normal(key, (r, d_in)) * rank**-0.5, 0.0)


def check_components(A: Tensor, B: Tensor, rank: int, name: str) -> None:
    """Check that a client's LoRA has no components beyond its own ``rank``. Raises InputError where
    A ``[r, d_in]`` or B ``[d_out, r]`` of the projection ``name`` holds some."""
    if A[rank:].any() or B[:, rank:].any():
        raise InputError(
            f"the LoRA of {name} holds values beyond rank {rank}, the client's; allowed there: 0"
        )


def check_uploaded_rank(upload: Params, allowed: Collection[int]) -> None:
    """Check the rank that an upload says to have, and that it has no components beyond it. Raises
    InputError where its rank is none of those ``allowed``, or a LoRA has more components."""
    rank = int(upload["rank"])
    if rank not in allowed:
        ranks = " or ".join(map(str, sorted(allowed)))
        raise InputError(f"its LoRA has rank {rank}; allowed for this client: {ranks}")
    for path, (A, B) in lora_pairs(upload).items():
        check_components(A, B, rank, path)


def truncate_rank(tensors: Params, rank: int) -> Params:
    """The same tensors; of every LoRA the first ``rank`` components alone."""
    short = dict(tensors)
    for name_A, name_B in lora_names(tensors):
        short[name_A], short[name_B] = tensors[name_A][:rank], tensors[name_B][:, :rank]
    return short


def pad_rank(tensors: Params, rank: int) -> Params:
    """The same tensors; every LoRA is padded with components of zero up to ``rank``."""
    wide = dict(tensors)
    for name_A, name_B in lora_names(tensors):
        missing = rank - len(tensors[name_A])
        wide[name_A] = F.pad(tensors[name_A], (0, 0, 0, missing))
        wide[name_B] = F.pad(tensors[name_B], (0, missing))
    return wide


def pack_rank(upload: Params) -> Params:
    """An upload as it travels: without the LoRA components from ``upload["rank"]`` on, which are
    zero, and without the rank, which the shapes tell."""
    packed = truncate_rank(upload, int(upload["rank"]))
    del packed["rank"]
    return packed


def unpack_rank(packed: Params, rank: int) -> Params:
    """The inverse of `pack_rank`; ``rank`` is that of all padded uploads."""
    first = packed[lora_names(packed)[0][0]]
    return {**pad_rank(packed, rank), "rank": torch.tensor(len(first), device=first.device)}


def pack_rows(upload: Params) -> Params:
    """An upload as it travels, where ``PATH.kept``, bool ``[d_out]``, is a mask of the rows of
    ``PATH.B`` ``[d_out, r]``.

    Rows that the mask leaves out do not travel, nor do the components that are zero in ``PATH.A``.
    The mask travels as bits.
    """
    packed = dict(upload)
    for path in _masked_paths(upload):
        A, B, kept = (upload[f"{path}.{part}"] for part in ("A", "B", "kept"))
        used = A.any(1)
        packed[f"{path}.A"], packed[f"{path}.B"] = A[used], B[kept][:, used]
        packed[f"{path}.kept"] = pack_bits(kept)
    return packed


def unpack_rows(packed: Params, like: Params) -> Params:
    """The inverse of `pack_rows`, if the components that travelled are the first ones.

    ``PATH.B`` gets its shape from ``like``, and zeros in the rows that did not travel.
    """
    upload = dict(packed)
    for path in _masked_paths(packed):
        A, B, bits = (packed[f"{path}.{part}"] for part in ("A", "B", "kept"))
        d_out, rank = like[f"{path}.B"].shape
        kept, missing = unpack_bits(bits, d_out), rank - len(A)
        upload[f"{path}.A"] = F.pad(A, (0, 0, 0, missing))
        upload[f"{path}.B"] = B.new_zeros(d_out, rank)
        upload[f"{path}.B"][kept] = F.pad(B, (0, missing))
        upload[f"{path}.kept"] = kept
    return upload


def _masked_paths(upload: Params) -> list[str]:
    return [name.removesuffix(".kept") for name in upload if name.endswith(".kept")]
