"""Three tables from comparison.json: what drafters gain (for the README too), what they take, what the head saves.

Owns their columns. It computes nothing; without the file there is nothing to show, since `mtp compare` runs on demand.
What an older file does not hold is shown as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.core import paths
from components.core.files import read_json
from components.core.manifest import MANIFEST_FILE, bundle_hash
from pipelines.report import GAP, markdown_table, text_table

MEGABYTE = 1e6
PASS_FIGURES = ("drafts_per_round", "rows_per_pass", "steps_per_round", "modelled_speedup")
SECONDS = ("seconds", "draft_seconds", "plain_seconds")


def comparison_lines() -> list[str]:
    """Lines to print, none before `mtp compare`.

    Raises:
        UserError: the file is broken.
    """
    document = _read()
    if document is None:
        return []
    if not _of_current_bundle(document):
        return ["", f"{paths.COMPARISON_REPORT} is about an earlier bundle; `mtp compare` makes it anew"]
    return [
        "",
        "extra tokens per pass, by drafter",
        *text_table(*_drafter_table(document)),
        *_departures(document),
        "",
        "what drafting takes, by drafter: means over passes; seconds are medians over whole answers",
        *_cost_table(document),
        "",
        "one instance: the head against a standalone drafter",
        *_memory_table(document),
        "",
        f"drafters: {_source(document)}",
    ]


def comparison_markdown() -> str | None:
    """The first table for the README; None before `mtp compare`, or when it is about an earlier bundle."""
    document = _read()
    if document is None or not _of_current_bundle(document):
        return None
    return "\n".join([*markdown_table(*_drafter_table(document)), "", f"- {_source(document)}"])


def _read() -> Any:
    return read_json(paths.COMPARISON_REPORT, "run `mtp compare`") if paths.COMPARISON_REPORT.is_file() else None


def _source(document: Mapping[str, Any]) -> str:
    made, overall = document["created_with"], document["drafters"][0]["overall"]
    source = f"{made['cpu']}, {made['threads']} thread, {made['precision']}, torch, {overall['prompts']} prompts"
    if "load_average_before_timing" in document:
        source += f", load {document['load_average_before_timing']:.1f} before timing"
    return f"{source} ({paths.COMPARISON_REPORT})"


def _of_current_bundle(document: Mapping[str, Any]) -> bool:
    """Whether the compared head is the one that the other figures are about."""
    manifest = paths.BUNDLE / MANIFEST_FILE
    return manifest.is_file() and document["head_in_bundle"]["bundle_sha256"] == bundle_hash(paths.BUNDLE)


def _drafter_table(document: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
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
                f"{overall['exact_match']:.1%}" if "exact_match" in overall else "changes text",
                _number(drafter["parameters"], 1e6),
                _number(overall["prompt_pass_ms"]["median"], 1.0),
            )
        )
    return ("drafter", *tasks, "all [95 %]", "exact", "M params", "ms/prompt"), rows


def _departures(document: Mapping[str, Any]) -> list[str]:
    """One line for each drafter that changes the text."""
    return [
        f"{one['name']}: {one['overall']['departed_share']:.1%} of tokens are not the backbone's choice,"
        f" {one['overall']['changed_answers']:.1%} of answers differ"
        for one in document["drafters"]
        if "departed_share" in one["overall"]
    ]


def _cost_table(document: Mapping[str, Any]) -> list[str]:
    heading = "drafter", "drafts", "rows", "steps", "modelled", "s", "s drafting", "s plain", "ms/draft"
    rows = []
    for drafter in document["drafters"]:
        overall = drafter["overall"]
        rows.append(
            (
                drafter["name"],
                *(_number(overall.get(name), 1.0, 2) for name in PASS_FIGURES),
                *(_number(overall.get(f"{name}_per_answer", {}).get("median"), 1.0, 2) for name in SECONDS),
                _number(overall["draft_ms_per_step"]["median"], 1.0),
            )
        )
    return text_table(heading, rows)


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


def _number(value: float | None, unit: float, digits: int = 1) -> str:
    return GAP if value is None else f"{value / unit:.{digits}f}"
