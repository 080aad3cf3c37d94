"""Stage `check_prompts`: hold the prompt table against its contract."""

from __future__ import annotations

from tokenizers import Tokenizer

from components.core.errors import exits_cleanly
from components.core.paths import BACKBONE, CONTRACTS, DATA_DOCS, PROMPTS, TEMPLATES
from components.data.facts import prompt_facts, read_table
from components.data.quality import judge, prompt_rules, require, write_report
from components.data.table import read_templates
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write the report and the Data Docs, then fail if the contract failed."""
    params = stage_params("check_prompts")
    tokenizer = Tokenizer.from_file(str(BACKBONE / "tokenizer.json"))
    table = read_table(PROMPTS, "run `mtp repro prompts`")
    frame = prompt_facts(table, read_templates(TEMPLATES), params.tasks, tokenizer, params.data.deduplicate_ngram)
    rules = prompt_rules(list(params.tasks), params.data.max_prompt_tokens)
    report = judge(frame, "prompts", rules, DATA_DOCS / "prompts")
    write_report(CONTRACTS / "prompts.json", report)
    require(report, DATA_DOCS / "prompts")
    print(f"check_prompts: {len(report.expectations)} rules hold on {report.rows} prompts")


if __name__ == "__main__":
    main()
