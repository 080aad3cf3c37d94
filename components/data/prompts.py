"""The prompt table: which prompts exist, and which split each belongs to.

Owns the split and the rule that held-out prompts share nothing with training. It refuses to give fewer prompts than
asked for. Its surprising decision: training is filled first and the held-out splits lose what looks like it, because a
test that shrinks fails loudly here and one that leaks only flatters later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.core.config import SPLITS, Task
from components.core.errors import UserError
from components.data import recipes
from components.data.corpora import Conversation, word_ngrams
from components.data.recipes import Candidate
from components.data.splits import DataParams, assign_rows, split_of
from components.data.table import Prompt

FILL_ORDER = ("train", "test", "validation")  # each is kept apart from those before it

Encode = Callable[[str, Mapping[str, str]], Sequence[int]]


@dataclass(frozen=True)
class Corpus:
    """Everything that recipes draw from."""

    chats: tuple[Conversation, ...]
    misspellings: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]


def build_prompts(tasks: Mapping[str, Task], data: DataParams, corpus: Corpus, encode: Encode) -> tuple[Prompt, ...]:
    """Draw, split and de-duplicate.

    Args:
        tasks: by name.
        data: counts, seed, longest prompt, and the run of words that counts as a copy.
        corpus: text to draw from.
        encode: (task name, slots) -> token ids of the whole prompt.

    Returns: prompts by task, then split, then drawing order (a prefix is a fair sample).

    Raises:
        UserError: a task cannot be filled.
    """
    pools = _pools(tasks, data, corpus)
    drawn: dict[tuple[str, str], list[Prompt]] = {}
    taken: set[tuple[int, ...]] = set()
    others: set[tuple[str, ...]] = set()  # word runs of the splits filled before
    for split in FILL_ORDER:
        wanted = getattr(data.prompts_per_task, split)
        for name, task in tasks.items():
            made = _prompts(name, split, pools[name, split](), encode, data.max_prompt_tokens)
            chosen = _choose(made, wanted, taken, others if split != "train" else set(), data.deduplicate_ngram)
            _check_enough(name, task, split, len(chosen), wanted)
            drawn[name, split] = chosen
        for name in tasks:
            for prompt in drawn[name, split]:
                others |= word_ngrams(prompt.source_text, data.deduplicate_ngram)
    return tuple(prompt for name in tasks for split in SPLITS for prompt in drawn[name, split])


def _prompts(name: str, split: str, candidates: Iterable[Candidate], encode: Encode, most: int) -> Iterator[Prompt]:
    for candidate in candidates:
        ids = tuple(encode(name, candidate.slots))
        if len(ids) <= most:
            identity = prompt_id(name, candidate.slots)
            yield Prompt(identity, name, split, candidate.group, candidate.slots, candidate.source_text, ids)


def _choose(
    prompts: Iterable[Prompt], wanted: int, taken: set[tuple[int, ...]], others: set[tuple[str, ...]], ngram: int
) -> list[Prompt]:
    """The first ``wanted`` prompts that are not in ``taken`` (which grows) and share no run with ``others``."""
    chosen: list[Prompt] = []
    for prompt in prompts:
        if prompt.prompt_ids in taken or not others.isdisjoint(word_ngrams(prompt.source_text, ngram)):
            continue
        taken.add(prompt.prompt_ids)
        chosen.append(prompt)
        if len(chosen) == wanted:
            break
    return chosen


def _check_enough(name: str, task: Task, split: str, found: int, wanted: int) -> None:
    """Corpora must give the exact number; a user's own rows may be fewer, but not none."""
    if found == wanted or (task.recipe == "jsonl" and found > 0):
        return
    remedy = (
        f"add rows to {task.path}" if task.recipe == "jsonl" else f"lower data.prompts_per_task.{split} in params.yaml"
    )
    seen = f"{found} that are short enough, new, and share no run of words with another split"
    raise UserError(f"task {name}: {wanted} {split} prompts are wanted, too few are there", seen, remedy)


def prompt_id(task: str, slots: Mapping[str, str]) -> str:
    """Name of a prompt: sha256[:16] of its task and slots."""
    content = json.dumps([task, dict(sorted(slots.items()))], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


Pool = Callable[[], Iterable[Candidate]]


def _pools(tasks: Mapping[str, Task], data: DataParams, corpus: Corpus) -> dict[tuple[str, str], Pool]:
    """For each task and split, what gives its candidates; only the slots that the task uses are kept."""
    split_by_group = {chat.identity: split_of(chat.identity, data.seed) for chat in corpus.chats}
    chats = {split: [chat for chat in corpus.chats if split_by_group[chat.identity] == split] for split in SPLITS}
    pools: dict[tuple[str, str], Pool] = {}
    for name, task in tasks.items():
        rows: tuple[Candidate, ...] = ()
        if task.recipe == "jsonl":
            rows = recipes.jsonl(Path(str(task.path)), task.slots(), task.choices)
            assign_rows(rows, data, split_by_group)
        for split in SPLITS:
            own = [row for row in rows if split_by_group[row.group] == split]
            pools[name, split] = _pool(task, chats[split], corpus, data.seed, own)
    return pools


def _pool(task: Task, chats: Sequence[Conversation], corpus: Corpus, seed: int, rows: Sequence[Candidate]) -> Pool:
    def candidates() -> Iterator[Candidate]:
        for candidate in _drawn(task, chats, corpus, seed) if task.recipe != "jsonl" else rows:
            slots = recipes.draw_choices(task.choices, candidate, seed) | dict(candidate.slots)
            used = {name: slots[name] for name in task.slots()}
            yield Candidate(candidate.group, used, candidate.source_text)

    return candidates


def _drawn(task: Task, chats: Sequence[Conversation], corpus: Corpus, seed: int) -> Iterator[Candidate]:
    note_characters = task.characters or recipes.NOTE_CHARACTERS
    match task.recipe:
        case "notifications":
            messages, characters = task.messages or recipes.STACK_MESSAGES, task.characters or recipes.STACK_CHARACTERS
            return recipes.notifications(chats, corpus.names, seed, messages, characters)
        case "misspelt":
            return recipes.misspelt(chats, corpus.misspellings, seed, note_characters)
        case "last_message":
            return recipes.last_message(chats, corpus.names, seed, note_characters)
    raise ValueError(f"no corpus recipe: {task.recipe}")
