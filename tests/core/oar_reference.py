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
from tests.core.reference import boxed_spans

DEFAULTS = {
    "variant": "official",
    "probe": "answer_mean",
    "noise_std": 1e-3,
    "noise_seed": 0,
    "max_perturbations": None,
    "reshaper": "bilevel",
    "quantile": 0.4,
    "boost": 2.0,
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "normalize_mass": True,
}

Span = tuple[int, int, int, int]


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

    def gradient_scores(self, ids: list[int], start: int, span: Span, options: dict, step: int = 0) -> list[float]:
        """Scores of the response tokens, NaN where there is none."""
        port = options["variant"] == "grail_port"
        length = len(ids) - start
        noisy = range(start - 1, len(ids) - 1) if port else range(start, start + span[0])
        content = str(ids[: start + span[3]]).strip("[]").replace(" ", "")
        digest = hashlib.sha256(f"{options['noise_seed']}/{step}/{content}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        clean = self.embed(ids)
        noise = torch.randn((len(noisy), clean.shape[1]), generator=generator).double()
        shaken = clean.clone()
        for index, position in enumerate(noisy):
            shaken[position] += options["noise_std"] * noise[index]
        shaken.requires_grad_()
        with torch.no_grad():
            before = self.probe(clean, ids, start, span, options["probe"])
        loss = self.apart(before, self.probe(shaken, ids, start, span, options["probe"]), options["probe"])
        (gradient,) = torch.autograd.grad(loss, shaken)
        scores = [math.nan] * length
        for t in range(length if port else span[0]):
            position = start + t - 1 if port else start + t
            vector = (shaken if port else clean)[position]
            scores[t] = abs(math.fsum(g * e for g, e in zip(gradient[position].tolist(), vector.tolist(), strict=True)))
        return scores

    @torch.no_grad()
    def perturbation_scores(self, ids: list[int], start: int, span: Span, options: dict) -> list[float]:
        before = self.probe(self.embed(ids), ids, start, span, options["probe"])
        scores = [math.nan] * (len(ids) - start)
        reasoning, most = span[0], options["max_perturbations"]
        if most is None or most >= reasoning:
            chosen = list(range(reasoning))
        else:
            chosen = [round(k * (reasoning - 1) / (most - 1)) if most > 1 else 0 for k in range(most)]
        exact = {}
        for t in chosen:
            other = [*ids[: start + t], self.pad, *ids[start + t + 1 :]]
            # The replaced row is what the model reads; the answer asked for is that of the row itself.
            after = self.probe(self.embed(other), ids, start, span, options["probe"])
            exact[t] = float(self.apart(before, after, options["probe"]))
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
    whole = method == "gradient" and options["variant"] == "grail_port"
    weights = [1.0] * len(scores)
    if span is None or advantage == 0:
        return weights
    members = list(range(len(scores))) if whole else list(range(span[0]))
    if not members:
        return weights
    names = {"bilevel": ("quantile", "boost"), "log_zscore": ("weight_mean", "weight_std", "weight_min", "weight_max")}
    numbers = {name: options[name] for name in names[options["reshaper"]]}
    if options["reshaper"] == "bilevel":
        numbers["quantile_rule"] = "sorted" if options["variant"] == "grail_port" else "linear"
    values = MAPS[options["reshaper"]]([scores[t] for t in members], **numbers)
    if options["normalize_mass"]:
        values = to_mass(values, range(len(values)))
    for t, value in zip(members, values, strict=True):
        weights[t] = value
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
