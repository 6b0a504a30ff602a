"""OAR (arXiv 2601.07408): a token matters as much as the model's own answer reacts when the token is disturbed.

``oar_g`` adds Gaussian noise to the embeddings; J is the divergence of the answer from what it is without noise, and a
position's score ``| sum over dims of (dJ/de) * e |``. ``oar_p`` replaces one reasoning token after the other by padding,
which is still attended to: its score is J itself. Logits have no temperature.

Shapes: S positions, D hidden, R rows, K positions that a probe
reads (of all rows, one row after the other), V vocabulary, M replaced tokens, N counterfactuals of a batch."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from grail_advantage.data import Row, RowScores
from grail_advantage.method import Among, option, register
from grail_advantage.methods.saliency import MapOptions, row_scores
from grail_advantage.model.hooks import capture_leaf, gradient_at
from grail_advantage.model.interface import Forward, MicroBatch, Model, Range

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@register("oar_g", method="gradient")
@register("oar_p", method="perturbation")
class Oar(MapOptions):
    """Every response with an answer gets weights; tokens outside ``statistics`` have 1."""

    section = "oar"
    source = (
        "arXiv 2601.07408 (Valsure/Outcome-Grounded-Advantage-Reshaping, `OAR-main.py`; port: declare-lab/grail, "
        "`src/train/grail_trainer.py`, `compute_oar_g_weights`)"
    )
    needs_answer = True

    method: Literal["gradient", "perturbation"] = option(
        "gradient", "gradient: OAR-G; perturbation: OAR-P"
    )
    variant: Literal["official", "grail_port"] = option(
        "official",
        "official scores the reasoning. grail_port, as GRAIL's authors ran it: OAR-G scores the whole response, at the "
        "position before each token, by the noisy embedding; the quantile is a sorted score",
    )
    probe: Literal["answer_mean", "last", "answer_joint"] = option(
        "answer_mean",
        "the answer's mean logits, the logits of the response's last position, or the answer's mean log-likelihood",
    )
    noise_std: float = option(1e-3, "OAR-G: standard deviation of the noise", gt=0)
    noise_seed: int = option(
        0, "OAR-G: seed of the noise, with the step and the response's tokens", ge=0
    )
    max_perturbations: int | None = option(
        None,
        "OAR-P: most tokens replaced in a response, evenly spaced, the scores between interpolated; null: all",
        ge=1,
    )
    reshaper: str = option("bilevel", "map from scores to weights")
    weight_mean: float = option(1.0, "reshaper=log_zscore: weight at the mean log score", ge=0)
    statistics: Among = option(None, "follows from variant: the tokens that have scores")
    normalize_mass: bool = option(
        True, "whether a response's weighed tokens have weights that sum to their number"
    )

    # The method may be given by its place: Oar("perturbation").
    def __init__(self, method: str | None = None, **options: Any) -> None:
        super().__init__(**options | {"method": method})

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        port = (
            options.get("method", "gradient") == "gradient"
            and options.get("variant") == "grail_port"
        )
        return {"statistics": "response" if port else "reasoning"} | options

    def check(self) -> None:
        super().check()
        unread = {"max_perturbations"} if self.method == "gradient" else {"noise_std", "noise_seed"}
        for name in self.model_dump(include=unread, exclude_defaults=True):
            logger.warning(
                "%s.%s does nothing with %s, which does not read it", self.section, name, self.name
            )
        if (self.statistics == "response") != self._port:
            raise ValueError(
                f"{self.section}.statistics={self.statistics!r} follows from variant; leave it out"
            )

    @property
    def _port(self) -> bool:
        return self.method == "gradient" and self.variant == "grail_port"

    @property
    def uses(self) -> str:  # type: ignore[override]
        return "logits" if self.method == "gradient" else "sequences"

    @property
    def formula(self) -> str:  # type: ignore[override]
        score = (
            "|sum (dKL/de) e|, noisy embeddings"
            if self.method == "gradient"
            else "KL, token replaced by padding"
        )
        return f"bi-level map of log(1 + {score})"

    @property
    def cost(self) -> str:  # type: ignore[override]
        return f"{'3 on' if self.method == 'gradient' else '1 for every reasoning token of'} the selected responses"

    def map_options(self) -> dict[str, Any]:
        options = super().map_options()
        if self.reshaper == "bilevel":
            options["quantile_rule"] = "sorted" if self.variant == "grail_port" else "linear"
        return options

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.method == "perturbation" and tokenizer.pad_token_id is None:
            raise ValueError(
                f"{self.section} replaces tokens by the padding token, which is missing; set tokenizer.pad_token"
            )

    def probe_of(self, row: Row) -> Range:
        """The positions whose logits the probe reads: the response's last one, or the predictor positions of the
        answer's tokens."""
        if self.probe == "last":
            return row.start + row.length - 1, row.start + row.length
        return row.start + row.answer.start - 1, row.start + row.answer.end - 1

    def _shaken(self, row: Row) -> Range:
        """OAR-G: the positions that get noise and have scores: the reasoning tokens' own, or the predictor positions of
        all response tokens."""
        if self._port:
            return row.start - 1, row.start - 1 + row.length
        return row.start, row.start + row.answer.start

    def replaced(self, row: Row) -> Tensor:
        """OAR-P: the reasoning tokens that get a counterfactual, all or evenly spaced ones; int64 (M,), ascending."""
        length = row.answer.start
        count = min(self.max_perturbations or length, length)
        places = torch.linspace(0, length - 1, count, dtype=torch.float64, device="cpu")
        return places.round().long()

    def prepare(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        # With the token after the last position, for which answer_joint asks.
        return replace(row, tokens=row.tokens[: self.probe_of(row)[1] + 1])

    def row_cost(self, row: Row) -> int:
        length = super().row_cost(row)
        return length if self.method == "gradient" else length * len(self.replaced(row))

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        if self.method == "gradient":
            return model.micro_batches(
                rows, lambda micro: self._gradient(micro, model.step), gradients=True
            )
        total = sum(len(self.replaced(row)) for row in rows)
        with (
            model.sequences() as forward,
            tqdm(total=total, desc="OAR-P", disable=None, delay=5) as bar,
        ):
            return [RowScores(self._perturbation(row, model, forward, bar)) for row in rows]

    def _gradient(self, micro: MicroBatch, step: int) -> list[RowScores]:
        """A forward without noise, a forward with it, and a backward to the noisy embeddings. No hook is left, whatever
        happens."""
        probes = [self.probe_of(row) for row in micro.rows]
        pairs = list(zip(micro.rows, probes, strict=True))
        # The token after each position, as far as there is one: the one that its logits predict.
        tokens = torch.cat([row.tokens[start + 1 : end + 1] for row, (start, end) in pairs])
        counts = [end - start for start, end in probes]
        clean_embeddings = []

        def add_noise(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
            clean_embeddings.append(output.detach())
            noisy = output.detach().clone()
            for index, (row, (_, stop)) in enumerate(pairs):
                first, end = self._shaken(row)
                identity = row.tokens[: row.start + row.answer.end].tolist()
                generator = torch.Generator(noisy.device).manual_seed(
                    noise_seed(self.noise_seed, step, identity)
                )
                # For the whole length, so that a row that is cut has the same noise on what is left of it.
                size = (end - first, noisy.shape[-1])
                noise = torch.randn(
                    size, generator=generator, device=noisy.device, dtype=torch.float32
                )
                # A row may be cut where nothing matters any more.
                count = max(0, min(end, stop) - first)
                # Only the host knows where the row is: several may be packed into one.
                place, start = micro.at(index, first)
                # In float32 where the model is narrower.
                noisy[place, start : start + count] += self.noise_std * noise[:count]
            return noisy

        with torch.no_grad():
            # Without a graph: J is differentiated at the noisy embeddings alone.
            clean = self._read(micro.logits(probes), tokens, counts)
        embedding = micro.leaf("embeddings")
        # Hooks run in this order, so that the leaf is the noisy embedding.
        with embedding.register_forward_hook(add_noise), capture_leaf(embedding) as leaves:
            logits = micro.logits(probes)
        # Summed over rows, each of which depends on its own embeddings alone.
        j = self._divergence(clean, self._read(logits, tokens, counts)).sum()
        gradient = gradient_at(j, leaves[0])
        embeddings = (leaves[0].detach() if self._port else clean_embeddings[0]).float()
        scores = (gradient * embeddings).sum(dim=-1).abs()
        return row_scores(micro, scores, gradient, self._shaken)

    @torch.no_grad()
    def _perturbation(self, row: Row, model: Model, forward: Forward, bar: tqdm) -> Tensor:
        """float32, one a reasoning token; with ``answer_joint`` negative where the replacement makes the answer more
        probable.

        Counterfactuals go through the model in batches. Those of a batch have everything before their first replaced
        token in common, so its keys and values are taken from the clean pass over the row; that is exact in a causal
        model."""
        # Not above: it would import its model code.
        from transformers.cache_utils import DynamicCache, DynamicLayer

        start, length = self.probe_of(row)
        replaced = self.replaced(row)
        assert model.pad_token is not None  # check_tokenizer() has seen to it
        # After the row's last token, which "last" alone reads, there is none.
        tokens = row.tokens[start + 1 : length + 1]
        positions = torch.arange(start, length, device=row.tokens.device)
        logits, cache = forward(row.tokens[None, :length], positions, None)
        counts = [len(positions)]
        clean = self._read(logits[0], tokens, counts)
        # Only plain attention keeps the keys and values of every position; a sliding window or a state does not, a cache
        # of a model's own may hold a state beside its layers, and that of prefix tuning begins with virtual tokens.
        if (
            cache is None
            or type(cache) is not DynamicCache
            or cache.get_seq_length() != length
            or any(type(layer) is not DynamicLayer for layer in cache.layers)
        ):
            cache = None
        scores: list[Tensor] = []
        for chunk in replaced.split(model.sequences_together(length)):
            # The probe's positions come after every replaced token or are the last one's own, so none is cut off here.
            count = len(chunk)
            shared = 0
            prefix = None
            if cache is not None:
                shared = row.start + int(chunk[0])
                prefix = shared_prefix(cache, shared, count)
            changed = row.tokens[shared:length].repeat(count, 1)
            changed[torch.arange(count, device="cpu"), row.start + chunk - shared] = model.pad_token
            logits, _ = forward(changed, positions - shared, prefix)
            reading = self._read(logits.flatten(0, 1), tokens.repeat(count), counts * count)
            scores.append(self._divergence(clean, reading).float())
            bar.update(count)
        return interpolate(torch.cat(scores), replaced, row.answer.start)

    def _read(self, logits: Tensor, tokens: Tensor, counts: list[int]) -> Tensor:
        """The answer as the model sees it: the log-softmax of a row's mean logits, (R, V); with ``answer_joint`` its
        mean log-likelihood, (R,), by the token after each position. Logits (K, V) of any floating dtype, of which
        ``counts`` belong to each row; in float64 on the CPU from the mean on, as readings that differ in the seventh
        digit are compared."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.probe == "answer_joint":
            log_probs = -cross_entropy(logits, tokens, reduction="none").cpu().double()
            return torch.stack([values.mean() for values in log_probs.split(counts)])
        mean = torch.stack([values.mean(dim=0) for values in logits.split(counts)])
        return torch.log_softmax(mean.cpu().double(), dim=-1)

    def _divergence(self, clean: Tensor, changed: Tensor) -> Tensor:
        """``KL(P0 || P)`` of two readings, or for ``answer_joint`` the drop ``phi0 - phi``; float64 (R,)."""
        if self.probe == "answer_joint":
            return clean - changed
        return (clean.exp() * (clean - changed)).sum(dim=-1)


def noise_seed(seed: int, step: int, tokens: Sequence[int]) -> int:
    """Seed of one response's noise: the first eight bytes of the SHA-256 of ``"seed/step/token,token,..."``,
    little-endian, with the tokens up to the end of the answer. So it is the same on any rank, in any micro-batch, in
    any order and with any padding."""
    content = ",".join(map(str, tokens))
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{step}/{content}".encode()).digest()[:8], "little"
    )


def interpolate(scores: Tensor, replaced: Tensor, length: int) -> Tensor:
    """Scores (M,) of replaced tokens as those of all reasoning tokens, (length,): linear between them, level beyond the
    outermost."""
    index = torch.arange(length, device=scores.device)
    # Of scores 1 and 3 of the tokens 0 and 2, token 1 lies half way and has 2. The first token is always replaced.
    lower = torch.searchsorted(replaced, index, right=True) - 1
    upper = (lower + 1).clamp(max=len(replaced) - 1)
    # Beyond the outermost both are the same one.
    gap = (replaced[upper] - replaced[lower]).clamp(min=1)
    share = (index - replaced[lower]) / gap
    return torch.lerp(scores[lower], scores[upper], share.to(scores.dtype))


def shared_prefix(cache: Cache, length: int, rows: int) -> Cache:
    """A cache that holds the first ``length`` positions of a one-row cache for ``rows`` rows; the cache itself stays as
    it is. ``Cache.crop`` means the length that is left in some versions, and in others the tokens to remove."""
    prefix = copy.copy(cache)
    prefix.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in prefix.layers:
        # A view for all rows: a forward joins the new positions to it and writes nothing into it.
        layer.keys = layer.keys[..., :length, :].expand(rows, -1, -1, -1)
        layer.values = layer.values[..., :length, :].expand(rows, -1, -1, -1)
    return prefix
