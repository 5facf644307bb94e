"""Robust rules and attacks beside ByzFL's: python -m benchmarks.robustness.

Install ByzFL first, without the packages for its own experiments:
pip install --no-deps byzfl==0.0.11. Each line is the largest difference of a coordinate, as a
part of the largest coordinate. ByzFL computes in float32, so 1e-7 is the best to be expected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedtailor import random
from fedtailor.uploads.attacks import AttackConfig, attack_uploads
from fedtailor.uploads.robust import changed, combined
from fedtailor.uploads.rules import Robust

F, C, P = 2, 12, 1000


def byzfl(part: str) -> Any:
    """ByzFL's ``aggregators`` or ``attacks``, without the rest of it, which imports torchvision."""
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        if spec is None or spec.submodule_search_locations is None:
            sys.exit("byzfl is missing: pip install --no-deps byzfl==0.0.11")
        package = types.ModuleType("byzfl")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["byzfl"] = package
    return importlib.import_module(f"byzfl.{part}")


def vectors() -> Tensor:
    """Twelve vectors, two of them far from the others."""
    x = torch.randn(C, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3] += 20
    x[7] -= 9
    return x


def ours(robust: Robust, x: Tensor) -> Tensor:
    """What a rule makes of vectors; of selected ones their mean."""
    state, uploads = {"x": torch.zeros(P, dtype=torch.float64)}, {"x": x.clone()}
    uploads = changed(robust, uploads, state, ["x"], torch.arange(C))
    if robust.combines:
        return combined(robust, uploads, state, ["x"])["x"]
    rows = robust.select(uploads)
    return uploads["x"] if rows is None else uploads["x"][rows].mean(0)


def rules(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each rule's name, our result and ByzFL's. ByzFL's Krum has c - f - 1 neighbours beside the
    upload itself, so it gets f + 1."""
    a = byzfl("aggregators")
    yield "median", ours(Robust("median", F), x), a.Median()(x)
    yield "trimmed-mean", ours(Robust("trimmed-mean", F), x), a.TrMean(F)(x)
    yield "meamed", ours(Robust("meamed", F), x), a.Meamed(F)(x)
    weiszfeld = a.GeometricMedian(nu=1e-9, T=200)(x)
    yield "geometric-median", ours(Robust("geometric-median", F, steps=200), x), weiszfeld
    robust = Robust("centred-clipping", F, radius=10.0, steps=5)
    yield "centred-clipping", ours(robust, x), a.CenteredClipping(L=5, tau=10.0)(x)
    yield "krum", ours(Robust("krum", F), x), a.Krum(F + 1)(x)
    yield "multi-krum", ours(Robust("multi-krum", F, keep=C - F - 1), x), a.MultiKrum(F + 1)(x)
    yield "mda", ours(Robust("mda", F), x), a.MDA(F)(x)
    yield "nnm", ours(Robust(attackers=F, before=("nnm",)), x), a.NNM(F)(x)
    yield "clip", ours(Robust(before=("clip",), radius=10.0), x), a.Clipping(10.0)(x)
    mixed = a.TrMean(F)(a.NNM(F)(x))
    yield "nnm, trimmed-mean", ours(Robust("trimmed-mean", F, before=("nnm",)), x), mixed


def attacks(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each attack's name, what our attacker sends and what ByzFL's does."""
    a = byzfl("attacks")
    theirs = {
        "sign-flip": a.SignFlipping(),
        "inner-product": a.InnerProductManipulation(tau=2.0),
        "little-is-enough": a.ALittleIsEnough(tau=1.5),
        "mimic": a.Mimic(epsilon=0),
    }
    for kind, attack in theirs.items():
        uploads = {"x": x.clone()}
        unchanged = {"x": torch.zeros(P, dtype=torch.float64)}
        attack_uploads(AttackConfig(kind), uploads, unchanged, [C - 1], random.key(0))  # type: ignore[arg-type]
        yield kind, uploads["x"][-1], attack(x[:-1])


def main() -> None:
    """Print the differences; exit code 1 if one is above 1e-6."""
    x, worst = vectors(), 0.0
    for name, a, b in (*rules(x), *attacks(x)):
        difference = float((a - b).abs().max() / b.abs().max())
        worst = max(worst, difference)
        print(f"{name:18} {difference:.1e}")
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()
