"""Merging by the optimal truncation of the weighted sum (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="svd_merge",
    kind=Kind.MERGE,
    target="hfplug.tuners.svd_merge.merge:SvdMerge",
    config="hfplug.tuners.svd_merge.config:SvdMergeConfig",
    summary="the weighted sum of LoRA adapters, exact or truncated to the closest update of the rank asked for",
    paper=Paper(
        title="The approximation of one matrix by another of lower rank",
        venue="Psychometrika 1936",
        url="https://doi.org/10.1007/BF02288367",
        fidelity="paper",
    ),
    requires=("peft>=0.21", "safetensors>=0.8"),
    capabilities={
        "adapter folders without the base model": True,
        "adapters of a PeftModel": True,
        "ranks and targets that differ": True,
        "negative weights": True,
        "quantised base": True,
        "embeddings, convolutions, DoRA": False,
    },
    limits=("Truncation favours adapters of large norm; the report says what each kept, and ctm balances them.",),
    example='hfplug.tuners.merge(["adapter_a", "adapter_b"], weights=[1, -0.5], method="svd_merge", output="merged")',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [METHOD]
