"""KIVI: a KV cache of two bits, keys per channel and values per token (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="kivi",
    kind=Kind.CACHE,
    target="hfplug.kernels.kivi.cache:KiviCache",
    config="hfplug.kernels.kivi.config:KiviConfig",
    summary="a KV cache of 2, 4 or 8 bits: keys in groups of tokens per channel, values in groups of channels per token",
    paper=Paper(
        title="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        venue="ICML 2024",
        url="https://arxiv.org/abs/2402.02750",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "generate: greedy, sampled, beam search, several turns, chunked prefill": True,
        "assisted decoding": "refused: tokens cannot be taken back out of a block",
        "left padding": "read off the positions of generate; else say padding(attention_mask)",
        "sliding, chunked, linear, shared layers": "transformers' own layers",
        "static caches, torch.compile of decoding": False,
        "encoder-decoder models": "refused",
    },
    limits=(
        "Tokens leave the exact window in blocks of residual tokens, keys and values together; the authors' code lets values go "
        "one by one.",
        "Blocks are columns of the batch: a row padded on the left is cut at other places than alone, and its quantised tokens "
        "differ from the row's alone.",
        "update() gives whole keys and values to any attention implementation: memory is saved, time is not.",
        "No gradient flows through stored tokens.",
    ),
    example="model.generate(**batch, cache=KiviCache(model.config))   # from hfplug.kernels.kivi import KiviCache",
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
