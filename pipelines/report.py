"""The one table of results, read from the evidence files.

Owns the choice of columns and their source: exactness and acceptance come from verification.json, speeds, echo rate
and the prompt-lookup baseline from benchmark/local.json, both measured on the final bundle; tree drafting, which the
bundle cannot do, from evaluation.json. It refuses to fill a gap:
what was not measured is shown as `-`. Its surprising decision: it computes nothing, so a figure here is the figure in
the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core import paths
from components.core.errors import UserError
from components.core.files import atomic_path, read_json

if TYPE_CHECKING:
    from components.release.gates import Decision

GAP = "-"
OVERALL = "all"


@dataclass(frozen=True)
class Column:
    """One figure: heading, evidence it comes from, key, how it is shown, and whether with its 95 % interval."""

    heading: str
    source: str
    key: str
    form: str
    with_interval: bool = False


COLUMNS = (
    Column("prompts", "verification", "prompts", "{:.0f}"),
    Column("tokens", "verification", "tokens", "{:.0f}"),
    Column("exact match", "verification", "exact_match", "{:.1%}"),
    Column("accept. length", "verification", "acceptance_length", "{:.2f}"),
    Column("extra tokens", "verification", "extra_tokens_per_pass", "{:.2f}", with_interval=True),
    Column("head only", "verification", "head_extra_tokens_per_pass", "{:.2f}"),
    Column("at most", "verification", "most_tokens_extra_tokens_per_pass", "{:.2f}"),
    Column("trees", "evaluation", "tree_extra_tokens_per_pass", "{:.2f}"),
    Column("alone tok/s", "benchmark", "greedy_tokens_per_s", "{:.1f}"),
    Column("drafted tok/s", "benchmark", "mtp_tokens_per_s", "{:.1f}"),
    Column("speed-up", "benchmark", "speedup", "{:.2f}x", with_interval=True),
    Column("with prompt", "benchmark", "speedup_with_prompt", "{:.2f}x"),
    Column("echo", "benchmark", "echo_rate", "{:.2f}"),
    Column("loops", "verification", "loop_share", "{:.0%}"),
    Column("lookup", "benchmark", "prompt_lookup_acceptance_length", "{:.2f}"),
    Column("its speed-up", "benchmark", "prompt_lookup_speedup", "{:.2f}x"),
)


@dataclass(frozen=True)
class Report:
    """What there is to show.

    Attributes:
        rows: task (the last is all together) and its cells, in the order of ``COLUMNS``.
        notes: where the figures come from.
        passed: the gate's verdict, None before there is one.
        refusals: one line for each rule that failed.
    """

    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    passed: bool | None
    refusals: tuple[str, ...]


def load_report() -> Report:
    """Read the evidence.

    Raises:
        UserError: there is none yet, or a file is broken.
    """
    verification = _document(paths.VERIFICATION_REPORT)
    benchmark = _document(paths.BENCHMARK_REPORT)
    evaluation = _document(paths.EVALUATION_REPORT)
    gate = _document(paths.GATE_REPORT)
    if not verification and not benchmark:
        raise UserError("there are no results yet", f"nothing in {paths.REPORTS}", "run `mtp repro`")
    documents = {"verification": verification, "evaluation": evaluation, "benchmark": benchmark}
    names = dict.fromkeys(row["task"] for document in documents.values() for row in document.get("tasks", ()))
    rows = [_cells(name, {kind: _row(document, name) for kind, document in documents.items()}) for name in names]
    rows.append(_cells(OVERALL, {kind: document.get("overall", {}) for kind, document in documents.items()}))
    notes = [
        _note("exactness and acceptance", paths.VERIFICATION_REPORT, verification),
        _note("trees, in torch", paths.EVALUATION_REPORT, evaluation),
        _note("speed, echo and lookup", paths.BENCHMARK_REPORT, benchmark),
    ]
    refused = [rule for rule in gate.get("rules", ()) if not rule.get("passed")]
    return Report(
        rows=tuple(rows),
        notes=tuple(note for note in notes if note),
        passed=bool(gate["passed"]) if "passed" in gate else None,
        refusals=tuple(f"{rule['rule']}: {rule.get('reason') or rule.get('value')}" for rule in refused),
    )


def _document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = read_json(path, "run `mtp repro`")
    if not isinstance(document, dict):
        raise UserError(f"{path} is no evidence", f"a {type(document).__name__}", "run `mtp repro`")
    return document


def _row(document: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((row for row in document.get("tasks", ()) if row.get("task") == task), {})
    return found


def _cells(name: str, rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    return (name, *(_cell(column, rows[column.source]) for column in COLUMNS))


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    return shown(row, column.key, column.form, column.with_interval)


def shown(row: Mapping[str, Any], key: str, form: str, with_interval: bool = True) -> str:
    """A figure of a row, its interval behind it where there is one; a gap for what was not measured."""
    value, interval = row.get(key), row.get(f"{key}_interval")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return GAP
    if not (with_interval and interval):
        return form.format(value)
    return f"{form.format(value)} [{', '.join(map(form.rstrip('x').format, interval))}]"


def _note(what: str, path: Path, document: Mapping[str, Any]) -> str:
    """Source of some columns: device, threads, numeric mode, sample count and file."""
    if not document:
        return ""
    made, overall = document.get("created_with", {}), document.get("overall", {})
    parts = [
        str(made.get("cpu", "unknown device")),
        f"{made.get('threads', '?')} threads",
        str(made.get("precision", "unknown precision")),
        f"{overall.get('prompts', '?')} prompts",
    ]
    if "repeats" in overall:
        parts.append(f"{overall['repeats']} rounds each")
    return f"{what}: {', '.join(parts)} ({path})"


def _verdict(report: Report) -> list[str]:
    if report.passed is None:
        return ["gate: no verdict yet"]
    if report.passed:
        return [f"gate: passed ({paths.GATE_REPORT})"]
    return [f"gate: refused ({paths.GATE_REPORT})", *(f"  {line}" for line in report.refusals)]


def render_text(report: Report) -> str:
    """The table for a terminal, the sources of its figures, and the verdict."""
    lines = text_table(("task", *(column.heading for column in COLUMNS)), report.rows)
    return "\n".join([*lines, "", *report.notes, *_verdict(report), f"evidence: {paths.REPORTS}/"])


def render_markdown(report: Report) -> str:
    """The same as Markdown, for Prefect's summary artifact and the README."""
    table = markdown_table(("task", *(column.heading for column in COLUMNS)), report.rows)
    rest = [*report.notes, *_verdict(report)]
    return "\n".join([*table, "", *(f"- {line.strip()}" for line in rest)])


def write_block(name: str, content: str, readme: Path = Path("README.md")) -> None:
    """Put ``content`` between the README's markers of that name, so that no figure there is ever typed.

    Raises:
        UserError: the markers are gone.
    """
    text = readme.read_text(encoding="utf-8")
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise UserError(f"{readme} has no place for the {name}", f"no {first}", f"put {first} and {last} back")
    with atomic_path(readme) as temporary:
        temporary.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def decision_table(decision: Decision) -> list[str]:
    """Every rule of a decision with its value, bound and reason."""
    rows = [
        ("ok" if rule.passed else "FAIL", rule.rule, _brief(rule.value), _brief(rule.bound)) for rule in decision.rules
    ]
    lines = text_table(("", "rule", "value", "bound"), rows)
    if decision.passed:
        return [*lines, "", f"gate: passed for bundle {decision.bundle_sha256[:12]}"]
    return [*lines, "", "gate: refused", *(f"  {rule.rule}: {rule.reason}" for rule in decision.refusals)]


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return GAP if value is None else str(value)[:32]


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column flush left, the others flush right."""
    widths = [max(len(row[index]) for row in (heading, *rows)) for index in range(len(heading))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()

    return [line(heading), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, aligned as :func:`text_table` does."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
