"""An agent loop whose conversations are two responses each, as where the context is compressed, with two calls in every turn;
and its reward function."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState

from grail_advantage.data import runs
from grail_advantage.verl_ext.tool_agent import TurnToolAgent
from verl_cpu.tiny.task import boxed_answer


class CompressingAgent(TurnToolAgent):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        whole = await super().run(sampling_params, priority, **kwargs)
        turns, rewards = runs(whole.response_mask), whole.extra_fields["call_rewards"]
        if len(turns) < 2:
            return whole
        end, begin = turns[0][1], turns[1][0]
        known = {"metrics": whole.metrics, "num_turns": whole.num_turns}
        logs = whole.response_logprobs
        return [
            AgentLoopOutput(
                prompt_ids=whole.prompt_ids,
                response_ids=whole.response_ids[:end],
                response_mask=whole.response_mask[:end],
                response_logprobs=logs and logs[:end],
                extra_fields={**whole.extra_fields, "call_rewards": rewards[:1]},
                **known,
            ),
            AgentLoopOutput(
                prompt_ids=[*whole.prompt_ids, *whole.response_ids[end:begin]],
                response_ids=whole.response_ids[begin:],
                response_mask=whole.response_mask[begin:],
                response_logprobs=logs and logs[begin:],
                extra_fields={**whole.extra_fields, "call_rewards": rewards[1:]},
                **known,
            ),
        ]

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        agent_data.tool_calls = agent_data.tool_calls * 2
        return await super()._handle_processing_tools_state(agent_data)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1 for the right answer."""
    return float(boxed_answer(solution_str) == ground_truth)
