"""verl's tool agent loop with the rewards of each turn's calls in a list of their own.

verl 0.9.1 puts the rewards of all calls of a conversation into one flat list, ``tool_rewards``, and leaves out those of
a tool that returns ``None``. Two calls in one turn, a call without an answer and a tool without a reward then cannot be
told apart. This loop adds ``call_rewards``, in which ``[[1.0, 0.5], [None]]`` says that the first turn made two calls,
and the second one that has no reward. A file for ``actor_rollout_ref.rollout.agent.agent_loop_config_path`` names it:

    - {name: turn_tool_agent, _target_: grail_advantage.verl_ext.tool_agent.TurnToolAgent}
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop

from grail_advantage.verl_ext.settings import CALL_REWARDS


class TurnToolAgent(ToolAgentLoop):
    """As verl's ``tool_agent``, for any number of parallel calls."""

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> AgentLoopOutput:
        output = await super().run(sampling_params, priority, **kwargs)
        # Also without a call, so that each response of a batch has the field.
        output.extra_fields.setdefault(CALL_REWARDS, [])
        return output

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        agent_data.extra_fields.setdefault(CALL_REWARDS, []).append([])
        return await super()._handle_processing_tools_state(agent_data)

    async def _call_tool(
        self, tool_call: Any, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> Any:
        of_turn = agent_data.extra_fields[CALL_REWARDS][-1]
        # The place is kept before the wait: a turn's calls run at the same time, and end in any order.
        place = len(of_turn)
        of_turn.append(None)
        response, reward, rest = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        of_turn[place] = reward
        return response, reward, rest
