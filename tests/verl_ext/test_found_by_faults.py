"""Behaviour of the verl host that no other test saw when a deliberate fault took it away (``tests/faults.toml``)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from grail_advantage import GrailConfig
from grail_advantage.batch import PassRow
from grail_advantage.methods import methods
from grail_advantage.model.interface import RowScores
from grail_advantage.signals.shear import ShearConfig
from grail_advantage.verl_ext import transfer
from grail_advantage.verl_ext.checks import check_config
from grail_advantage.verl_ext.selection import reward_advantages
from grail_advantage.verl_ext.shared_forward import SALIENCY_FIELDS, SECONDS, TARGET
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.wire import build_reply, rows_of
from tests.composed import compose
from tests.core.tiny_models import char_tokenizer, encode
from tests.verl_ext.test_one_step import Store

OF_THIS_PROJECT = [name for name, of in methods().items() if of.signal_class.__module__.startswith("grail_advantage.")]


def test_no_answer_is_found_in_the_output_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(transfer, "tq", store)
    turns = [("I ask for", 1), (r"\boxed{3}", 0), (r"so it is \boxed{4}", 1), (r"\boxed{5}", 0)]
    for key, row in (("a_0_0", turns), ("a_1_0", turns[1:2])):
        response, mask = (torch.cat(parts) for parts in zip(*map(_turn, row), strict=True))
        store.rows[key] = {"prompts": torch.tensor(encode("Two?")), "responses": response, "loss_mask": mask}
    batch = KVBatchMeta(partition_id="train", keys=list(store.rows), tags=[{}, {}])
    for which in ("first", "last"):
        rollouts = transfer.fetch_rollouts(batch, GrailConfig(span=which), char_tokenizer(), {})
        span, of_tool_alone = rollouts.spans
        assert rollouts.responses[0][span.content_start : span.content_end].tolist() == encode("4")
        assert of_tool_alone is None


def _turn(turn: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = encode(turn[0])
    return torch.tensor(ids), torch.full((len(ids),), turn[1])


@pytest.mark.parametrize("name", ["fp16", "float16", "16"])
@pytest.mark.parametrize("option", ["+{}.mixed_precision={{param_dtype:{}}}", "{}.model_dtype={}"])
def test_half_precision_is_refused_for_methods_that_need_gradients(option: str, name: str) -> None:
    override = option.format("actor_rollout_ref.actor.fsdp_config", name)
    for estimator in OF_THIS_PROJECT:
        overrides = ["actor_rollout_ref.rollout.n=4", f"algorithm.adv_estimator={estimator}", override]
        overrides.append("actor_rollout_ref.actor.entropy_from_logits_with_chunking=true")
        config = compose("grail_trainer", overrides=overrides)
        if estimator in ("grail", "oar_g"):
            with pytest.raises(ValueError, match=rf"dtype={name} does not .*={estimator}; use bf16 or fp32"):
                check_config(config)
        else:
            check_config(config)


def test_the_backward_took_as_long_as_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(transfer, "tq", store)
    for length, seconds in ((3, 0.25), (4, 1.5), (5, 0.5)):
        values = {name: torch.ones(length) for name in SALIENCY_FIELDS}
        store.rows[f"a_{length}_0"] = {**values, SECONDS: torch.tensor([seconds])}
    assert transfer.fetch_saliency(list(store.rows), "train")[1] == 1.5


def test_every_field_of_the_saliency_is_kept_from_verls_next_stages() -> None:
    fields = ["prompts", TARGET, *SALIENCY_FIELDS, SECONDS, "old_log_probs"]
    batch = KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{}], fields=fields)
    assert transfer.without_saliency_fields(batch).fields == ["prompts", "old_log_probs"]


def test_copies_that_fill_up_a_rank_belong_to_no_group() -> None:
    asked: list[PassRow] = []

    def compute_token_scores(request: TensorDict) -> TensorDict:
        asked.extend(rows_of(request))
        return build_reply([RowScores(torch.full((row.response_length,), float(row.place))) for row in asked])

    trainer = SimpleNamespace(
        signal=ShearConfig(),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}, compute_token_scores=compute_token_scores),
        config=OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}}),
        global_steps=1,
        tokenizer=char_tokenizer(),
    )
    rows = [PassRow(torch.arange(4 + i), 2, 2 + i, None, 1.0, group, i) for i, group in enumerate((0, 0, 1))]
    scores = TokenWeightTrainer._run_pass(trainer, rows)
    assert [of_row.scores_T.tolist() for of_row in scores] == [[float(i)] * (2 + i) for i in range(3)]
    assert sorted(row.group for row in asked) == [-1, 0, 0, 1]


def test_every_output_of_a_session_is_unjudged_where_the_last_one_is() -> None:
    keys = ["a_0_0", "a_0_1", "a_1_0", "a_1_1", "a_2_0"]
    rewards_BT = torch.tensor([[0.0, 1.0], [0.0, torch.nan], [0.0, torch.inf], [0.0, 1.0], [0.0, 0.0]])
    mask_BT = torch.ones(5, 2).bool()
    rollouts = transfer.Rollouts(keys, [], [], mask_BT, [], transfer.group_numbers(keys), [])
    config = compose("grail_trainer", overrides=["actor_rollout_ref.rollout.n=3"])
    advantages_BT, unjudged_B = reward_advantages(rewards_BT, rollouts, mask_BT, config)
    assert unjudged_B.tolist() == [True, True, False, False, False]
    assert advantages_BT[:2].tolist() == [[0.0, 0.0]] * 2
    assert (advantages_BT[2:4] > 0).all() and (advantages_BT[4] < 0).all()
