"""The saliency pass inside verl's FSDP engine on two ranks against one process and a plain model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grail_advantage import GrailConfig, RolloutBatch, TokenWeights, compute_token_weights, find_answer_span
from grail_advantage.signals.grail import target_range
from grail_advantage.weighting import batch_weights
from tests.core.tiny_models import ROLLOUTS, Batch, Rollout, char_tokenizer, encode, make_batch, tiny_model
from tests.verl_ext import saliency_pass_ranks as ranks
from tests.verl_ext.rank_group import of_all_ranks, start_ranks

pytestmark = pytest.mark.slow

MODELS = {
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tied": True},
    "qwen3-dropout": {"family": "qwen3", "tied": True, "attention_dropout": 0.5},
}
ADAPTERS = {
    "adapter": ("qwen3-tied", {"target_modules": "all-linear"}),
    "adapter-head": ("qwen3", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-tied-head": ("qwen3-tied", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-embeddings": ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapter-saved": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
}
"""LoRA adapters by name: the model that they belong to and what they adapt."""
LONG = "One and one is two, and two is three, " * 4
BATCH = [
    *(ROLLOUTS[name] for name in ("text after the box", "several boxes", "empty box", "box at the start")),
    *(ROLLOUTS[name] for name in ("one token before the box", "box at the end")),
    Rollout("How long can it be?", LONG + r"so \boxed{3}.<end>", -0.5),
]
SHORTEST = 4
SHARES = ([0, 2, 4, 6], [1, 3, 5, SHORTEST])
"""Indices into BATCH of each rank's rows; the last of the second rank fills it up, as the trainer does."""
UNBALANCED = (
    [Rollout("How long?" + "?" * extra, LONG + r"\boxed{3}", -1.0) for extra in range(4)],
    [Rollout("Six" + "?" * extra, r"=\boxed{6}", -1.0) for extra in range(4)],
)
TRAINER_BATCH = [
    *(ROLLOUTS[name] for name in ("no box", "right")),
    *BATCH[:4],
    *(ROLLOUTS[name] for name in ("truncated box", "right, several boxes")),
    *BATCH[4:],
]
RTOL = 1e-4
Row = tuple[torch.Tensor, int, int]


def _row(rollout: Rollout, config: GrailConfig) -> Row:
    """Tokens up to the target's end, index of the first response token, index of the first target token."""
    prompt, response = encode(rollout.prompt), encode(rollout.response)
    start, end = target_range(find_answer_span(response, char_tokenizer(), config.span), config.target)
    return torch.tensor(prompt + response[:end]), len(prompt), len(prompt) + start


def _plan(preset: str) -> dict[str, list[list[Row]]]:
    config = GrailConfig(preset)
    return {
        "even": [[_row(BATCH[index], config) for index in share] for share in SHARES],
        "unbalanced": [[_row(rollout, config) for rollout in share] for share in UNBALANCED],
    }


def write_models(folder: Path) -> dict[str, PreTrainedModel]:
    """Write the models that the ranks load, and return them."""
    from peft import LoraConfig, PeftModel, get_peft_model

    models = {}
    for seed, (name, options) in enumerate(MODELS.items()):
        models[name] = tiny_model(seed=seed, **options)
        models[name].save_pretrained(folder / name)
    for name, (base, options) in ADAPTERS.items():
        seed = list(MODELS).index(base)
        torch.manual_seed(0)
        adapted = get_peft_model(
            tiny_model(seed=seed, **MODELS[base]), LoraConfig(task_type="CAUSAL_LM", r=4, **options)
        )
        for path, parameter in adapted.named_parameters():
            if "lora_B" in path or "lora_embedding_A" in path:  # zeros when new, which would leave the model as it was
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(folder / name)
        models[name] = PeftModel.from_pretrained(tiny_model(seed=seed, **MODELS[base]), folder / name).eval()
    return models


def trainer_batch(rollouts: list[Rollout]) -> dict[str, Any]:
    """What the trainer holds of a batch when it comes to scores."""
    responses = [torch.tensor(encode(rollout.response)) for rollout in rollouts]
    spans = [find_answer_span(response, char_tokenizer(), "last") for response in responses]
    advantages_B = torch.tensor([rollout.advantage for rollout in rollouts])
    mask_BT = torch.arange(max(map(len, responses))) < torch.tensor([[len(response)] for response in responses])
    return {
        "prompts": [torch.tensor(encode(rollout.prompt)) for rollout in rollouts],
        "responses": responses,
        "mask_BT": mask_BT,
        "advantages_B": advantages_B,
        "advantages_BT": advantages_B.unsqueeze(1) * mask_BT,
        "spans": spans,
    }


