"""A person's own JSON lines: one object a line.

Owns the reading and the messages about what cannot be read; each names the line. It refuses to skip a broken line: a
file that lost rows silently would be measured as if it were whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.core.errors import UserError


def read_objects(path: Path, example: str, if_missing: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of every line that is not blank; a line is checked when it is reached.

    Args:
        path: the file, UTF-8, with or without a byte order mark.
        example: a line as it should be, for the messages.
        if_missing: what to do when there is no such file.

    Raises:
        UserError: missing, a folder, not text, no row at all, or a line that is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} is missing", f"no such file, seen from {Path.cwd()}", if_missing) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", str(error), "save it as UTF-8, one JSON object a line") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder", "one file of JSON lines is wanted", if_missing) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error), if_missing) from None
    lines = text.split("\n")  # not splitlines(): JSON text may hold U+2028 as it is
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise UserError(f"{path} holds no row", f"{len(lines)} lines, all blank", f"add lines such as {example}")
    for number, line in filled:
        yield number, _object(line, f"{path}, line {number}", f"write {example}")


def _object(line: str, where: str, remedy: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON", f"{error} in {line[:60]!r}", remedy) from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object", f"a {type(row).__name__}: {line[:60]}", remedy)
    return row
