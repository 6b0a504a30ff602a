# Training with NVIDIA GPUs, with the versions of requirements.txt.
#
#   docker build -t grail .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --network=host \
#       -v "$PWD/data:/workspace/grail/data" -v "$PWD/outputs:/workspace/grail/outputs" \
#       -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       grail bash examples/run_qwen3_grail.sh
#
# CUDA 13.0 is what torch 2.11.0 on PyPI is built for; "devel" because flash-attn is compiled with nvcc. Without Docker, the
# same packages of the distribution and scripts/setup_gpu.sh in a virtual environment give the same.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

# Compilers at once; each takes several GB of memory.
ARG MAX_JOBS=8

# The long part first, so that a change of the project's code does not repeat it.
WORKDIR /workspace/grail
COPY requirements.txt ./
COPY scripts/setup_gpu.sh scripts/
RUN MAX_JOBS=$MAX_JOBS bash scripts/setup_gpu.sh --requirements-only

COPY . .
RUN bash scripts/setup_gpu.sh
