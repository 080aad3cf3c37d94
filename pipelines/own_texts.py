"""`mtp evaluate`: the bundle on a person's own texts, from the file to one screen and a report.

Owns which rows of the file are used, the report and the screen. It refuses to judge: the wiring alarm is for the test
split; here little acceptance is a finding about the texts. Its surprising decision: the test split's figures stand
beside the file's own only when they are of the very same bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.core import paths
from components.core.errors import UserError
from components.core.files import atomic_path, read_json, sha256_file, write_json
from components.data.free_text import example_row, fill_from_row, unused_keys
from components.data.jsonl import read_objects
from components.data.table import Prompt
from components.data.template import encode_prompt
from components.decoding.bootstrap import Bootstrap
from components.devices.benchmark import Plan, run_benchmark
from components.devices.circumstances import created_with
from components.devices.speed import benchmark_row
from components.onnx.runtime import Bundle, open_bundle
from pipelines.report import GAP, shown, text_table

PLAN = Plan(rounds=1, warmup_prompts=1, lookup_draft_length=3, lookup_ngram=3)
SHOWN_MISMATCHES = 5
ACCEPTANCE = (
    ("texts", "prompts", "{:.0f}"),
    ("exact match", "exact_match", "{:.1%}"),
    ("accept. length", "acceptance_length", "{:.2f}"),
    ("extra tokens", "extra_tokens_per_pass", "{:.2f}"),
    ("extra tokens, mean over texts", "extra_tokens_per_pass_by_prompts", "{:.2f}"),
    ("extra tokens without loops", "extra_tokens_per_pass_without_loops", "{:.2f}"),
)
EASE_AND_SPEED = (
    ("loops", "loop_share", "{:.0%}"),
    ("echo", "echo_rate", "{:.2f}"),
    ("accept. length of prompt lookup", "prompt_lookup_acceptance_length", "{:.2f}"),
    ("tokens/s alone", "greedy_tokens_per_s", "{:.1f}"),
    ("tokens/s with drafts", "mtp_tokens_per_s", "{:.1f}"),
    ("speed-up", "speedup", "{:.2f}x"),
    ("speed-up, prompt included", "speedup_with_prompt", "{:.2f}x"),
)


@dataclass(frozen=True)
class Texts:
    """What a file gave.

    Attributes:
        prompts: rows that fit, in the file's order; named by their line.
        too_long: lines whose text does not fit into the bundle's buffers together with an answer.
        unused: keys that filled no slot.
    """

    prompts: tuple[Prompt, ...]
    too_long: tuple[int, ...]
    unused: tuple[str, ...]


def evaluate_texts(
    file: Path, task: str, limit: int | None, folder: Path | None, output: Path | None, threads: int
) -> tuple[str, bool]:
    """Run the bundle over a file and write the report.

    Args:
        file: JSON lines.
        limit: rows to use, from the top; None: all.
        folder: the bundle; None: models/bundle.
        output: the report; None: models/reports/own_texts/TASK-FILE.json.

    Returns: the screen, and whether every answer was the greedy one.

    Raises:
        UserError: the file, the task, the bundle or the place for the report is not as it should be.
    """
    target = output or paths.OWN_TEXTS / f"{task}-{file.stem}.json"
    _check_place(target)
    bundle = open_bundle(folder or paths.BUNDLE, threads)
    texts = read_texts(file, task, bundle, limit)
    row = benchmark_row(run_benchmark(bundle, texts.prompts, PLAN), PLAN, Bootstrap())
    report = {
        "created_with": created_with(bundle),
        "bundle_sha256": bundle.sha256,
        "file": {"name": file.name, "sha256": sha256_file(file)},
        "lines_too_long": list(texts.too_long),
        "unused_keys": list(texts.unused),
        "tasks": [{"task": task, **row}],
    }
    write_json(target, report)
    return render(report, target), not row["mismatches"]


def _check_place(target: Path) -> None:
    """Before the work, not after it."""
    if target.is_dir():
        raise UserError(f"cannot write {target}", "a folder", "choose a file: --output FILE.json")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target.with_name(f"{target.name}.probe")) as probe:
            probe.touch()
        target.with_name(f"{target.name}.probe").unlink()
    except OSError as error:
        raise UserError(f"cannot write {target}", str(error), "choose another --output FILE.json") from None


def read_texts(file: Path, task: str, bundle: Bundle, limit: int | None) -> Texts:
    """The first ``limit`` rows that fit; lines behind them are not looked at.

    Raises:
        UserError: no such task or file, a line that cannot be used, or no text that fits.
    """
    template = bundle.task(task)
    prompts: list[Prompt] = []
    too_long: list[int] = []
    unused: set[str] = set()
    for number, row in read_objects(file, example_row(template), "correct --prompts FILE.jsonl"):
        prompt = _prompt(file, number, task, row, bundle)
        unused |= unused_keys(template, row)
        if _fits(bundle, prompt):
            prompts.append(prompt)
        else:
            too_long.append(number)
        if len(prompts) == limit:
            break
    if not prompts:
        seen = f"{len(too_long)} texts, each too long for {bundle.manifest.max_length} rows with the answer"
        raise UserError(f"no text of {file} fits into this bundle", seen, "shorten the texts")
    return Texts(tuple(prompts), tuple(too_long), tuple(sorted(unused)))


def _prompt(file: Path, number: int, task: str, row: Mapping[str, Any], bundle: Bundle) -> Prompt:
    template, name = bundle.task(task), f"line {number}"
    try:
        slots = fill_from_row(template, row)
        ids = tuple(encode_prompt(bundle.tokenizer, template.rendered, slots))
    except UserError as error:
        raise UserError(f"{file}, {name}: {error.what}", error.seen, f"write {example_row(template)}") from None
    return Prompt(name, task, "own", name, slots, "", ids)


def _fits(bundle: Bundle, prompt: Prompt) -> bool:
    try:
        bundle.start_from_ids(list(prompt.prompt_ids), bundle.answer(prompt.task), None)
    except UserError:  # it has one reason only: no room
        return False
    return True


def render(report: Mapping[str, Any], target: Path) -> str:
    """One screen: the figures with their intervals, the test split beside them, and where they come from."""
    row, made = report["tasks"][0], report["created_with"]
    own, test = _cells(row), _cells(_test_split(report["bundle_sha256"], row["task"]))
    heading = ("", report["file"]["name"], *(["test split"] if test else []))
    rows = [(label, cell, *([test.get(label, GAP)] if test else [])) for label, cell in own.items()]
    where = f"{made['cpu']}, {made['threads']} threads, {made['precision']}, bundle {report['bundle_sha256'][:12]}"
    notes = [
        f"{row['task']}: {where}; each text timed once in each mode; brackets: 95 % over texts",
        *([f"test split: {paths.VERIFICATION_REPORT}"] if test else []),
        *([f"left out, too long: {len(report['lines_too_long'])} texts"] if report["lines_too_long"] else []),
        *([f"keys that fill no slot: {', '.join(report['unused_keys'])}"] if report["unused_keys"] else []),
        *(f"differs from plain decoding: {one}" for one in row["mismatches"][:SHOWN_MISMATCHES]),
        f"report: {target}",
    ]
    return "\n".join([*text_table(heading, rows), "", *notes])


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """What is shown of a row, by label; a figure that it does not hold is left out."""
    cells = {label: shown(row, key, form) for label, key, form in ACCEPTANCE if key in row}
    for bucket in row.get("by_prompt_length", ()):
        figure = shown(bucket, "extra_tokens_per_pass", "{:.2f}")
        cells[f"extra tokens, prompts of {_bucket_name(bucket)} tokens"] = f"{bucket['prompts']} texts: {figure}"
    for depth, share in enumerate(row.get("conditional_acceptance", ()), start=1):
        cells[f"accepted at depth {depth}, when reached"] = f"{share:.0%}"
    return cells | {label: shown(row, key, form) for label, key, form in EASE_AND_SPEED if key in row}


def _bucket_name(bucket: Mapping[str, Any]) -> str:
    start, end = bucket["prompt_tokens_from"], bucket["prompt_tokens_below"]
    return f"{start}+" if end is None else f"{start}-{end - 1}"


def _test_split(bundle: str, task: str) -> Mapping[str, Any]:
    """The task's row of verification.json, empty when there is none of this bundle."""
    if not paths.VERIFICATION_REPORT.is_file():
        return {}
    document = read_json(paths.VERIFICATION_REPORT, "run `mtp repro verify`")
    rows = document.get("tasks", ()) if document.get("bundle_sha256") == bundle else ()
    found: Mapping[str, Any] = next((row for row in rows if row.get("task") == task), {})
    return found
