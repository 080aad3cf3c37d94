"""The command line: `mtp repro | run | release | report | gate | generate | evaluate | doctor | ui`.

Owns what people type and what they get back, exit codes included (0 well, 1 refused or not exact, 2 three lines about
what to mend). It refuses to hide a bug: that keeps its traceback. Its surprising decision: every import stands inside
the command that needs it, so that `mtp --help` answers in a fraction of a second.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.core.errors import EXIT_USER_ERROR, UserError, exits_cleanly

if TYPE_CHECKING:
    from components.onnx.generation import Generation, Piece

EXIT_REFUSED = 1
GREEN, PLAIN = "\033[32m", "\033[0m"

app = typer.Typer(
    name="mtp",
    help="Train, prove, export and release a multi-token-prediction head for a frozen language model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Mark(StrEnum):
    """How accepted drafts are shown."""

    auto = "auto"
    always = "always"
    never = "never"


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


@app.command()
def repro(
    stages: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE]...", help="stages of dvc.yaml; none: all"),
    ] = None,
) -> None:
    """Bring every result up to date and show the table (exit 1 when the gate refuses); or STAGE and what it needs."""
    from pipelines.repro import has_results, reproduce

    reproduce(stages or [], say)
    if not stages and has_results() and _print_report() is False:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def compare() -> None:
    """The head against other drafters trained on the same answers, on demand: about an hour and a half."""
    from pipelines.compare import run_comparison

    run_comparison()


@app.command()
def run() -> None:
    """The same through Prefect, one task a stage, then release."""
    from pipelines.repro import check_ready

    check_ready()
    from pipelines.flows.build import build
    from pipelines.flows.steps import run_flow

    run_flow(build)
    _print_report()
    release()


@app.command()
def release() -> None:
    """Gates, registration in MLflow, alias `candidate`, smoke test; run twice, it changes nothing."""
    from pipelines.flows.release import release as release_flow
    from pipelines.flows.steps import run_flow

    run_flow(release_flow)


def _print_report() -> bool | None:
    from pipelines.comparison import comparison_lines
    from pipelines.report import load_report, render_text

    report_ = load_report()
    say(render_text(report_))
    for line in comparison_lines():
        say(line)
    return report_.passed


@app.command()
def report(
    readme: Annotated[bool, typer.Option("--readme", help="also write the table into README.md")] = False,
) -> None:
    """Show the table of results and the gate's verdict; exit 1 when refused."""
    from pipelines.report import load_report, write_readme

    if readme:
        write_readme(load_report())
    if _print_report() is False:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def gate() -> None:
    """Decide on the release from the evidence as it lies there now; exit 1 when refused."""
    from components.core.config import load_params
    from components.release.evidence import load_evidence
    from components.release.gates import decide
    from pipelines.report import decision_table

    decision = decide(load_evidence(), load_params().gates)
    say("\n".join(decision_table(decision)))
    if not decision.passed:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help='what the task is about; notifications as "Anna: at 5? | Ben: yes"')],
    task: Annotated[str, typer.Option("--task", help="a task of the bundle")],
    slot: Annotated[list[str] | None, typer.Option("--slot", metavar="NAME=VALUE", help="fill a slot by name")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="folder of the bundle; default: models/bundle")
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="the backbone alone: the same text, slower")] = False,
    mark: Annotated[
        Mark, typer.Option("--mark", help="accepted drafts: green on a terminal, else [in brackets] (always: brackets)")
    ] = Mark.auto,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core this process may use")] = 0,
) -> None:
    """Write TEXT's answer as it is decoded, accepted drafts marked, then what it cost."""
    from components.core import paths
    from components.data.free_text import fill_from_text
    from components.onnx.runtime import open_bundle

    opened = open_bundle(bundle or paths.BUNDLE, threads)
    slots = fill_from_text(opened.task(task).rendered, text, _parse_slots(slot or []))
    generation = opened.start(task, slots, draft=not no_draft)
    for piece in generation.stream():
        print(marked(piece, mark, sys.stdout.isatty()), end="", flush=True)
    print(flush=True)
    where = f"{opened.threads} threads, {opened.manifest.precision}, bundle {opened.sha256[:12]}"
    print(f"[{cost_line(generation)}; {where}]", file=sys.stderr)


def _parse_slots(given: list[str]) -> dict[str, str]:
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


def cost_line(generation: Generation) -> str:
    """Tokens per pass and tokens/s of a finished answer."""
    cost = generation.statistics
    return (
        f"{cost.tokens} tokens, {cost.tokens_per_pass:.2f} tokens per pass, {cost.tokens_per_s:.1f} tokens/s, "
        f"{cost.accepted} accepted drafts"
    )


@app.command()
def evaluate(
    prompts: Annotated[
        Path, typer.Option("--prompts", metavar="FILE.jsonl", help='a line a text: its slots, or {"text": "some text"}')
    ],
    task: Annotated[str, typer.Option("--task", help="a task of the bundle")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="use the first so many; default: all")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="folder of the bundle; default: models/bundle")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE.json", help="report; default: models/reports/own_texts/TASK-FILE.json"),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core this process may use")] = 0,
) -> None:
    """Measure the bundle on your own texts: exactness, acceptance, speed; exit 1 when an answer is not the plain one.

    Every text is answered in turn plainly, with the head, and with prompt lookup. It may be unlike all training text.

    A notification stack is written {"text": "Anna: at 5? | Ben: yes"}. Keys that are no slots are left alone.
    """
    from pipelines.own_texts import evaluate_texts

    screen, exact = evaluate_texts(prompts, task, limit, bundle, output, threads)
    say(screen)
    if not exact:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and what to type; exit 2 when something is missing."""
    from pipelines.doctor import examine, render

    findings = examine()
    say(render(findings))
    if not all(finding.well for finding in findings):
        raise typer.Exit(EXIT_USER_ERROR)


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="port on this machine")] = 5000,
) -> None:
    """Open MLflow's pages on this machine, and say how to open Prefect's."""
    from components.core.config import load_params
    from pipelines.ui import open_ui

    open_ui(load_params().registry, port)


@exits_cleanly
def main() -> None:
    """Entry point of the `mtp` script."""
    app()


if __name__ == "__main__":
    main()
