"""The trainers' advantages under verl's options: token weight times verl's advantage, and nothing else differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grail_advantage import Grail, find_answer_span
from tests.core.tiny_models import END_ID, char_tokenizer, encode
from tests.verl_ext.one_step import Store, Workers, made_up_saliency, make_trainer, row_of

Rows = dict[str, dict[str, torch.Tensor]]
FIELDS = ("advantages", "returns", "response_mask", "loss_mask", "rollout_is_weights", "token_level_rewards")


@dataclass(frozen=True)
class Output:
    """One response: its key is ``{uid}_{session}_{index}``."""

    uid: str
    session: int
    index: int
    prompt: str
    response: str
    reward: float

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session}_{self.index}"


def _group(uid: str, prompt: str, *answers: tuple[str, float]) -> list[Output]:
    return [Output(uid, session, 0, prompt, response, reward) for session, (response, reward) in enumerate(answers)]


GROUPS = {
    "a": _group(
        "a",
        "Two plus three?",
        (r"Two and three make \boxed{5}, so five it is.<end>", 1.0),
        (r"It must be \boxed{4}.<end>", 0.0),
        (r"I think so: \boxed{6}<end>", 0.0),
        ("I do not know, boxed{3} or {4}.<end>", 0.0),
    ),
    "b": _group(
        "b",
        "Half?",
        (r"\boxed{4} no, it is \boxed{\frac{1}{2}}<end>", 1.0),
        (r"Clearly \boxed{2}.<end>", 0.0),
        (r"=\boxed{3}<end>", 0.0),
        (r"First \boxed{3}, no, \boxed{0.5}<end>", 1.0),
    ),
}
TWO_GROUPS = [*GROUPS["a"], *GROUPS["b"]]
# Earlier outputs of a session carry the reward of its last one, as verl's agent loop writes them.
SEVERAL_OUTPUTS = [
    *TWO_GROUPS,
    Output("a", 0, 1, "Two plus three? Sure?", r"Yes, \boxed{5}.<end>", 1.0),
    Output("a", 1, 1, "Two plus three? Sure?", "Let me see.<end>", 0.0),
    Output("a", 1, 2, "Two plus three? Sure? Yes?", r"Then it is \boxed{4}.<end>", 0.0),
]
CORRECTION = "algorithm.rollout_correction"
TOKENS = [f"{CORRECTION}.rollout_{of}" for of in ("is=token", "rs=token_k1", "rs_threshold='0.7_1.4'")]
SEQUENCES = [f"{CORRECTION}.rollout_{of}" for of in ("is=sequence", "rs=seq_mean_k1", "rs_threshold='0.95_1.05'")]
KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"]


@dataclass(frozen=True)
class Scenario:
    """Rollouts, the options, and verl's name of the trainer."""

    overrides: list[str] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=lambda: TWO_GROUPS)
    mode: str = "sync"


SCENARIOS = {
    "plain": Scenario(),
    "separate_async": Scenario(mode="separate_async"),
    "decoupled, sequences": Scenario(SEQUENCES),
    "bypass": Scenario([f"{CORRECTION}.bypass_mode=True", *TOKENS]),
    "several outputs": Scenario(outputs=SEVERAL_OUTPUTS),
    "everything": Scenario([*KL, *TOKENS], SEVERAL_OUTPUTS, "colocate_async"),
}


def put_rollouts(store: Store, outputs: list[Output], multiple: int = 5) -> Any:
    """Write rollouts into the store as verl's agent loop does, fill up, and add log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    rows, tags, log_probs = [], [], []
    for output in outputs:
        row = row_of(output.prompt, output.response, output.reward)
        prompt, length = len(row["prompts"]), len(row["responses"])
        old = -2 * torch.rand(length, generator=generator)
        spread = 0.3 * torch.randn((2, length), generator=generator)
        log_probs.append({"old_log_probs": old, "ref_log_prob": old + spread[1]})
        lengths = {"prompt_len": prompt, "response_len": length, "seq_len": prompt + length}
        tags.append({"status": "success", **lengths})
        whole = {"input_ids": torch.cat([row["prompts"], row["responses"]]), "rollout_log_probs": old + spread[0]}
        whole |= {"attention_mask": torch.ones(prompt + length).long(), "position_ids": torch.arange(prompt + length)}
        rows.append({**row, **whole, "uid": output.uid, "session_id": output.session, "num_turns": 2})
    keys = [output.key for output in outputs]
    batch = store.kv_batch_put(keys, "train", list_of_dict_to_tensordict(rows), tags)
    batch = upsample_batch_to_divisible_size(batch, multiple, END_ID)
    log_probs += [{name: torch.zeros(1) for name in log_probs[0]}] * (len(batch) - len(outputs))
    store.kv_batch_put(batch.keys, "train", list_of_dict_to_tensordict(log_probs))
    return batch


def _get(store: Store, keys: list[str]) -> Rows:
    """Every response's fields that an advantage computation reads or writes, by key."""
    return {key: {name: store.rows[key][name] for name in FIELDS if name in store.rows[key]} for key in keys}


def trainer_of(scenario: Scenario, store: Store, estimator: str = "grail", workers: Any = None) -> Any:
    """The scenario's trainer, with workers that make saliencies up unless others are given."""
    given = [f"algorithm.adv_estimator={estimator}", "data.train_batch_size=3", "actor_rollout_ref.rollout.n=4"]
    signal = Grail("robust", gate="all")
    return make_trainer([*given, *scenario.overrides], signal, workers or Workers(store), mode=scenario.mode)


