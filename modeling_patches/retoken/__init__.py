"""ReToken and MoRT: parameters that are looked up by token id inside every layer (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

_PAPER = Paper(
    title="Inner-layer Token Self-Modulation as Another Scaling Axis for LLMs",
    venue="ICML 2026",
    url="https://icml.cc/virtual/2026/poster/66476",
    fidelity="our reading",
)
_WORKS: dict[str, bool | str] = {
    "identity at init": True,
    "gradient checkpointing": True,
    "left padding": True,
    "packing": True,
    "cache, beam search, assisted decoding": True,
    "DDP, FSDP2": "not with offload=True or sparse=True",
    "PEFT on top": "modules_to_save trains the patch beside the adapter",
    "torch.compile": "breaks the graph where token ids are read",
    "input embeddings without ids": "inside hfplug.modeling_patches.token_ids(model, ids)",
}
_LIMITS = (
    "The equations were read in notes on the twin paper (arXiv 2602.00800, JTok and JTok-M); first values of tables, scales and "
    "router, the epsilon, the router's norm and the weighting of the balance loss are our reading.",
    "The paper trains from scratch at pre-training scale. rank > 0 (tables factored and shared over layers) is our own form for "
    "adapting a trained model; nothing is promised of it.",
    "Full tables are large: layers x vocabulary x width values, times experts for mort. hfplug.plan says how much.",
    "The vocabulary must not grow afterwards; resize the embeddings first.",
    "Nothing can be merged into dense weights.",
    "sparse=True needs an optimizer for sparse gradients (torch.optim.SparseAdam, SGD); a Trainer's AdamW refuses them.",
    "offload=True was tested on the CPU alone. Loading with a device_map moves the tables, and the first forward refuses that.",
)
_EXPORTS = ("hfplug.modeling_patches.retoken.tokens:token_ids",)

METHODS = [
    Method(
        name="retoken",
        kind=Kind.PATCH,
        target="hfplug.modeling_patches.retoken.patch:ReToken",
        config="hfplug.modeling_patches.retoken.patch:ReToken",
        summary="scales what each MLP adds to the residual by a vector looked up by token id",
        paper=_PAPER,
        requires=("transformers>=5.24",),
        capabilities=_WORKS,
        limits=_LIMITS,
        example='hfplug.apply(model, "retoken")                      # or, for adapting: rank=16',
        exports=_EXPORTS,
    ),
    Method(
        name="mort",
        kind=Kind.PATCH,
        target="hfplug.modeling_patches.retoken.patch:MoRT",
        config="hfplug.modeling_patches.retoken.patch:MoRT",
        summary="adds to each MLP's output a vector looked up by token id in several tables, which a router on the context mixes",
        paper=_PAPER,
        requires=("transformers>=5.24",),
        capabilities=_WORKS,
        limits=_LIMITS,
        example='hfplug.apply(model, "mort", experts=5, top_k=2)',
        exports=(
            *_EXPORTS,
            "hfplug.modeling_patches.retoken.loss:RouterBalance",
            "hfplug.modeling_patches.retoken.loss:RouterBalanceConfig",
            "hfplug.modeling_patches.retoken.loss:router_balance",
        ),
    ),
]


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return METHODS
