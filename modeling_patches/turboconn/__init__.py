"""TurboConn: upper layers of earlier tokens feed lower layers of later ones (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="turboconn",
    kind=Kind.PATCH,
    target="hfplug.modeling_patches.turboconn.patch:TurboConn",
    config="hfplug.modeling_patches.turboconn.patch:TurboConn",
    summary="projections from upper layers of earlier tokens into lower layers of later ones: depth grows with the sequence",
    paper=Paper(
        title="Turbo Connection: Reasoning as Information Flow from Higher to Lower Layers",
        venue="arXiv 2602.17993",
        url="https://arxiv.org/abs/2602.17993",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "identity at the start": "bit for bit; exact feedback with gradients runs in groups, which changes the order of sums",
        "decoding with a cache, beams, assisted decoding": "the state stands in the cache",
        "static caches": "without a gain by compilation",
        "left and right padding, packing": "padding feeds nothing back, documents start anew",
        "gradient checkpointing": "by full passes, ceil(tokens / group_size) of them for exactness",
        "PEFT on top": 'modules_to_save=["turboconn"] trains and saves the connections with an adapter',
        "torch.compile": "what stands around the token stack is compiled, the stack itself runs eagerly (a graph break)",
        "continuous batching, prefix tuning": "refused",
        "retoken, mort, U-LoRA on the same model": "refused: they need all tokens of a forward at once",
        "DDP, FSDP2": "FSDP2: every rank needs batches of the same length",
    },
    limits=(
        "Training and prefill are sequential: ceil(tokens / group_size) forwards one after the other. Decoding is not slowed "
        "down but for the projections.",
        "mode 'jacobi' with fewer passes than that approximates; a model trained so decodes with the exact feedback.",
        "A cache can be cropped by 64 tokens; by more after cache.activate_past_recording().",
        "Anything the model is called with that cannot be cut into groups (attention maps, prepared block masks) is computed "
        "by full passes: exact and slow.",
    ),
    example='hfplug.apply(model, "turboconn", group_size=4)',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
