"""Every private or unstable upstream name hfplug relies on, with its owner and the condition for deletion; pure data.

``hfplug doctor`` checks them in the user's environment, tests/drift in ours. A name used anywhere and not listed here is a
bug. ``PROVEN`` is the set of versions the tests run with, the same as constraints.txt.
"""

from __future__ import annotations

from dataclasses import dataclass

PROVEN = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "pluggy": "1.7.0",
    "wrapt": "2.5.2",
}


@dataclass(frozen=True)
class Upstream:
    """One name of another library.

    Attributes:
        name: ``"module:attribute.path"``.
        owner: the seam, core module or method that breaks without it.
        until: when this reliance can go.
        parameters: parameters of the callable that are used by name or position.
    """

    name: str
    owner: str
    until: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derived:
    """A function of another library that a method overrides by arithmetic of its own, derived from its source.

    Attributes:
        name: ``"module:attribute.path"``.
        owner: the module that must be derived anew when it changes.
        until: when this reliance can go.
        sha256: of the function's code, as tests/drift/test_upstream.py takes it.
    """

    name: str
    owner: str
    until: str
    sha256: str


_PEFT_API = "PEFT offers third-party registration (huggingface/peft#2273)"
_ATTENTION_API = "transformers offers a hook on an attention module's queries and keys"
_MASK_API = "transformers tells a mask function about packing by a tensor"
_NAMES_API = "transformers unregisters attention names and refuses those without a mask function"
_POSITIONS_API = "cache layers say which tokens the keys they return are"
_FOLLOW_API = "caches tell when their rows or tokens change"
_TRAINER_API = "Trainer hands callbacks the trainer, or takes metrics from them"
_PATCH_API = "transformers builds a model with changes that its configuration records"
_LOSS_API = "Trainer offers added loss terms"
_QUANTIZER_API = "transformers takes a registered quantizer out again, and refuses a folder whose quantizer is missing"
_CACHE_API = "transformers builds a cache from third-party layers, by layer type"
_DPO_API = "DPOTrainer takes a loss of the two log ratios, and a column for it"
_GRPO_API = "GRPOTrainer offers hooks for weights and token loss"
_DISTILL_API = "TRL's distillation trainers take a loss over both models' hidden states"
_CHECKPOINT_API = "Trainer lets a callback write and read files of a checkpoint"

