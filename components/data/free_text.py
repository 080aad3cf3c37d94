"""From what a person types, or has in a file, to the slots of a task's prompt.

Owns the little that has to be known to fill slots from one line of text or one JSON object: which slot takes the text
itself, which have a default (a choice: its first text), and how a stack of notifications is typed (``Anna: see you at 5
| Ben: bring cake``). It refuses to guess the rest, and text that would fill nothing. Its surprising decision: it goes
by slot names, not by task names, so a user's own task needs nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from components.core.config import SLOT
from components.core.errors import UserError
from components.core.manifest import TaskPrompt

TEXT = "text"
STACK, SENDER = "notifications", "sender"
DEFAULTS = {"me": "Alex"}
EXAMPLE = "Anna: see you at 5 | Ben: bring cake"


def slot_names(prompt: TaskPrompt) -> tuple[str, ...]:
    """Slots of a task's prompt in order of appearance, once each."""
    return tuple(dict.fromkeys(SLOT.findall(prompt.rendered)))


def defaults(prompt: TaskPrompt) -> dict[str, str]:
    """Slots that may be left out, and what then stands there: of a choice, its first text."""
    return DEFAULTS | {name: texts[0] for name, texts in prompt.choices.items()}


def fill_from_text(prompt: TaskPrompt, text: str, given: Mapping[str, str]) -> dict[str, str]:
    """Slots for a task's prompt.

    Args:
        prompt: the task's prompt, slots in braces.
        text: what the person typed; fills a stack of notifications, the slot ``text``, or the only slot left. May be
            empty when every slot is named.
        given: slots named explicitly; they win.

    Raises:
        UserError: an unknown slot is given, a slot stays empty, or the text fills none.
    """
    names = slot_names(prompt)
    if unknown := sorted(set(given) - set(names)):
        raise UserError(
            f"the task has no slot {unknown[0]!r}", f"slots: {', '.join(names)}", "correct --slot NAME=VALUE"
        )
    left = [name for name in names if name not in given and name not in defaults(prompt)]
    target = _target(left)
    slots = {**defaults(prompt), **given}
    if target is not None and text.strip():
        slots = {**notification_slots(text), **slots} if target == STACK else {**slots, target: text}
    elif text.strip() and not left:
        seen = f"text {text[:40]!r}, and by name: {', '.join(given) or 'nothing'}"
        raise UserError("the text fills no slot: every slot is named already", seen, "leave out the text or a --slot")
    filled = {name: slots.get(name, "") for name in names}
    if empty := [name for name in names if not filled[name].strip()]:
        raise _empty(empty, target, text)
    return filled


def _target(left: Sequence[str]) -> str | None:
    """Which of the slots left a text without a name fills; None where that would be a guess."""
    for name in (STACK, TEXT):
        if name in left:
            return name
    return left[0] if len(left) == 1 else None


def _empty(empty: Sequence[str], target: str | None, text: str) -> UserError:
    """What to say about slots without a text."""
    if target in empty:
        example = EXAMPLE if target == STACK else "are we still on for friday?"
        return UserError("there is no text", f"got {text[:60]!r}", f'give some text, for example "{example}"')
    named = " ".join(f"--slot {name}=VALUE" for name in empty)
    return UserError(f"the slot {empty[0]!r} is empty", f"text {text[:60]!r} does not fill it", f"name it: {named}")


def fill_from_row(prompt: TaskPrompt, row: Mapping[str, Any]) -> dict[str, str]:
    """Slots for a task's prompt from one row of a file: its slots by name, or the one key ``text``.

    Other keys are left alone; see :func:`unused_keys`.

    Raises:
        UserError: a slot is missing, empty, or no text.
    """
    names = slot_names(prompt)
    usable = {name: row[name] for name in (*names, TEXT) if name in row}
    if bad := [name for name, value in usable.items() if not isinstance(value, str) or not value.strip()]:
        raise UserError(f"{bad[0]} is not a text", json.dumps(row[bad[0]])[:60], f"write {example_row(prompt)}")
    missing = [name for name in names if name not in usable and name not in defaults(prompt)]
    if missing and (TEXT in names or TEXT not in usable):
        seen = f"keys there: {', '.join(row) or 'none'}"
        raise UserError(f"{', '.join(missing)} is missing", seen, f"write {example_row(prompt)}")
    given = {name: value for name, value in usable.items() if name in names}
    return fill_from_text(prompt, usable[TEXT] if missing else "", given)


def unused_keys(prompt: TaskPrompt, row: Mapping[str, Any]) -> set[str]:
    """Keys that fill nothing: worth a word to the person, who may have mistyped one."""
    names = slot_names(prompt)
    fills = all(name in row or name in defaults(prompt) for name in names)
    return set(row) - set(names) - (set() if fills else {TEXT})


def example_row(prompt: TaskPrompt) -> str:
    """A row as it may stand in a file."""
    names = slot_names(prompt)
    if STACK in names:
        return json.dumps({TEXT: EXAMPLE})
    needed = [name for name in names if name not in defaults(prompt)]
    return json.dumps(dict.fromkeys(needed if len(needed) > 1 else [TEXT], "some text"))


def notification_slots(text: str) -> dict[str, str]:
    """``notifications`` and ``sender`` from ``NAME: message | NAME: message``, worded as in the training prompts.

    Raises:
        UserError: a part has no name or no message.
    """
    stack = [_notification(part) for part in text.split("|") if part.strip()]
    if not stack:
        raise UserError("there is no notification to summarise", "an empty text", f'type for example "{EXAMPLE}"')
    return {STACK: stack_text(stack), SENDER: stack[0][0]}


def stack_text(stack: Iterable[tuple[str, str]]) -> str:
    """(sender, message) pairs as the prompt shows them."""
    return " ".join(f'{sender} says: "{message}"' for sender, message in stack)


def _notification(part: str) -> tuple[str, str]:
    sender, colon, message = (piece.strip() for piece in part.partition(":"))
    if not (colon and sender and message):
        raise UserError(
            "a notification is NAME: message", f"got {part.strip()[:60]!r}", f'type for example "{EXAMPLE}"'
        )
    return sender, message.replace('"', "'")  # a quotation mark would end the message inside the prompt
