"""Compress-then-merge: shared subspaces first, then a merging rule in their coordinates (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="ctm",
    kind=Kind.MERGE,
    target="hfplug.tuners.ctm.merge:CtM",
    config="hfplug.tuners.ctm.config:CtMConfig",
    summary="several LoRA adapters compressed into shared subspaces of the final rank, then merged there by a rule",
    paper=Paper(
        title="Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2606.03723",
        fidelity="authors' code",
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
    limits=(
        "Subspaces, rescaling and TIES follow the authors' code, read but not run side by side; scalings, weights, zero updates, "
        "the rank's upper bound, DARE's draws and the defaults rule='linear', density, drop are our reading.",
        "It balances what the adapters keep; the sum itself is closer in svd_merge at the same rank.",
        "The authors choose scale, density and drop on validation data of every task; only the subspaces need no data.",
        "Memory grows with T·(sum of ranks)² numbers: 2 GB for 100 adapters of rank 16.",
        "With beta near 0 an adapter of tiny norm, noise included, has the same say in the subspaces as any other.",
    ),
    example='hfplug.tuners.merge(["adapter_a", "adapter_b"], rank=16, rule="ties", output="merged")',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [METHOD]
