"""`mtp ui`: MLflow's pages for the project's store, on this machine only.

Owns the two commands and nothing else; MLflow serves, Prefect is started by the person who wants it.
"""

from __future__ import annotations

import os
import sys

from components.core.config import Registry
from components.release.tracking import database_path, open_client, resolve_tracking_uri
from pipelines.repro import child_environment

HOST = "127.0.0.1"


def ui_command(address: str, artifact_root: str, port: int) -> list[str]:
    """MLflow's own command for a SQLite store."""
    store = ["--backend-store-uri", address, "--default-artifact-root", artifact_root]
    return [sys.executable, "-m", "mlflow", "server", *store, "--host", HOST, "--port", str(port), "--workers", "1"]


def prefect_command() -> str:
    """What to type for Prefect's pages, over the same state that `mtp run` leaves."""
    return f"PREFECT_HOME={os.environ.get('PREFECT_HOME', '$PWD/.prefect')} prefect server start --host {HOST}"


def open_ui(registry: Registry, port: int) -> None:
    """Become MLflow's server; with a server elsewhere, say where it is.

    Raises:
        UserError: the store does not work.
    """
    print(f"Prefect: {prefect_command()}", flush=True)
    if database_path(registry) is None:
        print(f"MLflow: {registry.tracking_uri}", flush=True)
        return
    open_client(registry)  # makes the store under our lock, so that MLflow's server finds it whole
    print(f"MLflow: http://{HOST}:{port} (Ctrl-C ends it)", flush=True)
    command = ui_command(resolve_tracking_uri(registry), registry.artifact_root, port)
    os.execve(command[0], command, child_environment())  # in our place, so that whoever ends us ends the server
