"""Next implicit token prediction: the last hidden state also predicts an early hidden state of the next token."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="nitp",
    kind=Kind.LOSS,
    target="hfplug.losses.nitp.loss:NITPLoss",
    config="hfplug.losses.nitp.config:NITPConfig",
    summary="the last hidden state also predicts the next token's hidden state after the first fifth of the layers",
    paper=Paper(
        title="Next Implicit Token Prediction",
        venue="arXiv 2605.24956",
        url="https://arxiv.org/abs/2605.24956",
        fidelity="paper",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "Trainer": True,
        "SFTTrainer": True,
        "other TRL trainers": 'pairs="all" where batches carry no labels (DPO, GRPO, ...)',
        "gradient accumulation": True,
        "packing, padding_free": True,
        "gradient checkpointing": True,
        "peft": True,
        "DDP": True,
        "FSDP, DeepSpeed, torch_compile": False,
    },
    limits=(
        "The paper pretrains from scratch; what the term does in fine-tuning is not claimed there.",
        "The paper gives no initialisation of the projector and does not say whether h is taken before or after the final "
        "norm: nn.Linear's own initialisation and the state after the norm are our reading.",
        "The projector adds 12 d^2 weights to the optimizer (gradient and moments) while training.",
        "The logged training loss includes weight * nitp/loss; eval_loss does not.",
    ),
    example='hfplug.losses.add(trainer, "nitp", weight=1.0)',
    exports=("hfplug.losses.nitp.loss:SwiGLUProjector",),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]
