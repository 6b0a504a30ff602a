"""What the saliency pass holds on two ranks: whole blocks as in training, saved tensors, and the logits of long targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grail_advantage import find_answer_span
from tests.core.tiny_models import char_tokenizer, encode, tiny_model
from tests.verl_ext import pass_memory_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import CLEAN, write_models

pytestmark = pytest.mark.slow

RTOL = 1e-4
NAN_TOKEN = "@"


def _row(prompt: str, response: str) -> tuple[torch.Tensor, int, tuple[int, int]]:
    span = find_answer_span(encode(response), char_tokenizer(), "first")
    start = len(encode(prompt))
    return torch.tensor(encode(prompt + response)), start, (start + span.start, start + span.end)


LONG = [
    [_row("Recite.", rf"So \boxed{{{'one, two, ' * times}}} it is.") for times in (3, 1, 7, 4)],
    [_row("And now?", rf"\boxed{{{'3, 4; ' * times}}}") for times in (2, 9, 1, 1)],
]
"""Each rank's rows, with targets of 13 to 77 tokens."""
WITH_NAN = [
    [_row("Two?", r"It is @ \boxed{2}"), _row("Three?", r"It is ! \boxed{3}"), _row("Is", r"So \boxed{4}")],
    [_row("Four?", r"I take \boxed{4}"), _row("Five?", r"I take \boxed{5} or"), _row("Six?", r"\boxed{6} @")],
]


def _write_nan_model(folder: Path) -> None:
    model = tiny_model(seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[encode(NAN_TOKEN)] = torch.nan
    model.save_pretrained(folder / "qwen3-nan")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Starts the two ranks and waits for all their experiments."""
    folder = tmp_path_factory.mktemp("memory")
    write_models(folder)
    _write_nan_model(folder)
    replaced = {encode(NAN_TOKEN)[0]: encode("!")[0]}
    clean = [
        [(tokens.clone().apply_(lambda t: replaced.get(t, t)), *rest) for tokens, *rest in own] for own in WITH_NAN
    ]
    torch.save({"long": LONG, "nan": WITH_NAN, "clean": clean}, folder / "plan.pt")
    return start_ranks("tests.verl_ext.pass_memory_ranks", folder, 2)


@pytest.mark.parametrize("setup", ranks.WHOLE)
class TestWholeBlocks:
    def test_are_as_few_as_in_training(self, results: list[Results], setup: str) -> None:
        for result in of_all_ranks(results, "whole", setup):
            most = max(result["training"]["during"])
            assert most < 4  # what the test stands on: training does not hold the whole model
            for name in ("embeddings", "middle", "shared"):
                assert len(result[name]["during"]) % (2 if name == "middle" else 4) == 0 < len(result[name]["during"])
                assert max(result[name]["during"]) <= most

    def test_are_gone_behind_the_backward(self, results: list[Results], setup: str) -> None:
        for result in of_all_ranks(results, "whole", setup):
            assert all(of_run["behind"] == [] for of_run in result.values())


@pytest.mark.parametrize("strategy", ranks.STRATEGIES)
class TestSavedTensors:
    def test_checkpointing_saves_memory(self, results: list[Results], strategy: str) -> None:
        """What the next tests stand on."""
        for with_it, without in zip(
            of_all_ranks(results, "saved", f"{strategy}, plain, checkpointing"),
            of_all_ranks(results, "saved", f"{strategy}, plain, none"),
            strict=True,
        ):
            assert with_it < without / 4

    @pytest.mark.parametrize("checkpointing", ["checkpointing", "none"])
    def test_are_as_few_with_activations_offloaded(
        self, results: list[Results], strategy: str, checkpointing: str
    ) -> None:
        """verl then saves memory in its own way, in training mode alone."""
        offloaded = of_all_ranks(results, "saved", f"{strategy}, activations offloaded, {checkpointing}")
        assert offloaded == of_all_ranks(results, "saved", f"{strategy}, plain, checkpointing")


@pytest.mark.parametrize("setup", ranks.CHUNKED)
class TestLongTargets:
    @pytest.mark.parametrize("kind", ["pass", "shared"])
    def test_have_the_same_saliency_in_chunks(self, results: list[Results], setup: str, kind: str) -> None:
        for result in of_all_ranks(results, "chunked", setup):
            at_once, chunked = result["at once"][kind], result["chunked"][kind]
            for name in at_once.keys() - {"saliency_seconds"}:
                for found, expected in zip(chunked[name], at_once[name], strict=True):
                    scale = float(expected.abs().max())
                    assert scale > 0
                    torch.testing.assert_close(found, expected, rtol=RTOL, atol=RTOL * scale)

    def test_are_taken_in_chunks(self, results: list[Results], setup: str) -> None:
        """Where ranks may take different numbers of them: each call of a head with a LoRA gathers parameters with FSDP1."""
        for result in of_all_ranks(results, "chunked", setup):
            assert result["at once"]["chunks"] == []
            if setup == "fsdp, lora on the head":
                assert result["chunked"]["chunks"] == []
            else:
                assert len(result["chunked"]["chunks"]) > 20
                assert max(result["chunked"]["chunks"]) == ranks.CHUNK

    def test_leave_nothing_behind(self, results: list[Results], setup: str) -> None:
        for result in of_all_ranks(results, "chunked", setup):
            assert {**result["leftovers"], "held": []} == {**CLEAN, "held": []}


@pytest.mark.parametrize("setup", ranks.TRAINED)
def test_the_next_optimiser_step_is_the_same(results: list[Results], setup: str) -> None:
    for result in of_all_ranks(results, "trained", setup):
        assert result["alone"]["norms"] == result["after passes"]["norms"]
        assert all(norm > 0 for norm in result["alone"]["norms"])
        assert all(map(torch.equal, result["alone"]["final"], result["after passes"]["final"]))


@pytest.mark.parametrize("setup", ranks.NAN)
def test_rows_with_nan_logits_leave_the_others_alone(results: list[Results], setup: str) -> None:
    touched = 0
    for own, result in zip(WITH_NAN, of_all_ranks(results, "nan", setup), strict=True):
        for row, (tokens, _, (_, end)) in enumerate(own):
            found, clean = result["nan"]["saliency"][row], result["clean"]["saliency"][row]
            assert clean[:end].isfinite().all()
            if encode(NAN_TOKEN)[0] in tokens:
                touched += 1
                assert found[:end].isnan().any()
            else:
                torch.testing.assert_close(found[:end], clean[:end], rtol=RTOL, atol=RTOL)
    assert touched == 2
