"""What a hostile node sends ends, at worst, in that node's refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, MessageType
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.engine.config import EvaluateConfig
from fedtailor.engine.executors.work import ClientRequest
from fedtailor.engine.metrics import Metrics, MetricValues
from fedtailor.engine.prepare import upload_chain
from fedtailor.errors import DivergedError, InputError
from fedtailor.flower import serve
from fedtailor.flower.border import accept_upload, evaluation_of
from fedtailor.flower.codec import WireError, pack, unpack
from fedtailor.flower.messages import ClientReply, NodeInfo, Sizes
from fedtailor.flower.nodes import remote_federation
from fedtailor.flower.schema import UploadSchema
from fedtailor.params import subtract
from fedtailor.task.batch_norm import check_variances
from fedtailor.task.task import Task
from fedtailor.testing import Case, pictures
from tests.flower.grid import ANY, QUICK, DirectGrid, experiment, grid
from tests.flower.hostile import HOSTILE, WILD, replies, sends
from tests.small import digits_backbone

MESSAGES = (
    *HOSTILE,
    (sends(lambda sent: {n: -v if "_var" in n else v for n, v in sent.items()}), "variances below"),
)


class BrokenGrid(DirectGrid):
    """Flower can't read the reply of a node to an order: as its own Grid, it raises."""

    broken = 100 + len(MESSAGES)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for number in message_ids:
            reply = self.waiting.get(number)
            train = reply is not None and reply.metadata.message_type == MessageType.TRAIN
            if train and reply is not None and reply.metadata.src_node_id == self.broken:
                for one in message_ids:  # Flower's server forgets all that were pulled
                    self.waiting.pop(one, None)
                raise ValueError("not a RecordDict")
        return super().pull_messages(message_ids)


@pytest.mark.slow
def test_no_message_ends_the_run(tmp_path: Path) -> None:
    honest = len(MESSAGES) + 1
    split = {"scheme": "iid", "clients": honest + 2, "max_examples": 12}
    chosen = experiment("fedavg", rounds=1, split=split, cohort={})
    direct = BrokenGrid(grid(chosen, tmp_path / "clients", nodes=honest + 2).apps)

    def change(message: Message, reply: Message) -> Message:
        client = message.metadata.dst_node_id - 100
        if message.metadata.message_type == MessageType.TRAIN and client < len(MESSAGES):
            reply.content = MESSAGES[client][0](reply.content)
        return reply

    direct.change = change
    timeouts = replace(QUICK, least=0.01)
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=timeouts)
    folder = out / "methods/fedavg/seed-0"
    (only,) = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert only["cohort"] == [honest, honest + 1]
    lines = list(map(json.loads, (folder / "refused.jsonl").read_text().splitlines()))
    reasons = {line["client"]: line["reason"] for line in lines}
    assert reasons.keys() == set(range(honest))
    for client, (_, reason) in enumerate(MESSAGES):
        assert reason in reasons[client], client
        assert len(reasons[client]) <= 500
    assert all(v.isfinite().all() for v in load_file(folder / "server.safetensors").values())


