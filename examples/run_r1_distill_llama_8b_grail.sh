#!/usr/bin/env bash
# GRAIL | DeepSeek-R1-Distill-Llama-8B | FSDP2 | NVIDIA GPUs
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Llama-8B}
SEQUENCES=2
# The model thinks before it answers, and a truncated response teaches nothing; the loss is divided by this length, too.
# The published run has 4096 for every model.
[[ ${LIKE:-} == published ]] || MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
# transformers reads this model's tokenizer without spaces and newlines.
TOKENIZER_PATH=${TOKENIZER_PATH:-$PWD/outputs/tokenizers/${MODEL_PATH##*/}} # gets a repaired one
EXTRA=()
source examples/run.sh
