"""The README's commands, and how each of them is tested.

A command that stands in no table here fails the test of the README: nobody can add one that is never run.
"""

from __future__ import annotations

import re
import shlex
from enum import Enum
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


class Way(Enum):
    """How a README command is tested."""

    MAKE = "its recipe, without running it: the suite runs inside `make test`"
    HERE = "run for real by test_readme.py"
    END_TO_END = "run for real, on tiny parameters, by test_end_to_end.py"


HOW = {
    "make repro": Way.MAKE,
    "make test": Way.MAKE,
    "make ui": Way.MAKE,
    "mtp doctor": Way.HERE,
    "mtp run": Way.END_TO_END,
    "mtp release": Way.END_TO_END,
    'mtp generate --task proofread "i has went to the store yesterday"': Way.END_TO_END,
    'mtp generate --task proofread --no-draft "i has went to the store yesterday"': Way.END_TO_END,
    "mtp evaluate --task proofread --prompts docs/example-texts.jsonl": Way.END_TO_END,
}


def blocks(language: str) -> list[str]:
    """Texts of the README's fenced blocks in ``language``."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def readme_commands() -> list[str]:
    """Every command of the README's ``sh`` blocks, comments dropped, in order."""
    lines = [line.strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands_tested(how: Way) -> list[list[str]]:
    """Argument lists of the README commands tested in that way, in the README's order."""
    return [shlex.split(command) for command in readme_commands() if HOW.get(command) is how]
