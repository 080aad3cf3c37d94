"""From what a person types to the slots of a task's prompt.

Owns the little that has to be known to fill slots from one line of text: which slot takes the text itself, which have a
default, and how a stack of notifications is typed (``Anna: see you at 5 | Ben: bring cake``). It refuses to guess the
rest. Its surprising decision: it goes by slot names, not by task names, so a user's own task needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
