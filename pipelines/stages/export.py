"""Stage `export`: assemble the bundle and prove that it is the trained model."""

from __future__ import annotations

from components.core import paths
from components.core.errors import UserError, exits_cleanly
from components.core.files import write_json
from components.core.host import host_card
from components.core.manifest import bundle_hash, read_policies
from components.data.table import read_prompts, read_templates
from components.devices.verification import first_test_prompts
from components.modeling.backbone import load_backbone
from components.modeling.head import MTPHead
from components.modeling.session import TorchBackbone, TorchHead
from components.onnx.bundle import MAKERS, BundleSettings, build_bundle, file_sizes
from components.onnx.parity import compare_with_torch
from components.onnx.runtime import open_bundle
from pipelines.stages.common import stage_params

PROMPTS_PER_TASK, ROUNDS = 2, 6


@exits_cleanly
def main() -> None:
    """Write the bundle and models/reports/export.json."""
    params = stage_params("export")
    backbone, head = load_backbone(paths.BACKBONE), MTPHead.from_pretrained(paths.HEAD)
    runtime, policies = params.runtime, read_policies(paths.POLICY)
    settings = BundleSettings(
        name=f"{backbone.card.source} with an MTP head",
        max_length=runtime.max_length,
        policies=policies,
        oldest_onnxruntime=runtime.oldest_onnxruntime,
        tasks=read_templates(paths.TEMPLATES),
    )
    evidence = [paths.TRAINING_REPORT, paths.EVALUATION_REPORT, paths.POLICY, *sorted(paths.CONTRACTS.glob("*.json"))]
    build_bundle(paths.BUNDLE, paths.BACKBONE, backbone.card, head, settings, evidence)

    bundle = open_bundle(paths.BUNDLE, runtime.threads)
    session = TorchBackbone(backbone, runtime.max_length)
    ids = [prompt.prompt_ids for prompt in first_test_prompts(read_prompts(paths.PROMPTS), PROMPTS_PER_TASK)]
    parity = compare_with_torch(
        bundle.backbone, bundle.head, session, TorchHead(head, session), ids, policies.policy.longest, ROUNDS
    )
    report = {
        "created_with": {**host_card(*MAKERS).as_dict(), "threads": bundle.threads, "precision": "float32"},
        "parity": parity.as_dict(),
        "bundle_sha256": bundle_hash(paths.BUNDLE),
        "file_sizes_bytes": file_sizes(paths.BUNDLE),
    }
    write_json(paths.EXPORT_REPORT, report)
    print(f"export: {sum(file_sizes(paths.BUNDLE).values()) / 1e6:.0f} MB, {parity.as_dict()}")
    if not parity.passed:
        raise UserError(
            "the bundle does not compute what torch computes", str(parity.as_dict()), f"see {paths.EXPORT_REPORT}"
        )


if __name__ == "__main__":
    main()
