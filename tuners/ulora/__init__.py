"""U-LoRA: token-level utilisation of the directions of a LoRA subspace (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="ulora",
    kind=Kind.TUNER,
    target="hfplug.tuners.ulora.model:ULoraModel",
    config="hfplug.tuners.ulora.config:ULoraConfig",
    summary="LoRA whose r directions are each scaled per token by a gate that reads the causal context",
    paper=Paper(
        title="Adaptive Utilization of Low-Rank Adaptation via Conditioned Gating",
        venue="ICML 2026",
        url="https://icml.cc/virtual/2026/poster/62892",
        fidelity="our reading",
    ),
    requires=("peft>=0.21", "transformers>=5.24"),
    capabilities={
        "merge": "mean only, on request (merge_mode='mean')",
        "quantised base": True,
        "multiple adapters": True,
        "gradient checkpointing": True,
        "left padding": True,
        "packing": "by position_ids",
        "beam search": True,
        "cache": "dynamic and static; crop (assisted decoding) refused",
        "mixed batches (adapter_names=)": False,
    },
    limits=(
        "Only the abstract of the paper is public: the gate, its context and every default are our reading.",
        "The context is a running mean kept beside the KV cache; a cache advanced without the adapter, or cropped, is refused.",
        "Modules outside the token stack (lm_head), encoder-decoder models and MoE experts on flattened tokens are refused.",
        "The gates want a larger learning rate: hfplug.tuners.use_optimizer_groups(trainer), done by `hfplug train`.",
    ),
    example='get_peft_model(model, hfplug.tuners.config(type="ulora", r=8))',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [METHOD]
