"""The texts of an export: a model card from what the run says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.config import DataConfig, SplitConfig
from ..data.sources import BUILTIN
from ..objectives import objective_of
from ..objectives.objective import Objective
from ..report.names import client_name
from ..report.text import markdown
from ..runs.experiment import Experiment
from ..store.metrics import bare, is_percentage
from .scores import SplitScore

_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)  # what a command line takes as it is
_VLLM_RANKS = (8, 16, 32, 64, 128, 256)  # what its --max-lora-rank may be; 16 without it


def licence(base: str | None) -> str:
    """The licence of a model on the hub or in a folder, or where to find it; None: an own one."""
    if base is None:
        return "that of your own module"
    if not Path(base).is_dir():
        return f"see https://huggingface.co/{base}"
    readme = Path(base) / "README.md"
    lines = readme.read_text().splitlines() if readme.is_file() else []
    stated = (line.partition(":")[2].strip() for line in lines if line.startswith("license:"))
    return next(stated, "not stated in the model's folder")


def division(data: DataConfig, split: SplitConfig, clients: int) -> str:
    """Return the data's name, and how they are divided among the clients.

    >>> division(DataConfig(path="a.csv", client="hospital"), SplitConfig(scheme="natural"), 8)
    "a.csv, divided by the column 'hospital' among 8 clients"
    >>> division(DataConfig(name="digits"), SplitConfig(scheme="dirichlet", alpha=0.3), 8)
    'digits, divided by Dirichlet(0.3) among 8 clients'
    """
    name = data.name or data.path or "the sites' data"
    column = data.client or (BUILTIN[name].client if name in BUILTIN else None)
    if split.scheme == "natural" and column is None:
        return f"{name}, of {clients} clients with rows of their own"
    by = {
        "natural": f"by the column {column!r}",
        "iid": "at random",
        "dirichlet": f"by Dirichlet({split.alpha:g})",
        "pathological": f"by label, {split.classes_per_client} classes a client,",
        "shards": f"by label, {split.shards_per_client} shards a client,",
        "clusters": f"by {split.clusters} clusters of labels",
    }
    return f"{name}, divided {by[split.scheme]} among {clients} clients"


def card(
    experiment: Experiment,
    about: Mapping[str, Any],
    results: list[SplitScore],
    joined: str | None,
    *,
    is_shared: bool = False,
) -> str:
    """Return the model card, in Markdown. ``about`` is the content of the export's description,
    ``joined`` what a client keeps that joined afterwards, `Onboarded.kept` (None: any other), and
    ``is_shared`` whether all clients have this very model."""
    objective = objective_of(about["task"])
    paper = experiment.methods[about["label"]].paper()
    cited = f": {paper.title}. {paper.authors}. {paper.venue}." if paper.title else ""
    library = "transformers" if _is_transformers(about["form"], about["network"]) else "pytorch"
    is_global = about["client"] is None
    whose = "all clients (global)" if is_global else _client(about)
    owner, client = whose, whose
    if is_shared:
        owner, client = "all clients (global)", f"{whose}; all clients have this same model"
    front = [
        "---",
        f"base_model: {_yaml(about['base']['name'])}",
        f"license: {_yaml(about['base']['licence'])}",
        f"library_name: {'peft' if about['form'] == 'adapter' else library}",
        "---",
    ]
    facts = [
        "| | |",
        "|---|---|",
        f"| method | {about['method']}{cited} |",
        f"| data | {markdown(_data(experiment, about, joined))} |",
        f"| client | {client} |",
        f"| seed | {about['seed']} |",
        f"| base model | {markdown(about['base']['name'])} |",
        f"| licence of the base model | {markdown(about['base']['licence'])} |",
    ]
    if (get := about["base"]["get"] or "").startswith("pip "):
        facts.append(f"| the base model came with | `{get}`; this folder doesn't need it |")
    if rounding := experiment.model.rounding:
        facts.append(f"| trained on | the base in {rounding}; here it has its unrounded weights |")
    if about["id2label"]:
        names = ", ".join(map(markdown, about["id2label"].values()))
        facts.append(f"| {objective.names_classes} | {names} |")
    if about["max_length"]:
        facts.append(f"| longest input | {about['max_length']} tokens |")
    scores = ["No results of this model were at hand where it was written."]
    if results:
        of = f"Of this model, as it was after round {results[0].round}, on data of {whose}:"
        scores = [of, "\n".join(_table(results, objective)), *_baseline(results)]
        if objective.learns_texts and (names := ", ".join(results[0].metrics)):
            most = experiment.evaluate.generate.examples
            scores.append(f"Of answers that it wrote, at most {most} of a split: {names}.")
    parts = [
        "\n".join(front),
        f"# {markdown(experiment.name)}: the model of {owner}",
        _origin(experiment, about, joined),
        "\n".join(facts),
        "## Results",
        *scores,
        "## Use",
        *_use(about),
        *_uses(about),
    ]
    return "\n\n".join(parts) + "\n"


def _client(about: Mapping[str, Any]) -> str:
    return markdown(client_name(str(about["client"]), None))


def _yaml(text: str) -> str:
    """A text of the front matter, in quotes where YAML would read more in it, or another type."""
    plain = re.fullmatch(r"(?!(?:null|true|false|yes|no|on|off)$)[A-Za-z][\w./-]*", text, re.I)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _origin(experiment: Experiment, about: Mapping[str, Any], joined: str | None) -> str:
    client = _client(about)
    together = f"{about['clients']} clients trained together, each on its own data, with federated"
    if experiment.methods[about["label"]].trains_alone:
        if joined == "guess":
            return f"The model with which every client begins; {client} did not train it."
        return f"A model that {client} trained alone, on its own data."
    if joined == "fitted":
        return (
            f"A model fitted to the data of {client}, starting from a model that {together} "
            "learning."
        )
    if joined is not None:
        return (
            f"A model that {together} learning; {client} joined afterwards and uses it unchanged."
        )
    return f"A model that {together} learning."


def _data(experiment: Experiment, about: Mapping[str, Any], joined: str | None) -> str:
    """The data of those who trained the model."""
    divided = division(experiment.data, experiment.split, about["clients"])
    own = f"those of {client_name(str(about['client']), None)}"
    if experiment.methods[about["label"]].trains_alone and joined is not None:
        return own if joined == "fitted" else "none"
    return f"{divided}; then {own}" if joined == "fitted" else divided


def packages(about: Mapping[str, Any]) -> list[str]:
    """The packages that an export's own code imports, beside those that they need."""
    text, form = about["modality"] == "text", about["form"]
    wanted = {
        "transformers": text or about["network"]["kind"] == "transformers",
        "peft": form == "adapter",
        "pillow": not text,
        "numpy": not text or form == "gated_blocks",
    }
    return ["torch", "safetensors", *(name for name, needed in wanted.items() if needed)]