class Measured:
    """What both ranks measured, and the plain models."""

    def __init__(self, models: dict[str, PreTrainedModel], results: list[dict]) -> None:
        self.models = models
        self.results = results
        self._known: dict[tuple, TokenWeights] = {}

    def of(self, kind: str, setup: str) -> list[dict]:
        """The results of both ranks; fails with the traceback of a rank that raised."""
        return of_all_ranks(self.results, kind, setup)

    def plain(
        self, setup: ranks.Setup, leaf: str, preset: str, temperature: float, rollouts: list[Rollout]
    ) -> TokenWeights:
        """The same weights in one process, with one row at a time and no sharding."""
        name = setup.adapter or setup.model
        key = (name, leaf, preset, temperature, tuple(rollouts))
        if key not in self._known:
            self._known[key] = compute_token_weights(
                self.models[name],
                char_tokenizer(),
                *make_batch(rollouts, padding="right").tensors(),
                GrailConfig(preset, leaf=leaf),
                temperature=temperature,
            )
        return self._known[key]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("ranks")
    models = write_models(folder)
    plan = {"trainer": trainer_batch(TRAINER_BATCH), **{preset: _plan(preset) for preset in ("official", "robust")}}
    torch.save(plan, folder / "plan.pt")
    return Measured(models, start_ranks("tests.verl_ext.saliency_pass_ranks", folder, ranks.WORLD_SIZE))


def _token_scores(saliency_P: torch.Tensor, alignment: str, length: int) -> torch.Tensor:
    """Scores by response token; tokens behind the pass's last position have none."""
    shift = 0 if alignment == "predictor" else 1
    return torch.tensor([float(saliency_P[t + shift]) if t + shift < len(saliency_P) else 0.0 for t in range(length)])


def _by_rollout(per_rank: list[dict], rtol: float) -> list[torch.Tensor]:
    """The saliencies in the order of BATCH; the row that fills up must agree with the one that it repeats."""
    rows: list[Any] = [None] * len(BATCH)
    for share, result in zip(SHARES, per_rank, strict=True):
        assert len(result["saliency"]) == len(share)
        for index, row in zip(share, result["saliency"], strict=True):
            if rows[index] is not None:
                torch.testing.assert_close(row, rows[index], rtol=rtol, atol=rtol * float(row.max()))
            rows[index] = row
    return rows


def _assert_scores_agree(
    saliencies: list[torch.Tensor], expected: TokenWeights, batch: Batch, config: GrailConfig
) -> torch.Tensor:
    """Compare scores row by row, and return them as (B, T), 0 behind each response."""
    lengths = batch.response_mask.sum(dim=1).tolist()
    scores_BT = torch.zeros(len(saliencies), max(lengths))
    for row, saliency_P in enumerate(saliencies):
        scores_T = _token_scores(saliency_P, config.alignment, lengths[row])
        expected_T = expected.scores[row, batch.response_mask[row].bool()]
        torch.testing.assert_close(scores_T, expected_T, rtol=RTOL, atol=RTOL * float(expected_T.max()))
        scores_BT[row, : lengths[row]] = scores_T
    return scores_BT


def test_rows_make_several_micro_batches() -> None:
    """What the other tests stand on: on the first rank each kind of micro-batch occurs more than once."""
    for how in ranks.PASSES.values():
        lengths = [len(_row(BATCH[index], GrailConfig(how.preset))[0]) for index in SHARES[0]]
        assert max(lengths) < (how.budget or math.inf) < sum(lengths) or how.rows < len(lengths)
        assert max(lengths) > 10 * min(lengths)


CASES = [(setup, name) for setup in ranks.SETUPS for name in ranks.PASSES]


