"""``python -m grail_advantage.receipt RUN``: the receipts of a run, read from its token dump (docs/receipt.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from grail_advantage.dump import TokenDump, read_dump
from grail_advantage.receipt import report
from grail_advantage.view.places import STATE, find, is_log


def rollout_names(dump: TokenDump | None) -> Callable[[int, int, str], str | None]:
    """Gives the name that the page has for a response, from its step, update and key; each step's file is read once."""

    @cache
    def of_step(step: int) -> dict[tuple[int, str], str]:
        rows = () if dump is None else dump.rows([step])
        return {(row.update, row.key): f"{row.step}{f'u{row.update}' if row.update else ''}.{row.row}" for row in rows}

    return lambda step, update, key: of_step(step).get((update, key))


def main(argv: list[str] | None = None) -> int:
    """Print one page; :func:`grail_advantage.receipt.report.main`."""
    folders: list[Path] = []

    def read(path: Path, problems: list[str]) -> Sequence[report.Record]:
        try:
            places = find(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
            return []
        if places.curves == path and path.name != STATE and not is_log(path):
            return report.read(path, problems)
        folders.extend([places.tokens] if places.tokens else [])
        dumps = [read_dump(folder) for folder in folders]
        records = [record for dump in dumps for record in dump.receipts()]
        problems += [problem for dump in dumps if dump.files for problem in dump.problems]
        return records

    @cache
    def names() -> Callable[[int, int, str], str | None]:
        return rollout_names(read_dump(folders[0]) if folders else None)

    return report.main(
        argv,
        read=read,
        called="a run's folder (with tokens/), a token dump's, or a file of JSON lines",
        remedy=lambda path: f"{find(path).remedy}; received=false must not be among the dump's options",
        rollout=lambda step, update, key: names()(step, update, key),
    )
