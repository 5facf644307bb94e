"""Metrics of texts that stand beside the right ones."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import numpy as np

from ..errors import InputError

Right = Sequence[Sequence[str]]  # the right answers of each example

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain_words(text: str) -> list[str]:
    """The words of a text without capitals, punctuation and articles (Rajpurkar et al., EMNLP
    2016)."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(targets: Right, predictions: Sequence[str]) -> float:
    """The share of answers that are one of the right ones, but for capitals, punctuation and
    articles (Rajpurkar et al., EMNLP 2016).

    Args:
        targets: the right answers of each example; none if "" is right.
        predictions: an answer to each.

    >>> exact_match([["the Nile", "Nile river"], []], ["Nile.", ""])
    1.0
    """
    pairs = zip(targets, predictions, strict=True)
    return float(np.mean([plain_words(b) in [plain_words(a) for a in r or [""]] for r, b in pairs]))


def rouge1(targets: Right, predictions: Sequence[str]) -> float:
    """ROUGE-1: the mean F1 of words, stemmed, of the right answer that is closest (Lin, 2004)."""
    return _rouge("rouge1", targets, predictions)


def rouge2(targets: Right, predictions: Sequence[str]) -> float:
    """ROUGE-2: the mean F1 of pairs of neighbouring words."""
    return _rouge("rouge2", targets, predictions)


def rouge_l(targets: Right, predictions: Sequence[str]) -> float:
    """ROUGE-L: the mean F1 of the longest common subsequence of words."""
    return _rouge("rougeL", targets, predictions)


def _rouge(name: str, targets: Right, predictions: Sequence[str]) -> float:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise InputError(
            f"the metric {name!r} needs the package rouge-score; get it with: pip install "
            "'fedtailor[rouge]'"
        ) from error
    scorer = RougeScorer([name], use_stemmer=True)
    pairs = zip(targets, predictions, strict=True)
    return float(np.mean([scorer.score_multi(r, said)[name].fmeasure for r, said in pairs]))
