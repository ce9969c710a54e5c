"""Circle-RoPE: image tokens on a circle around the text axis (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="circle_rope",
    kind=Kind.PATCH,
    target="hfplug.modeling_patches.circle_rope.patch:CircleRope",
    config="hfplug.modeling_patches.circle_rope.patch:CircleRope",
    summary="image tokens at positions on a circle around the axis of the text, in the layers a schedule says (AGE)",
    paper=Paper(
        title="Circle-RoPE: Cone-like Decoupled Rotary Positional Embedding for Large Vision-Language Models",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2505.16416",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "models": "Qwen2-VL, Qwen2.5-VL, Qwen3-VL; LLaVA on Llama, Mistral, Qwen2, Qwen3",
        "text-only input": "bit-identical",
        "several images, left padding, cached decoding, beams": True,
        "videos": "refused unless video='mrope' (stock positions) or 'frames' (a circle for each frame)",
        "PEFT, quantised weights, an existing optimizer": True,
        "gradient checkpointing, torch.compile": True,
    },
    limits=(
        "PTD = 0 is a statement about distances between indices. It does not make the RoPE logits of an image's tokens equal: "
        "M-RoPE gives each axis its own frequencies.",
        "A pretrained model must be tuned after the patch; without tuning, expect it to lose (in the paper it is behind after "
        "3k steps of tuning and ahead after about 8.5k).",
        "Text keeps the positions it has without the patch; the authors' code shifts it by an amount that depends on the radius.",
    ),
    example='hfplug.apply(model, "circle_rope", radius=10.0, age="alternate")',
    exports=(
        "hfplug.modeling_patches.circle_rope.distance:ptd",
        "hfplug.modeling_patches.circle_rope.distance:per_token_distance",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
