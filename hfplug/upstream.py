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
        digest: of a function whose body we do over, the start of the SHA-256 of its source (tests/drift): a change
            upstream has to be read and done over as well.
    """

    name: str
    owner: str
    until: str
    parameters: tuple[str, ...] = ()
    digest: str = ""


_PEFT_API = "PEFT offers third-party registration (huggingface/peft#2273)"
_ATTENTION_API = "transformers offers a hook on an attention module's queries and keys"
_MASK_API = "transformers tells a mask function about packing by a tensor"
_NAMES_API = "transformers unregisters attention names and refuses those without a mask function"
_POSITIONS_API = "cache layers say which tokens the keys they return are"
_FOLLOW_API = "caches tell when their rows or tokens change"
_TRAINER_API = "Trainer hands callbacks the trainer, or takes metrics from them"
_PATCH_API = "transformers builds a model with changes that its configuration records"
_LOSS_API = "Trainer offers added loss terms"
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
    Upstream("peft.utils:resolve_quantization_backend", "ulora", "listed as stable by PEFT"),
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
        "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss", "eopd", _DISTILL_API,
        ("unwrapped_student", "inputs", "num_items_in_batch"), digest="9fc0021cbcc0b5e9",
    ),
    Upstream(
        "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss", "eopd", _DISTILL_API,
        ("model", "inputs", "return_outputs", "num_items_in_batch"), digest="e5082879a7183040",
    ),
    Upstream(
        "trl.trainer.distillation_trainer:DistillationTrainer._get_last_hidden_state", "eopd", _DISTILL_API,
        ("unwrapped_model", "input_ids", "attention_mask", "logits_to_keep"), digest="12dc17e4ad4b1999",
    ),
    Upstream(
        "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "bridge_garden", _DISTILL_API,
        ("model", "inputs", "return_outputs", "num_items_in_batch"), digest="ca448211ff653fe6",
    ),
    Upstream("trl.models.utils:_ForwardRedirection", "bridge_garden", _DISTILL_API),
    Upstream("trl.models:prepare_deepspeed", "bridge_garden", _DISTILL_API),
    Upstream("trl.trainer.utils:maybe_gather_lm_head_ctx", "eopd, bridge_garden", _DISTILL_API),
    Upstream("peft.config:PeftConfigMixin.save_pretrained", "patch seam", _PEFT_API, ("save_directory",)),
    Upstream("peft.config:PeftConfigMixin.from_pretrained", "patch seam", _PEFT_API, ("pretrained_model_name_or_path",)),
    Upstream("peft.tuners.tuners_utils:BaseTuner._check_merge_allowed", "patch seam", _PEFT_API),
)  # fmt: skip
