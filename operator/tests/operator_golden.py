"""Golden files: text that is reviewed as part of a change."""

from pathlib import Path


class Golden:
    """Compares text with a file that is reviewed as part of a change."""

    def __init__(self, folder: Path, update: bool) -> None:
        self._folder = folder
        self._update = update

    def check(self, name: str, text: str) -> None:
        path = self._folder / name
        if self._update:
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} differs; if the change is meant, run with --update-golden and review it"
        )
