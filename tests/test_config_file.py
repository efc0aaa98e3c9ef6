"""Settings as files: every fault names the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr_pl.arguments import shipped_configs
from rlvr_pl.config_file import MAX_BYTES, read_config
from rlvr_pl.configs import find_config
from rlvr_pl.errors import UserError

GOOD = b"data:\n  updates: 3\n"
# the list of line 1 has 10 values and itself, 11; that of line 2 ten such and itself, 111; that of line 5 has 111,111
BOMB = b"a0: &a0 [" + b"x," * 10 + b"]\n"
BOMB += b"".join(b"a%d: &a%d [%s]\n" % (n, n, b"*a%d," % (n - 1) * 10) for n in range(1, 9))


def message(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [GOOD, b"\xef\xbb\xbf" + GOOD, GOOD.replace(b"\n", b"\r\n"), b"# first\n" + GOOD])
def test_byte_order_marks_line_endings_and_comments_are_fine(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    assert read_config(tmp_path / "c.yaml") == {"data": {"updates": 3}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "c.yaml: holds nothing"),
        (b"# nothing\n", "c.yaml: holds nothing"),
        (b"- 1\n", "c.yaml: holds no settings"),
        (b"just text", "c.yaml: holds no settings"),
        (b"data:\n  updates: [1\n", "c.yaml:3: not YAML"),
        (b"data:\n  updates: 3\n  updates: 5\n", "c.yaml:3: not YAML: 'updates' is already in line 2"),
        (b"a: 1\ndata: {updates: 3, updates: 5}\n", "c.yaml:2: not YAML: 'updates'"),
        (b"a: 1\nb: \xff\n", "c.yaml:2: is not UTF-8"),
        (b"a: 1\nb: 3\0\n", "c.yaml:2: not YAML: a control character"),
        (b'a: "\\ud800"\n', "c.yaml:1: not YAML"),
        (
            b"a: 1\nb: !!python/object/apply:os.system ['true']\n",
            "c.yaml:2: not YAML: could not determine a constructor",
        ),
        (b"a: 1\nb: !include other.yaml\n", "c.yaml:2: not YAML: could not determine a constructor"),
        (b"a: *nothing\n", "c.yaml:1: not YAML"),
        (b"a: 2024-99-99\n", "c.yaml: not YAML"),
        (b"a: " + b"[" * 5000, "c.yaml"),
        (b"a: 1\n" + b"#" * MAX_BYTES, "c.yaml: longer than 4 MB"),
        (b"a: 1\nx: &x [*x]\n", "c.yaml:2: not YAML: an alias that stands inside itself"),
        (b"x: &x {y: {z: *x}}\n", "c.yaml:1: not YAML: an alias that stands inside itself"),
        (BOMB, "c.yaml:5: not YAML: aliases here stand for more than 100,000 values"),
    ],
    ids=range(19),
)
def test_each_fault_is_one_line(tmp_path, content, words):
    (tmp_path / "c.yaml").write_bytes(content)
    assert words in message(tmp_path / "c.yaml")


def test_aliases_and_long_lists_are_fine(tmp_path):
    (tmp_path / "c.yaml").write_text(f"a: &a [1, 2]\nb: {{x: *a, y: *a}}\nc: {list(range(110_000))}\n")
    read = read_config(tmp_path / "c.yaml")
    assert read["b"] == {"x": [1, 2], "y": [1, 2]} and len(read["c"]) == 110_000


def test_what_is_no_file(tmp_path):
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "symbolic links" in message(tmp_path / "loop.yaml")
    assert "is a folder" in message(tmp_path)
    assert "no such file" in message(tmp_path / "none.yaml")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text("ab:[]{}-#&*!|>'\"\n 1?", max_size=60).map(str.encode))
def test_any_bytes_are_settings_or_a_user_error(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    try:
        assert isinstance(read_config(tmp_path / "c.yaml"), dict)
    except UserError as error:
        assert str(tmp_path / "c.yaml") in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("words", [["--config=quickstart.yaml"], ["--config", "quickstart.yaml"]])
def test_a_shipped_config_is_found_by_its_name_unless_a_file_here_has_it(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert find_config("quickstart.yaml").samefile(shipped_configs(words)[-1].removeprefix("--config="))
    (tmp_path / "quickstart.yaml").write_text("seed: 3\n")
    assert shipped_configs(words) == words
