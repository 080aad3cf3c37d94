"""Stage `evaluate`: live acceptance of the head on held-out prompts, and token-exact comparison, in torch."""

from __future__ import annotations

from typing import Any

from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.core.host import allowed_cores, host_card
from components.core.manifest import read_policies
from components.core.paths import BACKBONE, EVALUATION_REPORT, HEAD, POLICY, PROMPTS, TEMPLATES
from components.core.progress import Progress
from components.data.table import read_prompts, read_templates
from components.decoding.comparison import check_wiring
from components.decoding.metrics import add_up
from components.modeling.evaluation import compare_prompts, evaluation_row
from components.modeling.live import Comparison
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write evaluation.json."""
    params = stage_params("evaluate")
    settings, policy = params.evaluate, read_policies(POLICY).policy
    length = policy.longest
    test = [prompt for prompt in read_prompts(PROMPTS) if prompt.split == "test"]
    tasks = list(read_templates(TEMPLATES))
    chosen = [p for task in tasks for p in [q for q in test if q.task == task][: settings.prompts_per_task]]
    progress, results = Progress("evaluate", len(chosen), "prompts"), {}
    compared = compare_prompts(chosen, BACKBONE, HEAD, TEMPLATES, params.runtime.max_length, policy, allowed_cores())
    for result in compared:
        results[result.prompt.prompt_id] = result
        progress.advance()
    ordered = [results[prompt.prompt_id] for prompt in chosen]
    total = add_up([result.counts for result in ordered], length)
    check_wiring(total, sum(result.drafted for result in ordered), "evaluation")

    def row(name: str, part: list[Comparison]) -> dict[str, Any]:
        return evaluation_row(name, part, length, settings.bootstrap_samples, settings.seed)

    rows = [row(task, [result for result in ordered if result.prompt.task == task]) for task in tasks]
    overall = row("overall", ordered)
    numerics = {"threads": 1, "precision": "float32", "runtime": "torch", "policy": policy.model_dump()}
    created = host_card("torch", "transformers").as_dict() | numerics
    write_json(EVALUATION_REPORT, {"created_with": created, "tasks": rows, "overall": overall})
    print(
        f"evaluate: {overall['prompts']} prompts, {overall['extra_tokens_per_pass']:.2f} extra tokens per pass, "
        f"{overall['exact_match']:.1%} exact in torch"
    )


if __name__ == "__main__":
    main()
