// The list of Miles flags without a member, by area and by what is said of them.
//
// Flags of one area with one answer stand together in one line of words:
//   name      a switch, off by default        name=true   a switch, on by default
//   name=     takes a value, no default       name=3      takes a value, default 3
//   name?     takes a value or none           name*       takes several values
#include "config/miles_flags.h"

#include <array>

#include "base/text.h"

namespace tandem {
namespace {

struct Together {
  std::string_view area;
  Kind kind;
  std::string_view why;
  std::string_view words;
};

using enum Kind;

constexpr std::array kTogether = {
    // ---- placement ----
    Together{"Placement", refused,
             "trainer ranks share the work by samples alone, a cut of the model over them is not "
             "built; leave it out",
             "tensor_model_parallel_size=1 pipeline_model_parallel_size=1 context_parallel_size=1 "
             "expert_model_parallel_size=1 expert_tensor_parallel_size=1 dp_replicate_size=1 "
             "virtual_pipeline_model_parallel_size= num_layers_per_virtual_pipeline_stage= "
             "decoder_first_pipeline_num_layers= decoder_last_pipeline_num_layers= indep_dp"},
    Together{"Placement", no_effect, "it only matters with several trainer ranks",
             "sequence_parallel allgather_cp balance_data balance_by_flops "
             "delay_split_train_data_by_dp use_distributed_optimizer overlap_grad_reduce "
             "overlap_param_gather tp_comm_overlap distributed_backend=nccl fsdp_cpu_backend=gloo "
             "align_grad_reduce align_param_gather use_custom_fsdp use_distributed_post "
             "debug_deterministic_collective"},
    Together{"Placement", no_effect, "--control-timeout-seconds bounds every wait",
             "distributed_timeout_minutes=10"},
    Together{"Placement", no_effect, "the driver runs where it is started, without Ray's store",
             "pin_rollout_manager_to_head object_store_backend=ray mooncake_store_init_kwargs= "
             "mooncake_replica_num=1"},
    Together{
        "Placement", refused, "engines belong to the run; leave it out",
        "rollout_external rollout_external_engine_addrs* sglang_router_ip= sglang_router_port= "
        "sglang_config= prefill_num_servers="},
    Together{"Placement", refused, "evaluation uses the engine of the rollout; leave it out",
             "eval_num_gpus=0 eval_num_gpus_per_engine=1 eval_hf_dir= eval_max_in_flight=2 "
             "eval_overflow_policy=backpressure eval_keep_snapshots=2"},
    Together{"Placement", refused, "environment variables are not settings here; leave it out",
             "train_env_vars={}"},
    Together{"Placement", refused, "configure by flags or --config FILE (TOML)",
             "custom_config_path= yaml_cfg="},
    // ---- memory ----
    Together{"Memory", no_effect, "on the CPU everything is in host memory and stays there",
             "offload_rollout_level* offload_train_target=cpu offload_train_disk_dir= "
             "offload_train_disk_chunk_mb=256 rematerialize_param_from_master_weight "
             "check_rematerialize_param_from_master_weight fsdp_cpu_offload optimizer_cpu_offload "
             "optimizer_offload_fraction= overlap_cpu_optimizer_d2h_h2d offload_optimizer_states "
             "use_torch_optimizer_for_cpu_offload train_memory_margin_bytes=1073741824 "
             "low_memory_resume"},
    Together{"Memory", refused, "the optimizer's state stays in memory in float32; leave it out",
             "stream_optimizer_state_to_disk stream_optimizer_state_moment_dtype=fp32 "
             "use_precision_aware_optimizer main_params_dtype=fp32 main_grads_dtype=fp32 "
             "exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 keep_fp32_master=true"},
    Together{"Memory", no_effect, "what is computed again or kept changes memory, not results",
             "recompute_modules* recompute_activations recompute_loss_function "
             "log_probs_chunk_size=-1 distribute_saved_activations"},
    // ---- model and precision ----
    Together{
        "Model", no_effect, "the shape is read from the model folder's config.json",
        "num_layers= hidden_size= ffn_hidden_size= num_attention_heads= num_query_groups= "
        "group_query_attention kv_channels= swiglu squared_relu normalization= norm_epsilon= "
        "layernorm_epsilon= qk_layernorm apply_layernorm_1p layernorm_zero_centered_gamma "
        "rotary_base= rotary_percent= rotary_scaling_factor= rotary_interleaved "
        "use_rotary_position_embeddings no_rope_fusion position_embedding_type= rope_type= "
        "use_rope_scaling rope_scaling_factor= disable_bias_linear add_bias_linear add_qkv_bias "
        "untie_embeddings_and_output_weights vocab_size= padded_vocab_size= "
        "make_vocab_size_divisible_by= max_position_embeddings= seq_length= "
        "decoder_seq_length= encoder_num_layers= spec* attention_output_gate "
        "multi_latent_attention q_lora_rank= kv_lora_rank= qk_head_dim= qk_pos_emb_head_dim= "
        "v_head_dim= num_experts= window_size= model_name= megatron_to_hf_mode=raw "
        "tokenizer_type= tokenizer_model= use_gated_attention"},
    Together{"Model", refused, "only models in Hugging Face form are built; leave it out",
             "custom_model_provider_path= custom_megatron_init_path= "
             "custom_megatron_before_log_prob_hook_path= "
             "custom_megatron_before_train_step_hook_path= custom_megatron_post_save_hook_path="},
    Together{"Model", no_effect, "exact mode: trainer and engine run the same kernels on the CPU",
             "attention_backend= attn_implementation= use_flash_attn qkv_format=thd "
             "linear_attention_backend=fla miles_dsa_topk_backend=torch "
             "dsa_attention_backend=tilelang transformer_impl= "
             "recompute_logprobs_via_prefill no_masked_softmax_fusion "
             "no_bias_swiglu_fusion no_bias_gelu_fusion no_bias_dropout_fusion "
             "no_gradient_accumulation_fusion bias_swiglu_fusion gradient_accumulation_fusion "
             "cross_entropy_loss_fusion cross_entropy_fusion_impl= freeze_indexer "
             "use_cpu_initialization init_method_std= batch_invariant_mode"},
    Together{"Model", no_effect, "gradients, softmax and reductions are always in float32",
             "accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 "
             "no_query_key_layer_scaling apply_query_key_layer_scaling fp32_residual_connection"},
    Together{"Model", refused, "use --dtype bfloat16 or float32", "bf16 fp16"},
    Together{"Model", refused, "8-bit and 4-bit numbers are not built yet; use --dtype bfloat16",
             "fp8_format= fp8_recipe= fp8_param_gather fp4_format= fp4_recipe= "
             "extra_high_precision_layers_hf* extra_high_precision_layers_megatron*"},
    Together{"Model", refused, "models run without dropout; use 0",
             "attention_dropout=0 hidden_dropout=0"},
    Together{"Model", refused, "adapters are not built yet; train the whole model",
             "lora_rank=0 lora_alpha=16 lora_dropout=0.0 lora_type=lora target_modules* "
             "exclude_modules* lora_adapter_path= lora_base_cpu_backup lora_train_only "
             "experts_shared_outer_loras lora_sync_from_tensor multi_lora_n_adapters=0"},
    Together{"Model", refused, "multi-token prediction is not built yet; leave it out",
             "enable_mtp_training mtp_num_layers= mtp_loss_scaling_factor=0.2"},
    Together{"Model", no_effect, "dense models have no experts and no indexer to replay",
             "use_routing_replay use_rollout_routing_replay use_indexer_replay "
             "use_rollout_indexer_replay"},
    // ---- rollout ----
    Together{"Rollout", refused, "rollout functions of your own are not built yet; leave it out",
             "rollout_function_path= eval_function_path= data_source_path= "
             "custom_async_data_buffer_path= custom_agent_function_path= buffer_filter_path= "
             "rollout_sample_filter_path= rollout_all_samples_process_path= "
             "rollout_data_postprocess_path= custom_convert_samples_to_train_data_path="},
    Together{"Rollout", refused,
             "fully asynchronous rollouts are not built yet (--async-steps 1 is); leave it out",
             "mask_offpolicy_in_partial_rollout max_weight_staleness= "
             "async_max_concurrent_samples= async_data_buffer_capacity_factor=2.0 "
             "async_unused_samples_handler=drop keep_old_actor"},
    Together{"Rollout", no_effect, "samples are ordered by id, however they are submitted",
             "rollout_submission_granularity= sglang_server_concurrency=512"},
    Together{"Rollout", refused, "multi-turn sessions are not built yet; leave it out",
             "use_session_server? session_server_ip= session_server_port* tito_model=default "
             "session_message_matcher=strict session_sample_picker_path= "
             "session_sample_postprocessor_path="},
    Together{"Rollout", no_effect, "the driver talks to the engine itself, without a router",
             "use_miles_router miles_router_timeout= miles_router_max_connections= "
             "miles_router_health_check_failure_threshold=3 sglang_router_policy= http_proxy="},
    Together{"Rollout", refused, "prompts are text; leave it out", "multimodal_keys="},
    Together{"Rollout", no_effect, "Miles's core does not read it either",
             "eval_min_new_tokens= eval_max_context_len= log_probs_max_tokens_per_gpu= "
             "rollout_buffer_url= fetch_trajectory_retry_times=-1 min_batch_collection_ratio=1 "
             "rollout_task_type=math"},
    Together{"Rollout", refused, "tools come with multi-turn rollouts; leave it out",
             "eval_tool_key="},
    // ---- SGLang's own flags ----
    Together{"SGLang", no_effect, "Tandem's engine has no such limit or setting; no token changes",
             "sglang_mem_fraction_static= sglang_cuda_graph_max_bs= sglang_cuda_graph_bs* "
             "sglang_disable_cuda_graph sglang_cuda_graph_backend_prefill= "
             "sglang_enable_metrics sglang_log_level= sglang_decode_log_interval= "
             "sglang_attention_backend= sglang_prefill_attention_backend= "
             "sglang_decode_attention_backend= sglang_sampling_backend= "
             "sglang_schedule_policy= sglang_schedule_conservativeness= "
             "sglang_watchdog_timeout= sglang_enable_deterministic_inference "
             "sglang_rl_on_policy_target= sglang_true_on_policy_contract= "
             "sglang_disable_custom_all_reduce sglang_enable_mixed_chunk "
             "sglang_disable_overlap_schedule sglang_stream_interval= sglang_tokenizer_worker_num= "
             "sglang_skip_tokenizer_init sglang_tool_call_parser= sglang_reasoning_parser= "
             "sglang_mamba_scheduler_strategy= sglang_log_requests sglang_host="},
    // ---- reward and algorithm ----
    Together{"Reward", refused, "the estimator normalises rewards; leave it out",
             "custom_reward_post_process_path="},
    Together{"Algorithm", refused, "PPO is not built yet; use --advantage-estimator grpo",
             "critic_num_nodes= critic_num_gpus_per_node= num_critic_only_steps=0 critic_load= "
             "critic_save= critic_lr= critic_lr_warmup_iters=0"},
    Together{"Algorithm", no_effect, "only PPO reads it", "value_clip=0.2"},
    Together{"Algorithm", refused, "losses of your own are not built yet; leave it out",
             "custom_loss_function_path= custom_tis_function_path= "
             "custom_pg_loss_reducer_function_path="},
    Together{"Algorithm", no_effect,
             "a rollout of one optimizer step always takes the step's own forward",
             "skip_actor_forward_only"},
    Together{"Algorithm", refused,
             "a reference is a Hugging Face folder; name that of the step in --ref-load",
             "ref_ckpt_step="},
    Together{"Algorithm", refused, "distillation is not built yet; leave it out",
             "use_opd opd_type= opd_kl_coef=1.0 opd_log_prob_top_k=0 "
             "opd_top_k_strategy=only-student opd_reward_weight_mode=student_p "
             "opd_topk_per_position opd_teacher_urls* opd_teacher_key=opd_teacher "
             "opd_teacher_load= opd_teacher_ckpt_step="},
    Together{"Algorithm", no_effect, "only SFT reads it", "loss_mask_type=qwen"},
    // ---- training step ----
    Together{"Training", no_effect,
             "micro-batches are always packed up to --max-tokens-per-gpu; the loss does not depend "
             "on the cut",
             "use_dynamic_batch_size micro_batch_size=1 data_pad_size_multiplier=128 "
             "variable_seq_lengths"},
    Together{"Training", refused,
             "every rollout must fill its optimizer steps; see "
             "--global-batch-size",
             "allow_partial_train_step use_dynamic_global_batch_size"},
    Together{"Training", no_effect, "every rollout fills its optimizer steps exactly",
             "disable_rollout_trim_samples"},
    Together{"Training", refused, "use --lr-warmup-iters and --lr-decay-iters",
             "lr_warmup_samples=0 lr_decay_samples= warmup_ratio=0 decoupled_lr= decoupled_min_lr= "
             "start_weight_decay= end_weight_decay= weight_decay_incr_style=constant"},
    Together{"Training", no_effect, "only other optimizers or a continued run read it",
             "sgd_momentum= muon_momentum= override_opt_param_scheduler "
             "use_checkpoint_opt_param_scheduler reset_optimizer_states"},
    Together{"Training", no_effect, "a step whose gradient is not finite is always skipped whole",
             "check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad"},
    Together{"Training", no_effect, "there is no garbage collector and no data loader to set",
             "manual_gc manual_gc_interval=0 num_workers= train_iters= exit_interval= "
             "eval_iters="},
    // ---- weight update ----
    Together{"Weight update", no_effect, "only the p2p and disk ways read it",
             "update_weight_disk_dir= update_weight_local_checkpoint_dir= "
             "update_weight_delta_encoding=xor update_weight_delta_checksum=xxh3-128 "
             "update_weight_disk_keep_files p2p_transfer_num_workers=4 p2p_transfer_timeout=30.0"},
    Together{"Weight update", refused, "the disk way is not built yet; leave it out",
             "custom_update_weight_post_write_path="},
    Together{"Weight update", no_effect,
             "every update is verified, and colocated sides share bytes",
             "check_weight_update_selector=all "
             "check_weight_update_skip_list* check_weight_update_allow_quant_error "
             "check_lora_weight_equal save_local_weight_checksum"},
    // ---- checkpoints ----
    Together{"Checkpoints", no_effect, "random numbers follow from --seed and the sample alone",
             "no_load_rng no_save_rng"},
    Together{"Checkpoints", no_effect, "checkpoints have one form, which any number of ranks reads",
             "ckpt_format= dist_ckpt_strictness= auto_detect_ckpt_format "
             "ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_assume_constant_structure "
             "non_persistent_ckpt_type= non_persistent_save_interval="},
    Together{"Checkpoints", refused, "Ctrl-C saves and ends; use --save-interval",
             "save_trigger_sentinel="},
    // ---- fault tolerance ----
    Together{"Fault tolerance", refused, "a dead rank ends the run with its cause; leave it out",
             "use_fault_tolerance control_server_port=0 mini_ft_controller_enable "
             "ci_ft_test_actions="},
    Together{"Fault tolerance", no_effect, "--use-fault-tolerance is refused so far",
             "ft_components* rollout_health_check_interval=30.0 rollout_health_check_timeout=30.0 "
             "rollout_health_check_first_wait=0 trainer_heartbeat_checker_interval=10.0 "
             "trainer_heartbeat_checker_timeout=10.0 trainer_heartbeat_checker_first_wait=300.0 "
             "trainer_heartbeat_checker_failure_threshold=3 mini_ft_controller_poll_interval=10.0 "
             "mini_ft_controller_resume_delay=10.0"},
    // ---- logging ----
    Together{"Logging", no_effect,
             "no tracker is fed yet; metrics.jsonl in the run's folder holds every metric",
             "wandb_mode= wandb_dir= wandb_key= wandb_host= wandb_team= wandb_group= "
             "wandb_project= wandb_run_id= wandb_exp_name= wandb_save_dir= "
             "disable_wandb_random_suffix wandb_always_use_train_step use_mlflow "
             "mlflow_tracking_uri= mlflow_experiment_name=miles mlflow_run_name= mlflow_run_id= "
             "tb_project_name= tb_experiment_name= tensorboard_dir= use_prometheus "
             "prometheus_port= prometheus_run_name= use_miles_dashboard "
             "dashboard_flush_interval=5.0 dashboard_gpu_sample_interval=1.0 "
             "dashboard_sglang_scrape_interval=2.0 dashboard_sglang_scrape_mode=auto "
             "dashboard_sglang_metrics* dashboard_forward_prometheus log_multi_turn log_passrate "
             "log_reward_category= log_correct_samples log_interval= log_throughput "
             "mfu_peak_tflops= env_report="},
    Together{"Logging", refused, "log functions of your own are not built yet; leave it out",
             "custom_rollout_log_function_path= custom_eval_rollout_log_function_path="},
    // ---- debugging ----
    Together{"Debugging", no_effect, "samples are in the run's folder (--save-rollouts)",
             "save_debug_trajectory_data= dump_details="},
    Together{"Debugging", no_effect, "no such recording is made",
             "save_debug_train_data= save_debug_event_data= profile use_pytorch_profiler "
             "profile_step_start= profile_step_end= profile_ranks* profile_target* "
             "record_memory_history memory_snapshot_path= memory_snapshot_dir=. "
             "memory_snapshot_num_steps= memory_recorder=torch enable_event_analyzer "
             "enable_witness witness_buffer_size=1048576"},
    Together{"Debugging", refused, "leave it out; --num-rollout says when a run ends",
             "debug_exit_after_rollout= load_debug_rollout_data_subsample= "
             "debug_skip_weight_update debug_disable_optimizer dumper_enable"},
    Together{"Debugging", refused, "read metrics.jsonl instead; leave it out",
             "ci_save_grad_norm= ci_load_grad_norm= ci_metric_checker_key= "
             "ci_metric_checker_threshold= ci_save_model_hash ci_check_model_hash "
             "ci_inject_rollout_data_path= ci_inject_start_rollout_id= "
             "ci_inject_min_match_ratio=0.9"},
};

MilesFlag read_word(const Together& together, std::string_view word) {
  MilesFlag flag{together.area, word, Takes::nothing, "false", together.kind, together.why};
  const std::size_t equals = word.find('=');
  if (equals != std::string_view::npos) {
    flag.name = word.substr(0, equals);
    flag.standard = word.substr(equals + 1);
    flag.takes = flag.standard == "true" ? Takes::nothing : Takes::one;
  } else if (word.back() == '*' || word.back() == '?') {
    flag.name = word.substr(0, word.size() - 1);
    flag.standard = {};
    flag.takes = word.back() == '*' ? Takes::some : Takes::optional_one;
  }
  return flag;
}

}  // namespace

const std::vector<MilesFlag>& miles_flags() {
  static const std::vector<MilesFlag> flags = [] {
    std::vector<MilesFlag> read;
    for (const Together& together : kTogether) {
      for (const std::string_view word : split(together.words, ' ')) {
        read.push_back(read_word(together, word));
      }
    }
    return read;
  }();
  return flags;
}

const std::vector<MilesPrefix>& miles_prefixes() {
  static const std::vector<MilesPrefix> prefixes = {
      {"sglang_", refused, "Tandem's engine does not have this setting of SGLang; leave it out"},
      {"eval_sglang_", refused, "evaluation uses the engine of the rollout; leave it out"},
      {"router_", no_effect, "the driver talks to the engine itself, without a router"},
      {"moe_", no_effect, "the model folder says whether there are experts"},
      {"multi_lora_", refused, "adapters are not built yet; train the whole model"},
      {"dumper_", refused, "the dumper is not built; leave it out"},
      {"tt_", refused, "use --train-backend fsdp; leave it out"},
  };
  return prefixes;
}

bool same_value(std::string_view a, std::string_view b) {
  if (a == b) return true;
  const auto x = parse_double(a);
  const auto y = parse_double(b);
  return x && y && *x == *y;
}

}  // namespace tandem
