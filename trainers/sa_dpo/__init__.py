"""SA-DPO: DPO with a margin that grows with the semantic distance of the two responses, under a surrogate of choice."""

from hfplug import Extension, Kind, Method, Paper, hookimpl

METHOD = Method(
    name="sa_dpo",
    kind=Kind.TRAINER,
    target="hfplug.trainers.sa_dpo.trainer:SADPOTrainer",
    config="hfplug.trainers.sa_dpo.config:SADPOConfig",
    summary="DPO with a margin by the semantic distance of the two responses, and a choice of surrogates",
    paper=Paper(
        title="Mind the Gap: Structure-Aware Consistency in Preference Learning",
        venue="arXiv 2604.27733",
        url="https://arxiv.org/abs/2604.27733",
        fidelity="our reading",
    ),
    requires=("trl>=1.16",),
    capabilities={
        "precomputed reference log-probs": True,
        "reference-free": True,
        "peft": "the reference is the model without its adapter, or a frozen copy of a trained one",
        "further TRL losses": 'loss_type=["sa_dpo", "sft"] with loss_weights',
        "gradient accumulation": True,
        "gradient checkpointing": True,
        "reward models": "add_margin() writes the margin column of stock RewardTrainer",
        "padding_free, use_liger_kernel, ld_alpha, use_weighting, f-divergences": False,
    },
    limits=(
        "The public text is an abstract: gamma(d), the distance and every default are our reading.",
        "Distances are data: compute them once with add_semantic_distance(), or bring a column of your own.",
        "The slope of poly and exp has no bound: keep gradient clipping on.",
        "hinge and poly have no slope once u >= 1: sa_dpo/active_frac is the share of pairs with one.",
        "sa_dpo_reference_free: after training, evaluate() takes no new dataset (as TRL's precomputed references).",
    ),
    example='SADPOTrainer(model, args=SADPOConfig("out"), train_dataset=add_semantic_distance(data, encoder))',
    exports=(
        "hfplug.trainers.sa_dpo.distance:HiddenStateEncoder",
        "hfplug.trainers.sa_dpo.distance:add_semantic_distance",
        "hfplug.trainers.sa_dpo.margins:add_margin",
        "hfplug.trainers.sa_dpo.margins:structure_margin",
        "hfplug.trainers.sa_dpo.surrogates:margin_capacity_profile",
        "hfplug.trainers.sa_dpo.surrogates:surrogate",
    ),
    extension_points={"surrogate": "a dataclass of options whose instances map u = beta*Delta - gamma to losses, elementwise"},
)

_SURROGATES = {
    "logistic": ("Logistic", "log(1 + exp(-u)), DPO's"),
    "hinge": ("Hinge", "max(0, 1 - u)"),
    "poly": ("Poly", "max(0, 1 - u) ** power"),
    "exp": ("Exponential", "exp(-u)"),
}


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]


@hookimpl
def hfplug_extensions() -> list[Extension]:
    """The surrogates of the abstract, offered as any other plugin offers one."""
    return [
        Extension(method="sa_dpo", point="surrogate", name=name, target=f"hfplug.trainers.sa_dpo.surrogates:{cls}", summary=text)
        for name, (cls, text) in _SURROGATES.items()
    ]
