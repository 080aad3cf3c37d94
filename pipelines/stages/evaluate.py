"""Stage `evaluate`: live acceptance of the head on held-out prompts, and token-exact comparison, in torch."""

from __future__ import annotations

from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.core.host import allowed_cores, host_card
from components.core.paths import BACKBONE, EVALUATION_REPORT, HEAD, PROMPTS, TEMPLATES
from components.core.progress import Progress
from components.data.table import read_prompts, read_templates
from components.decoding.bootstrap import Bootstrap
from components.decoding.comparison import check_wiring
from components.decoding.outcomes import summary_rows, total_acceptance
from components.modeling.evaluation import compare_prompts
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write evaluation.json."""
    params = stage_params("evaluate")
    settings, length = params.evaluate, params.runtime.draft_length
    test = [prompt for prompt in read_prompts(PROMPTS) if prompt.split == "test"]
    tasks = list(read_templates(TEMPLATES))
    chosen = [p for task in tasks for p in [q for q in test if q.task == task][: settings.prompts_per_task]]
    progress, results = Progress("evaluate", len(chosen), "prompts"), {}
    compared = compare_prompts(chosen, BACKBONE, HEAD, TEMPLATES, params.runtime.max_length, length, allowed_cores())
    for outcome in compared:
        results[outcome.prompt_id] = outcome
        progress.advance()
    ordered = [results[prompt.prompt_id] for prompt in chosen]
    total = total_acceptance(ordered)
    check_wiring(total, total.drafted, "evaluation")
    rows, overall = summary_rows(ordered, Bootstrap(settings.bootstrap_samples, settings.seed))
    created = host_card("torch", "transformers").as_dict() | {"threads": 1, "precision": "float32", "runtime": "torch"}
    write_json(EVALUATION_REPORT, {"created_with": created, "tasks": rows, "overall": overall})
    print(
        f"evaluate: {overall['prompts']} prompts, {overall['extra_tokens_per_pass']:.2f} extra tokens per pass, "
        f"{overall['exact_match']:.1%} exact in torch"
    )


if __name__ == "__main__":
    main()
