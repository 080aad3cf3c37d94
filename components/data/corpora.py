"""Public text: real chats and human misspellings, loaded into plain values.

Owns how the corpora are read and which messages are fit to become prompts. It refuses rude, foreign, broken or private
text. Its surprising decision: the word list is short and cuts whole families by stem; it would rather lose a harmless
message than teach or show a rude one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.files import read_json

REMEDY = "delete data/raw and run `mtp repro corpora`"
URL_OR_CONTACT = re.compile(
    r"https?:|www\.|\w\.(?:com|org|net|edu|io|ly)\b|@\w|\d{7,}|\d{3}[-. ]\d{3,4}[-. ]?\d{4}", re.IGNORECASE
)
RUDE = re.compile(
    r"\b(?:f+u+c+k|fck|fuk|wtf|stfu|lmfao|gtfo|(?:bull)?sh[i1]t|b[i1]tch|cunt|dick(?:s|head)?\b|cock(?:s|sucker)?\b|puss(?:y|ies)|"
    r"nigg|fag(?:s|got)|whore|slut|porn|sex(?:y|ual|ually|ting|t|ist|ism|es)?\b|rap(?:e|ed|es|ist|ing)\b|penis|vagina|nud(?:e|es|ity)\b|"
    r"naked|ass(?:es|hole|holes)?\b|(?:dumb|bad|jack)ass|bastard|(?:god)?damn|crap|p[i1]ss|tit(?:s|ties)\b|boob|orgasm|erection|"
    r"horny|masturbat|suck|suicid|kill|murder|die\b|kys|drug|cocaine|weed\b|stoned\b|hitler|nazi|retard|terroris|gay|homo|tranny|"
    r"hooker|prostitut|idiot|stupid|moron|dumb|shut up|hate you|ugly|racis[tm])",
    re.IGNORECASE,
)
MIN_LETTER_SHARE = 0.7  # ASCII letters among the characters that are not spaces: leaves smileys, drops ASCII art
LETTER = re.compile(r"[A-Za-z]")
STRETCHED = re.compile(r"([A-Za-z.!?])\1{3}")  # "noooooo", "......": real, but it teaches nothing
WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
MISSPELLING = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
MIN_SIMILARITY = 0.65  # of a misspelling to its word: "teh" and "definatly" stay, "rainjack" for "raincoat" goes


@dataclass(frozen=True)
class Message:
    """One message: who sent it (an opaque id) and what it says, one line."""

    sender: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """One chat, oldest message first."""

    identity: str
    messages: tuple[Message, ...]


def load_chats(path: Path) -> tuple[Conversation, ...]:
    """Read ``{id: {"messages": [[{"text", "sender", ..}, ..], ..]}}``: a list of turns, each a list of messages.

    Returns: conversations sorted by id, turns joined.

    Raises:
        UserError: missing, not JSON, of another shape, or without one message.
    """
    document = read_json(path, REMEDY)
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a chat corpus", f"a JSON {type(document).__name__}, not an object", REMEDY)
    conversations = tuple(Conversation(name, tuple(_messages(path, name, document[name]))) for name in sorted(document))
    if not any(conversation.messages for conversation in conversations):
        raise UserError(f"{path} holds no message", f"{len(conversations)} conversations", REMEDY)
    return conversations


def _messages(path: Path, name: str, chat: Any) -> Iterator[Message]:
    try:
        for turn in chat["messages"]:
            for message in turn:
                yield Message(str(message["sender"]), " ".join(str(message["text"] or "").split()))
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a chat corpus", f"conversation {name}: {error!r}", REMEDY) from None


def is_usable(text: str, shortest: int, longest: int) -> bool:
    """Whether a message is polite English of ``shortest`` to ``longest`` characters without links or contacts."""
    if not shortest <= len(text) <= longest or URL_OR_CONTACT.search(text) or RUDE.search(text):
        return False
    if not text.isprintable() or STRETCHED.search(text):
        return False
    return letter_share(text) >= MIN_LETTER_SHARE


def letter_share(text: str) -> float:
    """ASCII letters among the characters that are not spaces; 0 for no characters."""
    solid = len("".join(text.split()))
    return len(LETTER.findall(text)) / solid if solid else 0.0


def words(text: str) -> list[str]:
    """Lower-case words; punctuation and spacing do not count, so they cannot hide a copy."""
    return WORD.findall(text.lower().replace("\u2019", "'"))


def word_ngrams(text: str, length: int) -> frozenset[tuple[str, ...]]:
    """Every run of ``length`` words; a shorter text counts as one run, so that short copies are found as well."""
    found = words(text)
    if not found:
        return frozenset()
    return frozenset(tuple(found[start : start + length]) for start in range(max(1, len(found) - length + 1)))


def load_misspellings(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines of ``right wrong wrong ..``: lower-case word -> its misspellings, sorted.

    Left out: misspellings that are words of the list themselves (the error would change the sense, and no reader could
    mend it), that start with another letter, or that look too unlike.

    Raises:
        UserError: missing, not text, or without one usable misspelling.
    """
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "no such file", REMEDY) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", str(error), REMEDY) from None
    known = {right.lower() for right, *_ in lines}
    collected: dict[str, set[str]] = {}
    for right, *wrongs in lines:
        word = right.lower()
        good = {wrong.lower() for wrong in wrongs if wrong.lower() not in known and _is_plausible(word, wrong.lower())}
        collected.setdefault(word, set()).update(good)
    found = {word: tuple(sorted(wrongs)) for word, wrongs in sorted(collected.items()) if wrongs and len(word) >= 3}
    if not found:
        raise UserError(
            f"{path} holds no misspelling", f"{len(lines)} lines, none of the form `right wrong ..`", REMEDY
        )
    return found


def _is_plausible(word: str, wrong: str) -> bool:
    if wrong == word or not MISSPELLING.fullmatch(wrong) or wrong[0] != word[0] or len(wrong) < 2:
        return False
    return SequenceMatcher(None, word, wrong, autojunk=False).ratio() >= MIN_SIMILARITY
