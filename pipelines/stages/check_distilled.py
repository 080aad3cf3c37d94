"""Stage `check_distilled`: hold the distilled answers against their contract."""

from __future__ import annotations

from components.core.errors import exits_cleanly
from components.core.paths import ANSWERS, CONTRACTS, DATA_DOCS, PROMPTS, TEMPLATES
from components.data.facts import answer_facts, read_table
from components.data.quality import answer_rules, judge, require, write_report
from components.data.table import read_templates
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write the report and the Data Docs, then fail if the contract failed."""
    stage_params("check_distilled")
    prompts = read_table(PROMPTS, "run `mtp repro prompts`")
    answers = read_table(ANSWERS, "run `mtp repro distil`")
    templates = read_templates(TEMPLATES)
    report = judge(
        answer_facts(answers, prompts, templates), "distilled", answer_rules(list(templates)), DATA_DOCS / "distilled"
    )
    write_report(CONTRACTS / "distilled.json", report)
    require(report, DATA_DOCS / "distilled")
    print(f"check_distilled: {len(report.expectations)} rules hold on {report.rows} answers")


if __name__ == "__main__":
    main()
