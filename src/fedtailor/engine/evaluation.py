"""A round's evaluation: which models, on which clients, and which results need not be worked out
again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..data.federation import Federation
from ..method import Method, Server
from ..params import Params, add_prefix, clone, same_tensors, stack
from ..task.task import Task
from .client import ClientEvaluationResult, client_diagnostics
from .config import Plan
from .executors.work import ClientRequest, Map, Refusal, client_requests
from .forms import check_predicts
from .joining import join_requests
from .metrics import MetricValues
from .private_states import PrivateStates
from .scoring import SPLITS, EvaluatedModel, Evaluation, Scoring, evaluate_one, evaluations
from .writing import Exercises, Sample, Writing

Results = dict[int, ClientEvaluationResult]  # by client


@dataclass
class Evaluator:
    """Evaluates the clients of one run; keeps the results that would come out the same."""

    method: Method
    task: Task
    federation: Federation
    plan: Plan
    store: PrivateStates
    run: Map  # that of an executor
    scoring: Scoring
    writing: Writing
    kept: Results = field(default_factory=dict)  # of clients whose state is the same
    kept_for: Params = field(default_factory=dict)  # the server's state behind `kept`
    kept_texts: bool = False  # whether models wrote texts for `kept`

    def forget(self, clients: Sequence[int]) -> None:
        """The states of ``clients`` have changed."""
        for client in clients:
            self.kept.pop(client, None)

    def evaluate(
        self, server: Server, number: int
    ) -> tuple[list[Evaluation], Params, tuple[Sample, ...]]:
        """After round ``number``: the evaluations of personal and global models, then of those of
        novel clients; the method's diagnostics of its states; and what models write. Clients
        without a result are left out."""
        config, method = self.plan.evaluate, self.method
        novel = sorted(self.federation.novel(self.plan.cohort.novel))
        clients = self.plan.evaluated(self.federation)
        shared = method.global_state(self.task, server)
        if shared is not None:
            check_predicts(method, self.task, "global_state", shared, self.task.state)
        single = shared is not None and self._is_single(server, shared, clients)
        of_global: list[Evaluation] = []
        if shared is not None and (single or config.global_model):
            of_global = self._evaluate_global(shared, clients, number)
        shown: dict[int, Params | None] = {}
        written: dict[str, tuple[str, ...]] = {}
        if shared is not None and single:
            personal = [replace(evaluation, model="personal") for evaluation in of_global]
            if not self.federation.remote:
                context = method, self.task, self.federation
                shown = {client: client_diagnostics(*context, client, shared) for client in clients}
        else:
            results = self._evaluate_changed(server, clients, number)
            personal = self._evaluations("personal", clients, results)
            shown = {k: results[k].diagnostics for k in clients if k in results}
            written = {str(k): one.samples for k, one in results.items() if one.samples}
        if novel:
            results = self._evaluate_joining(server, novel, number)
            personal += self._evaluations("novel", novel, results)
        diagnostics = self._diagnostics(server, clients, shown)
        samples = self._samples(shared, written) if self.writing.is_due(number) else ()
        return personal + (of_global if config.global_model else []), diagnostics, samples

    def _samples(
        self, shared: Params | None, written: Mapping[str, tuple[str, ...]]
    ) -> tuple[Sample, ...]:
        """What the base and the global model answer, and what clients' models have ``written``."""
        rows = self.writing.samples
        if not rows:
            return ()
        base = self.writing.texts(None, [*rows.values()])
        answers = {"base": [text.answer for text in base]}
        if shared is not None:
            texts = self.writing.texts(shared, [*rows.values()])
            answers["global"] = [text.answer for text in texts]
        answers |= {client: [*written[client]] for client in map(str, rows) if client in written}
        return tuple(
            Sample(
                client, text.prompt, text.reference, {k: said[at] for k, said in answers.items()}
            )
            for at, (client, text) in enumerate(zip(rows, base, strict=True))
        )

    def _is_single(self, server: Server, shared: Params, clients: Sequence[int]) -> bool:
        """Whether all ``clients`` use the global model, ``shared``, as it is."""
        if self.store.has_states or self.method.finetune_passes:
            return False
        sent = (self.method.send(self.task, server, client) for client in clients)
        return all(same_tensors(received, shared) for received in sent)

    def _evaluate_global(
        self, shared: Params, clients: Sequence[int], number: int
    ) -> list[Evaluation]:
        """One state on all clients' examples, in common batches where the data are here."""
        if not self.federation.remote:
            scores_of = partial(self.run, "score", shared)
            batch_size = self.plan.evaluate.batch_size
            of_texts = self._global_texts(shared, clients, number)
            return evaluate_one(scores_of, self.scoring, clients, batch_size, of_texts)
        results = self._results("global", shared, clients, number)
        return self._evaluations("global", clients, results)

    def _global_texts(
        self, shared: Params, clients: Sequence[int], number: int
    ) -> list[tuple[MetricValues, ...]]:
        if not self.federation.dataset.objective.learns_texts or not self.scoring.metrics.asked:
            return []
        if not self.writing.is_due(number):
            return [self.writing.undefined] * len(clients)
        sizes = {
            client: sum(self.federation.num_rows(client, split) for split in SPLITS)
            for client in clients
        }
        items = (Exercises(client, size) for client, size in sizes.items())
        found = {item.client: got for item, got in self.run("write", shared, items)}
        return [found[client] for client in clients]

    def _evaluations(
        self, model: EvaluatedModel, clients: Sequence[int], results: Results
    ) -> list[Evaluation]:
        present = [client for client in clients if client in results]
        shape = -1, len(SPLITS), self.scoring.num_sums
        sums = np.reshape([results[client].sums for client in present], shape)
        asked = self.scoring.metrics.asked
        values = [results[client].metrics for client in present] if asked else ()
        return evaluations(self.scoring, model, present, sums, values)

    def _evaluate_changed(self, server: Server, clients: Sequence[int], number: int) -> Results:
        """The results of personal models; where the server's state is the very same as the last
        time, those of clients that have trained since are new."""
        if (
            self.writing.is_due(number) != self.kept_texts
            or self.federation.remote  # sites keep what they evaluate
            or self.method.finetune_passes
            or not same_tensors(server, self.kept_for)
        ):
            self.kept.clear()
        self.kept_for, self.kept_texts = server, self.writing.is_due(number)
        changed = [client for client in clients if client not in self.kept]
        self.kept.update(self._results("evaluate", server, changed, number))
        return self.kept

    def _results(self, work: str, server: Server, clients: Sequence[int], number: int) -> Results:
        passes, federation = self.method.finetune_passes, self.federation
        sizes = {
            client: federation.num_steps(client, self.plan.local, passes)
            if passes
            else sum(federation.num_rows(client, split) for split in SPLITS)
            for client in clients
        }
        order = sorted(clients, key=lambda client: (sizes[client], client)) if passes else clients
        read = self.store.read
        requests = client_requests(order, number, "personalise", passes, sizes, read)
        return _usable(self.run(work, server, requests))

    def _evaluate_joining(self, server: Server, clients: Sequence[int], number: int) -> Results:
        """Of clients that have just joined: fitted for a few passes, of which nothing is kept."""
        passes, local = self.plan.evaluate.novel_passes, self.plan.local
        requests = join_requests(
            self.federation, local, clients, number, passes, lambda k: self.store.read(k) or {}
        )
        return _usable(self.run("join", server, requests))

    def _diagnostics(
        self, server: Server, clients: Sequence[int], shown: Mapping[int, Params | None]
    ) -> Params:
        """The method's diagnostics; ``clients`` and ``server_clients`` say whose they are."""
        of_server = self.method.server_diagnostics(self.task, server, clients)
        diagnostics = {f"server/{name}": value.cpu() for name, value in of_server.items()}
        by_client = {client: state for client, state in shown.items() if state is not None}
        if by_client and all(by_client.values()):
            order = sorted(by_client)
            diagnostics |= add_prefix(stack([by_client[client] for client in order]), "client/")
            diagnostics["clients"] = torch.tensor(order)
        if of_server:
            diagnostics["server_clients"] = torch.tensor(list(clients))
        return diagnostics


def _usable(results: Iterable[tuple[ClientRequest, Any]]) -> Results:
    """By client, with tensors that stay valid when the next result is asked for."""
    found: Results = {}
    for request, result in results:
        if not isinstance(result, Refusal):
            shown = result.diagnostics
            copied = None if shown is None else clone(shown)
            found[request.client] = replace(result, diagnostics=copied)
    return found
