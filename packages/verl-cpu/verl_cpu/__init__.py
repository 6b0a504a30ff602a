"""verl 0.9.1 on a machine without an accelerator: FSDP over gloo and vLLM's CPU build.

verl has no CPU platform, but it lets others add one. :func:`install` does: environment variables that Ray, vLLM and
verl read (``environment``), verl's device abstraction (``platform``), replaced code of verl and torch with the reasons
(``patches``), and a vLLM that can reload weights (``vllm``). ``plugin``, an entry point of ``verl.plugins``, calls it
in every process that imports verl with ``VERL_PLATFORM=cpu``, so Ray workers need nothing else.

What a run names in its configuration, or may do without: ``config/cpu.yaml`` (verl's options on this platform),
``replay_buffer``, ``checkpoint_engine``, ``workers`` (Ray's workers as forks of one process), and ``tiny`` (a model and
tasks that train in minutes).
"""

from importlib import import_module


def install() -> None:
    """Register the CPU platform, its rollout replica and its patches with verl.

    Runs while ``import verl`` is finishing, in every process, so it imports neither vLLM nor FSDP.
    """
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_cpu import environment, patches

    environment.apply_defaults()
    import_module("verl_cpu.platform")  # registers itself
    patches.patch()
    RolloutReplicaRegistry.register("vllm", lambda: import_module("verl_cpu.vllm").CpuVLLMReplica)
