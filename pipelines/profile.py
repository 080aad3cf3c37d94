"""`mtp profile`: a named set of parameters merged into params.yaml.

Owns the sets (`pipelines/profiles/NAME.yaml`, each holding only what differs) and what is said about a merge. It
refuses to write a file that the stages would refuse. Its surprising decision: the person's own params.yaml is edited
and no second file is laid over it, so that DVC, the doctor and a reader all see the numbers that a run will use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from components.core.errors import UserError
from components.core.files import atomic_path
from components.core.params import PARAMS_FILE, load_params, parse_params
from pipelines.yaml_merge import merge_text

PROFILES = Path(__file__).with_name("profiles")
LONGEST_SHOWN = 60  # characters of a value on the screen


def profile_files() -> dict[str, Path]:
    """Every profile by name."""
    return {file.stem: file for file in sorted(PROFILES.glob("*.yaml"))}


def profile_lines() -> list[str]:
    """Every profile with the first line of its file, which says what it is for."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in profile_files().items()}
    return [*(f"{name}: {text.splitlines()[0].lstrip('# ')}" for name, text in texts.items()), "next: mtp profile NAME"]


def apply_profile(name: str, path: Path = PARAMS_FILE) -> list[str]:
    """Merge a profile into the parameter file; comments, order and everything that it does not name stay.

    Returns: one line per key that changed, old value and new, and what to type next.

    Raises:
        UserError: no such profile, no valid parameter file, or the two do not go together; nothing is written then.
    """
    files = profile_files()
    if name not in files:
        raise UserError(f"there is no profile {name!r}", f"profiles: {', '.join(files)}", "type one of them")
    load_params(path)
    before = path.read_text(encoding="utf-8")
    after = merge_text(before, files[name].read_text(encoding="utf-8"), str(path))
    changes = list(changed_keys(yaml.safe_load(before), yaml.safe_load(after)))
    if not changes:
        return [f"{path} holds all of profile {name} already; nothing changed", "next: make repro"]
    _check(yaml.safe_load(after), f"{path} with profile {name}")
    with atomic_path(path) as temporary:
        temporary.write_text(after, encoding="utf-8")
    return [*changes, f"next: make repro (and `git checkout {path}` to go back)"]


def _check(document: Any, name: str) -> None:
    try:
        parse_params(document, name)
    except UserError as error:
        raise UserError(error.what, error.seen, "change your own values so that the profile fits") from None


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`KEY: OLD -> NEW` for every key whose value differs, by dotted name; a new mapping is one key."""
    for key, value in new.items():
        name = f"{prefix}{key}"
        if key not in old:
            yield f"{name}: not there -> {_shown(value)}"
        elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
            yield from changed_keys(old[key], value, f"{name}.")
        elif value != old[key]:
            yield f"{name}: {_shown(old[key])} -> {_shown(value)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}.."
