"""An agent loop that asks the model to check its answer, twice at most; docs/turns.md has its command."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class CheckAgain(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        mask = []
        logs = []
        answers = []
        ids = await self.ct_build_initial_tokens(messages)
        limit = self.rollout_config.response_length
        while len(mask) < limit:
            new = await self.server_manager.generate(
                uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
            )
            merged, mask, logs = await self.ct_merge_assistant_token(
                ids, new.token_ids, mask, logs, new.log_probs
            )
            ids = merged.token_ids
            answers.append(self.tokenizer.decode(new.token_ids, skip_special_tokens=True))
            if len(answers) == 3 or "####" not in answers[-1]:
                break
            conversation = [*messages, {"role": "assistant", "content": answers[-1]}]
            messages = [
                *conversation,
                {"role": "user", "content": "Check. If it is wrong, answer again with ####."},
            ]
            merged, mask, logs = await self.ct_merge_context_msg(
                conversation, messages, ids, mask, logs
            )
            ids = merged.token_ids
        start = len(ids) - len(mask)
        return AgentLoopOutput(
            prompt_ids=ids[:start],
            response_ids=ids[start:][:limit],
            response_mask=mask[:limit],
            response_logprobs=logs[:limit],
            extra_fields={**new.extra_fields, "answers": answers},
            num_turns=2 * len(answers),
            metrics={},
        )
