#!/usr/bin/env bash
# GRAIL | DeepSeek-R1-Distill-Llama-8B | FSDP training | NVIDIA GPUs
#
# The model always thinks before it answers, so a response may have 8192 tokens: under the published
# limit of 4096 many would be cut off, and a truncated response teaches nothing. The loss is divided by the longest response,
# and so by 8192.
#
# transformers reads this model's tokenizer without spaces and newlines, so the run takes a repaired copy (TOKENIZER_PATH).
#
# Knobs: MODEL_PATH, TOKENIZER_PATH, MAX_RESPONSE_LENGTH here; the others are in examples/common.sh.
# Arguments are Hydra overrides. More than one node: docs/multi_node.md.

set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Llama-8B}
max_response_length=${MAX_RESPONSE_LENGTH:-8192}
# full-length sequences in a micro-batch, estimated for GPUs with 80 GB
micro_batch_sequences=2

# shellcheck source=examples/common.sh
source examples/common.sh

tokenizer_path=${TOKENIZER_PATH:-$PWD/outputs/tokenizers/$model_name}
refuse_references "TOKENIZER_PATH=$tokenizer_path"
if [[ $dry_run == 0 && ! -f $tokenizer_path/tokenizer_config.json ]]; then
    "$python" -m grail_advantage.answers.tokenizers "$model_path" "$tokenizer_path"
fi
MODEL+=(actor_rollout_ref.model.tokenizer_path="$(quoted "$tokenizer_path")")

run_training "$@"