@cache
def results_of(name: str) -> dict[str, Any]:
    """Both trainers' results on a scenario's rollouts."""
    results: dict[str, Any] = {}
    for kind, estimator in (("verl", "grpo"), ("weighted", "grail")):
        with pytest.MonkeyPatch.context() as monkeypatch:
            store = Store()
            store.install(monkeypatch)
            batch = put_rollouts(store, SCENARIOS[name].outputs)
            trainer = trainer_of(SCENARIOS[name], store, estimator)
            metrics: dict[str, Any] = {}
            batch = trainer._compute_advantage(batch, metrics)
        padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]
        results[kind] = {"rows": _get(store, batch.keys), "metrics": metrics, "padding": padding}
    return results


def _expected_weights(output: Output, mask_T: torch.Tensor, trains: bool) -> np.ndarray:
    """Preset ``robust``, in numpy: statistics over the reasoning tokens that train, content at 5, sum of weights restored."""
    mask = mask_T.numpy().astype(bool)
    prompt, response = torch.tensor(encode(output.prompt)), torch.tensor(encode(output.response))
    span = find_answer_span(response, char_tokenizer(), "last")
    scores_T = made_up_saliency(torch.cat([prompt, response]))[len(prompt) :]
    if span is None or not trains:
        return mask.astype(float)
    index = np.arange(len(mask))
    reasoning = index < span.start
    logs = np.log(scores_T.double().numpy() + 1e-8)
    known = logs[reasoning & mask]
    z = (logs - known.mean()) / np.sqrt(known.var() + 1e-8) if known.size else np.zeros_like(logs)
    weights = np.where(reasoning, np.clip(1 + 0.5 * z, 0.5, 5.0), 1.0)
    weights[span.content_start : span.content_end] = 5.0
    weights = weights * mask
    return weights * mask.sum() / weights.sum()


def _assert_weighted(outputs: list[Output], base: Rows, weighted: Rows) -> int:
    """Advantages are weight times verl's; returns the number of responses whose weights are not all 1."""
    moved = 0
    for output in outputs:
        advantages = base[output.key]["advantages"].double().numpy()
        mask = base[output.key]["response_mask"]
        trains = bool((advantages != 0).any())
        expected = _expected_weights(output, mask, trains)
        found = weighted[output.key]["advantages"].double().numpy()
        np.testing.assert_allclose(found, expected * advantages, rtol=2e-4, atol=1e-6, err_msg=output.key)
        torch.testing.assert_close(weighted[output.key]["returns"], weighted[output.key]["advantages"], rtol=0, atol=0)
        moved += trains and not np.allclose(expected, mask.numpy())
    return moved


def _same(verls: Rows, ours: Rows) -> bool:
    """Whether nothing but the advantages differs."""
    columns = {name for row in verls.values() for name in row} - {"advantages", "returns"}
    equal = (torch.equal(row[name], ours[key][name]) for key, row in verls.items() for name in columns & row.keys())
    return all(set(row) == set(ours[key]) for key, row in verls.items()) and all(equal)


@pytest.mark.parametrize("name", SCENARIOS)
def test_advantages_are_weight_times_verls_and_nothing_else_differs(name: str) -> None:
    result, outputs = results_of(name), SCENARIOS[name].outputs
    verl, weighted = result["verl"], result["weighted"]
    assert _assert_weighted(outputs, verl["rows"], weighted["rows"]) >= 3
    assert _same({output.key: verl["rows"][output.key] for output in outputs}, weighted["rows"])
    assert {metric: weighted["metrics"][metric] for metric in verl["metrics"]} == verl["metrics"]
    # Responses that fill up get no advantage.
    assert len(weighted["padding"]) == -len(outputs) % 5 > 0
    assert all(weighted["rows"][key]["advantages"].tolist() == [0.0] for key in weighted["padding"])
    assert all(np.isfinite(value) for value in weighted["metrics"].values())


def test_corrections_reject_tokens_sequences_and_with_bypass_nothing() -> None:
    """What the test above rests on."""

    def rejected(name: str, corrected: bool) -> list[torch.Tensor]:
        rows = [results_of(name)["weighted"]["rows"][output.key] for output in SCENARIOS[name].outputs]
        assert all(("rollout_is_weights" in row) == corrected for row in rows)
        return [row["loss_mask"].bool() & ~row["response_mask"].bool() for row in rows]

    assert sum(bool(row.any()) and not row.all() for row in rejected("everything", True)) >= 4
    sequences = rejected("decoupled, sequences", True)
    assert all(row.all() or not row.any() for row in sequences)
    assert 0 < sum(bool(row.all()) for row in sequences) <= len(sequences) - 3
    assert not any(row.any() for row in rejected("bypass", False))


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_trainer_has_the_replay_buffer_of_verls_own(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which verl chooses by its own names of the modes."""
    monkeypatch.setattr(get_trainer_cls(mode), "__init__", lambda self, config: None)
    config = make_trainer([], Grail(), None).config
    config.trainer.v1.trainer_mode = f"grail_{mode}"
    get_trainer_cls(f"grail_{mode}")(config)
    assert config.trainer.v1.trainer_mode == mode