@pytest.mark.slow
def test_finite_values_that_break_the_sums_are_left_out(tmp_path: Path) -> None:
    """LoRA-FAIR can't solve its equation with them."""
    chosen = experiment("lora-fair", rounds=2, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)

    def change(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type == MessageType.TRAIN and metadata.dst_node_id == 103:
            spoil = sends(lambda sent: {n: torch.full_like(v, 1e20) for n, v in sent.items()})
            reply.content = spoil(reply.content)
        return reply

    direct.change = change
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    folder = out / "methods/lora-fair/seed-0"
    history = list(map(json.loads, (folder / "history.jsonl").read_text().splitlines()))
    assert [line["cohort"] for line in history] == [[0, 1, 2, 4]] * 2
    assert "without client 3: " in history[0]["notes"][0]
    assert "without client 3: " in (out / "run.log").read_text()


@pytest.mark.slow
def test_uploads_above_the_bound_count_as_missing_ones(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)
    spoil = sends(lambda sent: {name: value + 1e20 for name, value in sent.items()})

    def change(message: Message, reply: Message) -> Message | None:
        node, is_train = message.metadata.dst_node_id, message.metadata.message_type == "train"
        if node == 101 and is_train:
            return None
        if node == 103 and is_train:
            reply.content = spoil(reply.content)
        return reply

    direct.change = change
    options: dict[str, Any] = {"backbone": digits_backbone()}
    with pytest.raises(DivergedError, match=r"1 of 4 uploads are .* 3 are left and 4 needed"):
        serve(direct, chosen, tmp_path / "a", timeouts=replace(QUICK, least=0.8), **options)
    out = serve(direct, chosen, tmp_path / "b", timeouts=replace(QUICK, least=0.6), **options)
    (only,) = map(
        json.loads, (out / "methods/fedavg/seed-0/history.jsonl").read_text().splitlines()
    )
    assert only["cohort"] == [0, 2, 4]


def spoilt_info(change: Callable[[NodeInfo], NodeInfo], node: int = 101) -> Callable[..., Message]:
    def spoil(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type == MessageType.QUERY and metadata.dst_node_id == node:
            info, _ = unpack(reply.content, NodeInfo, ANY)
            reply.content = pack(change(info))
        return reply

    return spoil


def counted(info: NodeInfo, train: int) -> NodeInfo:
    (sizes,) = info.sizes
    return replace(info, sizes=(replace(sizes, train=(train, *sizes.train[1:])),))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda info: replace(info, classes=tuple(f"{k:01000}" for k in range(9_000))),
            "characters of text; at most",
        ),
        (lambda info: replace(info, classes=()), "its task is classification, and it has no class"),
        (lambda info: replace(info, picture=(10**6, 10**6, 3)), "its picture is (1000000"),
        (lambda info: replace(info, scale=(37.0, 1.0)), "its scale is (37.0, 1.0)"),
        (lambda info: replace(info, num_clients=10**9), "its num_clients is 1000000000; split.cl"),
        (lambda info: replace(info, clients=(0, 3)), "client 0 is served by node 100, too"),
        (lambda info: counted(info, 2**62), "client 1 has 4611686018427387904 training examples"),
        (lambda info: counted(info, 0), "client 1 has 0 training examples"),
        (lambda info: counted(info, -5), "client 1 has -5 training examples"),
        (lambda info: replace(info, sizes=info.sizes * 3), "its sizes are of seeds [0, 0, 0]"),
    ],
)
def test_what_a_node_says_of_itself_is_bounded(
    change: Callable[[NodeInfo], NodeInfo], reason: str, tmp_path: Path
) -> None:
    chosen = experiment("fedavg", rounds=1)
    direct = grid(chosen, tmp_path / "clients")
    direct.change = spoilt_info(change)
    with pytest.raises(InputError) as raised:
        serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    assert re.search(f"node 101: .*{re.escape(reason)}", str(raised.value))


def test_the_form_of_most_nodes_data_counts_and_not_that_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)
    direct.change = spoilt_info(lambda info: replace(info, picture=(3, 9, 9)), node=100)
    with pytest.raises(InputError, match=r"no node serves clients 0$"):
        serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    said = capsys.readouterr().err
    assert "node 100: its picture is (3, 9, 9), other nodes' is (1, 8, 8)" in said
    assert "node 101" not in said


@pytest.mark.parametrize("method", [ft.FedAvg(), ft.FedALA()])
def test_variances_below_0_are_refused_of_states_and_of_updates(method: ft.Method) -> None:
    received = {"norm.running_var": torch.tensor([1.0, 0.5, 1e-20])}
    before = received if method.sends_updates else {}
    for trained in ([0.9, 0.0, 1e-12], [0.9, -0.01, 1e-12]):
        upload = {"norm.running_var": torch.tensor(trained)}
        if method.sends_updates:
            upload = subtract(upload, received)
        if min(trained) < 0:
            with pytest.raises(InputError, match="running_var holds variances below 0"):
                check_variances(upload, before)
        else:
            check_variances(upload, before)


