"""Trust-gated policy optimisation: token ratios pulled to the ratio of their sequence, as far as they are trusted."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="tgpo",
    kind=Kind.TRAINER,
    target="hfplug.trainers.tgpo.trainer:TGPOTrainer",
    config="hfplug.trainers.tgpo.config:TGPOConfig",
    summary="GRPO whose token ratios are anchored to their sequence's ratio by a trust gate, and whose gradient never clips away",
    paper=Paper(
        title="TGPO: Trust-Gated Policy Optimization",
        venue="abstract only",
        url="",
        fidelity="our reading",
    ),
    requires=("trl>=1.16,<1.17",),
    capabilities={
        "loss_type": "grpo, bnpo, dr_grpo, dapo",
        "KL, entropy bonus, MoE auxiliary loss, vision models, vLLM ratio": "as in GRPOTrainer",
        "per-token advantages": True,
        "gradient accumulation": True,
        "peft": True,
        "importance_sampling_level='sequence'": False,
    },
    limits=(
        "Only the abstract is public: anchor, gate, surrogates and defaults are a reconstruction.",
        "On-policy (num_iterations=1, no more steps per generation than accumulation steps) every ratio is 1 and TGPO is GRPO.",
        "The information factor takes its entropy quantile over the micro-batch of one rank.",
        "The retain surrogate has larger gradients than clipping after drift: it wants a smaller step, or kappa.",
    ),
    example="TGPOTrainer(model, reward_funcs=reward, args=TGPOConfig(num_iterations=4), train_dataset=data)",
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]
