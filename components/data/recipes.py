"""From corpora to candidates: who fills the slots of a task's template.

Owns one pure function per recipe; each gives an endless-looking but finite stream of candidates, best spread first: one
from every conversation, then a second from each, and so on. It refuses to know about splits and tokens (prompts.py).
Its surprising decision: every draw is seeded by (seed, recipe, conversation), never by the draw before it, so leaving
out one conversation changes no other prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.data.corpora import Conversation, Message, is_usable, words
from components.data.jsonl import read_objects

Bounds = tuple[int, int]  # least and most
# What a task gets that names no bounds of its own.
STACK_MESSAGES: Bounds = (2, 5)  # messages in one notification stack
STACK_CHARACTERS: Bounds = (60, 400)  # less holds nothing to summarise; more is no stack of notifications
STACK_MESSAGE_CHARACTERS = (6, 160)
NOTE_CHARACTERS: Bounds = (20, 160)  # a text worth proofreading or answering, and short enough for a phone
NOTE_WORDS = 5
WORDS_PER_ERROR = 7  # about how densely people who type in a hurry err; at least one error is always made
MAX_ERRORS = 3
TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")


@dataclass(frozen=True)
class Candidate:
    """A prompt to be.

    Args:
        group: the conversation it comes from; a group never spans two splits.
        slots: text for each slot of the template.
        source_text: the text as a person wrote it, for finding copies.
    """

    group: str
    slots: Mapping[str, str]
    source_text: str


def first_names() -> tuple[str, ...]:
    """First names of faker's American list, sorted: its version is pinned, its random state is not used."""
    from faker.providers.person.en_US import Provider  # half a second to import; only the prompts stage needs it

    return tuple(sorted(set(Provider.first_names)))


def seeded_order(conversations: Iterable[Conversation], seed: int) -> list[Conversation]:
    """Conversations in an order that depends on the seed and their ids alone."""
    return sorted(conversations, key=lambda chat: hashlib.sha256(f"{seed}:{chat.identity}".encode()).digest())


def round_robin(streams: Iterable[Iterator[Candidate]]) -> Iterator[Candidate]:
    """The first of each stream, then the second of each, until all are empty; streams are opened only when reached."""
    waiting: deque[Iterator[Candidate]] = deque()
    for stream in streams:
        if (first := next(stream, None)) is not None:
            yield first
            waiting.append(stream)
    while waiting:
        stream = waiting.popleft()
        if (following := next(stream, None)) is not None:
            yield following
            waiting.append(stream)


def notifications(
    chats: Sequence[Conversation],
    names: Sequence[str],
    seed: int,
    messages: Bounds = STACK_MESSAGES,
    characters: Bounds = STACK_CHARACTERS,
) -> Iterator[Candidate]:
    """Stacks of consecutive messages: ``notifications`` is ``NAME says: "text" ..``, ``sender`` is the first NAME.

    Args:
        messages: in one stack.
        characters: of all its messages together, names not counted.
    """
    return round_robin(_stacks(chat, names, seed, messages, characters) for chat in seeded_order(chats, seed))


def _stacks(
    chat: Conversation, names: Sequence[str], seed: int, messages: Bounds, characters: Bounds
) -> Iterator[Candidate]:
    rng = random.Random(f"{seed}:notifications:{chat.identity}")
    senders = list(dict.fromkeys(message.sender for message in chat.messages))
    name_of = dict(zip(senders, rng.sample(names, len(senders)), strict=True))
    stacks = _windows(chat.messages, rng, messages, characters)
    rng.shuffle(stacks)
    for stack in stacks:
        shown = " ".join(f'{name_of[message.sender]} says: "{message.text}"' for message in stack)
        slots = {"notifications": shown, "sender": name_of[stack[0].sender]}
        yield Candidate(chat.identity, slots, "\n".join(message.text for message in stack))


def _windows(
    messages: Sequence[Message], rng: random.Random, counts: Bounds, characters: Bounds
) -> list[Sequence[Message]]:
    """Runs of usable messages that do not overlap."""
    usable = [is_usable(message.text, *STACK_MESSAGE_CHARACTERS) and '"' not in message.text for message in messages]
    found: list[Sequence[Message]] = []
    start = 0
    while start < len(messages):
        stop = start + rng.randint(*counts)
        window = messages[start:stop]
        length = sum(len(message.text) for message in window)
        fits = stop <= len(messages) and characters[0] <= length <= characters[1]
        if fits and all(usable[start:stop]):
            found.append(window)
            start = stop
        else:
            start += 1
    return found


def misspelt(
    chats: Sequence[Conversation],
    misspellings: Mapping[str, tuple[str, ...]],
    seed: int,
    characters: Bounds = NOTE_CHARACTERS,
) -> Iterator[Candidate]:
    """Messages with human misspellings put in: ``text``; its source text is the message before that."""
    return round_robin(_misspelt(chat, misspellings, seed, characters) for chat in seeded_order(chats, seed))


