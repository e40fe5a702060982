"""Draw README's terminal pictures from a real run: python docs/assets/make_terminal_picture.py

Runs `phalanx train digits` in a pseudo-terminal of 100 columns, in a temporary folder, keeps the screen as it was in
the middle of the run and at its end, and writes both as SVG beside this file. The SVG names no web font.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import sys
import sysconfig
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 24
COMMAND = ["phalanx", "train", "digits"]
MIDDLE = "epoch 8/12"
CONTROL = re.compile(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[lh])")

# rich's own template loads a font from a content delivery network; this one takes what the reader has.
TEMPLATE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
  <style>
    .{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
      font-size: {char_height}px; line-height: {line_height}px; }}
    {styles}
  </style>
  <defs>
    {lines}
  </defs>
  <rect fill="#15181c" width="100%" height="100%" rx="8" />
  <g transform="translate({terminal_x}, 22)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
  </g>
</svg>
"""


class Screen:
    """A terminal as far as rich needs one: it rewrites whole lines, so lines are all that is kept."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0

    def feed(self, text: str) -> None:
        """Take what the program wrote."""
        for part in CONTROL.split(text):
            if part in ("\r\n", "\n"):
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part.endswith("A") and part.startswith("\x1b["):
                self.row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part and not CONTROL.fullmatch(part):
                self.lines[self.row] += part

    def text(self) -> str:
        """Return everything that stands on the screen."""
        return "\n".join(self.lines).rstrip()


def run_in_terminal(folder: Path) -> tuple[str, str]:
    """Run the command and return the screen in the middle of the run and at its end."""
    scripts = sysconfig.get_path("scripts")
    program = str(Path(scripts) / COMMAND[0])
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        path = f"{scripts}:{os.environ['PATH']}"  # as in an activated environment
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), COLORTERM="truecolor", PATH=path)
        os.execv(program, [program, *COMMAND[1:]])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, middle, pending = Screen(), "", b""
    while True:
        try:
            pending += os.read(terminal, 1 << 16)
        except OSError:  # Linux's way of saying that the other side has closed
            break
        # Whole lines only, so that neither a control sequence nor a character is cut in two.
        complete, newline, pending = pending.rpartition(b"\n")
        screen.feed((complete + newline).decode())
        if not middle and MIDDLE in screen.text():
            screen.feed(pending.decode(errors="ignore"))
            middle, pending = screen.text(), b""
    screen.feed(pending.decode())
    _, status = os.waitpid(pid, 0)
    if status != 0 or not middle:
        sys.exit(f"{' '.join(COMMAND)} ended with status {status}:\n{screen.text()}")
    return middle, screen.text()


def draw(screen: str, path: Path, rows: int) -> None:
    """Write the last rows of a screen as SVG, below the command that was typed."""
    lines = screen.splitlines()
    shown = [f"\x1b[1m$ {' '.join(COMMAND)}\x1b[0m", *(lines if len(lines) <= rows else ["...", *lines[-rows:]])]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi("\n".join(shown)))
    path.write_text(console.export_svg(code_format=TEMPLATE, unique_id="terminal"), encoding="utf-8")
    print(path)


def main() -> None:
    """Make both pictures."""
    here = Path(__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="phalanx-picture-"))
    try:
        middle, end = run_in_terminal(folder)
    finally:
        shutil.rmtree(folder)
    draw(middle, here / "train-running.svg", rows=10)
    draw(end, here / "train-finished.svg", rows=17)


if __name__ == "__main__":
    main()
