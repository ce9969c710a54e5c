"""EOPD: on-policy distillation with forward KL added where the teacher is uncertain."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="eopd",
    kind=Kind.TRAINER,
    target="hfplug.trainers.eopd.trainer:EOPDTrainer",
    config="hfplug.trainers.eopd.config:EOPDConfig",
    summary="on-policy distillation: reverse KL on every token, forward KL added where the teacher's entropy is high",
    paper=Paper(
        title="Entropy-Aware On-Policy Distillation",
        venue="arXiv 2603.07079",
        url="https://arxiv.org/abs/2603.07079",
        fidelity="our reading",
    ),
    requires=("trl>=1.16",),
    capabilities={
        "base": "trl.DistillationTrainer",
        "gradient accumulation": True,
        "gradient checkpointing": True,
        "peft": True,
        "lm_head bias, logit scale, final softcap, temperature": True,
        "vLLM, tools, images": "TRL's own paths, not tested here",
        "DDP, FSDP, DeepSpeed": "TRL's own paths, not tested here",
        "liger, another vocabulary, an adapter on lm_head, prompt learning": False,
    },
    limits=(
        "The paper updates several times per rollout with a clipped surrogate; TRL's trainer once, so nothing is clipped.",
        "The paper's code estimates reverse KL from the sampled token; the default here is the exact sum "
        "(eopd_reverse_kl='sampled' is the other one).",
        "The student and the teacher need the same number of words and the same ids.",
    ),
    example='EOPDTrainer(model="student", teacher_model="teacher", args=EOPDConfig("out"), train_dataset=prompts).train()',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]
