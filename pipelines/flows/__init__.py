"""Prefect flows, and the environment that Prefect must find before it is imported.

Owns Prefect's place and manners: all of its state lies in `.prefect` inside the project, its temporary server may take
its time on a slow core, it phones nobody. What the user has set already is left alone. Its surprising decision: this
happens when the package is imported, because Prefect reads its settings at import and never again.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from components.core.host import set_quiet_environment

LOCAL = ("127.0.0.1", "localhost")
PREFECT_ENVIRONMENT = {
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # 20 by default: too few for one slow core
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",  # the stages speak for themselves
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_PROMPT": "false",
}


def prepare_environment(environment: MutableMapping[str, str], project: Path) -> None:
    """Fill in what is not set.

    Args:
        environment: usually ``os.environ``.
        project: folder that gets ``.prefect``.
    """
    environment.setdefault("PREFECT_HOME", str(project.resolve() / ".prefect"))
    for name, value in PREFECT_ENVIRONMENT.items():
        environment.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach the temporary server on this machine
        known = [host for host in environment.get(name, "").split(",") if host]
        environment[name] = ",".join([*known, *(host for host in LOCAL if host not in known)])


set_quiet_environment()
prepare_environment(os.environ, Path())
