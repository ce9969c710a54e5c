"""The options of Bayesian LoRA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from hfplug.errors import ConfigError
from hfplug.tuners.linear import LoraOptions, option


@dataclass
class BayesLoraConfig(LoraOptions):
    """Configuration of Bayesian LoRA ("Singular Bayesian Neural Networks", ICML 2026; in an adapter: our reading).

    ``dW = s·B̃Ã`` with ``Ã ~ N(A, σ_A²)`` ``(r, in)`` and ``B̃ ~ N(B, σ_B²)`` ``(out, r)``, ``σ = softplus(rho)``, every
    entry independent. Training minimises ``loss + kl_weight·ramp·KL(q‖prior) / train_size``.
    """

    method: ClassVar[str] = "bayes_lora"

    random_factors: Literal["both", "A"] = option(
        "both", "which factors are random: both (paper), or A alone (BLoB), where a fresh adapter samples the base model exactly"
    )
    sigma_init: float = option(
        0.01, "posterior standard deviation at the start, over that of LoRA's initialisation (paper: 0.01 or 0.1); see the page"
    )
    prior: Literal["scale_mixture", "gaussian"] = option(
        "scale_mixture", "pi·N(0, prior_sd²) + (1 - pi)·N(0, prior_sd_narrow²) (paper; KL by Monte Carlo), or N(0, prior_sd²)"
    )
    prior_sd: float = option(1.0, "standard deviation of the (wide) prior; our reading")
    prior_sd_narrow: float = option(math.exp(-3), "standard deviation of the narrow part of the mixture (paper, main text)")
    prior_mix: float = option(0.5, "pi, weight of the wide part (paper)")
    kl_weight: float = option(
        0.001, "weight of the KL against the data (paper: 0.001 for a Transformer, up to 1 for small networks); 0: no prior"
    )
    train_size: int | None = option(
        None, "terms the loss is a mean over in one pass of the training data: label tokens, or examples of a classifier"
    )
    kl_start_step: int = option(0, "optimizer steps without the KL (paper, SST-2: two epochs)")
    kl_warmup_steps: int = option(0, "then this many steps of linear increase to its full weight (paper, SST-2: two epochs)")
    rho_lr_multiplier: float = option(10.0, "learning rate of rho over the run's; our reading; see hfplug.tuners.prepare")
    train_mode: Literal["sample", "mean"] = option("sample", "train on a weight sample per step, or on the mean (MAP)")
    eval_mode: Literal["mean", "sample"] = option(
        "mean",
        "in evaluation: the mean, or the weight sample number `seed`; hfplug.tuners.posterior(model, sample=...) overrides",
    )
    seed: int = option(0, "of the weight samples; torch's global generator is never touched")

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = ("sigma_init", "prior_sd", "prior_sd_narrow", "prior_mix", "kl_weight")
        self.require(*((name, isinstance(getattr(self, name), (int, float)), "a number") for name in numbers))
        sized = self.train_size is None or (type(self.train_size) is int and self.train_size > 0)
        self.require(
            ("random_factors", self.random_factors in ("both", "A"), "'both' or 'A'"),
            ("sigma_init", self.sigma_init > 0, "> 0"),
            ("prior", self.prior in ("scale_mixture", "gaussian"), "'scale_mixture' or 'gaussian'"),
            ("prior_sd", self.prior_sd > 0, "> 0"),
            ("prior_sd_narrow", self.prior_sd_narrow > 0, "> 0"),
            ("prior_mix", 0 < self.prior_mix < 1, "in (0, 1)"),
            ("kl_weight", self.kl_weight >= 0, ">= 0"),
            ("train_size", sized, "an integer > 0, or None"),
            ("kl_start_step", self.kl_start_step >= 0, ">= 0"),
            ("kl_warmup_steps", self.kl_warmup_steps >= 0, ">= 0"),
            ("rho_lr_multiplier", self.rho_lr_multiplier > 0, "> 0"),
            ("train_mode", self.train_mode in ("sample", "mean"), "'sample' or 'mean'"),
            ("eval_mode", self.eval_mode in ("mean", "sample"), "'mean' or 'sample'"),
            ("seed", isinstance(self.seed, int) and self.seed >= 0, "an integer >= 0"),
        )

    def kl_coefficient(self, step: int, counted: int | None = None) -> float:
        """What the KL is multiplied with at optimizer step ``step`` (the first is 0), in units of the mean loss per term.

        ``counted`` takes the place of ``train_size`` where that is not given.

        Raises:
            ConfigError: ``train_size`` is not known.
        """
        if self.kl_weight == 0:
            return 0.0
        size = self.train_size if self.train_size is not None else counted
        if size is None:
            raise ConfigError(
                "bayes_lora: the loss is a mean over label tokens, so the KL must be divided by their number, which is not "
                "known: call hfplug.tuners.prepare(trainer) before train(), set train_size=..., or kl_weight=0 for no prior"
            )
        since = step - self.kl_start_step
        ramp = 0.0 if since < 0 else min(1.0, since / self.kl_warmup_steps) if self.kl_warmup_steps else 1.0
        return self.kl_weight * ramp / size
