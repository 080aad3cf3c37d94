"""One answer on the screen: `mtp generate`.

Owns what is shown of an answer while it is written, and the closing line that says what it cost and how it was decoded.
It refuses to call an answer exact that is not: sampled and relaxed answers say what they are. Its surprising decision:
the comparison with greedy decoding runs after the answer, on the same buffers, so it costs as much as the answer again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import UserError

if TYPE_CHECKING:
    from components.decoding.options import Options
    from components.onnx.generation import Generation, Piece, Statistics

GREEN, GREY, PLAIN = "\033[32m", "\033[90m", "\033[0m"


class Mark(StrEnum):
    """How accepted drafts, and what the answer was given to begin with, are shown."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line.

    Attributes:
        draft: False decodes with the backbone alone.
        compare: decode greedily too, and say whether the text is the same.
        options: decoding options that were named, None where they were not.
    """

    text: str
    task: str
    slots: tuple[str, ...]
    bundle: Path
    draft: bool
    mark: Mark
    compare: bool
    threads: int
    options: dict[str, float | None]


def write_answer(asked: Asked) -> None:
    """Stream the answer to the screen, then its closing line to stderr.

    Raises:
        UserError: options, slots or bundle cannot be used.
    """
    from components.data.free_text import fill_from_text
    from components.decoding.options import check_options
    from components.onnx.runtime import open_bundle

    options = check_options({name: value for name, value in asked.options.items() if value is not None})
    if options.relaxed is not None and not asked.draft:
        raise UserError("there are no drafts to relax", "--relaxed with --no-draft", "leave one of them out")
    opened = open_bundle(asked.bundle, asked.threads)
    slots = fill_from_text(opened.task(asked.task), asked.text, parse_slots(asked.slots))
    generation = opened.start(asked.task, slots, asked.draft, options.rule)
    opening = opened.opening(asked.task, slots)
    print(given(opening, asked.mark, sys.stdout.isatty()), end="", flush=True)
    for piece in generation.stream():
        print(marked(piece, asked.mark, sys.stdout.isatty()), end="", flush=True)
    print(flush=True)
    said = [cost_line(generation.statistics), *manner(options, generation.statistics)]
    if opening:
        said.append(f"{opening.strip()!r} was given")
    if asked.compare:
        said.append(departure(opened.start(asked.task, slots, draft=False).finish(), generation))
    said.append(f"{opened.threads} threads, {opened.manifest.precision}, bundle {opened.sha256[:12]}")
    print(f"[{'; '.join(said)}]", file=sys.stderr)


def parse_slots(given: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE entries.

    Raises:
        UserError: an entry has no name or no equals sign.
    """
    slots = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not (name.strip() and equals):
            raise UserError("--slot needs NAME=VALUE", f"got {entry!r}", "type for example --slot me=Alex")
        slots[name.strip()] = value
    return slots


def marked(piece: Piece, mark: Mark, terminal: bool) -> str:
    """A piece of text as shown; spaces around it stay outside the mark."""
    inner = piece.text.strip()
    if not piece.drafted or mark is Mark.never or not inner:
        return piece.text
    before, _, after = piece.text.partition(inner)
    shown = f"{GREEN}{inner}{PLAIN}" if terminal and mark is Mark.auto else f"[{inner}]"
    return f"{before}{shown}{after}"


def given(opening: str, mark: Mark, terminal: bool) -> str:
    """What the answer was given to begin with, as shown."""
    if mark is Mark.never or not opening:
        return opening
    return f"{GREY}{opening}{PLAIN}" if terminal and mark is Mark.auto else f"<{opening}>"


def cost_line(cost: Statistics) -> str:
    """Tokens per pass and tokens/s of a finished answer."""
    return (
        f"{cost.tokens} tokens, {cost.tokens_per_pass:.2f} tokens per pass, {cost.tokens_per_s:.1f} tokens/s, "
        f"{cost.accepted} accepted drafts"
    )


def manner(options: Options, cost: Statistics) -> list[str]:
    """How the answer was decoded, when not greedily."""
    if options.relaxed is not None:
        share = cost.departed / cost.accepted if cost.accepted else 0.0
        return [
            f"not exact: relaxed by {options.relaxed:g}, {cost.departed} of {cost.accepted} accepted drafts "
            f"({share:.0%}) were not the backbone's choice"
        ]
    if options.temperature > 0:
        return [f"sampled: temperature {options.temperature:g}, top-p {options.top_p:g}, seed {options.seed}"]
    return []


def departure(greedy: Generation, generation: Generation) -> str:
    """Where an answer leaves the greedy one."""
    from components.decoding.metrics import first_mismatch

    at = first_mismatch(greedy.answer.tokens, generation.answer.tokens)
    return "same tokens as greedy decoding" if at is None else f"leaves greedy decoding at token {at + 1}"
