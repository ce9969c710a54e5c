"""MXFP4 with overflow-aware scaling and macro block scaling: weights in 4 bits (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(
    name="mxfp4_plus",
    kind=Kind.QUANTIZER,
    target="hfplug.kernels.mxfp4_plus.quantizer:Mxfp4PlusQuantizer",
    config="hfplug.kernels.mxfp4_plus.config:Mxfp4PlusConfig",
    summary="weights, and activations if wanted, in 4 bits: MXFP4 with overflow-aware scales and a factor per 128 numbers",
    paper=Paper(
        title="Overflow-Aware Scaling and Macro Block Scaling for MXFP4",
        venue="arXiv preprint",
        url="https://arxiv.org/abs/2603.08713",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "quantise on load, float32, bfloat16, float16, shards": True,
        "packed folders": "bit for bit; refused without hfplug",
        "LoRA and tuners of hfplug on top": "train; merging is refused, or asked for by merge_quantized",
        "gradient checkpointing, Trainer": True,
        "full fine-tuning of packed weights": False,
        "nn.Linear": "but output heads, tied weights, routers and the last module",
        "fused experts, Conv1D": False,
        "native 4-bit arithmetic": "no: emulated on every device",
        "plain OCP MXFP4": "export_ocp(), which quantises again without the factors",
    },
    limits=(
        "Emulated: products are computed from unpacked weights. Memory is saved, time is not.",
        "Blocks of 16 (the paper's, and the default) are no OCP format; hardware for MXFP4 reads blocks of 32.",
        "With activations=4 a token's output depends on its own numbers alone, but rounding is applied again at every call.",
        "At block 32 'oas' equals torchao's and Quark's 'even' but where a significand is exactly 1.75: no gain over it there.",
    ),
    example='AutoModelForCausalLM.from_pretrained(path, quantization_config={"quant_method": "mxfp4_plus"})',
    exports=(
        "hfplug.kernels.mxfp4_plus.calibration:calibrate",
        "hfplug.kernels.mxfp4_plus.export:export_ocp",
        "hfplug.kernels.mxfp4_plus.ops:linear",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]


__getattr__, __dir__ = lazy_method(METHOD, __name__)