def _use(about: Mapping[str, Any]) -> list[str]:
    text = about["modality"] == "text"
    given, what = ('"some text"', "texts") if text else ("picture.png", "paths")
    if about.get("pair"):
        given, what = "PAIRS.csv", "pairs of texts"
    does = "generate(text)" if objective_of(about["task"]).writes else f"predict({what})"
    has_own_code = about["network"]["kind"] in ("module", "pickled")
    own = ", and those that its own code imports" if has_own_code else ""
    return [
        f"It needs Python with these packages{own}:",
        f"```\npip install {' '.join(packages(about))}\npython use.py {given}\n```",
        f"In Python, `Model` of `model.py` has `{does}` and `logits(batch)`.",
    ]


def _table(scores: list[SplitScore], objective: Objective) -> Iterator[str]:
    """The results on each split: the accuracy, the task's other metrics, and the loss."""
    has_accuracy = any(one.accuracy is not None for one in scores) and not objective.learns_texts
    names = [*["accuracy"] * has_accuracy, *scores[0].metrics, "loss"]
    yield f"| {' | '.join(['split', objective.counted, *names])} |"
    yield "|---" * (2 + len(names)) + "|"
    for one in scores:
        values = {"accuracy": one.accuracy, "loss": one.loss, **one.metrics}
        units = (" %" if is_percentage(name) else "" for name in names)
        shown = (bare(n, values.get(n)) + unit for n, unit in zip(names, units, strict=True))
        yield f"| {' | '.join([one.split, str(one.examples), *shown])} |"


def _baseline(results: list[SplitScore]) -> list[str]:
    for score in results:
        if score.split == "test" and score.majority is not None:
            answer = f", {markdown(score.answer)}," if score.answer else ""
            poor = " This model is no better." if score.is_no_better else ""
            text = (
                f"Always answering the most frequent class of a client's training examples"
                f"{answer} has an accuracy of {100 * score.majority:.1f} % on the test examples."
            )
            return [text + poor]
    return []


def _is_transformers(form: str, network: Mapping[str, Any]) -> bool:
    """Whether a class of transformers reads the folder."""
    return form == "plain" and network.get("source") == "." and "auto_class" in network


def _served(about: Mapping[str, Any]) -> list[str]:
    """How vLLM serves the adapter of a decoder, if its rank is one that vLLM has."""
    rank, task = about["settings"]["rank"], objective_of(about["task"]).peft_task
    wide = next((most for most in _VLLM_RANKS if rank and rank <= most), None)
    if task != "CAUSAL_LM" or wide is None:
        return []
    base = about["network"]["source"] or "BASE"
    client = str(about["client"] or "")
    name = client if _PLAIN.fullmatch(client) else "client"
    command = f"vllm serve {base} --enable-lora --max-lora-rank {wide} --lora-modules {name}=."
    return [
        f"Its rank is {rank}. vLLM serves it, beside the adapters of other clients:",
        f"```\n{command}\n```",
    ]


def _uses(about: Mapping[str, Any]) -> list[str]:
    network = about["network"]
    if _is_transformers(about["form"], network):
        auto = network["auto_class"]
        return [f"`transformers.{auto}.from_pretrained` loads this folder."]
    if network.get("source") == "encoder":
        return ["`transformers.AutoModel.from_pretrained` loads the folder `encoder`."]
    if about["form"] == "adapter":
        adds = "`peft.PeftModel.from_pretrained(base, folder)` adds the adapter to the base."
        return [adds, *_served(about)]
    if about["form"] == "gated_blocks":
        if about["settings"]["gates_of"] == "row":
            return ["Each row has gates of its own."]
        return [
            "**A prediction depends on the rows that share its batch.** The gates are predicted "
            "for a whole batch: `predict` sorts the rows by length, and takes "
            f"{about['batch_size']} at a time, as when the results above were measured. A row by "
            "itself is a batch of one: it has the gates that are predicted for that row alone.",
        ]
    return []
