"""TRL's GRPO loss in parts: ``log_weights``, ``token_loss`` and ``extra_loss`` are what an RL method replaces.

TRL 1.16 has one hook for a policy loss, ``GRPOTrainer._compute_loss``: 250 lines that also hold the KL, the entropy bonus,
the MoE auxiliary loss, importance sampling for vLLM, normalisation and metrics. :class:`GRPOBaseTrainer` runs the same
arithmetic with three places left open; with the defaults it equals the stock trainer for every ``loss_type``, level and
setting (tests/trainers/test_grpo_base.py), and tests/drift says when TRL's function has changed and this must be derived anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfplug import ConfigError
from hfplug.seams.trainer import stock_trainer

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # the loss types with PPO's clipped surrogate
# What a vision model's processor may add to a batch, handed on to the forward as it is.
_VISION = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Rollout:
    """What the hooks see of one micro-batch: ``B`` completions of at most ``T`` tokens.

    A group of completions of one prompt is neither contiguous nor complete in a micro-batch: TRL shuffles and splits the
    generated rows. What is group-wise must be done before, in ``_generate_and_score_completions``.

    Attributes:
        inputs: the batch as ``_compute_loss`` got it.
        logps: ``(B, T)`` log-probabilities of the tokens under the policy, at the run's temperature, with gradient.
        log_ratio: ``(B, T)`` log policy minus log old policy, with gradient; at padding it means nothing.
        entropies: ``(B, T)`` entropy of the policy at each position (nats).
        mask: ``(B, T)`` 1 for the tokens of the model that count, 0 for padding, tool output and masked rows.
        advantages: ``(B, 1)`` or ``(B, T)``.
    """

    inputs: Mapping[str, Any]
    logps: Tensor
    log_ratio: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor


class GRPOBaseTrainer(stock_trainer("grpo")):  # type: ignore[misc]
    """``GRPOTrainer`` with its policy loss in three overridable parts."""

    entropy_coef: float
    _entropy_window_stats: Tensor | None

    def log_weights(self, rollout: Rollout) -> Tensor:
        """Log importance weights, ``(B, T)`` or ``(B, 1)``; by default TRL's, of ``importance_sampling_level``."""
        if self.importance_sampling_level == "token":
            return rollout.log_ratio
        if self.importance_sampling_level == "sequence":
            return masked_mean(rollout.log_ratio, rollout.mask).unsqueeze(-1)
        level = self.importance_sampling_level
        raise ConfigError(f"importance_sampling_level={level!r} is not one of ['token', 'sequence']")

    def token_loss(self, rollout: Rollout, log_weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss per token, ``(B, T)`` or ``(B, 1)``, and what is to be logged (name -> the same shapes, averaged over
        tokens); by default TRL's, of ``loss_type``. Masking, KL, aggregation and normalisation come after."""
        ratio, advantages = torch.exp(log_weights), rollout.advantages
        if self.loss_type in CLIPPED:
            clipped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
            bounded = ratio if self.args.delta is None else torch.clamp(ratio, max=self.args.delta)
            return -torch.min(bounded * advantages, clipped * advantages), {}
        if self.loss_type == "cispo":
            weight = torch.clamp(ratio, max=self.epsilon_high).detach()
            beyond = (ratio > self.epsilon_high) & (advantages > 0)
            return -weight * advantages * rollout.logps, {"cispo_clip_ratio": beyond.float()}
        if self.loss_type == "sapo":
            heat = torch.where(advantages > 0, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)
            return -(torch.sigmoid(heat * (ratio - 1)) * 4 / heat) * advantages, {}
        if self.loss_type == "vespo":
            args = self.args
            phi = self.get_gamma_weights(
                advantages=advantages, log_ratio_per_token=rollout.log_ratio, mask=rollout.mask,
                importance_sampling_ratio=rollout.inputs.get("importance_sampling_ratio"), k_pos=args.vespo_k_pos,
                lambda_pos=args.vespo_lambda_pos, k_neg=args.vespo_k_neg, lambda_neg=args.vespo_lambda_neg,
            )  # fmt: skip
            return -phi * advantages * rollout.logps, {"vespo/phi_seq_mean": phi}
        raise ConfigError(f"loss_type={self.loss_type!r} is not one that GRPOTrainer of TRL 1.16 has")

    def extra_loss(self, rollout: Rollout) -> Tensor | None:
        """A further 0-d term with gradient, a mean over this micro-batch; divided by the accumulation steps here."""
        return None

    def kl_ratio(self, rollout: Rollout, log_weights: Tensor) -> Tensor:
        """The ratio that TRL multiplies the KL with under ``use_bias_correction_kl``; by default of the same weights."""
        return torch.exp(log_weights)

    # -- the whole, in the order of TRL's function

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"]
        mask = mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{key: inputs.get(key) for key in _VISION},
        )
        entropy_mask = None
        if self.top_entropy_quantile < 1.0:
            entropy_mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        advantages = inputs["advantages"] if inputs["advantages"].dim() > 1 else inputs["advantages"].unsqueeze(1)
        old = inputs.get("old_per_token_logps")  # absent where the policy is the old policy
        old = logps.detach() if old is None else old
        rollout = Rollout(inputs, logps, logps - old, entropies, mask, advantages)

        log_weights = self.log_weights(rollout)
        token_loss, shown = self.token_loss(rollout, log_weights)
        if self.off_policy_mask_threshold is not None:
            token_loss = token_loss * self.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if entropy_mask is not None:
            token_loss = token_loss * entropy_mask
        if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":
            token_loss = token_loss * inputs["importance_sampling_ratio"]
        kl = None
        if self.beta != 0.0:
            gap = inputs["ref_per_token_logps"] - logps
            kl = torch.exp(gap) - gap - 1
            if self.args.use_bias_correction_kl:
                kl = kl * self.kl_ratio(rollout, log_weights)
            token_loss = token_loss + self.beta * kl

        mode = "train" if self.model.training else "eval"
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        loss, policy_loss = self._aggregate(token_loss, mask, inputs, accumulation, mode)
        if self._entropy_bonus_enabled:
            active = mask if entropy_mask is None else mask * entropy_mask
            loss = loss - self._entropy_bonus(entropies, active) / accumulation
            self._metrics[mode]["policy_loss"].append(self.accelerator.gather(policy_loss).nanmean().item())
            self._adapt_entropy(entropies, active, mode)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        extra = self.extra_loss(rollout)
        if extra is not None:
            loss = loss + extra / accumulation
        self._log_parts(rollout, log_weights, kl, shown, mode)
        return loss

    def _aggregate(
        self, token_loss: Tensor, mask: Tensor, inputs: Mapping[str, Any], accumulation: float, mode: str
    ) -> tuple[Tensor, Tensor]:
        """The loss scaled for accumulation, and the policy loss as it is logged."""
        if self.loss_type in ("cispo", "dapo", "vespo"):
            # num_items_in_batch spans the generated batch; in evaluation that is neither split nor accumulated.
            normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if mode == "train":
                normalizer = normalizer * accumulation / self.args.steps_per_generation
            loss = (token_loss * mask).sum() / normalizer
            return loss, loss.detach()
        if self.loss_type in ("grpo", "sapo"):
            loss = masked_mean(token_loss, mask).mean()
        elif self.loss_type == "bnpo":
            loss = (token_loss * mask).sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            loss = (token_loss * mask).sum() / (token_loss.size(0) * self.max_completion_length)
        elif self.loss_type == "luspo":
            loss = (token_loss * mask).sum(-1).mean()
        else:
            raise ConfigError(f"loss_type={self.loss_type!r} is not one that GRPOTrainer of TRL 1.16 has")
        return loss / accumulation, loss.detach()

    def _entropy_bonus(self, entropies: Tensor, active: Tensor) -> Tensor:
        coefficient = self.entropy_coef
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            coefficient = 0.0
        bonus: Tensor = coefficient * (entropies * active).sum() / active.sum().clamp(min=1.0)
        return bonus

    def _adapt_entropy(self, entropies: Tensor, active: Tensor, mode: str) -> None:
        """Move the coefficient of the bonus at the end of a window, by the entropy of all its tokens on all ranks."""
        if mode != "train":
            return
        args = self.args
        if self.use_adaptive_entropy:
            window = torch.stack([(entropies * active).sum(), active.sum()]).detach()
            if self._entropy_window_stats is not None:
                window = window + self._entropy_window_stats
            self._entropy_window_stats = window
            if self.accelerator.sync_gradients:
                total = self.accelerator.reduce(window, reduction="sum")
                found = (total[0] / total[1].clamp(min=1.0)).item()
                if found <= args.entropy_target:
                    self.entropy_coef = min(self.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
                else:
                    self.entropy_coef = max(self.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
                self._last_world_entropy, self._entropy_window_stats = found, None
        if self.accelerator.sync_gradients:
            self._metrics[mode]["entropy_coef"].append(self.entropy_coef)

    def _log_parts(
        self, rollout: Rollout, log_weights: Tensor, kl: Tensor | None, shown: Mapping[str, Tensor], mode: str
    ) -> None:
        mask, metrics = rollout.mask, self._metrics[mode]

        def over_tokens(x: Tensor) -> float:
            if x.shape[1] == 1:  # one value per sequence
                parts = x.sum(), torch.tensor(float(x.shape[0]), device=x.device)
            else:
                parts = (x * mask).sum(), mask.sum().float()
            total = self.accelerator.reduce(torch.stack(parts), reduction="sum")
            return float((total[0] / total[1].clamp(min=1.0)).item())

        def per_row(x: Tensor) -> Tensor:
            return x.squeeze(1) if x.shape[1] == 1 else (x * mask).sum(-1) / mask.sum(-1)

        if kl is not None:
            metrics["kl"].append(over_tokens(kl))
        metrics["entropy"].append(over_tokens(rollout.entropies))
        if self.loss_type in CLIPPED:
            ratio = torch.exp(log_weights)
            if self.args.delta is not None:
                ratio = torch.clamp(ratio, max=self.args.delta)
            low = (ratio < 1 - self.epsilon_low) & (rollout.advantages < 0)
            high = (ratio > 1 + self.epsilon_high) & (rollout.advantages > 0)
            for name, found in (("low", low), ("high", high), ("region", low | high)):
                metrics[f"clip_ratio/{name}_mean"].append(over_tokens(found.float()))
            lowest = self.accelerator.gather(per_row(low.float()))
            highest = self.accelerator.gather(per_row(high.float()))
            # A row that is masked whole has no share of clipped tokens (NaN), and all may be such rows.
            lowest, highest = lowest[~lowest.isnan()], highest[~highest.isnan()]
            metrics["clip_ratio/low_min"].append(lowest.min().item() if len(lowest) else float("nan"))
            metrics["clip_ratio/high_max"].append(highest.max().item() if len(highest) else float("nan"))
        for name, values in shown.items():
            metrics[name].append(over_tokens(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``(B, T) -> (B,)``: the mean over the tokens of each row that count; 0 for a row without any."""
    mean: Tensor = (values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    return mean
