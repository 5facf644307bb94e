"""Metrics of texts that stand beside the right ones."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import InputError

Right = Sequence[Sequence[str]]  # the right answers of each example
_PACKAGES = {
    "rouge": ("rouge_score.rouge_scorer", "rouge-score"),
    "chrf": ("sacrebleu", "sacrebleu"),
}

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(targets: Right, predictions: Sequence[str]) -> float:
    """The share of answers that are one of the right ones, but for capitals, punctuation and
    articles (Rajpurkar et al., EMNLP 2016). An example has no right answer if "" is right.

    >>> exact_match([["the Nile", "Nile river"], []], ["Nile.", ""]), exact_match([["A"]], [""])
    (1.0, 0.0)
    """
    return _mean_of_best(targets, predictions, lambda right, said: float(right == said))


def span_f1(targets: Right, predictions: Sequence[str]) -> float:
    """The mean F1 of an answer's words, of the right answer that is closest; without capitals,
    punctuation and articles (Rajpurkar et al., EMNLP 2016).

    >>> span_f1([["the river Nile"]], ["Nile"])
    0.6666666666666666
    """
    return _mean_of_best(targets, predictions, _f1)


def _mean_of_best(targets: Right, predictions: Sequence[str], score: Any) -> float:
    best = []
    for right, said in zip(targets, predictions, strict=True):
        wanted = [words for words in map(_words, right) if words] or [[]]
        best.append(max(score(words, _words(said)) for words in wanted))
    return float(np.mean(best))


def _words(text: str) -> list[str]:
    """Its words without articles, unless there are no others: the answer A is an answer."""
    plain = text.lower().translate(_PUNCTUATION)
    return _ARTICLE.sub(" ", plain).split() or plain.split()


def _f1(right: Sequence[str], said: Sequence[str]) -> float:
    both = len(right) + len(said)
    return 2 * (Counter(right) & Counter(said)).total() / both if both else 1.0


def rouge(name: str, targets: Right, predictions: Sequence[str]) -> float:
    """ROUGE (Lin, 2004): the mean F1, of the right answer that is closest, of stemmed words
    (``rouge1``), of pairs of neighbouring ones (``rouge2``), or of the longest common subsequence
    of words (``rougeL``)."""
    scorer = _loaded(name).RougeScorer([name], use_stemmer=True)
    pairs = zip(targets, predictions, strict=True)
    return float(np.mean([scorer.score_multi(r, said)[name].fmeasure for r, said in pairs]))


def chrf(targets: Right, predictions: Sequence[str]) -> float:
    """chrF: the mean F-score of the characters' n-grams, where recall counts twice, of the right
    answer that is closest (Popovic, WMT 2015); from 0 to 1."""
    score = _loaded("chrf").sentence_chrf
    pairs = zip(targets, predictions, strict=True)
    return float(np.mean([score(said, list(right)).score / 100 for right, said in pairs]))


WRITTEN: dict[str, Callable[[Right, Sequence[str]], float]] = {
    **{name: partial(rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
    "exact_match": exact_match,
    "chrf": chrf,
}
"""Metrics of texts that models write."""


def check_packages(names: Collection[str]) -> None:
    """Raise InputError if a package is missing that one of these metrics needs."""
    for name in names:
        if name.startswith(tuple(_PACKAGES)):
            _loaded(name)


def _loaded(name: str) -> Any:
    """The module that computes a metric."""
    module, package = next(of for start, of in _PACKAGES.items() if name.startswith(start))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the metric {name!r} needs the package {package}; get it with: pip install "
            "'fedtailor[rouge]'"
        ) from error
