"""The tool ``check`` of :mod:`verl_cpu.tiny.agent` as verl's tool agent loop calls it; in ``agent_tools.yaml``."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from verl_cpu.tiny.agent import check
from verl_cpu.tiny.task import Problem


class CheckTool(BaseTool):
    """Replies with the running value after the next step of the chain in the prompt. verl makes an instance for each
    call, so that the steps taken are the replies so far (``agent_data.user_turns``)."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Returns the reply, its reward, and no figures."""
        problem = Problem.parse(agent_data.messages[0]["content"])
        reply, reward = check(problem, agent_data.user_turns, str(parameters["step"]))
        return ToolResponse(text=reply), reward, {}
