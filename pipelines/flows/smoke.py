"""Smoke test of a release, run as a process of its own: load by alias, answer one prompt of every task.

Owns the proof that what the alias points to is the expected bundle and works without anything that the release has
loaded. It refuses an answer that differs with and without drafts. `python -m pipelines.flows.smoke BUNDLE_SHA256`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pandas as pd

from components.core.errors import UserError, exits_cleanly
from components.core.manifest import TaskPrompt
from components.core.params import load_params
from components.data.free_text import EXAMPLE, STACK, notification_slots, slot_names
from components.release.registry import load_candidate

SAMPLE = "i has went to the store yesterday"
REMEDY = "the alias was put back; run `mtp repro`, then `mtp release`"


def smoke(model: Any, expected: str) -> list[str]:
    """Ask every task once.

    Args:
        model: MLflow's PyFuncModel.
        expected: hash of the bundle that it should hold.

    Returns:
        One line per task.

    Raises:
        UserError: another bundle, no answer, or another answer without drafts.
    """
    bundle = model.unwrap_python_model().bundle
    if bundle.sha256 != expected:
        raise UserError("the alias gives another bundle", f"{bundle.sha256[:16]}.., not {expected[:16]}..", REMEDY)
    lines = []
    for task, prompt in bundle.manifest.tasks.items():
        slots = sample_slots(prompt)
        request = pd.DataFrame([{"task": task, "slots": json.dumps(slots)}])
        fast, plain = (model.predict(request, params={"draft": draft}).iloc[0] for draft in (True, False))
        if fast["tokens"] < 1 or fast["text"] != plain["text"]:
            raise UserError(f"task {task} does not answer as it should", f"{fast['text']!r}, {plain['text']!r}", REMEDY)
        lines.append(f"smoke test, {task}: {fast['tokens']} tokens in {fast['passes']} passes")
    return lines


def sample_slots(prompt: TaskPrompt) -> dict[str, str]:
    """Something sensible for every slot: a summary that starts with a whole sentence as its sender ends at once."""
    names = slot_names(prompt)
    stack = notification_slots(EXAMPLE) if STACK in names else {}
    known = {name: texts[0] for name, texts in prompt.choices.items()} | stack
    return {name: known.get(name, SAMPLE) for name in names}


@exits_cleanly
def main() -> None:
    """Load `candidate` and ask it."""
    if len(sys.argv) != 2:
        raise UserError(
            "one bundle hash is needed", f"{len(sys.argv) - 1} arguments", f"python -m {__spec__.name} HASH"
        )
    print("\n".join(smoke(load_candidate(load_params().registry), sys.argv[1])))


if __name__ == "__main__":
    main()
