# Training with NVIDIA GPUs in verl's own image, which has torch, vLLM 0.24 and flash-attn. It has not been built yet.
#
#   docker build -t grail .
#   mkdir -p data outputs ~/.cache/huggingface
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --network=host \
#       -v "$PWD/data:/workspace/grail/data" -v "$PWD/outputs:/workspace/grail/outputs" \
#       -e HF_HOME=/hf -v "$HOME/.cache/huggingface:/hf" grail bash examples/run_qwen3_grail.sh
#
# With InfiniBand also --device=/dev/infiniband --cap-add=IPC_LOCK (docs/multi_node.md). Keys are handed over when it runs, as
# in -e WANDB_API_KEY, and are in no layer. Without Docker, scripts/setup_gpu.sh makes the environment.
FROM verlai/verl:vllm024.latest

WORKDIR /workspace/grail
COPY . .
# The versions of verl, TransferQueue and math-verify that this project is tested with; the rest is the image's.
RUN pip install --no-cache-dir --no-deps \
        $(grep -oE '^(verl|transferqueue|math-verify|latex2sympy2-extended|pebble)==[^ ]+' requirements.txt) \
    && pip install --no-cache-dir --no-deps -e .
