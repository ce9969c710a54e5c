"""Sink monitor: how much attention the first token draws, layer by layer, while training with fused attention."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="sink_monitor",
    kind=Kind.CALLBACK,
    target="hfplug.callbacks.sink_monitor.callback:SinkMonitorCallback",
    config="hfplug.callbacks.sink_monitor.config:SinkMonitorConfig",
    summary="attention mass and value norm of the first token per layer, logged while training",
    paper=Paper(
        title="SinkProbe: Attention Sinks as Internal Signals for Hallucination Detection",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2604.10697",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "sdpa, eager, flex attention": True,
        "flash attention": "by its mask conventions; not run against the flash-attn package",
        "gradient checkpointing": True,
        "left and right padding, packing": True,
        "grouped-query attention": "scores are per query head",
        "sliding window, logit softcap, learned sinks": "in the scores; learned sinks not with sdpa, which ignores them",
        "torch.compile": "not measured while compiled",
        "encoder-decoder models": False,
    },
    limits=(
        "A measured step costs one more QK^T product per layer, in fp32; the output of the attention is not touched.",
        "With a sliding or chunked window the first token of each window-visible stretch is what is measured.",
        "Attention that does not go through transformers' AttentionInterface is not seen; the callback then says so.",
    ),
    example="Trainer(..., callbacks=[SinkMonitorCallback(every=10)])",
    exports=("hfplug.sinks:sink_scores",),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]
