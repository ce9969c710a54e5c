"""MuSe: multipole semantic attention (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="muse",
    kind=Kind.ATTENTION,
    target="hfplug.kernels.muse.backend:MuSeAttention",
    config="hfplug.kernels.muse.config:MuSeConfig",
    summary="causal attention that sees far tokens as clusters tilted towards each query, in O(N log N)",
    paper=Paper(
        title="Multipole Semantic Attention: A Fast Approximation of Softmax Attention for Pretraining",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2509.10406",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "training": "memory linear in tokens; gradient with clusters held fixed",
        "gradient checkpointing": True,
        "left and right padding, packing": "each document by itself",
        "grouped-query attention": "keys are clustered once per key head",
        "learned sinks (gpt-oss)": True,
        "sliding windows, static caches": "exact attention",
        "decoding, prefill in chunks": "exact attention",
        "logit softcap, position bias, dropout, output_attentions": "refused",
        "torch.compile": "exact attention where transformers makes a dense mask, as it does while compiling",
    },
    limits=(
        "An approximation. Layers with sharp retrieval heads lose by it; calibrate() finds them on your text, keeps them exact.",
        "Used from min_length=8192 tokens on: below that exact attention costs as much.",
        "The Triton kernels have run in Triton's interpreter and compile for four chips; they have not run on a GPU.",
        "Saved models load as stock ones (exact attention) unless attn_implementation='muse' is given again; the options are "
        "in config.json.",
    ),
    example='AutoModelForCausalLM.from_pretrained(path, attn_implementation="muse")',
    exports=(
        "hfplug.kernels.muse.backend:configure",
        "hfplug.kernels.muse.calibration:calibrate",
        "hfplug.kernels.muse.op:muse",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
