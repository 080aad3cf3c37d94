"""Two tables from comparison.json for `mtp report`: drafters by task, and what the head saves beside a standalone one.

Owns their columns. It computes nothing; without the file there is nothing to show, since `mtp compare` runs on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.core import paths
from components.core.files import read_json
from components.core.manifest import MANIFEST_FILE, bundle_hash
from pipelines.report import GAP, text_table

MEGABYTE = 1e6


def comparison_lines() -> list[str]:
    """Lines to print, none before `mtp compare`.

    Raises:
        UserError: the file is broken.
    """
    if not paths.COMPARISON_REPORT.is_file():
        return []
    document = read_json(paths.COMPARISON_REPORT, "run `mtp compare`")
    if not _of_current_bundle(document):
        return ["", f"{paths.COMPARISON_REPORT} is about an earlier bundle; `mtp compare` makes it anew"]
    made = document["created_with"]
    overall = document["drafters"][0]["overall"]
    source = f"{made['cpu']}, {made['threads']} thread, {made['precision']}, torch, {overall['prompts']} prompts"
    if "load_average_before_timing" in document:
        source += f", load {document['load_average_before_timing']:.1f} before timing"
    return [
        "",
        "extra tokens per pass, by drafter",
        *_drafter_table(document),
        "",
        "one instance: the head against a standalone drafter",
        *_memory_table(document),
        "",
        f"drafters: {source} ({paths.COMPARISON_REPORT})",
    ]


def _of_current_bundle(document: Mapping[str, Any]) -> bool:
    """Whether the compared head is the one that the other figures are about."""
    manifest = paths.BUNDLE / MANIFEST_FILE
    return manifest.is_file() and document["head_in_bundle"]["bundle_sha256"] == bundle_hash(paths.BUNDLE)


def _drafter_table(document: Mapping[str, Any]) -> list[str]:
    tasks = [row["task"] for row in document["drafters"][0]["tasks"]]
    rows = []
    for drafter in document["drafters"]:
        of_task = {row["task"]: row for row in drafter["tasks"]}
        overall = drafter["overall"]
        low, high = overall["extra_tokens_per_pass_interval"]
        rows.append(
            (
                drafter["name"],
                *(f"{of_task[task]['extra_tokens_per_pass']:.2f}" for task in tasks),
                f"{overall['extra_tokens_per_pass']:.2f} [{low:.2f}, {high:.2f}]",
                f"{overall['exact_match']:.1%}",
                _number(overall["draft_ms_per_step"]["median"], 1.0),
                _number(overall["prompt_pass_ms"]["median"], 1.0),
                _number(drafter["parameters"], 1e6),
            )
        )
    return text_table(("drafter", *tasks, "all [95 %]", "exact", "ms/draft", "ms/prompt", "M params"), rows)


def _memory_table(document: Mapping[str, Any]) -> list[str]:
    known = {(row["drafter"], row["prompt_tokens"]): row for row in document["memory"]}
    rows = []
    for saved in document["memory_saved"]:
        length, other = saved["prompt_tokens"], saved["instead_of"]
        pair = (known["mtp", length], known[other, length])
        rows.append(
            (
                str(length),
                *(f"{row['first_draft_ms']:.1f}" for row in pair),
                *(f"{row['kv_bytes'] / MEGABYTE:.1f}" for row in pair),
                *(f"{row['total_bytes'] / MEGABYTE:.1f}" for row in pair),
                f"{saved['total_bytes'] / MEGABYTE:.1f}",
            )
        )
    heading = ("prompt tokens", "head ms", "alone ms", "head KV MB", "alone KV MB", "head MB", "alone MB", "saved MB")
    return text_table(heading, rows)


def _number(value: float | None, unit: float) -> str:
    return GAP if value is None else f"{value / unit:.1f}"
