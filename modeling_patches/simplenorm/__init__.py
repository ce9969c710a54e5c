"""SimpleNorm: a norm right after every linear map of the blocks, none before (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="simplenorm",
    kind=Kind.PATCH,
    target="hfplug.modeling_patches.simplenorm.patch:SimpleNorm",
    config="hfplug.modeling_patches.simplenorm.patch:SimpleNorm",
    summary="a norm right after every linear map of the decoder layers and none before, for larger stable learning rates",
    paper=Paper(
        title="SimpleGPT: Improving GPT via A Simple Normalization Strategy",
        venue="arXiv",
        url="https://arxiv.org/abs/2602.01212",
        fidelity="authors' code",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "save_pretrained / from_pretrained": "with import hfplug; without it the folder is refused",
        "caches, padding, packing": "as the model's own",
        "gradient checkpointing, DDP, FSDP2": True,
        "torch.compile": "one graph",
        "PEFT on top": "an adapter is added after the norm; merging it is refused",
        "quantised weights, mixture-of-experts layers": "refused",
    },
    limits=(
        "For training from scratch: on a pretrained model every activation changes. warm_start() is a start for retraining.",
        "Scale invariance in a weight holds for linear maps without bias: a bias is inside the norm.",
    ),
    example='hfplug.apply(model, "simplenorm")',
    exports=(
        "hfplug.modeling_patches.simplenorm.build:build_simplenorm",
        "hfplug.modeling_patches.simplenorm.build:lr_scale",
        "hfplug.modeling_patches.simplenorm.build:warm_start",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]
