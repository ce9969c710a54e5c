"""LRAgent: one KV cache for several LoRA adapters that read one text, and attention on it (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

_PAPER = Paper(
    title="LRAgent: Efficient KV Cache Sharing for Multi-LoRA LLM Agents",
    venue="ICML 2026",
    url="https://arxiv.org/abs/2602.01053",
    fidelity="our reading",
)

METHODS = [
    Method(
        name="lragent",
        kind=Kind.CACHE,
        target="hfplug.kernels.lragent.cache:LowRankValueCache",
        config="hfplug.kernels.lragent.config:LRAgentConfig",
        summary="one KV cache for several LoRA agents on one text: keys and base values shared, low-rank parts of each",
        paper=_PAPER,
        requires=("transformers>=5.24", "peft>=0.21"),
        capabilities={
            "generate: greedy, sampled, several turns, chunked prefill, assisted decoding": True,
            "beam search": "while no other agent has stored anything, or on a copy",
            "left padding": "the same for every agent",
            "plain LoRA on any projection; 4-bit bases": True,
            "DoRA, biases, modules_to_save, other tuners": "refused",
            "several adapters in one batch (adapter_names)": "refused",
            "sliding windows, static caches, inputs_embeds": "refused",
            "training": "refused",
        },
        limits=(
            "Sharing beyond the first adapted layer is an approximation: from there on the agents' hidden states differ. Only "
            'mode="exact" is exact, and it shares little.',
            "Saves memory; in modes exact and base every agent still reads the text once.",
            "Agents with system prompts of their own have no common text, and share nothing.",
            "No gradient flows through stored tokens.",
        ),
        example='model.generate(**batch, cache=store.view("planner"))   # store = LowRankValueCache(model, mode="base")',
        exports=("hfplug.kernels.lragent.split:tie_value_a",),
    ),
    Method(
        name="lora_lowrank",
        kind=Kind.ATTENTION,
        target="hfplug.kernels.lragent.backend:LoraLowrankAttention",
        config="hfplug.kernels.lragent.config:LoraLowrankConfig",
        summary="exact attention over values stored as a base and a low-rank part, without adding them up",
        paper=_PAPER,
        requires=("transformers>=5.24",),
        capabilities={
            "with an lragent cache": "Flash-LoRA-Attention",
            "without": "exact attention through sdpa",
            "masks, windows, softcap, learned sinks, dropout, output_attentions": True,
        },
        limits=("Outside of Triton, values are added up, layer by layer, for calls of more than 8 queries.",),
        example='AutoModelForCausalLM.from_pretrained(path, attn_implementation="lora_lowrank")',
        exports=("hfplug.kernels.lragent.op:flash_lora_attention",),
    ),
]


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return METHODS


__getattr__, __dir__ = lazy_method(METHODS, __name__)
