# Training with NVIDIA GPUs, with the versions of requirements.txt. Needs no GPU to be built. It has not been built yet.
#
#   docker build -t grail .
#   mkdir -p data outputs ~/.cache/huggingface
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --network=host \
#       -v "$PWD/data:/workspace/grail/data" -v "$PWD/outputs:/workspace/grail/outputs" \
#       -e HF_HOME=/hf -v "$HOME/.cache/huggingface:/hf" \
#       grail bash examples/run_qwen3_grail.sh
#
# The user is ubuntu, 1000:1000, and not root: mounted folders must be writable for it (chown 1000:1000 FOLDER). As another
# user, with --user "$(id -u):$(id -g)" -e HOME=/tmp, the image runs as well, but nothing can be installed into it.
#
# With InfiniBand also --device=/dev/infiniband --cap-add=IPC_LOCK (docs/multi_node.md). Keys are handed over when it runs, as
# in -e WANDB_API_KEY, and are in no layer.
#
# CUDA 13.0 is what torch 2.11.0 on PyPI is built for; "devel" for nvcc, with which flash-attn is compiled where verl's wheel
# cannot be had. Without Docker, the same packages of the distribution and scripts/setup_gpu.sh in a virtual environment give
# the same.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# libibverbs1, its providers (the network cards' own parts) and librdmacm1 are what NCCL loads for InfiniBand and RoCE, and
# libnuma1 for the placement of its threads; without them it falls back to TCP. ibverbs-utils has ibv_devinfo, to see the cards.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers ibverbs-utils libibverbs1 libnuma1 librdmacm1 numactl \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=ubuntu --group=ubuntu /opt/venv \
        /workspace/grail /workspace/grail/data /workspace/grail/outputs

USER ubuntu
RUN python3.12 -m venv /opt/venv
ENV HOME=/home/ubuntu PATH=/opt/venv/bin:$PATH CUDA_HOME=/usr/local/cuda PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1

# For flash-attn where it is compiled: compilers at once (by memory and cores, if empty) and GPUs, as in "90" (all, if empty).
ARG MAX_JOBS=
ARG FLASH_ATTN_CUDA_ARCHS=

# The long part first, so that a change of the project's code does not repeat it.
WORKDIR /workspace/grail
COPY --chown=ubuntu:ubuntu requirements.txt ./
COPY --chown=ubuntu:ubuntu scripts/setup_gpu.sh scripts/uv.sh scripts/
RUN ANY_MACHINE=1 bash scripts/setup_gpu.sh --requirements-only

COPY --chown=ubuntu:ubuntu . .
RUN ANY_MACHINE=1 bash scripts/setup_gpu.sh
