"""Stage `benchmark`: time the bundle with and without drafts, and with prompt lookup, on this machine."""

from __future__ import annotations

from components.core import paths
from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.data.table import read_prompts
from components.decoding.bootstrap import Bootstrap
from components.devices.benchmark import Plan, measure_costs, run_benchmark
from components.devices.circumstances import created_with
from components.devices.speed import benchmark_rows
from components.devices.verification import first_test_prompts
from components.onnx.runtime import open_bundle
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write models/reports/benchmark/local.json."""
    params = stage_params("benchmark")
    wanted = params.benchmark
    plan = Plan(wanted.rounds, wanted.warmup_prompts, wanted.lookup_draft_length, wanted.lookup_ngram)
    bundle = open_bundle(paths.BUNDLE, params.runtime.threads)
    prompts = first_test_prompts(read_prompts(paths.PROMPTS), wanted.prompts_per_task)
    runs = run_benchmark(bundle, prompts, plan)
    rows, overall = benchmark_rows(runs, plan, Bootstrap(params.evaluate.bootstrap_samples, params.evaluate.seed))
    report = {
        "created_with": created_with(bundle),
        "bundle_sha256": bundle.sha256,
        "tasks": rows,
        "overall": overall,
        "costs": measure_costs(bundle, max((prompt.prompt_ids for prompt in prompts), key=len)),
    }
    write_json(paths.BENCHMARK_REPORT, report)
    print(
        f"benchmark: {overall['greedy_tokens_per_s']:.1f} -> {overall['mtp_tokens_per_s']:.1f} tokens/s, "
        f"{overall['speedup']:.2f}x ({bundle.threads} threads, {overall['prompts']} prompts, {plan.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
