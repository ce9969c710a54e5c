"""Bayesian LoRA on the rank-r manifold: both factors Gaussian, one coherent weight sample at a time (manifest; no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

_PACKAGE = "hfplug.tuners.bayes_lora"

METHOD = Method(
    name="bayes_lora",
    kind=Kind.TUNER,
    target=f"{_PACKAGE}.model:BayesLoraModel",
    config=f"{_PACKAGE}.config:BayesLoraConfig",
    summary="LoRA whose two factors are random: a posterior over adapters, with predictive uncertainty",
    paper=Paper(
        title="Singular Bayesian Neural Networks",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2602.00387",
        fidelity="our reading",
    ),
    requires=("peft>=0.21", "transformers>=5.24"),
    capabilities={
        "merge": "the mean",
        "export": "the mean, as a plain LoRA",
        "quantised base": True,
        "multiple adapters": True,
        "gradient checkpointing": True,
        "left padding": True,
        "packing": True,
        "beam search": True,
        "cache": "every cache",
        "mixed batches (adapter_names=)": False,
    },
    limits=(
        "The paper trains low-rank layers from scratch; placing the idea in an adapter is our reading, as are the defaults "
        "of the scales.",
        "One weight sample per optimizer step, shared by all micro-batches and ranks; not one per example.",
        "The KL is added to the gradients before each optimizer step, not to the logged loss (it is logged as bayes_lora/kl).",
        "The number of training tokens must be known: train_size=, or hfplug.tuners.prepare(trainer), done by `hfplug train`.",
        "DeepSpeed and FSDP1, which step copies of the parameters, are refused by prepare().",
        "The mean of the predictions is not the prediction of the mean; merging and exporting keep only the latter.",
        "Samples are reproducible on one kind of device; CPU and GPU draw different numbers from the same seed.",
    ),
    example='model = get_peft_model(model, hfplug.tuners.config(type="bayes_lora", r=8)); hfplug.tuners.prepare(trainer)',
    exports=(
        f"{_PACKAGE}.posterior:posterior",
        f"{_PACKAGE}.posterior:predictive",
        f"{_PACKAGE}.posterior:Predictive",
        f"{_PACKAGE}.calibration:expected_calibration_error",
        f"{_PACKAGE}.calibration:negative_log_likelihood",
        f"{_PACKAGE}.calibration:brier_score",
        f"{_PACKAGE}.calibration:ood_auroc",
        f"{_PACKAGE}.calibration:reliability_plot",
        f"{_PACKAGE}.conversion:from_lora",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [METHOD]
