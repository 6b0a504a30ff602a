"""The targets' names, apart from the targets, which import the package that the search has to watch being imported."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
MODULES = {
    "span": ["grail_advantage.answer_span", "grail_advantage.token_text"],
    "judge": ["grail_advantage.reward", "grail_advantage.answer_span"],
    "dump": ["grail_advantage.token_dump"],
    "report": ["grail_advantage.report", "grail_advantage.token_dump"],
    "prepare": ["recipe.data", "grail_advantage.reward"],
    "responses": ["grail_advantage.analyze.responses"],
    "shown": ["grail_advantage.report.visible"],
}
"""Whose branches guide the search for each target."""
