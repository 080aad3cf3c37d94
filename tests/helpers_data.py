"""A small made-up corpus in the shape of the real one, and a tiny wheel server on disk."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path

from components.core.config import Data, SplitSizes, Task
from components.data.corpora import Conversation, Message

VOCABULARY = (
    *("walk", "river", "garden", "market", "winter", "summer", "picture", "window", "kitchen", "train"),
    *("ticket", "music", "guitar", "coffee", "dinner", "movie", "teacher", "lesson", "homework", "mountain"),
    *("weather", "office", "meeting", "friend", "sister", "brother", "bicycle", "library", "painting", "holiday"),
)
MISSPELLINGS = {word: (word[:2] + word[3:], word + word[-1]) for word in VOCABULARY}
NAMES = ("Anna", "Ben", "Clara", "David", "Emil", "Frida")

TASKS = {
    "summary": Task(
        recipe="notifications",
        system="Summarise.",
        user="{notifications}\n\nIn one sentence.",
        answer_prefix="{sender}",
        stop_texts=("\n",),
        max_new_tokens=16,
    ),
    "proofread": Task(recipe="misspelt", user="Correct.\nText: {text}", max_new_tokens=16),
    "reply": Task(recipe="last_message", system="You are {me}.", user="{text}", max_new_tokens=16),
}


def sentence(rng: random.Random) -> str:
    """Eight to eleven words: long enough for one 8-gram, short enough for a note."""
    return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randint(8, 11)))


def make_chats(count: int, messages: int = 6, seed: int = 0, sentences: int = 1) -> tuple[Conversation, ...]:
    """Two people taking turns; messages of one or more sentences."""
    rng = random.Random(seed)
    return tuple(
        Conversation(
            f"chat-{seed}-{number:04d}",
            tuple(
                Message(f"p{number}-{turn % 2}", " ".join(sentence(rng) for _ in range(sentences)))
                for turn in range(messages)
            ),
        )
        for number in range(count)
    )


def data_params(train: int = 20, validation: int = 4, test: int = 8, seed: int = 7, most: int = 400) -> Data:
    """Section `data` at test size."""
    sizes = SplitSizes(train=train, validation=validation, test=test)
    return Data(seed=seed, prompts_per_task=sizes, max_prompt_tokens=most, deduplicate_ngram=8)


def write_jsonl(path: Path, rows: list[Mapping[str, object]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> tuple[Path, str]:
    """A wheel that pip accepts, and its sha256."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
