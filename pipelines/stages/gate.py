"""Stage `gate`: evidence in, models/reports/gate.json out.

It ends well even when the release is refused: the refusal is a result that must exist as a file. `mtp gate` shows it
and answers with its exit code.
"""

from __future__ import annotations

from components.core import paths
from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.core.host import host_card
from components.release.evidence import load_evidence
from components.release.gates import decide
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Decide and write the verdict."""
    params = stage_params("gate")
    decision = decide(load_evidence(), params.gates)
    write_json(paths.GATE_REPORT, decision.as_dict(host_card().as_dict()))
    verdict = "passed" if decision.passed else f"refused ({len(decision.refusals)} of {len(decision.rules)} rules)"
    print(f"gate: {verdict}, see {paths.GATE_REPORT}")


if __name__ == "__main__":
    main()
