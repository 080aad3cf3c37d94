"""Flow `build`: the stages of dvc.yaml through Prefect, one task each, in the order of the file.

Owns nothing that DVC owns: no second list of edges, no cache (DVC alone decides what is stale). It refuses to run
anything after a stage that failed. Its surprising decision: tasks run one after the other in this process, because two
`dvc repro` at once would wait for the same lock.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from components.core.errors import UserError
from pipelines.flows.steps import StepFailed, completed, fails_quietly
from pipelines.report import load_report, render_markdown
from pipelines.repro import reproduce
from pipelines.stages.common import load_stages


def say(line: str) -> None:
    """Pass a line of output on at once."""
    print(line, flush=True)


@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False)
@fails_quietly
def run_stage(stage: str) -> str:
    """Bring one stage up to date with `dvc repro --single-item`.

    Returns:
        The stage's name; a Failed state with three lines when it fails.
    """
    reproduce([stage], say, single=True)
    return stage


@flow(name="build", persist_result=False)
@fails_quietly
def build() -> Any:
    """Every stage, then a summary artifact; fails with the first stage that fails."""
    stages = list(load_stages())
    for number, stage in enumerate(stages, start=1):
        say(f"--- {stage} ({number}/{len(stages)})")
        try:
            completed(run_stage(stage, return_state=True))
        except StepFailed as error:
            return Failed(message=str(error))
    create_markdown_artifact(key="build-summary", markdown=summary(), description="Results of the last build")
    return Completed(message=f"{len(stages)} stages are up to date")


def summary() -> str:
    """The table of results as Markdown."""
    try:
        return render_markdown(load_report())
    except UserError as error:  # a dvc.yaml without verification: nothing to show is no failure
        return error.render()
