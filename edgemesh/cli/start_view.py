"""What ``edgemesh start`` shows: a live view on a terminal, plain lines anywhere else."""

from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edgemesh.decide.supervision import Note, Stage, Supervision
from edgemesh.inspect.escape import plain
from edgemesh.wire.ids import Role

BAR: Final = 32
SHOWN: Final = {
    "mesh.draining": "draining: running requests may finish; stop again to end now",
    "mesh.stopping": "ending now, as asked by a signal",
    "mesh.first_tick": "the first tick has run",
}
FRAME_NS: Final = 100_000_000
"""Between two drawings of the live view."""

TOLD: Final = {"vault.budget": "budget", "mps.absent": "cost"}
"""Events with a field that is said as it stands."""

LINE_NS: Final = 2_000_000_000
"""Between two plain lines about a start that goes on."""


class PlainView:
    """Lines for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = ""
        self._said_ns = 0

    def show(self, supervision: Supervision, now: int) -> None:
        """Say where the start is, when that has changed and not too often."""
        if supervision.stage is not Stage.STARTING or now - max(self._said_ns, supervision.started_ns) < LINE_NS:
            return
        line = "; ".join(f"{name}: {text}" for name, text, _ in steps(supervision, now))
        if line != self._said:
            self._said, self._said_ns = line, now
            self._print(line)

    def note(self, supervision: Supervision, note: Note) -> None:
        """Say what a person wants to know."""
        del supervision
        if note.event in SHOWN:
            self._print(SHOWN[note.event])
        elif note.event in TOLD:
            for line in str(note.fields[TOLD[note.event]]).splitlines():
                self._print(line)

    def serving(self, url: str, after_ns: int) -> None:
        """Print the address."""
        self._print(f"serving at {url} after {after_ns / 1e9:.1f} s")

    def failed(self, reason: str, log: Path) -> None:
        """Print the reason in one paragraph, with the culprit's last words."""
        self._print(failure(reason, log))

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, line: str) -> None:
        self._console.print(f"edgemesh: {line}", highlight=False, markup=False, soft_wrap=True)


class LiveView:
    """A table that redraws itself until the mesh serves, then lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._drawn_ns = 0
        self._lines = PlainView(console)

    def show(self, supervision: Supervision, now: int) -> None:
        """Draw where the start is."""
        if self._live is None:
            return
        if supervision.stage is not Stage.STARTING:
            self.close()
        elif now - self._drawn_ns >= FRAME_NS:
            self._drawn_ns = now
            self._live.update(picture(supervision, now), refresh=True)

    def note(self, supervision: Supervision, note: Note) -> None:
        """Say what a person wants to know."""
        self._lines.note(supervision, note)

    def serving(self, url: str, after_ns: int) -> None:
        """Print the address."""
        self.close()
        self._console.print(f"[bold green]serving[/] at [bold]{url}[/] after {after_ns / 1e9:.1f} s", highlight=False)

    def failed(self, reason: str, log: Path) -> None:
        """Print the reason in one paragraph, with the culprit's last words."""
        self.close()
        self._console.print(Text("failed: ", style="bold red") + Text(failure(reason, log), style=""), soft_wrap=True)

    def close(self) -> None:
        """Stop redrawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None


Step = tuple[str, str, float]
"""A line of the start: what, how far in words, and how far from 0 to 1."""


def steps(supervision: Supervision, now: int) -> list[Step]:
    """How far each role is."""
    lines: list[Step] = []
    for role in (Role.VAULT, Role.RANK, Role.GROUP, Role.BARRIER, Role.ROUTER, Role.GATEWAY):
        actors = [each for each in supervision.watched.values() if each.actor.role is role]
        if not actors:
            continue
        ready = sum(each.ready for each in actors)
        name, text, done = (
            f"{role}s" if len(actors) > 1 else str(role),
            f"{ready} of {len(actors)} ready",
            ready / len(actors),
        )
        slow = next((each for each in actors if not each.ready), None)
        loading = actors[0].loading
        if role is Role.VAULT and loading is not None and slow is not None:
            done = loading.done_bytes / loading.total_bytes if loading.total_bytes else 0.0
        if slow is not None and supervision.stage is Stage.STARTING:
            text += f" ({slow.step(now, vault_ready=supervision.capacity is not None)})"
        lines.append((name, text, done))
    return lines


def picture(supervision: Supervision, now: int) -> RenderableType:
    """The live table."""
    table = Table.grid(padding=(0, 1))
    for name, text, done in steps(supervision, now):
        table.add_row(Text(name, style="bold"), ProgressBar(total=1.0, completed=done, width=BAR), Text(text))
    took = (now - supervision.started_ns) / 1e9
    shape = supervision.mesh.topology
    return Group(Text(f"{shape.mesh.name}: {shape.mode}, starting for {took:.1f} s"), table)


def failure(reason: str, log: Path) -> str:
    """The reason, and the last line that the culprit wrote, if any."""
    last = last_line(log)
    hint = " If nobody did that, the kernel did, for want of memory." if "killed by SIGKILL" in reason else ""
    return f"{plain(reason)}.{hint}" + (f" Its last line in {log}: {last}" if last else "")


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return plain(lines[-1][:500]) if lines else ""
