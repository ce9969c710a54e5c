"""PatternKV: a KV cache of two bits, of the differences from a few patterns per head (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="patternkv",
    kind=Kind.CACHE,
    target="hfplug.kernels.patternkv.cache:PatternKVCache",
    config="hfplug.kernels.patternkv.config:PatternKVConfig",
    summary="a KV cache of 2, 4 or 8 bits that stores how tokens differ from a few patterns of their head",
    paper=Paper(
        title="PatternKV: Flattening KV Representation Expands Quantization Headroom",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2510.05176",
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
        "The default is not the paper's form: fewer patterns of 8 bits, exact first tokens, unrotated keys. "
        "PatternKVConfig.authors() is.",
        "Blocks are columns of the batch: a row padded on the left is cut at other places than alone, and its quantised tokens "
        "differ from the row's alone.",
        "attend() has a Triton kernel, which has run in Triton's interpreter and compiles for four chips, and not on a GPU.",
        "update() gives whole keys and values to any attention implementation: memory is saved, time is not.",
        "No gradient flows through stored tokens.",
    ),
    example="model.generate(**batch, cache=PatternKVCache(model.config))   # from hfplug.kernels.patternkv import PatternKVCache",
    exports=("hfplug.kernels.patternkv.split:attend",),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
