"""The command line: one function for each command of `mtp`.

Owns what people type and what they get back, exit codes included (0 well, 1 refused or not exact, 2 three lines about
what to mend). It refuses to hide a bug: that keeps its traceback. Its surprising decision: every heavy import stands
inside the command that needs it, so that `mtp --help` answers in a fraction of a second.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from components.core import paths
from components.core.errors import EXIT_USER_ERROR, UserError, exits_cleanly
from pipelines.generate import Mark

NAME = "mtp"
EXIT_REFUSED = 1
P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    name=NAME,
    help="Train, prove, export and release a multi-token-prediction head for a frozen language model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def in_project(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command that works in the project's folder: anywhere else, that is the first thing it says."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        paths.check_project()
        return command(*args, **kwargs)

    return checked


@app.command()
@in_project
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
def profile(name: Annotated[str | None, typer.Argument(help="none: list them")] = None) -> None:
    """Merge the profile NAME into params.yaml, say what changed and what to type next; without NAME, list them."""
    from pipelines.profile import apply_profile, profile_lines

    if name is not None:
        paths.check_project()
    for line in profile_lines() if name is None else apply_profile(name):
        say(line)


@app.command()
@in_project
def compare() -> None:
    """The head against other drafters trained on the same answers, on demand: about an hour and a half."""
    from pipelines.compare import run_comparison

    run_comparison()


@app.command()
@in_project
def study(
    file: Annotated[Path, typer.Argument(help="variants to train, as in docs/study.yaml")] = Path("docs/study.yaml"),
) -> None:
    """Train heads that differ by one thing each and judge them on the same held-out answers; minutes each."""
    from pipelines.study import run_study

    run_study(file)


@app.command()
@in_project
def throughput() -> None:
    """Where the time of training and distillation goes on this machine, beside its peak: about a minute."""
    from pipelines.throughput import run_throughput

    run_throughput()


@app.command()
@in_project
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
@in_project
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
@in_project
def report(
    readme: Annotated[bool, typer.Option("--readme", help="also write the tables into README.md")] = False,
) -> None:
    """Show the table of results and the gate's verdict; exit 1 when refused."""
    from pipelines.comparison import comparison_markdown
    from pipelines.report import load_report, render_markdown, write_block

    if readme:
        write_block("results", render_markdown(load_report()))
        if compared := comparison_markdown():
            write_block("comparison", compared)
    if _print_report() is False:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
@in_project
def gate() -> None:
    """Decide on the release from the evidence as it lies there now; exit 1 when refused."""
    from components.core.params import load_params
    from components.release.evidence import load_evidence
    from components.release.gates import decide
    from pipelines.report import decision_table

    decision = decide(load_evidence(), load_params().gates)
    say("\n".join(decision_table(decision)))
    if not decision.passed:
        raise typer.Exit(EXIT_REFUSED)


def project_bundle() -> Path:
    """The bundle of the project that we are in.

    Raises:
        UserError: this is no project folder.
    """
    paths.check_project()
    return paths.BUNDLE


@app.command()
def generate(
    task: Annotated[str, typer.Option("--task", help="a task of the bundle")],
    text: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help='what the task is about; notifications as "Anna: at 5? | Ben: yes"; none: see --slot',
        ),
    ] = "",
    slot: Annotated[
        list[str] | None,
        typer.Option("--slot", metavar="NAME=VALUE", help="fill a slot by name; a choice left out: its first text"),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="folder of the bundle; default: models/bundle")
    ] = None,
    no_draft: Annotated[
        bool, typer.Option("--no-draft", help="the backbone alone: the same text, slower; sampled: same distribution")
    ] = False,
    mark: Annotated[
        Mark,
        typer.Option("--mark", help="accepted drafts: green, else in brackets; a given opening: grey, else in <>"),
    ] = Mark.auto,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="sample: 0 is greedy, 1 the backbone as it is; default: 0")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="sample from the likeliest tokens that hold this share; default: 1")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="of sampling; drafts or none: same distribution, not the same text; default: 0"),
    ] = None,
    relaxed: Annotated[
        float | None,
        typer.Option("--relaxed", metavar="MARGIN", help="NOT EXACT: accept drafts within MARGIN of the best logit"),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="then say where the text leaves the greedy one")] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: every core this process may use")] = 0,
) -> None:
    """Write TEXT's answer as it is decoded, accepted drafts marked, then what it cost."""
    from pipelines.generate import Asked, write_answer

    options = {"temperature": temperature, "top_p": top_p, "seed": seed, "relaxed": relaxed}
    slots, folder = tuple(slot or ()), bundle or project_bundle()
    write_answer(Asked(text, task, slots, folder, not no_draft, mark, compare, threads, options))


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

    Every text is answered in turn plainly, with drafts, and with prompt lookup. It may be unlike all training text.

    A notification stack is written {"text": "Anna: at 5? | Ben: yes"}. A choice that a line leaves out takes its first
    text. Keys that are no slots are left alone.
    """
    from pipelines.own_texts import evaluate_texts

    screen, exact = evaluate_texts(prompts, task, limit, bundle or project_bundle(), output, threads)
    say(screen)
    if not exact:
        raise typer.Exit(EXIT_REFUSED)


@app.command()
@in_project
def doctor() -> None:
    """Say what is installed, what is missing and what to type; exit 2 when something is missing."""
    from pipelines.doctor import examine, render

    findings = examine()
    say(render(findings))
    if not all(finding.well for finding in findings):
        raise typer.Exit(EXIT_USER_ERROR)


@app.command()
@in_project
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="port on this machine")] = 5000,
) -> None:
    """Open MLflow's pages on this machine, and say how to open Prefect's."""
    from components.core.params import load_params
    from pipelines.ui import open_ui

    open_ui(load_params().registry, port)


def usage_fault(error: typer.TyperException) -> UserError:
    """What the option parser has to say, in our three lines instead of its box."""
    said = error.format_message().rstrip(".")
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    helped = " ".join([NAME, *(typed for typed in sys.argv[1:2] if typed in commands), "--help"])
    return UserError(said[:1].lower() + said[1:], shlex.join([NAME, *sys.argv[1:]])[:200], f"see `{helped}`")


@exits_cleanly
def main() -> None:
    """Entry point of the `mtp` script; alone, it shows its help."""
    try:
        ended = app(sys.argv[1:] or ["--help"], prog_name=NAME, standalone_mode=False)
    except typer.TyperException as error:
        raise usage_fault(error) from None
    raise SystemExit(ended or 0)


if __name__ == "__main__":
    main()