def _misspelt(
    chat: Conversation, misspellings: Mapping[str, tuple[str, ...]], seed: int, characters: Bounds
) -> Iterator[Candidate]:
    rng = random.Random(f"{seed}:misspelt:{chat.identity}")
    for text in _notes(chat, rng, characters):
        if (wrong := misspell(text, misspellings, rng)) is not None:
            yield Candidate(chat.identity, {"text": wrong}, text)


def misspell(text: str, misspellings: Mapping[str, tuple[str, ...]], rng: random.Random) -> str | None:
    """``text`` with one to three words misspelt as people do, case kept; None if no word has a known misspelling."""
    places = [match for match in TOKEN.finditer(text) if match.group().lower() in misspellings]
    if not places:
        return None
    most = min(MAX_ERRORS, len(places), max(1, len(words(text)) // WORDS_PER_ERROR))
    chosen = sorted(rng.sample(places, rng.randint(1, most)), key=lambda match: match.start(), reverse=True)
    for match in chosen:  # from the end, so that earlier places stay where they are
        wrong = _like(match.group(), rng.choice(misspellings[match.group().lower()]))
        text = text[: match.start()] + wrong + text[match.end() :]
    return text


def _like(model: str, word: str) -> str:
    """``word`` in the case of ``model``."""
    if model.isupper() and len(model) > 1:
        return word.upper()
    return word[0].upper() + word[1:] if model[0].isupper() else word


def last_message(
    chats: Sequence[Conversation], names: Sequence[str], seed: int, characters: Bounds = NOTE_CHARACTERS
) -> Iterator[Candidate]:
    """Messages to answer or to rewrite: ``text``, and ``me``, the name of the person who does."""
    return round_robin(_last_messages(chat, names, seed, characters) for chat in seeded_order(chats, seed))


def _last_messages(chat: Conversation, names: Sequence[str], seed: int, characters: Bounds) -> Iterator[Candidate]:
    rng = random.Random(f"{seed}:last_message:{chat.identity}")
    me = rng.choice(names)
    for text in _notes(chat, rng, characters):
        yield Candidate(chat.identity, {"me": me, "text": text}, text)


def _notes(chat: Conversation, rng: random.Random, characters: Bounds) -> list[str]:
    """The conversation's messages that can stand alone, each once, in seeded order."""
    texts = dict.fromkeys(message.text for message in chat.messages)
    notes = [text for text in texts if is_usable(text, *characters) and len(words(text)) >= NOTE_WORDS]
    rng.shuffle(notes)
    return notes


def jsonl(path: Path, slots: Sequence[str], choices: Collection[str] = ()) -> tuple[Candidate, ...]:
    """A user's own rows: one JSON object of slots a line, perhaps with a ``group``; other keys are ignored.

    Args:
        path: the file.
        slots: names that the template uses.
        choices: those of them that a row may leave out. They count neither for the group nor as source text: rows of
            one text belong into one split, and a wish that every row shares makes no row a copy of another.

    Raises:
        UserError: missing, not text, empty, or a row that is not as described; names the line.
    """
    needed = [name for name in slots if name not in choices]
    objects = read_objects(path, _example(needed), "correct `path` of the task")
    return tuple(_row(f"{path}, line {number}", row, slots, needed) for number, row in objects)


def _row(where: str, row: Mapping[str, Any], slots: Sequence[str], needed: Sequence[str]) -> Candidate:
    remedy = f"write {_example(needed)}"
    if missing := [name for name in needed if name not in row]:
        raise UserError(f"{where} lacks {', '.join(missing)}", f"keys there: {', '.join(row) or 'none'}", remedy)
    there = [name for name in slots if name in row]
    if bad := [name for name in there if not isinstance(row[name], str) or not row[name].strip()]:
        raise UserError(f"{where}: {bad[0]} is not a text", f"{json.dumps(row[bad[0]])[:60]}", remedy)
    filled = {name: row[name].strip() for name in there}
    own = {name: filled[name] for name in needed}
    content = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
    return Candidate(str(row.get("group", f"row-{content}")), filled, "\n".join(own.values()))


def _example(slots: Sequence[str]) -> str:
    return json.dumps(dict.fromkeys(slots, "some text"))


def draw_choices(choices: Mapping[str, Sequence[str]], candidate: Candidate, seed: int) -> dict[str, str]:
    """A text for every choice, by the seed and the candidate's own text alone."""
    place = f"{candidate.group}:{candidate.source_text}"
    return {name: random.Random(f"{seed}:{name}:{place}").choice(texts) for name, texts in choices.items()}
