"""Soft clusters of clients from the inner products of their updates."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def mixture_assignments(
    gram: Tensor, p: Tensor, components: int, reg_covar: float, seed: int
) -> Tensor:
    """New assignments of c clients to C clusters, by a Gaussian mixture over principal components.

    The components are those of the updates, scaled to a mean variance of 1. The Gaussians have
    diagonal covariances. EM starts from ``p``, or from k-means if ``p`` is the same for all
    clients.

    Args:
        gram: inner products of the updates, ``[c, c]``.
        p: the assignments so far, ``[c, C]``.
        components: how many principal components are used; at most c - 1 are.
        reg_covar: added to every variance.
        seed: of k-means.

    Returns:
        float64 ``[c, C]``, rows that sum to 1. A cluster to which no client is assigned in ``p``
        gets none. ``p`` itself if all updates are equal, or if they are fewer than two or than the
        clusters that have clients.
    """
    from sklearn.decomposition import KernelPCA
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    last: NDArray[np.float64] = p.double().cpu().numpy()
    present = np.flatnonzero(last.sum(0) > 1e-3)
    if len(last) < max(2, len(present)):
        return p.double()
    kernel = (gram / gram.diagonal().mean().clamp(min=1e-300)).cpu().numpy()
    pca = KernelPCA(min(components, len(last) - 1), kernel="precomputed", eigen_solver="dense")
    X = pca.fit_transform(kernel)  # [c, components]
    variance = X.var(0).mean()
    if variance < 1e-12:  # only rounding: the updates' own size is 1
        return p.double()
    X /= np.sqrt(variance)
    start: dict[str, NDArray[np.float64]] = {}
    if not np.allclose(last, last[0]):
        weights = last[:, present].sum(0)
        share = (last[:, present] / weights).T  # [present, c]
        means = share @ X
        variances = share @ X**2 - means**2 + reg_covar
        start = {"means_init": means, "precisions_init": 1 / variances}
        start["weights_init"] = weights / weights.sum()
    mixture = GaussianMixture(
        len(present), covariance_type="diag", reg_covar=reg_covar, n_init=1 if start else 10,
        max_iter=1000, random_state=seed, **start,
    )  # fmt: skip
    new = np.zeros_like(last)
    with warnings.catch_warnings():  # EM needs no converged start, nor fewer centres than clients
        warnings.simplefilter("ignore", ConvergenceWarning)
        new[:, present] = mixture.fit(X).predict_proba(X)
    return torch.tensor(new, device=p.device)


def likeness(gram: Tensor, clusters: int) -> Tensor:
    """How alike each of c updates is to the model of each of C clusters, in shares: the softmax of
    ten times the cosine of the update and what sets the model apart from the models' mean.

    Args:
        gram: inner products of the models and the updates, ``[C + c, C + c]``.
        clusters: C.

    Returns:
        ``[c, C]``, rows that sum to 1.

    >>> models, updates = torch.eye(2), torch.tensor([[0.1, 0.9], [2.0, 0.0]])
    >>> both = torch.cat([models, updates])
    >>> likeness(both @ both.T, 2).argmax(1).tolist()
    [1, 0]
    """
    products = gram[:, :clusters] - gram[:, :clusters].mean(1, keepdim=True)
    apart = products[:clusters] - products[:clusters].mean(0)  # of the centred models
    lengths = apart.diagonal().clamp(min=0).sqrt() * gram.diagonal()[clusters:, None].sqrt()
    return (10 * products[clusters:] / lengths.clamp(min=1e-300)).softmax(1)
