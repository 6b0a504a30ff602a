"""Environment variables of a CPU run. Every process applies them when it imports verl; a variable that is set stays."""

import os

import psutil


def apply_defaults() -> None:
    """Set every variable that is not set yet, for this machine."""
    defaults = {
        # verl registers its FSDP engines for "cuda" and "npu"; they run on "cpu" unchanged. This is verl's own switch
        # for picking the registration (verl/workers/engine/base.py, EngineRegistry.get_engine_cls).
        "VERL_ENGINE_DEVICE": "cuda",
        # Gigabytes of key-value cache. vLLM would otherwise claim a share of the whole machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Trainer and rollout take turns on the same cores, so vLLM must not pin its threads to some of them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Ray would set it to 1 in every worker; with nobind vLLM takes its number of threads from here.
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        # Waiting threads sleep. With spinning ones vLLM was measured to take ten times the processor time for a small
        # model as soon as a core was busy elsewhere.
        "OMP_WAIT_POLICY": "PASSIVE",
        # vLLM compiles two helpers of its sampler even under enforce_eager: 20 s of C++ compiler for every server.
        "TORCH_COMPILE_DISABLE": "1",
        # oneDNN keeps what it prepared for each shape of a product, 1024 of them by default, and the engine's shapes go
        # by the number of tokens in a batch: its memory grew by hundreds of MiB (docs/evidence.md, The soak).
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        # The engine keeps its one worker in its own process (distributed_executor_backend=uni in cpu.yaml).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Ray's control service keeps the last 100,000 tasks for its dashboard, which is off: the same page.
        "RAY_task_events_max_num_task_in_gcs": "1000",
        # TransferQueue wants 8 threads and says at each of some 500 transfers a step that there are fewer cores.
        "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or 1)),
        # Usage reports, which collect facts about the machine while everything else starts.
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
