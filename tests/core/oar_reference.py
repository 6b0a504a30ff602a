"""OAR's token scores and weights (arXiv 2601.07408) the plain way, to compare the package with.

Nothing here is shared with the package. Every row goes alone and whole through a float64 model; OAR-G adds its noise to
`inputs_embeds`, OAR-P runs one full forward for each replaced token; everything after the logits is Python floats in loops.
The tokenizer must be character-level, as for `reference.py`.
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch

from tests.core.plain_maps import MAPS, to_mass
from tests.core.reference import Span, boxed_spans

DEFAULTS = {
    **{"variant": "official", "probe": "answer_mean", "noise_std": 1e-3, "noise_seed": 0, "max_perturbations": None},
    **{"reshaper": "bilevel", "quantile": 0.4, "boost": 2.0, "weight_mean": 1.0, "weight_std": 0.5, "weight_min": 0.5},
    **{"weight_max": 5.0, "normalize_mass": True},
}
OF_MAP = {"bilevel": ("quantile", "boost"), "log_zscore": ("weight_mean", "weight_std", "weight_min", "weight_max")}


class PlainOar:
    """A float64 copy of a model in evaluation mode."""

    def __init__(self, model: torch.nn.Module, pad: int) -> None:
        self.model = copy.deepcopy(model).double().eval()
        self.pad = pad
        self.known: dict[tuple, list[float]] = {}

    def embed(self, ids: list[int]) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(ids)).detach()

    def probe(self, embeds: torch.Tensor, ids: list[int], start: int, span: Span, probe: str) -> torch.Tensor:
        """(V,) probabilities, or the scalar log-likelihood a token; with a gradient to `embeds` (S, D)."""
        logits = self.model(inputs_embeds=embeds.unsqueeze(0), use_cache=False).logits[0]
        answer = [start + t for t in range(span[0], span[3])]
        if probe == "answer_joint":
            return sum(logits[p - 1].log_softmax(-1)[ids[p]] for p in answer) / len(answer)
        if probe == "last":
            return logits[-1].softmax(-1)
        return (sum(logits[p - 1] for p in answer) / len(answer)).softmax(-1)

    @staticmethod
    def apart(clean: torch.Tensor, other: torch.Tensor, probe: str) -> torch.Tensor:
        if probe == "answer_joint":
            return clean - other
        return (clean * (clean.log() - other.log())).sum()

    def gradient_scores(self, ids: list[int], start: int, span: Span, options: dict) -> list[float]:
        """Scores of the response tokens, NaN where there is none."""
        port = options["variant"] == "grail_port"
        noisy = range(start - 1, len(ids) - 1) if port else range(start, start + span[0])
        content = str(ids[: start + span[3]]).strip("[]").replace(" ", "")
        digest = hashlib.sha256(f"{options['noise_seed']}/0/{content}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        clean = self.embed(ids)
        shaken = clean.clone()
        noise = torch.randn((len(noisy), clean.shape[1]), generator=generator).double()
        shaken[list(noisy)] += options["noise_std"] * noise
        shaken.requires_grad_()
        with torch.no_grad():
            before = self.probe(clean, ids, start, span, options["probe"])
        loss = self.apart(before, self.probe(shaken, ids, start, span, options["probe"]), options["probe"])
        (gradient,) = torch.autograd.grad(loss, shaken)
        scores = [math.nan] * (len(ids) - start)
        for t, position in enumerate(noisy):
            pairs = zip(gradient[position].tolist(), (shaken if port else clean)[position].tolist(), strict=True)
            scores[t] = abs(math.fsum(g * e for g, e in pairs))
        return scores

    @torch.no_grad()
    def perturbation_scores(self, ids: list[int], start: int, span: Span, options: dict) -> list[float]:
        before = self.probe(self.embed(ids), ids, start, span, options["probe"])
        reasoning, most = span[0], options["max_perturbations"]
        chosen = list(range(reasoning))
        if most is not None and most < reasoning:
            chosen = [round(k * (reasoning - 1) / max(most - 1, 1)) for k in range(most)]
        exact = {}
        for t in chosen:
            other = [*ids[: start + t], self.pad, *ids[start + t + 1 :]]
            # The replaced row is what the model reads; the answer asked for is that of the row itself.
            after = self.probe(self.embed(other), ids, start, span, options["probe"])
            exact[t] = float(self.apart(before, after, options["probe"]))
        scores = [math.nan] * (len(ids) - start)
        for t in range(reasoning):
            left = max((c for c in chosen if c <= t), default=chosen[0])
            right = min((c for c in chosen if c >= t), default=chosen[-1])
            share = (t - left) / (right - left) if right > left else 0.0
            scores[t] = exact[left] + share * (exact[right] - exact[left])
        return scores

    def scores(self, method: str, ids: list[int], start: int, span: Span, options: dict) -> list[float]:
        key = (method, tuple(ids), start, *sorted((name, str(value)) for name, value in options.items()))
        if key not in self.known:
            read = self.gradient_scores if method == "gradient" else self.perturbation_scores
            self.known[key] = read(ids, start, span, options)
        return self.known[key]


def row_weights(method: str, scores: list[float], span: Span | None, advantage: float, options: dict) -> list[float]:
    """Weights of one response from its tokens' scores."""
    weights, port = [1.0] * len(scores), options["variant"] == "grail_port"
    if span is None or advantage == 0:
        return weights
    members = len(scores) if port and method == "gradient" else span[0]
    if members:
        numbers = {name: options[name] for name in OF_MAP[options["reshaper"]]}
        if options["reshaper"] == "bilevel":
            numbers["quantile_rule"] = "sorted" if port else "linear"
        values = MAPS[options["reshaper"]](scores[:members], **numbers)
        weights[:members] = to_mass(values, range(members)) if options["normalize_mass"] else values
    return weights


def oar_weights(
    model: PlainOar,
    method: str,
    rows: list[tuple[list[int], list[int], float]],
    characters: dict[int, str],
    options: dict,
) -> list[tuple[list[float], list[float]]]:
    """For each row of (prompt ids, response ids, advantage) its response tokens' weights and scores."""
    options = {**DEFAULTS, **options}
    assert set(options) == set(DEFAULTS)
    results = []
    for prompt, response, advantage in rows:
        span = next(reversed(boxed_spans("".join(characters[token] for token in response))), None)
        scores = [math.nan] * len(response)
        if span is not None:
            scores = model.scores(method, prompt + response, len(prompt), span, options)
        results.append((row_weights(method, scores, span, advantage, options), scores))
    return results
