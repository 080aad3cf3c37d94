"""Stage `backbone`: fetch the frozen model and write it as a float32 transformers directory."""

from __future__ import annotations

from components.core.errors import exits_cleanly
from components.core.paths import BACKBONE
from components.modeling.backbone import import_backbone
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Run the stage."""
    params = stage_params("backbone")
    import_backbone(params.backbone, BACKBONE)
    print(f"backbone: {params.backbone.source} -> {BACKBONE}")


if __name__ == "__main__":
    main()
