"""``python -m grail_advantage.analyze``: token weights of existing responses, see
:mod:`grail_advantage.analyze.command`."""

from grail_advantage.analyze.command import analyze, main, record_in
from grail_advantage.analyze.lines import Response, json_lines, read_responses
from grail_advantage.analyze.methods import methods_for, parse_method

__all__ = [
    "Response",
    "analyze",
    "json_lines",
    "main",
    "methods_for",
    "parse_method",
    "read_responses",
    "record_in",
]
