"""What is sent to other machines, where it is unpacked, and which folder a rank works in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import write_script

from phalanx.engines.ray import sources as module
from phalanx.engines.ray.sources import SourceArchive, UnpackedSources, pack, unpack
from phalanx.errors import UsageError
from phalanx.launch.spec import ModuleTarget, ScriptTarget


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with a script and a package, from which the launch is started."""
    folder = tmp_path / "home"
    (folder / "parts").mkdir(parents=True)
    write_script(folder / "train.py", "import parts.model")
    write_script(folder / "parts/model.py", "WIDTH = 8")
    (folder / "data.bin").write_bytes(b"much")
    monkeypatch.chdir(folder)
    return folder


def packed(home: Path) -> SourceArchive:
    return pack(ScriptTarget(home / "train.py"), print)


def unpacked(archive: SourceArchive, tmp_path: Path, rank: int = 0) -> UnpackedSources:
    scratch = tmp_path / f"away/scratch-{rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    return unpack(archive, scratch)


def leave(home: Path, tmp_path: Path) -> None:
    """Be a machine that does not have the folder."""
    shutil.move(home, tmp_path / "moved")


def test_sources_are_sent_to_a_machine_that_does_not_see_them(home, tmp_path):
    archive = packed(home)
    leave(home, tmp_path)
    laid_out = unpacked(archive, tmp_path)
    root = Path(laid_out.folder)
    assert not laid_out.in_place
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.*")) == ["parts/model.py", "train.py"]
    assert laid_out.target == ScriptTarget(root / "train.py")
    assert laid_out.path == (str(root),)


def test_a_machine_that_sees_the_launch_stays_in_place_when_sources_are_edited(home, tmp_path):
    marker = tmp_path / "run/.launch"
    marker.parent.mkdir()
    marker.touch()
    archive = pack(ScriptTarget(home / "train.py"), print, marker)
    before = unpacked(archive, tmp_path)
    write_script(home / "notes.py", "# meanwhile")
    assert unpacked(archive, tmp_path) == before
    assert before.in_place
    assert (before.folder, before.target) == (str(home), archive.target)


def test_edits_on_another_machine_change_the_imports_but_not_the_working_folder(home, tmp_path):
    """A machine with a clone under the same path: relative paths must lead to the checkpoints of the attempt before."""
    archive = packed(home)
    before = unpacked(archive, tmp_path)
    assert (before.folder, before.target, before.in_place) == (str(home), archive.target, False)
    write_script(home / "train.py", "raise SystemExit('edited')")
    after = unpacked(archive, tmp_path)
    assert after.folder == before.folder
    assert Path(after.target.path).read_text() == "import parts.model"


def test_a_module_is_imported_from_what_was_sent(home, tmp_path):
    """`-m` looks into the working folder first: on another machine that must not be a clone in use."""
    archive = pack(ModuleTarget("parts.model"), print)
    assert unpacked(archive, tmp_path).folder.startswith(str(tmp_path / "away/phalanx-ray-"))


def test_dangling_links_and_special_files_are_not_sent(home, tmp_path):
    (home / ".#train.py").symlink_to("me@host.123")
    (home / "folder.py").mkdir()
    archive = packed(home)
    leave(home, tmp_path)
    assert not list(Path(unpacked(archive, tmp_path).folder).glob(".#*"))


def test_sources_over_the_limit_are_reported_and_used_where_they_are(home, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 8)
    told: list[str] = []
    archive = pack(ScriptTarget("train.py"), told.append)
    assert "must be on every node" in told[0]
    here = unpacked(archive, tmp_path)
    assert (here.folder, here.target) == (str(home), archive.target)
    leave(home, tmp_path)
    with pytest.raises(UsageError, match="no sources were sent"):
        unpacked(archive, tmp_path)


def test_a_rank_replaces_files_at_once_while_another_reads_them(home, tmp_path):
    archive = packed(home)
    leave(home, tmp_path)
    first = unpacked(archive, tmp_path, rank=0)
    with Path(first.target.path).open() as reading:
        inode = Path(first.target.path).stat().st_ino
        assert unpacked(archive, tmp_path, rank=1).folder == first.folder
        assert Path(first.target.path).stat().st_ino != inode, "the file that is being read was written over"
        assert reading.read() == "import parts.model"


def test_a_folder_of_another_user_is_not_trusted(home, tmp_path, monkeypatch):
    archive = packed(home)
    leave(home, tmp_path)
    owner = home.parent.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner == 0:  # whom all trust: the folder is made under its name before
        monkeypatch.setattr("phalanx.host.files.writer_of", lambda path: 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        unpacked(archive, tmp_path)
