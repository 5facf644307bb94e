"""Draw a picture of each method's round: python docs/method_pictures.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from picture_parts import (
    Picture,
    block_of_fedsdg,
    blocks_of_pfedgate,
    clusters_of_fedhft,
    copies_of_fedsq,
    draw,
    models_of_fedmerge,
    rows_of_fedhft,
)

FOLDER = Path(__file__).parent / "images/methods"

MODEL = ("the model", "shared")
PRETRAINED = ("pretrained weights", "frozen")
LORA = ("LoRA A, B", "shared")
HEAD = ("head", "shared")
MOMENTS = [MODEL, ("two moments", "server")]

FEDAVG = Picture(
    server=[MODEL],
    down="the model",
    up="the trained model",
    client=[MODEL],
    does="trains the model on its own data",
)
FEDIT = Picture(
    server=[LORA, HEAD],
    down="LoRA and the head",
    up="LoRA and the head, trained",
    client=[PRETRAINED, LORA, HEAD],
    does="trains LoRA and the head on its own data",
)
BODY = Picture(
    server=[("body", "shared")],
    down="the body",
    up="the trained body",
    client=[("body", "shared"), ("head", "private")],
    does="trains body and head together",
)
PICTURES = {
    "local": Picture(
        server=[],
        down="",
        up="",
        client=[("a model of its own", "private")],
        does="trains alone, from the same start as all others",
        aggregates="has nothing to do",
    ),
    # one model for all
    "fedavg": FEDAVG,
    "fedavg-ft": replace(FEDAVG, use="Before use it fine-tunes a copy, which is then thrown away"),
    "fedavgm": replace(
        FEDAVG,
        server=[MODEL, ("momentum", "server")],
        aggregates="moves the model by a momentum of the mean changes",
    ),
    "fedadam": replace(
        FEDAVG, server=MOMENTS, aggregates="takes a step of Adam along the mean change"
    ),
    "fedyogi": replace(
        FEDAVG, server=MOMENTS, aggregates="takes a step of Yogi along the mean change"
    ),
    "fedadagrad": replace(
        FEDAVG, server=MOMENTS, aggregates="takes a step of Adagrad along the mean change"
    ),
    "scaffold": replace(
        FEDAVG,
        server=[MODEL, ("control variate c", "shared")],
        down="the model and c",
        client=[MODEL, ("its own variate", "private")],
        does="corrects every step by c less its own variate",
        aggregates="averages the models, and updates c from them",
    ),
    "per-fedavg": replace(
        FEDAVG,
        does="trains the model for what it becomes after a gradient step",
        use="Before use it takes such steps on a copy, which is then thrown away",
    ),
    # training held near a shared model
    "fedprox": replace(
        FEDAVG, does="trains the model, and is pulled back towards the one that it received"
    ),
    "fedsq": Picture(
        server=[("quantitative copy", "shared")],
        down="the quantitative copy, the trained layers",
        up="the same, trained",
        client=[],
        does="trains the quantitative copy under the mask of the structural one",
        client_panel=copies_of_fedsq,
    ),
    "ditto": replace(
        FEDAVG,
        client=[MODEL, ("a second model", "private")],
        does="trains the shared model, then one of its own that is held near it",
        use="It uses its own model",
    ),
    "pfedme": replace(
        FEDAVG,
        client=[MODEL, ("a personal model", "private")],
        does="fits a personal model near the shared one, then moves the shared one towards it",
        use="It uses the personal model",
    ),
    # split between client and server
    "fedbn": replace(
        BODY,
        server=[("all other layers", "shared")],
        down="all but the normalisations",
        up="the same, trained",
        client=[("all other layers", "shared"), ("normalisations", "private")],
        does="trains all layers together",
    ),
    "fedper": BODY,
    "fedrep": replace(BODY, does="trains first its head, then the body"),
    "fedbabu": replace(
        BODY,
        client=[("body", "shared"), ("head, as it began", "frozen")],
        does="trains the body under a head that does not change",
        use="Before use it fine-tunes a copy of the head, which is then thrown away",
    ),
    "lg-fedavg": replace(
        BODY,
        server=[HEAD],
        down="the head",
        up="the trained head",
        client=[HEAD, ("body", "private")],
    ),
    # mixtures of models or of predictions
    "fedmerge": replace(
        FEDAVG,
        server=[],
        down="one model, the merge with this client's weights",
        up="the change of that model",
        client=[("the merged model", "shared")],
        does="trains the merged model on its own data",
        aggregates="has d models, and merging weights for every client. A client's change moves "
        "all models and its weights",
        server_panel=models_of_fedmerge,
    ),
    "apfl": replace(
        FEDAVG,
        client=[MODEL, ("a second model", "private"), ("the mix", "private")],
        does="trains the shared model, its own, and how much of each it mixes",
        use="It uses the mixture",
    ),
    "fedala": replace(
        FEDAVG,
        client=[MODEL, ("upper layers", "private"), ("weights of the blend", "private")],
        does="blends the received upper layers into its own, with learned weights, then trains",
    ),
    "fedem": replace(
        FEDAVG,
        server=[("M models", "shared")],
        down="M models",
        up="M models, trained",
        client=[("M models", "shared"), ("M weights", "private")],
        does="finds which model explains which of its examples, and trains them on those",
        use="It mixes the models' predictions with its weights",
        aggregates="averages each of the M models",
    ),
    "pfedmoe": replace(
        FEDAVG,
        server=[("shared extractor", "shared")],
        down="the shared extractor",
        up="the same, trained",
        client=[("shared extractor", "shared"), ("its own model", "private"), ("gate", "private")],
        does="trains both, and a gate that weighs them for every example",
    ),
    "fedmd": replace(
        FEDAVG,
        server=[("class scores", "shared")],
        down="mean class scores on public examples",
        up="its own class scores on public examples",
        client=[("public examples", "frozen"), ("its whole model", "private")],
        does="trains its model towards the mean scores, then on its own data",
        aggregates="averages the scores, not the models",
    ),
    # clusters of clients
    "fedhft": Picture(
        server=[],
        down="the adapters of all clusters, mixed for this client",
        up="the most important rows of its update, and the head",
        client=[("rank and mask ratio", "private")],
        does="trains a fresh LoRA on top of its mixture",
        aggregates="has an adapter for each cluster, and says how much each client belongs to it",
        server_panel=clusters_of_fedhft,
        client_panel=rows_of_fedhft,
    ),
    "ifca": replace(
        FEDAVG,
        server=[("model 1", "shared"), ("model 2", "shared"), ("... model C", "shared")],
        down="all C models",
        up="the one that it trained",
        client=[("the best of the C models", "shared"), ("its number", "private")],
        does="picks the model of lowest loss on its data, and trains it",
        aggregates="averages each model over the clients that picked it",
    ),
    # sparse and small models
    "pfedgate": Picture(
        server=[MODEL],
        down="the whole model",
        up="the changes of the blocks that it used",
        client=[],
        does="lets a gating layer choose, for every batch, the blocks to use and train",
        aggregates="averages each block over the clients that sent it",
        client_panel=blocks_of_pfedgate,
    ),
    "heterofl": replace(
        FEDAVG,
        down="the part of the model that is this client's size",
        up="the same part, trained",
        client=[("a narrow model", "shared")],
        does="trains a model of the width that it can afford",
        aggregates="averages each number over the clients that have it",
    ),
    "fedmask": replace(
        FEDAVG,
        server=[("mask", "shared")],
        down="the common mask, in bits",
        up="its mask, in bits",
        client=[("weights", "frozen"), ("mask", "shared"), ("scores of the mask", "private")],
        does="trains scores; they say which weights its mask lets through",
        aggregates="takes a vote on every bit of the masks",
    ),
    # LoRA
    "fedsdg": replace(
        FEDIT,
        server=[("shared LoRA", "shared"), HEAD],
        down="the shared LoRA and the head",
        up="the changes of both",
        client=[],
        does="trains both branches, the head, and a gate for each block",
        aggregates="adds the changes, weighed by how well they agree with their mean",
        client_panel=block_of_fedsdg,
    ),
    "fedsa-lora": replace(
        FEDIT,
        server=[("LoRA A", "shared"), HEAD],
        down="A and the head",
        up="A and the head, trained",
        client=[PRETRAINED, ("LoRA A", "shared"), ("LoRA B", "private"), HEAD],
        does="trains A, B and the head",
    ),
    "flora": replace(
        FEDIT,
        server=[("sum of all updates", "shared"), HEAD],
        down="the sum of all updates so far, and the head",
        up="a fresh LoRA of its rank, and the head",
        client=[("weights + updates", "shared"), LORA, HEAD],
        does="trains a fresh LoRA on top of all updates so far",
        aggregates="adds the products B A of all clients, exactly",
    ),
    "flexlora": replace(
        FEDIT,
        down="LoRA of this client's rank, and the head",
        up="the same, trained",
        does="trains LoRA of the rank that it can afford",
        aggregates="averages the products B A, and cuts the mean to each client's rank",
    ),
    "hetlora": replace(
        FEDIT,
        down="LoRA of this client's rank, and the head",
        up="the same, trained, perhaps of a lower rank",
        does="trains LoRA of its rank, and gives up components that it does not need",
        aggregates="fills up with zeros, and weighs clients by the size of their updates",
    ),
    "lora-fair": replace(
        FEDIT,
        aggregates="averages A and B, then corrects B so that B A is near the mean of the "
        "clients' products",
    ),
    "feddpa": replace(
        FEDIT,
        server=[("global LoRA", "shared"), HEAD],
        down="the global LoRA and the head",
        up="both, trained",
        client=[PRETRAINED, ("global LoRA", "shared"), HEAD, ("local LoRA", "private")],
        does="trains the global LoRA with the head, and a local one",
        use="In use the local one counts more for examples like its own",
    ),
    "fedalt": replace(
        FEDIT,
        server=[("every client's LoRA", "shared"), ("heads", "shared")],
        down="its own LoRA, the mean of the others', and the head",
        up="its LoRA and the head, trained",
        client=[("LoRA of the others", "frozen"), LORA, HEAD, ("mixer", "private")],
        does="trains its own LoRA beside the fixed mean of the others'",
        aggregates="keeps every client's LoRA, and averages those of the others for each",
    ),
    "fedlora": replace(FEDIT, use="Before use it fine-tunes a copy, which is then thrown away"),
    "ffa-lora": replace(
        FEDIT,
        server=[("LoRA B", "shared"), HEAD],
        down="B and the head",
        up="B and the head, trained",
        client=[PRETRAINED, ("LoRA A, as it began", "frozen"), ("LoRA B", "shared"), HEAD],
        does="trains B and the head",
    ),
}


def files() -> dict[str, str]:
    """The pictures' texts by method."""
    return {name: draw(picture, f"A round of {name}") for name, picture in PICTURES.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, svg in files().items():
        (FOLDER / f"{name}.svg").write_text(svg)
