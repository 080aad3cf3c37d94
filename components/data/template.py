"""From a message to token ids: the one function used in data, training, evaluation, export and serving.

Owns the rendered prompt of a task. Its surprising decision: the chat template is rendered once, with the slots still in
braces, and the result is kept as text. Filling slots and encoding then needs only `tokenizers`, so a phone builds the
same ids as the trainer. Control tokens inside a person's text are removed: text cannot open or close a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from components.core.config import SLOT, Task
from components.core.errors import UserError

BLANK = re.compile(r"\s+")


def render_prompt(chat_template: Any, task: Task) -> str:
    """Render a task through the backbone's chat template, slots left as ``{name}``.

    Args:
        chat_template: a transformers tokenizer, or anything with its ``apply_chat_template``.
        task: the task; its ``answer_prefix`` opens the answer.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    turns = [{"role": "system", "content": task.system}] if task.system else []
    turns.append({"role": "user", "content": task.user})
    try:
        text = chat_template.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except ValueError as error:
        raise UserError("the backbone has no usable chat template", str(error), "choose an instruct backbone") from None
    rendered = str(text) + task.answer_prefix
    missing = [name for name in task.slots() if f"{{{name}}}" not in rendered]
    if missing:
        raise UserError(
            "the chat template dropped part of the prompt", f"lost slots {missing}", "shorten the system turn"
        )
    return rendered


def clean_slot(value: str, control_tokens: tuple[str, ...]) -> str:
    """Remove control tokens from a person's text; repeated, since removal can join two halves of another."""
    while any(token in value for token in control_tokens):
        for token in control_tokens:
            value = value.replace(token, "")
    return value.strip()


def control_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts that the tokenizer turns into special tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special and token.content)


def fill_slots(rendered: str, slots: Mapping[str, str], control: tuple[str, ...] = ()) -> str:
    """Put ``slots`` into the rendered prompt in a single pass, so that braces inside a value stay as they are.

    Raises:
        UserError: a slot has no value, or an empty one.
    """

    def value(match: re.Match[str]) -> str:
        filled = clean_slot(slots.get(match.group(1), ""), control)
        if not filled:
            raise UserError(
                f"the slot {match.group(1)!r} of the prompt is empty",
                f"slots given: {sorted(name for name, text in slots.items() if text.strip()) or 'none'}",
                f"give some text for {match.group(1)!r}",
            )
        return filled

    return SLOT.sub(value, rendered)


def encode_prompt(tokenizer: Tokenizer, rendered: str, slots: Mapping[str, str]) -> list[int]:
    """Token ids of a filled prompt; the rendered template already holds the one BOS, so none is added.

    Args:
        tokenizer: the backbone's tokenizer.
        rendered: what :func:`render_prompt` gave, from the manifest or the prompt table.
        slots: text for each slot.

    Raises:
        UserError: a slot is missing or empty.
    """
    text = fill_slots(rendered, slots, control_tokens(tokenizer))
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]