@pytest.mark.parametrize(("setup", "name"), CASES, ids=[f"{setup}: {name}" for setup, name in CASES])
class TestPass:
    def test_gives_the_plain_models_scores_and_weights(self, measured: Measured, setup: str, name: str) -> None:
        how = ranks.PASSES[name]
        config = GrailConfig(how.preset, leaf=how.leaf)
        batch = make_batch(BATCH, padding="right")
        expected = measured.plain(ranks.SETUPS[setup], how.leaf, how.preset, how.temperature, BATCH)
        assert expected.stats["selected_rate"] == 1.0
        saliencies = _by_rollout([result[name] for result in measured.of("passes", setup)], RTOL)
        scores_BT = _assert_scores_agree(saliencies, expected, batch, config)

        lengths_B1 = batch.response_mask.sum(dim=1, keepdim=True)
        mask_BT = torch.arange(scores_BT.shape[1]) < lengths_B1
        seen = RolloutBatch(mask_BT, batch.advantages, expected.spans, {})
        weights_BT = batch_weights(scores_BT, seen, config.select(seen), config).weights_BT
        for row, length in enumerate(lengths_B1.flatten().tolist()):
            expected_T = expected.weights[row, batch.response_mask[row].bool()]
            torch.testing.assert_close(weights_BT[row, :length], expected_T, rtol=1e-3, atol=1e-4)

    def test_gives_every_position_from_the_first_predictor_to_the_target_end(
        self, measured: Measured, setup: str, name: str
    ) -> None:
        how = ranks.PASSES[name]
        results = measured.of("passes", setup)
        for share, result in zip(SHARES, results, strict=True):
            for index, saliency_P, norm_P in zip(
                share, result[name]["saliency"], result[name]["gradient_norm"], strict=True
            ):
                tokens, response_start, _ = _row(BATCH[index], GrailConfig(how.preset))
                assert saliency_P.shape == norm_P.shape == (len(tokens) - response_start + 1,)
                assert saliency_P.dtype == norm_P.dtype == torch.float32
                assert (norm_P[:-1] > 0).all()
                # Nothing predicts from the last target token, so its own position has exactly no gradient.
                assert norm_P[-1] == saliency_P[-1] == 0

    def test_leaves_nothing_behind(self, measured: Measured, setup: str, name: str) -> None:
        for result in measured.of("passes", setup):
            left = dict(result[name]["leftovers"])
            held = set(left.pop("held"))
            if setup == "fsdp, unsharded between forward and backward":
                # Asked to keep whole parameters for the backward, FSDP1 keeps those of blocks before the leaf, which no
                # backward reaches, until the next one that does. It does not use them as they are.
                blocks = {"embeddings": 0, "first": 1, "middle": 2, "last": 3}[ranks.PASSES[name].leaf]
                assert held <= {f"_fsdp_wrapped_module.model.layers.{block}" for block in range(blocks)}
            else:
                assert held == set()
            assert left == CLEAN


CLEAN = {"whole": [], "gradients": [], "hooks": [], "training": [], "mode": None, "grad_enabled": True}


@pytest.mark.parametrize("setup", ranks.TRAINED)
class TestNextOptimiserStep:
    def test_moves_and_repeats_exactly_without_a_pass(self, measured: Measured, setup: str) -> None:
        """What the next test stands on."""
        for result in measured.of("training", setup):
            first, second = result["alone"], result["alone again"]
            assert not any(map(torch.equal, *_moved(first)))
            assert all(map(torch.equal, first["final"], second["final"]))
            assert first["norms"] == second["norms"]
            assert all(norm > 0 for norm in first["norms"])

    def test_is_the_same_after_passes(self, measured: Measured, setup: str) -> None:
        for result in measured.of("training", setup):
            assert result["after passes"]["norms"] == result["alone"]["norms"]
            assert all(map(torch.equal, result["after passes"]["final"], result["alone"]["final"]))