@pytest.mark.parametrize(
    "method", [ft.FedEM(), ft.PFedMoE(), ft.IFCA(averaging="gradients"), ft.Scaffold()]
)
def test_variances_below_0_are_refused_of_models_with_names_of_their_own(
    method: ft.Method, tmp_path: Path
) -> None:
    case = Case(method, pictures(), tmp_path)
    task, one = case.task(), case.first_round(0)
    packed = method.pack(task, one.upload)
    schema = UploadSchema.of(method.unpack(task, packed), packed)
    request = ClientRequest(0, 1, None, "train", 1, 1.0, len(case.batches(0)))
    chain = upload_chain(method, task, case.subject.federation, case.subject.plan)
    context = method, task, chain, schema, one.received, request
    reply = ClientReply(0, loss=1.0)
    accept_upload(*context, reply, packed)
    (name,) = (name for name in packed if name.endswith("running_var"))
    with pytest.raises(WireError, match=f"{name} holds variances below 0"):
        accept_upload(*context, reply, {**packed, name: packed[name] - 2})


@pytest.mark.parametrize("clusters", [[100.0, 100.0], [-4.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
def test_a_site_chooses_one_model_of_ifca(clusters: list[float]) -> None:
    method = ft.IFCA(clusters=2)
    task = Task(digits_backbone(), method.adapt)
    method.check_upload(task, 0, {}, {"clusters": torch.tensor([0.0, 1.0])}, 1, 1.0)
    with pytest.raises(InputError, match="allowed: 1 for one model, 0 for all others"):
        method.check_upload(task, 0, {}, {"clusters": torch.tensor(clusters)}, 1, 1.0)


def test_too_few_uploads_for_a_rule_leave_the_state_as_it_is(tmp_path: Path) -> None:
    split = {"scheme": "iid", "clients": 3, "max_examples": 12}
    robust = {"robust": {"rule": "median", "attackers": 1}}
    chosen = experiment("fedavg", robust, rounds=2, split=split, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=3)

    def change(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type == MessageType.TRAIN and metadata.dst_node_id == 101:
            reply.content = sends(lambda sent: {})(reply.content)
        return reply

    direct.change = change
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    lines = (out / "methods/fedavg/seed-0/history.jsonl").read_text().splitlines()
    notes = [json.loads(line)["notes"] for line in lines]
    assert all("2 uploads are there; " in note[0] for note in notes)
    assert all(note[0].endswith("the server's state stays as it is") for note in notes)


GOOD = MetricValues((0.5, None), ((1, 0), (1, 2)))


FOUR = remote_federation(  # a client with four validation and four test examples
    {
        1: NodeInfo(
            (0,), 1, "classification", ("a", "b"), (1, 8, 8), "", (Sizes(0, "", (3,), (4,), (4,)),)
        )
    },
    seed=0,
)


@pytest.mark.parametrize(
    "second",
    [
        GOOD,
        None,
        replace(GOOD, values=(0.5,)),
        replace(GOOD, values=(0.5, float("inf"))),
        replace(GOOD, confusion=None),
        replace(GOOD, confusion=((1, 0), (1, -1))),
        replace(GOOD, confusion=((1, 0), (1, 3))),
        replace(GOOD, confusion=((1, 0),)),
        replace(GOOD, confusion=((1, 0, 0), (1, 1, 0), (0, 0, 0))),
        replace(GOOD, values=(1e300, None)),
    ],
)
def test_metrics_that_cannot_be_are_refused(second: MetricValues | None) -> None:
    metrics = Metrics(EvaluateConfig(metrics=("macro_f1", "auc"), confusion=True))
    values = (GOOD,) if second is None else (GOOD, second)
    reply = ClientReply(0, sums=((1.0, 2.0, 4.0), (1.0, 2.0, 4.0)), metrics=values)
    if second is GOOD:
        assert evaluation_of(reply, metrics, FOUR).metrics == values
    else:
        with pytest.raises(WireError, match="its metrics can't be"):
            evaluation_of(reply, metrics, FOUR)


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        (((1.0, 2.0, 4.0), (1.0, 2.0, 40.0)), r"of \[4.0, 40.0\] examples, not of \[4, 4\]"),
        (((1.0, 2.0, 4.0), (1.0, 2.0, 0.0)), "its results can't be"),
        (((1e300, 2.0, 4.0), (1.0, 2.0, 4.0)), "its results can't be"),
        (((float("nan"), 2.0, 4.0), (1.0, 2.0, 4.0)), "its results can't be"),
        (None, "its results can't be: None"),
    ],
)
def test_results_are_of_the_examples_that_were_counted(sums: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        evaluation_of(ClientReply(0, sums=sums), Metrics(EvaluateConfig()), FOUR)


def test_a_key_is_bound_to_its_clients(tmp_path: Path) -> None:
    """Node 102 has no key of a site, and 100 says that it serves the other site's client."""
    split = {"scheme": "iid", "clients": 2, "max_examples": 12}
    chosen = experiment("fedavg", rounds=1, split=split, cohort={})
    direct = grid(chosen, tmp_path / "clients")
    direct.apps[102] = direct.apps[100]
    sites = {100: range(1), 101: range(1, 2)}
    given = {"backbone": digits_backbone(), "timeouts": QUICK, "sites": sites}
    direct.change = spoilt_info(lambda info: replace(info, clients=(1,)), node=100)
    with pytest.raises(InputError) as raised:
        serve(direct, chosen, tmp_path / "out", **given)
    assert "node 102: its key is none of the sites'" in str(raised.value)
    assert "node 100: it says that it serves clients [1]; its key is for [0]" in str(raised.value)
    assert {message.metadata.dst_node_id for message in direct.sent} == {100, 101}
    direct.change = lambda message, reply: reply
    serve(direct, chosen, tmp_path / "out", **given)


@pytest.mark.slow
def test_words_of_a_node_fill_no_log_and_control_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)

    def change(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type != MessageType.TRAIN:
            return reply
        if metadata.dst_node_id == 102:
            return Message(Error(2, WILD), reply_to=message)
        if metadata.dst_node_id == 103:
            spoil = replies(lambda report: replace(report, results=(ClientReply(3, error=WILD),)))
            reply.content = spoil(reply.content)
        if metadata.dst_node_id == 104:
            many = tuple(ClientReply(k, error=WILD[:40]) for k in range(20_000))
            reply.content = replies(lambda report: replace(report, results=many))(reply.content)
        return reply

    direct.change = change
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    lines = (out / "methods/fedavg/seed-0/refused.jsonl").read_text().splitlines()
    reasons = {line["client"]: line["reason"] for line in map(json.loads, lines)}
    assert len(lines) == len(reasons) == 3
    assert reasons[3].startswith("?[2J?]0;owned? ?  round 1: all is well xxx")
    for text in (*reasons.values(), *capsys.readouterr().err.splitlines()):
        assert text.isprintable()
        assert len(text) < 600


@pytest.mark.parametrize("name", ["\x1b[3m", "a\n", "\0", "x" * 501])
def test_a_site_whose_classes_have_wild_names_is_refused(tmp_path: Path, name: str) -> None:
    chosen = experiment("fedavg", rounds=1)
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    names = (*"012345678", name)
    direct.change = spoilt_info(lambda info: replace(info, classes=names), node=100)
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, start=0.1)}
    with pytest.raises(
        InputError, match=r"node 100: class .* (can't be shown|has a name of 501 characters)"
    ):
        serve(direct, chosen, tmp_path / "out", **given)


def test_sites_whose_task_is_not_the_models_end_the_run_in_one_line(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1)
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    other: dict[str, Any] = {"task": "causal-lm", "classes": (), "picture": None}
    direct.change = spoilt_info(lambda info: replace(info, **other), node=100)
    with pytest.raises(InputError, match="data are for causal-lm, and the model is for classif"):
        serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)


@pytest.mark.slow
def test_nodes_without_number_are_named_in_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment("fedavg", rounds=1)
    direct = grid(chosen, tmp_path / "clients")
    direct.apps.update(dict.fromkeys(range(200, 300), direct.apps[100]))
    serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    told = [line for line in capsys.readouterr().err.splitlines() if "round" not in line]
    assert sum("is served by node" in line for line in told) <= 20
    assert any("80 more nodes are refused" in line for line in told)
