#!/usr/bin/env bash
# A script that calls verl for GSPO, with the settings that docs/guides/from_verl.md shows, as people write such scripts.
export MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen2.5-3B-Instruct"}
BATCH=512
PROMPT=2048
ANSWER=$((1024 * 8))
files="['/data/gsm8k/train.parquet']"
tokens=$(((PROMPT + ANSWER) * 2))
OBJECTIVE=(
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean   # one weight a response
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator="grpo" \
    "${OBJECTIVE[@]}" \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / 4)) \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    data.train_files="$files" \
    data.val_files="['/data/gsm8k/test.parquet']" \
    data.prompt_key=prompt \
    data.filter_overlong_prompts=True \
    data.train_batch_size=$BATCH \
    data.max_prompt_length=$PROMPT \
    data.max_response_length=${ANSWER} \
    trainer.nnodes="${SLURM_JOB_NUM_NODES}" \
    trainer.experiment_name="gspo-$(basename $MODEL_PATH)" \
    trainer.val_before_train=False \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.total_epochs=10 \
    trainer.total_training_steps=500 \
    | tee run.log