def _moved(steps: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Initial and final value of this rank's shards that are not empty and that train."""
    pairs = zip(steps["initial"], steps["final"], steps["trains"], strict=True)
    kept = [(initial, final) for initial, final, trains in pairs if trains and initial.numel()]
    return [initial for initial, _ in kept], [final for _, final in kept]


class TestErrors:
    """An unknown leaf, a token id outside the vocabulary, and a block that fails on all ranks."""

    @pytest.mark.parametrize("setup", ranks.RAISING)
    def test_leave_no_hook_and_no_mode(self, measured: Measured, setup: str) -> None:
        for result in measured.of("raising", setup):
            times = 1 if setup == "fsdp" else 2
            kinds = [kind for kind in ("KeyError", "IndexError", "ZeroDivisionError") for _ in range(times)]
            assert [kind for kind, _ in result["errors"]] == kinds
            for _, left in result["errors"]:
                # An interrupted forward leaves the block that it was in as a whole.
                assert {**left, "whole": [], "held": []} == {**CLEAN, "held": []}

    @pytest.mark.parametrize("failure", ["unknown_leaf", "invalid_token", "broken_block"])
    def test_do_not_change_the_next_optimiser_step_of_fsdp2(self, measured: Measured, failure: str) -> None:
        for result in measured.of("raising", "fsdp2"):
            assert result[failure]["norms"] == result["alone"]["norms"]
            assert all(map(torch.equal, result[failure]["final"], result["alone"]["final"]))


@pytest.mark.parametrize("setup", ranks.RECOMPUTED)
class TestGradientCheckpointing:
    def test_recomputes_the_blocks_that_the_backward_passes(self, measured: Measured, setup: str) -> None:
        behind = {"embeddings": [1, 1, 1, 1], "first": [0, 1, 1, 1], "middle": [0, 0, 1, 1], "last": [0, 0, 0, 1]}
        again = ranks.RECOMPUTED[setup].checkpointing
        for result in measured.of("recomputing", setup):
            for leaf, recomputed in behind.items():
                assert result[leaf]["forwards"] == [1 + again * times for times in recomputed]

    @pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
    def test_keeps_dropout_off(self, measured: Measured, setup: str, leaf: str) -> None:
        config = GrailConfig(leaf=leaf)
        expected = measured.plain(ranks.RECOMPUTED[setup], leaf, "official", 1.0, BATCH)
        saliencies = _by_rollout([result[leaf] for result in measured.of("recomputing", setup)], RTOL)
        _assert_scores_agree(saliencies, expected, make_batch(BATCH, padding="right"), config)


@pytest.mark.parametrize("setup", ranks.UNBALANCED)
def test_ranks_with_very_different_rows_run_as_many_micro_batches(measured: Measured, setup: str) -> None:
    results = measured.of("unbalanced", setup)
    assert [result["own_need"] for result in results] == [4, 1]
    forwards = [result["forwards"] for result in results]
    assert forwards == [8, 8]  # four micro-batches, each forward and recomputed
    for rank, result in enumerate(results):
        rollouts = UNBALANCED[rank]
        expected = measured.plain(ranks.UNBALANCED[setup], "embeddings", "official", 1.0, rollouts)
        _assert_scores_agree(result["saliency"], expected, make_batch(rollouts, padding="right"), GrailConfig())


@pytest.mark.parametrize("setup", ranks.HALVED)
def test_autocast_of_the_training_step_is_used(measured: Measured, setup: str) -> None:
    results = measured.of("half_precision", setup)
    assert [result["dtype"] for result in results] == ["torch.bfloat16"] * 2
    batch = make_batch(BATCH, padding="right")
    expected = measured.plain(ranks.HALVED[setup], "embeddings", "official", 1.0, BATCH)
    for row, saliency_P in enumerate(_by_rollout(results, rtol=0.2)):
        expected_P = expected.scores[row, batch.response_mask[row].bool()][: len(saliency_P) - 1]
        errors_P = (saliency_P[:-1] / expected_P).log().abs()
        assert 1e-4 < float(errors_P.median()) < math.log(1.1)


def test_trainer_puts_every_row_back_in_its_place(measured: Measured) -> None:
    """From a batch to scores through the trainer's and the worker's own code, with a row that fills up a rank."""
    expected = measured.plain(ranks.THROUGH_TRAINER["fsdp2"], "embeddings", "robust", 0.9, TRAINER_BATCH)
    batch = make_batch(TRAINER_BATCH, padding="right")
    selected = [row for row, rollout in enumerate(TRAINER_BATCH) if rollout in BATCH]
    assert len(selected) % ranks.WORLD_SIZE == 1
    results = measured.of("trainer", "fsdp2")
    for result in results:
        for row, length in enumerate(batch.response_mask.sum(dim=1).tolist()):
            scores_T = result["scores"][row]
            if row not in selected:
                assert scores_T.isnan().all()
                continue
            expected_T = expected.scores[row, batch.response_mask[row].bool()]
            assert scores_T[length:].isnan().all()
            torch.testing.assert_close(scores_T[:length], expected_T, rtol=RTOL, atol=RTOL * float(expected_T.max()))
    torch.testing.assert_close(results[0]["scores"], results[1]["scores"], equal_nan=True)
    lengths = [result["rows_of_rank"] for result in results]
    own = sorted(len(_row(rollout, GrailConfig("robust"))[0]) for rollout in BATCH)
    assert len(lengths[0]) == len(lengths[1])
    assert sorted(lengths[0] + lengths[1]) == sorted([own[0], *own])
