"""From what a person types, or has in a file, to the slots of a task's prompt.

Owns the little that has to be known to fill slots from one line of text or one JSON object: which slot takes the text
itself, which have a default, and how a stack of notifications is typed (``Anna: see you at 5 | Ben: bring cake``). It
refuses to guess the rest. Its surprising decision: it goes by slot names, not by task names, so a user's own task needs
nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from components.core.config import SLOT
from components.core.errors import UserError

TEXT = "text"
STACK, SENDER = "notifications", "sender"
DEFAULTS = {"me": "Alex"}
EXAMPLE = "Anna: see you at 5 | Ben: bring cake"


def slot_names(rendered: str) -> tuple[str, ...]:
    """Slots of a rendered prompt in order of appearance, once each."""
    return tuple(dict.fromkeys(SLOT.findall(rendered)))


def fill_from_text(rendered: str, text: str, given: Mapping[str, str]) -> dict[str, str]:
    """Slots for a rendered prompt.

    Args:
        rendered: the task's prompt, slots in braces.
        text: what the person typed; fills ``text``, a stack of notifications, or the only slot left.
        given: slots named explicitly; they win.

    Raises:
        UserError: an unknown slot is given, or a slot stays empty.
    """
    names = slot_names(rendered)
    if unknown := sorted(set(given) - set(names)):
        raise UserError(
            f"the task has no slot {unknown[0]!r}", f"slots: {', '.join(names)}", "correct --slot NAME=VALUE"
        )
    slots = dict(given)
    if STACK in names and not {STACK, SENDER} <= set(slots):
        slots = notification_slots(text) | slots
    left = [name for name in names if name not in slots and name not in DEFAULTS]
    if TEXT in left:
        slots[TEXT] = text
    elif len(left) == 1:
        slots[left[0]] = text
    filled = {name: slots.get(name, DEFAULTS.get(name, "")) for name in names}
    if empty := [name for name in names if not filled[name].strip()]:
        raise UserError(f"the slot {empty[0]!r} is empty", f"text {text[:60]!r}", f"add --slot {empty[0]}=VALUE")
    return filled


def fill_from_row(rendered: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Slots for a rendered prompt from one row of a file: its slots by name, or the one key ``text``.

    Other keys are left alone; see :func:`unused_keys`.

    Raises:
        UserError: a slot is missing, empty, or no text.
    """
    names = slot_names(rendered)
    usable = {name: row[name] for name in (*names, TEXT) if name in row}
    if bad := [name for name, value in usable.items() if not isinstance(value, str) or not value.strip()]:
        raise UserError(f"{bad[0]} is not a text", json.dumps(row[bad[0]])[:60], f"write {example_row(rendered)}")
    missing = [name for name in names if name not in usable and name not in DEFAULTS]
    if missing and TEXT not in usable:
        seen = f"keys there: {', '.join(row) or 'none'}"
        raise UserError(f"{', '.join(missing)} is missing", seen, f"write {example_row(rendered)}")
    given = {name: value for name, value in usable.items() if name in names}
    return fill_from_text(rendered, usable.get(TEXT, ""), given)


def unused_keys(rendered: str, row: Mapping[str, Any]) -> set[str]:
    """Keys that fill nothing: worth a word to the person, who may have mistyped one."""
    names = slot_names(rendered)
    fills = all(name in row or name in DEFAULTS for name in names)
    return set(row) - set(names) - (set() if fills else {TEXT})


def example_row(rendered: str) -> str:
    """A row as it may stand in a file."""
    if STACK in slot_names(rendered):
        return json.dumps({TEXT: EXAMPLE})
    needed = [name for name in slot_names(rendered) if name not in DEFAULTS]
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
