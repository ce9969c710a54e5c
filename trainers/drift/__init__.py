"""DRIFT: rollouts of a frozen model, weighted by their return, fine-tuned on as in SFT."""

from hfplug import Kind, Method, Paper, hookimpl

METHOD = Method(
    name="drift",
    kind=Kind.TRAINER,
    target="hfplug.trainers.drift.trainer:DRIFTTrainer",
    config="hfplug.trainers.drift.config:DRIFTConfig",
    command="hfplug.trainers.drift.command:app",
    summary="weighted SFT on multi-turn rollouts of the initial model, the weights exp(return / beta) with mean 1 per prompt",
    paper=Paper(
        title="DRIFT: Decoupled Rollouts and Importance-Weighted Fine-Tuning",
        venue="arXiv 2605.31455",
        url="https://arxiv.org/abs/2605.31455",
        fidelity="authors' code",
    ),
    requires=("trl>=1.16",),
    capabilities={
        "gradient accumulation": "one denominator per optimizer step",
        "peft": True,
        "evaluation": "the stock loss, with or without weights",
        "DDP": "by TRL's own scaling; not run over several ranks here",
        "collecting with transformers": True,
        "collecting with vLLM": "written to vLLM's documented calls; not run here",
        "packing, padding_free": False,
        "assistant_only_loss, label smoothing, loss_type dft": False,
        "Liger": False,
        "images": False,
        "tensor, context, sequence parallelism": False,
    },
    limits=(
        "The rollouts must come from the model that training starts from; of another policy they are no samples of pi_ref.",
        "A prompt none of whose rollouts succeeds keeps weights of mean 1, as in the authors' code, and so trains on failures; "
        "drift_drop_zero_success leaves such prompts out.",
        "Weights have mean 1 per prompt of the whole file: split by prompt, and weigh before any other selection of rows.",
        'The denominator of drift_normalization="sequence" is the number of rows of the optimizer step: the paper\'s mean.',
        "The verifier, and what counts as badly formatted, are the user's; the built-in one is our reading.",
    ),
    example='DRIFTTrainer(model, args=DRIFTConfig("out"), train_dataset=rollouts)  # a Dataset of rollouts.jsonl',
    exports=(
        "hfplug.trainers.drift.weights:drift_weights",
        "hfplug.trainers.drift.weights:discounted_return",
        "hfplug.trainers.drift.weights:repeat_penalty",
        "hfplug.trainers.drift.weights:effective_sample_size",
        "hfplug.trainers.drift.data:to_drift_dataset",
        "hfplug.trainers.drift.data:read_rollouts",
        "hfplug.trainers.drift.data:write_rollouts",
        "hfplug.trainers.drift.collect:DriftRolloutCollector",
        "hfplug.trainers.drift.collect:Verdict",
        "hfplug.trainers.drift.generators:ModelGenerator",
        "hfplug.trainers.drift.generators:VLLMGenerator",
        "hfplug.trainers.drift.verify:answer_match",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The one method of this plugin."""
    return [METHOD]
