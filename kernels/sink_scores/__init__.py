"""Sink scores: how much attention every token receives, without an attention map (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="sink_scores",
    kind=Kind.ATTENTION,
    target="hfplug.kernels.sink_scores.backend:SinkScoresAttention",
    config="hfplug.kernels.sink_scores.config:SinkScoresConfig",
    summary="mean attention every token receives, in any model and implementation, without storing an attention map",
    paper=Paper(
        title="SinkProbe: Attention Sinks as Internal Signals for Hallucination Detection",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2604.10697",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "sdpa, eager, flex attention, attention methods of hfplug": True,
        "flash attention": "by its mask conventions; not run against the flash-attn package",
        "generate: greedy and sampled; dynamic and static caches": True,
        "generate: beam search, assisted decoding": "refused",
        "a cached prefix recorded elsewhere": "pass its recording as prefix=",
        "left and right padding, packing": True,
        "grouped-query attention": "scores are per query head",
        "sliding window, logit softcap, learned sinks": True,
        "gradient checkpointing": True,
        "torch.compile": "not while compiling",
        "encoder-decoder models": False,
    },
    limits=(
        "record() costs a second QK^T product per layer, in fp32; the model's results are untouched. With no gradients and "
        "attn_implementation='sink_scores' one pass gives both; its output differs from sdpa's in the last bits.",
        "For an attention method that approximates, the scores are those of exact attention.",
        "Static caches with a sliding window are refused once the window has moved.",
    ),
    example="with record(model) as recorded: model.generate(**batch)   # from hfplug.kernels.sink_scores import record",
    exports=("hfplug.kernels.sink_scores.op:record", "hfplug.kernels.sink_scores.op:sink_scores"),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
