"""KL divergence of a diagonal Gaussian from the priors of the paper."""

from __future__ import annotations

import math

import torch

from hfplug.tuners.bayes_lora.config import BayesLoraConfig

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def kl_gaussian(mean: torch.Tensor, sigma: torch.Tensor, prior_sd: float) -> torch.Tensor:
    """``sum KL(N(mean, sigma²) ‖ N(0, prior_sd²))``, closed form, 0-d."""
    ratio = sigma / prior_sd
    return (0.5 * (ratio.square() + (mean / prior_sd).square() - 1) - ratio.log()).sum()


def log_mixture(w: torch.Tensor, config: BayesLoraConfig) -> torch.Tensor:
    """``log(pi·N(w; 0, prior_sd²) + (1 - pi)·N(w; 0, prior_sd_narrow²))``, elementwise."""
    wide, narrow = config.prior_sd, config.prior_sd_narrow
    a = math.log(config.prior_mix / wide) - 0.5 * (w / wide).square()
    b = math.log((1 - config.prior_mix) / narrow) - 0.5 * (w / narrow).square()
    return torch.logaddexp(a, b) - _LOG_SQRT_2PI


def kl_mixture(mean: torch.Tensor, sigma: torch.Tensor, eps: torch.Tensor, config: BayesLoraConfig) -> torch.Tensor:
    """Unbiased estimate of ``sum KL(N(mean, sigma²) ‖ scale mixture)``, 0-d.

    The entropy is exact; the cross term, which has no closed form, is averaged over ``mean ± sigma·eps``: the pair cancels
    the odd part of the noise. ``eps`` is standard normal, shaped as ``mean`` with any leading dimensions of draws.
    """
    entropy = sigma.log() + _LOG_SQRT_2PI + 0.5
    step = sigma * eps
    cross = 0.5 * (log_mixture(mean + step, config) + log_mixture(mean - step, config))
    draws = cross.numel() // max(mean.numel(), 1)
    return -(entropy.sum() + cross.sum() / max(draws, 1))


def kl(mean: torch.Tensor, sigma: torch.Tensor, eps: torch.Tensor, config: BayesLoraConfig) -> torch.Tensor:
    """KL from the prior of ``config``, summed over entries (0-d, the dtype of ``mean``, which should be float32 or float64)."""
    if config.prior == "gaussian":
        return kl_gaussian(mean, sigma, config.prior_sd)
    return kl_mixture(mean, sigma, eps, config)
