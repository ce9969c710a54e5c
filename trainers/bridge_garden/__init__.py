"""Bridge-Garden: hard and soft labels mixed token by token, by what the teacher says of the position."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="bridge_garden",
    kind=Kind.TRAINER,
    target="hfplug.trainers.bridge_garden.trainer:BridgeGardenTrainer",
    config="hfplug.trainers.bridge_garden.config:BridgeGardenConfig",
    summary="off-policy distillation: hard labels where one slip spoils the rest, soft labels where many words are good",
    paper=Paper(
        title="Bridge-Garden hybrid knowledge distillation",
        venue="arXiv 2605.26246",
        url="https://arxiv.org/abs/2605.26246",
        fidelity="paper",
    ),
    requires=("trl>=1.16",),
    capabilities={
        "base": "trl.SFTTrainer",
        "gradient accumulation": True,
        "gradient checkpointing": True,
        "packing, padding_free, completion_only_loss": True,
        "peft": True,
        "lm_head bias, logit scale, final softcap": True,
        "DDP, FSDP, DeepSpeed": "TRL's own way into the wrapper, not tested here",
        "liger, images, router loss, another vocabulary, an adapter on lm_head, prompt learning": False,
    },
    limits=(
        "The soft label's divergence is forward KL at temperature 1; the authors' code offers others.",
        "risk is the paper's formula with the last token of a sequence left out (our reading); the authors' code has a discount, "
        "another penalty and a terminal term.",
        "risk compares raw logits, whose offset cross-entropy leaves free: its value means little at the first steps.",
    ),
    example='BridgeGardenTrainer("student", teacher_model="teacher", args=BridgeGardenConfig("out"), train_dataset=data).train()',
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]