UPSTREAM = (
    Upstream("peft.mapping:PEFT_TYPE_TO_CONFIG_MAPPING", "tuner seam", _PEFT_API),
    Upstream("peft.mapping:PEFT_TYPE_TO_TUNER_MAPPING", "tuner seam", _PEFT_API),
    Upstream("peft.mapping:PEFT_TYPE_TO_PREFIX_MAPPING", "tuner seam", _PEFT_API),
    Upstream("peft.peft_model:PeftModel.create_or_update_model_card", "tuner seam", _PEFT_API, ("output_dir",)),
    Upstream("peft.config:PeftConfigMixin.from_json_file", "tuner seam", _PEFT_API, ("path_json_file",)),
    Upstream(
        "peft.tuners.tuners_utils:BaseTuner._create_and_replace", "tuner seam", _PEFT_API,
        ("peft_config", "adapter_name", "target", "target_name", "parent", "current_key"),
    ),
    Upstream("peft.tuners.tuners_utils:BaseTuner.inject_adapter", "tuner seam", _PEFT_API, ("model", "adapter_name")),
    Upstream("peft.tuners.tuners_utils:BaseTuner._check_target_module_exists", "tuner seam", _PEFT_API, ("peft_config", "key")),
    Upstream(
        "peft.tuners.tuners_utils:BaseTuner._replace_module", "tuner seam", _PEFT_API,
        ("parent", "child_name", "new_module", "child"),
    ),
    Upstream(
        "peft.tuners.tuners_utils:BaseTuner._remap_adapter_state_dict_for_load", "tuner seam", _PEFT_API,
        ("model", "config", "adapter_name", "state_dict"),
    ),
    Upstream("peft.tuners.tuners_utils:BaseTuner._prepare_adapter_config", "ulora", _PEFT_API, ("peft_config", "model_config")),
    Upstream("peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge", "ulora", _PEFT_API, ("merge",)),
    Upstream(
        "peft.tuners.tuners_utils:BaseTunerLayer._move_adapter_to_device_of_base_layer", "ulora", _PEFT_API, ("adapter_name",)
    ),
    Upstream("peft.tuners.tuners_utils:_get_in_out_features", "ulora", _PEFT_API, ("module",)),
    Upstream("peft.tuners._buffer_dict:BufferDict", "ulora", "PEFT makes BufferDict public", ("persistent",)),
    Upstream("peft.utils:resolve_quantization_backend", "quantizer seam", "listed as stable by PEFT"),
    Upstream("peft.utils.other:get_pattern_key", "merge seam", _PEFT_API, ("pattern_keys", "key_to_match")),
    Upstream("transformers.cache_utils:DummyLayer", "ulora, turboconn", "caches take third-party state layers"),
    Upstream(
        "transformers.cache_utils:Cache.get_mask_sizes", "turboconn", "caches take third-party state layers",
        ("query_length", "layer_idx"),
    ),
    Upstream("transformers.cache_utils:Cache.activate_past_recording", "turboconn", "caches take third-party state layers"),
    Upstream("transformers.cache_utils:Cache.reorder_cache", "ulora", "caches take third-party state layers", ("beam_idx",)),
    Upstream(
        "torch.optim.optimizer:register_optimizer_step_post_hook", "tuner seam", "never: public, listed for doctor", ("hook",)
    ),
    Upstream("transformers.modeling_utils:AttentionInterface._global_mapping", "attention seam", _NAMES_API),
    Upstream("transformers.masking_utils:AttentionMaskInterface._global_mapping", "attention seam", _NAMES_API),
    Upstream(
        "transformers.masking_utils:sdpa_mask", "attention seam", _MASK_API,
        (
            "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "local_size",
            "allow_is_causal_skip", "allow_is_bidirectional_skip", "use_vmap", "device",
        ),
    ),
    Upstream("transformers.masking_utils:and_masks", "attention seam", _MASK_API),
    Upstream("transformers.masking_utils:causal_mask_function", "attention seam", _MASK_API),
    Upstream(
        "transformers.masking_utils:remap_positions_for_packed_sequence", "attention seam", _MASK_API,
        ("mask_function", "position_ids"),
    ),
    Upstream(
        "transformers.masking_utils:packed_sequence_mask_function", "attention seam", _MASK_API, ("packed_sequence_mask",)
    ),
    Upstream("transformers.utils.import_utils:is_tracing", "attention seam", _MASK_API, ("tensor",)),
    Upstream(
        "transformers.utils.output_capturing:_active_collector", "attention seam",
        "every model passes output_attentions on to its attention function",
    ),
    Upstream(
        "transformers.integrations.sdpa_attention:sdpa_attention_forward", "hfplug.attention", "never: public, listed for doctor",
        ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "position_bias"),
    ),
    Upstream("torch.utils.weak:WeakTensorKeyDictionary", "hfplug.attention", "torch documents a dictionary keyed by tensors"),
    Upstream("transformers.trainer:DEFAULT_CALLBACKS", "hfplug.metrics", _TRAINER_API),
    Upstream("transformers.trainer:Trainer.log", "hfplug.metrics", _TRAINER_API, ("logs",)),
    Upstream(
        "transformers.modeling_layers:GradientCheckpointingLayer", "hfplug.calls",
        "transformers passes the call's arguments to hooks in recomputation",
    ),
    Upstream("transformers.modeling_utils:PreTrainedModel.get_decoder", "hfplug.calls", "never: public, listed for doctor"),
    Upstream("transformers.trainer:Trainer.compute_loss", "loss seam", _LOSS_API, ("model", "inputs", "num_items_in_batch")),
    Upstream("transformers.trainer:Trainer.training_step", "loss seam", _LOSS_API, ("model", "inputs", "num_items_in_batch")),
    Upstream("transformers.trainer:Trainer.get_batch_samples", "loss seam", _LOSS_API, ("epoch_iterator", "num_batches")),
    Upstream("transformers.trainer:Trainer.loss_is_scaled_for_ga", "loss seam", _LOSS_API),
    Upstream("transformers.trainer:Trainer.get_tp_size", "loss seam", "tensor parallelism is supported"),
    Upstream("transformers.trainer:Trainer.get_cp_size", "loss seam", "context parallelism is supported"),
    Upstream("transformers.trainer:Trainer.get_sp_size", "loss seam", "sequence parallelism is supported"),
    Upstream(
        "transformers.trainer:Trainer._save_optimizer_and_scheduler", "loss seam", _CHECKPOINT_API, ("output_dir",)
    ),
    Upstream(
        "transformers.trainer:Trainer._load_from_checkpoint", "loss seam", _CHECKPOINT_API, ("resume_from_checkpoint", "model")
    ),
    Upstream("transformers.trainer_callback:ExportableState.state", "callback seam", _TRAINER_API),
    Upstream("transformers.trainer_callback:TrainerState.stateful_callbacks", "callback seam", _TRAINER_API),
    Upstream("accelerate.utils:extract_model_from_parallel", "callback seam", "never: public, listed for doctor", ("model",)),
    Upstream("transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS", "observe", _ATTENTION_API),
    Upstream(
        "transformers.modeling_utils:AttentionInterface.get_interface", "observe", _ATTENTION_API,
        ("attn_implementation", "default"),
    ),
    Upstream("transformers.cache_utils:StaticLayer", "recording", _POSITIONS_API),
    Upstream("transformers.cache_utils:StaticSlidingWindowLayer", "recording", _POSITIONS_API),
    Upstream("transformers.cache_utils:DynamicSlidingWindowLayer", "recording", _POSITIONS_API),
    Upstream("transformers.cache_utils:Cache.crop", "recording", _FOLLOW_API, ("tokens_to_remove",)),
    Upstream("transformers.cache_utils:Cache.batch_repeat_interleave", "recording", _FOLLOW_API, ("repeats",)),
    Upstream("transformers.cache_utils:Cache.batch_select_indices", "recording", _FOLLOW_API, ("indices",)),
    Upstream("transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING", "quantizer seam", _QUANTIZER_API),
    Upstream("transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING", "quantizer seam", _QUANTIZER_API),
    Upstream(
        "transformers.quantizers.auto:AutoHfQuantizer.supports_quant_method", "quantizer seam", _QUANTIZER_API,
        ("quantization_config_dict",),
    ),
    Upstream(
        "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs", "quantizer seam", _QUANTIZER_API,
        ("quantization_config", "quantization_config_from_args"),
    ),
    Upstream(
        "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading", "quantizer seam", _QUANTIZER_API,
        ("model",),
    ),
    Upstream(
        "transformers.quantizers.base:HfQuantizer._process_model_after_weight_loading", "quantizer seam", _QUANTIZER_API,
        ("model",),
    ),
    Upstream("transformers.quantizers.base:HfQuantizer._dequantize", "quantizer seam", _QUANTIZER_API, ("model", "dtype")),
    Upstream(
        "transformers.quantizers.base:HfQuantizer.get_modules_to_not_convert", "quantizer seam", _QUANTIZER_API,
        ("model", "skip_modules", "keep_in_fp32_modules"),
    ),
    Upstream(
        "transformers.quantizers.quantizers_utils:should_convert_module", "quantizer seam", _QUANTIZER_API,
        ("full_name", "patterns"),
    ),
    Upstream("transformers.core_model_loading:ConversionOps.convert", "quantizer seam", _QUANTIZER_API, ("input_dict",)),
    Upstream(
        "transformers.core_model_loading:set_param_for_module", "quantizer seam",
        "transformers tells a quantizer which tensors a checkpoint lacked (it marks those it set _is_hf_initialized)",
    ),
    Upstream("peft.utils.quantization_utils:QuantizationBackend", "quantizer seam", _PEFT_API),
    Upstream("peft.utils.quantization_utils:resolve_quantization_backend", "quantizer seam", _PEFT_API, ("base_layer",)),
    Upstream(
        "peft.tuners.lora.model:dispatch_default", "quantizer seam", _PEFT_API,
        ("target", "adapter_name", "config", "parameter_name"),
    ),
    Upstream("peft.tuners.lora:Linear.lora_variants", "quantizer seam", _PEFT_API),
    Upstream(
        "peft.tuners.lora:Linear.update_layer", "quantizer seam", _PEFT_API, ("adapter_name", "r", "lora_alpha", "config")
    ),
    Upstream(
        "peft.tuners.tuners_utils:_maybe_include_all_linear_layers", "quantizer seam", _PEFT_API, ("peft_config", "model")
    ),
    Upstream("transformers.cache_utils:get_layer_types_and_kwargs", "hfplug.caching", _CACHE_API, ("config",)),
    Upstream("transformers.cache_utils:DYNAMIC_LAYER_TYPE_MAPPING", "hfplug.caching", _CACHE_API),
    Upstream("transformers.cache_utils:CacheLayerMixin", "hfplug.caching", "never: public, listed for doctor"),
    Upstream("transformers.cache_utils:Cache.update", "hfplug.caching", _CACHE_API, ("key_states", "value_states", "layer_idx")),
    Upstream("transformers.modeling_utils:PreTrainedModel.post_init", "patch seam", _PATCH_API),
    Upstream(
        "transformers.modeling_utils:PreTrainedModel._initialize_weights", "patch seam", _PATCH_API, ("module", "is_custom_code")
    ),
    Upstream(
        "transformers.configuration_utils:PreTrainedConfig.to_json_file", "patch seam", _PATCH_API, ("json_file_path", "use_diff")
    ),
    Upstream("transformers.configuration_utils:PreTrainedConfig.get_config_dict", "patch seam", _PATCH_API),
    Upstream(
        "transformers.modeling_utils:_get_resolved_checkpoint_files", "patch seam", _PATCH_API,
        ("transformers_explicit_filename",),
    ),
    *(
        Upstream(
            f"transformers.models.{module}:{name}.get_rope_index", "circle_rope", "transformers keeps positions as floats",
            ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask"),
        )
        for module, name in (
            ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLModel"), ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLModel"),
            ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLModel"),
        )
    ),
    Upstream(
        "trl.trainer.utils:create_model_from_path", "hfplug.building", "SFTTrainer offers a hook on the loaded model",
        ("model_id",),
    ),
    Upstream(
        "trl.trainer.grpo_trainer:GRPOTrainer._get_per_token_logps_and_entropies", "trainers.grpo_base", _GRPO_API,
        ("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy", "compute_aux_loss", "pixel_values",
         "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
         "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    Upstream(
        "trl.trainer.grpo_trainer:GRPOTrainer.get_high_entropy_mask", "trainers.grpo_base", _GRPO_API,
        ("entropies", "mask", "threshold"),
    ),
    Upstream(
        "trl.trainer.grpo_trainer:GRPOTrainer.get_off_policy_mask", "trainers.grpo_base", _GRPO_API,
        ("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"),
    ),
    Upstream(
        "trl.trainer.grpo_trainer:GRPOTrainer.get_gamma_weights", "trainers.grpo_base", _GRPO_API,
        ("advantages", "log_ratio_per_token", "mask", "importance_sampling_ratio", "k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    ),
    Upstream("trl.scripts.grpo:GRPOScriptArguments", "trainer seam", "TRL exports it"),
    Upstream(
        "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "drift", "SFTTrainer takes a weight per row",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
    ),
    Upstream("trl.trainer.sft_trainer:SFTTrainer._set_signature_columns_if_needed", "drift", "SFTTrainer takes a weight per row"),
    Upstream("trl.trainer.utils:FusedCausalLMOutput", "drift", "SFTTrainer takes a weight per row", ("log_probs", "label_mask")),
    Upstream(
        "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss", "eopd", _DISTILL_API,
        ("unwrapped_student", "inputs", "num_items_in_batch"),
    ),
    Upstream(
        "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss", "eopd", _DISTILL_API,
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
    ),
    Upstream(
        "trl.trainer.distillation_trainer:DistillationTrainer._get_last_hidden_state", "eopd", _DISTILL_API,
        ("unwrapped_model", "input_ids", "attention_mask", "logits_to_keep"),
    ),
    Upstream(
        "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "bridge_garden", _DISTILL_API,
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
    ),
    Upstream("trl.models.utils:_ForwardRedirection", "bridge_garden", _DISTILL_API),
    Upstream("trl.models:prepare_deepspeed", "bridge_garden", _DISTILL_API),
    Upstream("trl.trainer.utils:maybe_gather_lm_head_ctx", "eopd, bridge_garden", _DISTILL_API),
    Upstream(
        "trl.trainer.dpo_trainer:DPOTrainer._compute_loss", "sa_dpo", _DPO_API, ("model", "inputs", "return_outputs"),
    ),
    Upstream("trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps", "sa_dpo", _DPO_API, ("dataset", "name", "batch_size")),
    Upstream("trl.trainer.dpo_trainer:DPOTrainer.compute_ref_log_probs", "sa_dpo", _DPO_API, ("model", "inputs")),
    Upstream("trl.trainer.dpo_trainer:DPOTrainer._set_signature_columns_if_needed", "sa_dpo", _DPO_API),
    Upstream("peft.config:PeftConfigMixin.save_pretrained", "patch seam", _PEFT_API, ("save_directory",)),
    Upstream("peft.config:PeftConfigMixin.from_pretrained", "patch seam", _PEFT_API, ("pretrained_model_name_or_path",)),
    Upstream("peft.tuners.tuners_utils:BaseTuner._check_merge_allowed", "patch seam", _PEFT_API),
)  # fmt: skip

# What is overridden with arithmetic derived from it: a changed source means a new derivation, not a new hash alone.
DERIVED = (
    Derived(
        "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss", "trainers.grpo_base", _GRPO_API,
        "a0773aa2fda0f039bb971e47960d38b0f17ff46801f71043e1a7f8c000e7205f",
    ),
    Derived(
        "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss", "eopd", _DISTILL_API,
        "ad771055a2679258a294d68c763ebe87c53caf67ba95313857be968bacfd4009",
    ),
    Derived(
        "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss", "eopd", _DISTILL_API,
        "4d284fd0e27e4e75ede3b7aea35f4140c6d8ed30ee5ebd7238cff6af1f6ed342",
    ),
    Derived(
        "trl.trainer.distillation_trainer:DistillationTrainer._get_last_hidden_state", "eopd", _DISTILL_API,
        "5a98607c6937117f78aef18c69df38c9cf9af5fe12cd707fc82107a98b69404b",
    ),
    Derived(
        "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "bridge_garden", _DISTILL_API,
        "337f03c9d4c0dfe10ca5f4d3bf4f3285b876c5c35d365f6b309548c779538b5e",
    ),
    Derived(
        "trl.trainer.dpo_trainer:DPOTrainer._compute_loss", "sa_dpo", _DPO_API,
        "e1e96899b3b07d1087683ba8e890a04bac0737993ba5f18f08eade2d9340b3aa",
    ),
    Derived(
        "trl.trainer.dpo_trainer:DPOTrainer.compute_ref_log_probs", "sa_dpo", _DPO_API,
        "4d80fb98138e50bb0a430a7650642413acb3e42b9027b0bbc5ce803f798ca1a5",
    ),
)  # fmt: skip
