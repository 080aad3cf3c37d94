"""One YAML text merged into another, and every byte that need not change left as it was.

Owns where in the text a value stands and a new key belongs. It refuses to guess: the result is read again and must hold
exactly the merged values. Its surprising decision: values are replaced in the text, at the places that the parser
reports, because a library that writes the whole file anew moves blank lines, comments and quotes that are not its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from components.core.errors import UserError

Edit = tuple[int, int, str]  # from, to (characters of the text), and what to put there


def merge_text(text: str, extra: str, name: str) -> str:
    """``text`` with the keys of ``extra`` put in: mappings key by key, any other value as a whole.

    Args:
        text: a YAML mapping; its comments, order and style stay.
        extra: another; new keys are taken as they stand there, comments included.
        name: of ``text``, for the message.

    Raises:
        ValueError: one of them is no mapping.
        UserError: ``text`` is written in a way that cannot be edited so (an alias, a key without a value).
    """
    old, new = yaml.safe_load(text), yaml.safe_load(extra)
    edits = sorted(_edits(text, _root(text), old, extra, _root(extra), new), key=lambda edit: edit[0])
    pieces, at = [], 0
    for start, end, put in edits:
        pieces += [text[at:start], put]
        at = end
    merged = "".join([*pieces, text[at:]])
    try:
        whole = yaml.safe_load(merged) == merged_values(old, new)
    except yaml.YAMLError:
        whole = False
    if not whole:
        seen = "an alias, an empty value, or {braces} where a block is to go in"
        raise UserError(f"{name} cannot be merged with as it is written", seen, f"write plain values into {name}")
    return merged


def merged_values(old: Any, new: Any) -> Any:
    """``new`` over ``old``: mappings key by key, any other value as a whole."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: merged_values(old.get(key), value) for key, value in new.items()}}


def _root(text: str) -> yaml.MappingNode:
    node = yaml.compose(text)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("not a YAML mapping")
    return node


def _edits(
    text: str, node: yaml.MappingNode, old: Any, extra: str, wanted: yaml.MappingNode, new: Any
) -> Iterator[Edit]:
    """Replacements of values that differ, and per mapping one insertion of all its new keys.

    Args:
        text, extra: where ``node`` and ``wanted`` stand.
        old, new: their values.
    """
    there = {key.value: value for key, value in node.value}
    added = ""
    for key, value in wanted.value:
        place = there.get(key.value)
        if place is None:
            added += _entry(node, extra, key, value)
        elif isinstance(place, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            yield from _edits(text, place, old[key.value], extra, value, new[key.value])
        elif old[key.value] != new[key.value]:
            yield place.start_mark.index, _end(text, place), extra[value.start_mark.index : _end(extra, value)]
    if added:
        end = _end(text, node.value[-1][1])
        at = end if node.flow_style else end + len(text[end:].partition("\n")[0])  # behind a comment on that line
        yield at, at, added


def _entry(node: yaml.MappingNode, extra: str, key: yaml.Node, value: yaml.Node) -> str:
    """A new entry of ``node``, as it stands in ``extra`` but indented like its neighbours."""
    start = key.start_mark.index
    if node.flow_style:
        return f", {extra[start : _end(extra, value)]}"
    end = _end(extra, value)
    lines = extra[start - key.start_mark.column : end + len(extra[end:].partition("\n")[0])]
    return "\n" + textwrap.indent(textwrap.dedent(lines), " " * node.value[0][0].start_mark.column)


def _end(text: str, node: yaml.Node) -> int:
    """Where a value ends; the parser places the end of a block behind the blank lines that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    start, end = node.start_mark.index, node.end_mark.index
    return start + len(text[start:end].rstrip())
