"""How a flow of ours fails: at once, in three lines, with nothing run after it.

Owns the bridge between our errors and Prefect's states. It refuses to go on after a state that is not Completed. Its
surprising decision: a task *returns* a Failed state for a user's fault instead of raising, because Prefect prints some
fifty lines of traceback for a raised one; a bug is raised and keeps its traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import State
from prefect.states import Failed

from components.core.errors import UserError
from pipelines.repro import THREE_LINES

P = ParamSpec("P")
R = TypeVar("R")


class StepFailed(Exception):
    """A task of the flow did not complete; the text is its message."""


def fails_quietly(function: Callable[P, R]) -> Callable[P, Any]:
    """Decorate the function of a task or a flow: a UserError becomes a Failed state that holds its three lines."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            return Failed(message=error.render())

    return wrapped


def completed(state: Any) -> Any:
    """The result of a task's state.

    Raises:
        StepFailed: it is anything but Completed.
    """
    if not state.is_completed():
        raise StepFailed(state.message or f"the task ended as {state.name}")
    return state.result()


def run_flow(flow: Callable[..., Any]) -> State[Any]:
    """Run a flow here and now.

    Raises:
        UserError: the flow did not complete, or Prefect's temporary server did not start.
    """
    try:
        state: State[Any] = flow(return_state=True)
    except RuntimeError as error:
        if "ephemeral" not in str(error).lower():
            raise
        remedy = "run it again, or start `prefect server start` and set PREFECT_API_URL"
        raise UserError("Prefect's temporary server did not start", str(error), remedy) from None
    if state.is_completed():
        return state
    message = state.message or f"the flow ended as {state.name}"
    if found := THREE_LINES.search(message):
        raise UserError(*found.group("what", "seen", "do"))
    raise UserError("the flow failed", message[:300], "read the output above, then run the same command again")
