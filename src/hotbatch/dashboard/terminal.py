"""`hotbatch top`: the dashboard for a terminal.

One line a lane, of which each column is a tenth of a second: what most of the frames in it
said. Above it the figures, below it the queue. It shows what /live says and no more, so it
costs a server what a page does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hotbatch.dashboard.stream import watch

_COLUMN_SECONDS = 0.1
_MAX_COLUMNS = 400
_STYLES = {"interactive": "blue", "standard": "cyan", "batch": "yellow"}
_FIELDS = 8
_PAUSED, _EVICTED, _DONE = 1, 2, 3


class Cell(NamedTuple):
    """What one lane did in a column, as a character and how it is drawn."""

    glyph: str
    style: str


def cell_of(work: list[int], hue: str) -> Cell:
    """A prompt is a full block, a token half of one; drafts that were dropped show in red."""
    state, prompt, decode, drafts, accepted = work
    if state > _DONE:
        return Cell("✕", "red")
    if prompt:
        return Cell("█", f"bold {hue}")
    if decode:
        if drafts:
            return Cell("▆" if accepted else "▄", hue if accepted else "red")
        return Cell("▄", f"dim {hue}")
    if state == _PAUSED:
        return Cell("╌", f"dim {hue}")
    if state == _EVICTED:
        return Cell("┄", "red")
    return Cell("─" if state < _DONE else " ", f"dim {hue}")


class _Lane:
    """`first` is the number of the column in which it appeared."""

    def __init__(self, service_class: int, first: int) -> None:
        self.service_class = service_class
        self.first = first
        self.cells: deque[Cell] = deque(maxlen=_MAX_COLUMNS)
        self.last_column = first - 1
        self.is_gone = False


class BatchPicture:
    """Gathers hello and frames; renders what is known."""

    def __init__(self) -> None:
        self.hello: dict[str, Any] = {}
        self.gauges: dict[str, Any] = {}
        self.notice = "connecting"
        self.rates = (0.0, 0.0)  # tokens written and steps, a second
        self._before: tuple[float, dict[str, Any]] | None = None
        self._lanes: dict[int, _Lane] = {}
        self._seats: list[int | None] = []
        self._column = 0

    def take(self, name: str, data: dict[str, Any]) -> None:
        if name == "hello":
            self.hello, self.gauges, self._before = data, {}, None
            self._lanes.clear()
            self._seats.clear()
            self.notice = ""
        else:
            self._take_frame(data)

    def _take_frame(self, frame: dict[str, Any]) -> None:
        self.notice = ""
        self._column = int(frame["t"] / _COLUMN_SECONDS)
        present = set()
        flat = frame["lanes"]
        for at in range(0, len(flat), _FIELDS):
            number, service_class, *work = flat[at : at + _FIELDS - 1]
            present.add(number)
            self._note(number, service_class, work)
        for seat, number in enumerate(self._seats):
            if number is not None and number not in present:
                del self._lanes[number]
                self._seats[seat] = None
        if "gauges" in frame:
            self._take_gauges(frame["t"], frame["gauges"])

    def _note(self, number: int, service_class: int, work: list[int]) -> None:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(service_class, self._column)
            free = self._seats.index(None) if None in self._seats else len(self._seats)
            self._seats[free : free + 1] = [number]
        cell = cell_of(work, self._hue(service_class))
        if lane.last_column == self._column and lane.cells:
            if cell.glyph != "─":
                lane.cells[-1] = cell
            return
        missed = min(self._column - lane.last_column - 1, _MAX_COLUMNS)
        lane.cells.extend([Cell(" ", "")] * missed)
        lane.cells.append(cell)
        lane.last_column = self._column

    def _take_gauges(self, now: float, gauges: dict[str, Any]) -> None:
        if self._before is not None and now > self._before[0]:
            then, before = self._before
            steps = gauges["totals"]["steps"] - before["totals"]["steps"]
            written = gauges["generated"] - before["generated"]
            self.rates = (written / (now - then), max(0.0, steps) / (now - then))
        self._before = (now, gauges)
        self.gauges = {**self.gauges, **gauges}

    def _hue(self, service_class: int) -> str:
        return _STYLES.get(self._class(service_class), "white")

    def _class(self, service_class: int) -> str:
        names = self.hello.get("classes", ())
        return str(names[service_class]) if service_class < len(names) else "?"

    # --- rendering

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._lines(options.max_width, options.height or console.height))

    def _lines(self, width: int, height: int) -> Iterable[Text | Table]:
        yield self._head()
        if not self.gauges:
            return
        yield self._figures()
        yield Text()
        room = max(3, height - 10)
        for number in self._seats[:room]:
            yield self._lane_line(number, width)
        hidden = sum(number is not None for number in self._seats[room:])
        if hidden:
            yield Text(f"and {hidden} more lanes; make the window taller", style="dim")
        if not self._lanes:
            yield Text("the batch is empty", style="dim")
        yield Text()
        yield self._queue()

    def _head(self) -> Text:
        head = Text("hotbatch", style="bold")
        if self.hello:
            facts = (self.hello["model"], self.hello["precision"], self.hello["device"])
            head.append("  " + "  ".join(facts), style="default")
        notice = self.notice
        if self.gauges and not notice:
            if not self.gauges["healthy"]:
                notice = "the model's steps fail"
            elif not self.gauges["accepting"]:
                notice = "shutting down"
        if notice:
            head.append(f"  {notice}", style="red")
        return head

    def _figures(self) -> Text:
        gauges = self.gauges
        used, cached, free = gauges["kv"]
        line = Text()
        for value, unit in (
            (f"{self.rates[0]:.0f}", "tokens/s"),
            (f"{self.rates[1]:.0f}", "steps/s"),
            (f"{gauges['running']}/{self.hello['seats']}", "running"),
            (str(sum(gauges["waiting"])), "waiting"),
            (str(gauges["paused"]), "paused"),
            (f"{used / max(1, used + cached + free):.0%}", "KV"),
        ):
            line.append(value, style="bold").append(f" {unit}   ", style="dim")
        return line

    def _lane_line(self, number: int | None, width: int) -> Text:
        if number is None:
            return Text()
        lane = self._lanes[number]
        line = Text(f"{self._class(lane.service_class):>11} ", style=self._hue(lane.service_class))
        room = min(_MAX_COLUMNS, max(10, width - 13))
        lag = min(self._column - lane.last_column, room)
        cells = [*lane.cells, *([Cell(" ", "")] * lag)][-room:]
        line.append(" " * (room - len(cells)))
        for cell in cells:
            line.append(cell.glyph, style=cell.style)
        return line

    def _queue(self) -> Table:
        gauges = self.gauges
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("", "waiting", "oldest", "first token p50 / p95", "token p50 / p95"):
            table.add_column(name, justify="left" if not name else "right")
        for rank in reversed(range(len(self.hello["classes"]))):
            first, each = gauges["latency_ms"][rank]
            count = gauges["waiting"][rank]
            table.add_row(
                Text(self._class(rank), style=self._hue(rank)),
                str(count),
                f"{gauges['waits'][rank]:.1f} s" if count else "",
                _quantiles(first),
                _quantiles(each),
            )
        return table


def _quantiles(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.0f} / {pair[1]:.0f} ms"


def run_top(url: str, api_key: str | None, console: Console) -> None:
    """Shows the server's batch until Ctrl-C.

    Raises:
        LiveError: the key is wrong, or there is no hotbatch server at the address.
    """
    picture = BatchPicture()
    screen = console.is_terminal
    # Drawn by this thread alone, so that no frame is drawn while it is taken in.
    with Live(picture, console=console, screen=screen, auto_refresh=False) as live:
        drawn = 0.0

        def lost(reason: str) -> None:
            picture.notice = f"no connection ({reason}), trying again"
            live.refresh()

        for name, data in watch(url, api_key, on_lost=lost):
            picture.take(name, data)
            if time.monotonic() - drawn >= _COLUMN_SECONDS:
                drawn = time.monotonic()
                live.refresh()
