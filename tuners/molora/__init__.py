"""MoLoRA: independently trained LoRA adapters, one of them chosen for every token (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="molora",
    kind=Kind.TUNER,
    target="hfplug.tuners.molora.model:MoLoraModel",
    config="hfplug.tuners.molora.config:MoLoraConfig",
    summary="loads several trained LoRA adapters, frozen, and routes every token through one of them",
    paper=Paper(
        title="MoLoRA: Composable Specialization via Per-Token Adapter Routing",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2603.15965",
        fidelity="our reading",
    ),
    requires=("peft>=0.21", "transformers>=5.24"),
    capabilities={
        "merge": "one expert alone: hfplug.tuners.merge_single(model, expert)",
        "quantised base": True,
        "multiple adapters": True,
        "gradient checkpointing": "non-reentrant; router_scope='module' also reentrant",
        "left padding": True,
        "packing": True,
        "beam search": True,
        "cache": True,
        "mixed batches (adapter_names=)": False,
    },
    limits=(
        "Only the abstract of the paper was read: the router, where it reads, its loss and every default are our reading.",
        "Experts are plain LoRA on linear modules inside the token stack; DoRA and other variants, trained biases, embeddings "
        "and initialisations that change the base model (PiSSA, OLoRA, CorDA, LoftQ) are refused.",
        "Training with router_gradient='all' (default) takes every expert's rows for the router's gradient; 'chosen' takes N "
        "rows and hardly learns from the language model loss. Inference takes N rows.",
        "torch.compile breaks the graph in every adapted module.",
        "Cached keys and values keep the expert of their own token, as decided when it was read.",
    ),
    example='get_peft_model(model, hfplug.tuners.config(type="molora", experts={"math": "math-lora", "code": "code-lora"}))',
    exports=(
        "hfplug.tuners.molora.verbs:add_expert",
        "hfplug.tuners.molora.verbs:load_router",
        "hfplug.tuners.molora.verbs:merge_single",
        "hfplug.tuners.molora.verbs:remove_expert",
        "hfplug.tuners.molora.verbs:routing",
        "hfplug.tuners.molora.verbs:save_router",
        "hfplug.tuners.molora.loss:RouterLoss",
        "hfplug.tuners.molora.loss:RouterLossConfig",
        "hfplug.tuners.molora.loss:LabelCollator",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [METHOD]
