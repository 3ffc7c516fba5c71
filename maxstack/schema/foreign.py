"""Keys of other frameworks and ours for the same thing, for the message that refuses theirs.

The names are those of transformers' TrainingArguments and config.json, MaxText's base.yml,
torchtitan's job configuration, nanoGPT and Megatron-LM. NAME stands for a block of the model, N for
an index of a list. An optimizer's arguments belong to transforms, whose keys differ from optimizer
to optimizer.
"""

Row = tuple[str, str, str]
"""Foreign names, our keys, both separated by spaces, and a remark, which without keys is the whole
message."""

_TAKES_IT = (
    "of the transform that takes it, there or in optimizer.groups; maxstack config show has "
    "its place"
)
ROWS: tuple[Row, ...] = (
    # The loop.
    ("steps max_steps max_iters train_iters num_train_steps total_steps", "train.steps", ""),
    (
        "epochs num_epochs max_epochs num_train_epochs num_epoch",
        "train.steps",
        "steps, not epochs: epochs x tokens of the data / (train.batch_size x data.seq_len)",
    ),
    (
        "batch_size train_batch_size global_batch_size total_batch_size",
        "train.batch_size",
        "rows in a step, over all devices and accumulation",
    ),
    (
        "per_device_train_batch_size per_device_batch_size micro_batch_size local_batch_size "
        "micro_batch_size_per_gpu device_batch_size",
        "train.batch_size",
        "rows in a step: per device x devices x train.accumulate",
    ),
    (
        "gradient_accumulation_steps grad_accum grad_accum_steps gradient_accumulation",
        "train.accumulate",
        "it splits train.batch_size and does not multiply it",
    ),
    (
        "seed data_seed random_seed init_weights_seed data_shuffle_seed",
        "train.seed data.seed",
        "the initial weights, and the order of the data",
    ),
    ("profiling profiler profile enable_profiling", "train.profile", ""),
    ("training trainer", "train", ""),
    # The optimizer.
    ("lr learning_rate peak_lr max_lr base_lr", "optimizer.learning_rate", "the peak"),
    (
        "lr_scheduler_type lr_scheduler scheduler lr_schedule_type schedule",
        "optimizer.schedule",
        "a mapping with a kind: warmup_cosine, wsd, inverse_sqrt or any of Optax",
    ),
    (
        "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters warmup",
        "optimizer.schedule.warmup_steps",
        "",
    ),
    (
        "warmup_ratio warmup_steps_fraction warmup_fraction lr_warmup_fraction",
        "optimizer.schedule.warmup_steps",
        "a share of train.steps as 2%",
    ),
    (
        "min_lr min_lr_ratio min_lr_factor cosine_learning_rate_final_fraction",
        "optimizer.schedule.end_value",
        "a value, or a share of the peak as 10%",
    ),
    ("weight_decay wd adam_weight_decay", "optimizer.chain", f"weight_decay {_TAKES_IT}"),
    ("beta1 adam_beta1 adam_b1", "optimizer.chain", f"b1 {_TAKES_IT}"),
    ("beta2 adam_beta2 adam_b2", "optimizer.chain", f"b2 {_TAKES_IT}"),
    ("betas", "optimizer.chain", f"b1 and b2 {_TAKES_IT}"),
    ("adam_epsilon adam_eps", "optimizer.chain", f"eps {_TAKES_IT}"),
    (
        "max_grad_norm grad_clip gradient_clipping clip_grad gradient_clipping_threshold max_norm",
        "optimizer.chain",
        "max_norm of its item clip_by_global_norm; maxstack config show has its place",
    ),
    (
        "optim opt_type optimizer_name optimizer.name optimizer.type optimizer.kind",
        "optimizer",
        "a preset's name, or a mapping with a chain of Optax transforms",
    ),
    # Numbers and memory.
    (
        "bf16 fp16 tf32 mixed_precision mixed_precision_param compute_dtype torch_dtype precision",
        "model.dtype",
        "bfloat16, float16 or float32",
    ),
    ("weight_dtype param_dtype", "model.param_dtype", ""),
    ("fp8 load_in_8bit load_in_4bit", "quantization", "a preset: fp8, int8, nf4, ..."),
    (
        "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy "
        "recompute_granularity",
        "model.remat.policy",
        "none, full, dots, ...",
    ),
    (
        "use_flash_attention attn_implementation flash_attn attention",
        "model.blocks.NAME.mixer.backend",
        "auto takes the fastest kernel that can serve",
    ),
    # The architecture.
    (
        "model_name_or_path model_name pretrained_model_name_or_path base_model",
        "model",
        "a preset's name, or from: a Hugging Face folder",
    ),
    ("hidden_size n_embd d_model base_emb_dim emb_dim dim hidden_dim embed", "model.embed", ""),
    (
        "num_hidden_layers n_layer n_layers num_layers base_num_decoder_layers "
        "num_decoder_layers layers",
        "model.layers",
        "",
    ),
    (
        "num_attention_heads n_head n_heads num_heads base_num_query_heads num_query_heads heads",
        "model.blocks.NAME.mixer.heads",
        "",
    ),
    (
        "num_key_value_heads n_kv_heads num_kv_heads base_num_kv_heads num_query_groups kv_heads",
        "model.blocks.NAME.mixer.kv_heads",
        "",
    ),
    ("head_dim kv_channels", "model.blocks.NAME.mixer.head_dim", ""),
    (
        "intermediate_size ffn_hidden_size base_mlp_dim mlp_dim d_ff ffn_dim n_inner",
        "model.blocks.NAME.mlp.hidden",
        "",
    ),
    (
        "moe_intermediate_size base_moe_mlp_dim",
        "model.blocks.NAME.mlp.hidden",
        "of a block with mlp.kind: moe",
    ),
    ("num_experts n_routed_experts num_local_experts", "model.blocks.NAME.mlp.experts", ""),
    ("num_experts_per_tok num_experts_per_token", "model.blocks.NAME.mlp.top_k", ""),
    ("hidden_act hidden_activation activation_function", "model.blocks.NAME.mlp.activation", ""),
    ("sliding_window sliding_window_size window", "model.blocks.NAME.mixer.window", ""),
    ("rope_theta rope_max_timescale rotary_base", "model.blocks.NAME.mixer.rope.theta", ""),
    ("rope_scaling", "model.blocks.NAME.mixer.rope.scaling", ""),
    (
        "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps normalization_layer_epsilon",
        "model.norm.eps model.blocks.NAME.norm.eps",
        "",
    ),
    ("vocab_size padded_vocab_size vocab", "model.vocab", ""),
    ("tie_word_embeddings logits_via_embedding", "model.head.tied", ""),
    (
        "max_position_embeddings n_positions n_ctx",
        "data.seq_len",
        "tokens in a row; model.positions is for learned tables alone",
    ),
    (
        "dropout attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop dropout_rate",
        "",
        "there is no dropout but that of adapters, lora.dropout",
    ),
    # Adapters, as peft calls them.
    ("peft peft_config lora_config", "lora", ""),
    ("lora.r lora_r lora_rank", "lora.rank", ""),
    ("lora_alpha", "lora.alpha", ""),
    ("lora_dropout", "lora.dropout", ""),
    (
        "target_modules lora_target_modules lora_target",
        "lora.targets",
        "regular expressions over paths of weights",
    ),
    ("use_rslora", "lora.rslora", ""),
    ("use_dora", "lora.dora", ""),
    # The data.
    (
        "seq_len seq_length max_seq_length max_seq_len max_length block_size sequence_length "
        "max_target_length cutoff_len context_length",
        "data.seq_len",
        "",
    ),
    (
        "dataset dataset_name dataset_path train_file data_path train_files hf_path datasets",
        "data.sources",
        "a list of files, each with its kind",
    ),
    (
        "data.path data.paths data.file data.files sources.N.path sources.N.paths sources.N.file",
        "data.sources.N.files",
        "a list",
    ),
    ("text_field text_column dataset_text_field", "data.sources.N.field", ""),
    ("tokenizer.name tokenizer.name_or_path", "data.tokenizer.path", ""),
    (
        "tokenizer tokenizer_path tokenizer_name tokenizer_model",
        "data.tokenizer",
        "a mapping with a kind",
    ),
    ("dataloader_num_workers num_workers grain_worker_count", "data.workers", ""),
    ("sample_packing packing", "data.packing", "concat, fit or none"),
    # Saving and looking.
    (
        "save_steps save_every checkpoint_period save_interval checkpointing_steps "
        "checkpoint.interval "
        "checkpoint.save_interval",
        "checkpoint.every",
        "steps",
    ),
    ("save_total_limit keep_latest_k max_to_keep", "checkpoint.keep", ""),
    (
        "save_strategy evaluation_strategy eval_strategy",
        "checkpoint.every eval.every",
        "steps; 0: never",
    ),
    ("load_best_model_at_end", "checkpoint.keep_best", ""),
    (
        "resume_from_checkpoint load_path load_parameters_path init_from checkpoint.load_step",
        "checkpoint.restore",
        "",
    ),
    (
        "output_dir base_output_directory out_dir dump_folder save_dir checkpoint_dir "
        "checkpoint.folder",
        "run.output_dir",
        "",
    ),
    ("run_name wandb_run_name experiment_name exp_name", "run.name", ""),
    (
        "logging_dir tensorboard_dir enable_tensorboard",
        "run.tensorboard",
        "events lie in tensorboard/ of the run's folder",
    ),
    (
        "logging_steps log_interval log_freq log_period",
        "",
        "every step is logged, in metrics.jsonl",
    ),
    (
        "report_to wandb wandb_project wandb_log enable_wandb",
        "run.tensorboard",
        "and metrics.jsonl; there is no other tracker",
    ),
    (
        "eval_steps eval_interval eval.interval",
        "eval.every",
        "steps between evaluations; eval.steps is how many batches one has",
    ),
    (
        "eval_iters max_eval_steps",
        "eval.steps",
        "batches in an evaluation; eval.every is the steps between them",
    ),
    ("per_device_eval_batch_size eval_batch_size", "eval.batch_size", "rows over all devices"),
    ("compile torch_compile", "", "the step is always compiled"),
    # The mesh.
    ("parallelism", "mesh", ""),
    (
        "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
        "ici_tensor_parallelism tp_size tp",
        "mesh.tensor",
        "",
    ),
    (
        "fsdp fsdp_size data_parallel_shard_degree ici_fsdp_parallelism zero_stage deepspeed",
        "mesh.fsdp",
        "shards of the weights; -1: all devices that are left",
    ),
    (
        "data_parallel_size data_parallel_replicate_degree ici_data_parallelism ddp dp",
        "mesh.data",
        "",
    ),
    ("dcn_data_parallelism num_slices", "mesh.slices", ""),
    (
        "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size "
        "ici_pipeline_parallelism dcn_pipeline_parallelism pp_size pp",
        "mesh.stage",
        "",
    ),
    (
        "context_parallel_size context_parallel_degree ici_context_parallelism "
        "ici_sequence_parallelism cp",
        "mesh.context",
        "",
    ),
    (
        "expert_parallel_size expert_parallel_degree expert_model_parallel_size "
        "ici_expert_parallelism ep",
        "mesh.expert",
        "",
    ),
    ("num_pipeline_microbatches pipeline_parallel_microbatch_size", "mesh.microbatches", ""),
)

_BY_NAME = {name: row for row in ROWS for name in row[0].split()}


def equivalent(path: str) -> str:
    """The message about the foreign key at a dotted path, by the longest end of it that has a row.

    Empty if none has, or if it is our own key, which another kind of section has.
    """
    words = path.lower().replace("-", "_").split(".")
    parts = ["N" if word.isdecimal() else word for word in words]
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    _, keys, remark = next((_BY_NAME[end] for end in ends if end in _BY_NAME), ("", "", ""))
    if any(key.split(".")[-2:] == parts[-2:] for key in keys.split()):
        return ""
    if not keys:
        return remark
    note = f" ({remark})" if remark else ""
    return f"here that is {' and '.join(keys.split())}{note}"
