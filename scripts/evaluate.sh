#!/usr/bin/env bash
# GRAIL | evaluation on the benchmarks, grading again, or comparison of two evaluations | NVIDIA GPUs or CPU
# Knobs: PYTHON (an interpreter that has verl and vLLM: python3 if it has verl, else .venv, which is set up)
# Arguments go to `python -m recipe.evaluate` (--help lists them); the benchmarks are those of scripts/prepare_data.sh.
#   bash scripts/evaluate.sh --model CHECKPOINT_OR_FOLDER_OR_HUB_ID --benchmarks aime24,amc23 --output-dir DIR
#   bash scripts/evaluate.sh --compare DIR_OF_GRPO DIR_OF_GRAIL
#   bash scripts/evaluate.sh --regrade DIR --grader published

grail_module=recipe.evaluate grail_data=--data-dir source "$(dirname "${BASH_SOURCE[0]}")/prepare_data.sh"
