"""A server that is started again with other sizes says so, because they change bits."""

import json
import resource

import pytest

from jaxmux.engine import Engine
from jaxmux.planner import PlanningError
from jaxmux.runs import RunDirectoryError
from jaxmux.server.server import ServerOptions, tuning_server

from .conftest import SERVER


@pytest.fixture
def said_by(backbone, tmp_path, monkeypatch):
    """Starts and ends a server that trains nothing, so its programs are not compiled; returns what
    it has said."""
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)

    def run(**options):
        said = []
        chosen = ServerOptions(**SERVER | options)
        with tuning_server(backbone, tmp_path / "server", chosen, say=said.append):
            pass
        return said

    return run


def test_a_restart_with_other_sizes_is_told_once(said_by, tmp_path):
    assert said_by() == []
    assert said_by() == []
    (line,) = said_by(reserved_slots=2, reserved_dropout=False, round_tokens=64)
    assert (
        "round_tokens was 1024 and is 64, reserved_slots was 3 and is 2, "
        "reserved_dropout was True and is False; tasks that have begun go on, but their adapters "
        "may differ by rounding"
    ) in line
    assert said_by(reserved_slots=2, reserved_dropout=False, round_tokens=64) == []
    record = json.loads((tmp_path / "server" / "server.json").read_text())
    assert record["sizes"] == {
        **{"rows": 2, "row_len": 128, "chunk_len": 64, "max_sequences": 8},
        **{"round_tokens": 64, "reserved_slots": 2, "reserved_rank": 4},
        "reserved_targets": ["mlp.down_proj", "self_attn.q_proj"],
        **{"reserved_dropout": False, "elastic": False, "mesh": "pp1,tp1"},
        "reserved_adapters": [],
    }


def test_settings_that_change_no_bits_are_not_told(said_by):
    assert said_by() == []
    assert said_by(checkpoint_every=7, prepared_at_once=1, max_bad_steps=2) == []


def test_a_folder_without_recorded_sizes_is_opened_silently(said_by, tmp_path):
    said_by()
    path = tmp_path / "server" / "server.json"
    record = json.loads(path.read_text())
    recorded = record.pop("sizes")
    path.write_text(json.dumps(record))
    assert said_by() == []
    assert json.loads(path.read_text()) == record | {"sizes": recorded}


def test_sizes_that_cannot_be_written_do_not_keep_a_server_from_starting(
    said_by, tmp_path, monkeypatch
):
    said_by()

    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("jaxmux.server.folder.write_atomically", full)
        told, failed = said_by(reserved_slots=2)
    assert "reserved_slots was 3 and is 2" in told
    assert "server.json: its sizes cannot be recorded (No space left on device)" in failed
    # They are told again, because they are not known yet.
    assert said_by(reserved_slots=2) == [told]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1, "sizes": 3}'])
def test_a_damaged_record_is_refused(content, said_by, tmp_path):
    said_by()
    (tmp_path / "server" / "server.json").write_text(content)
    with pytest.raises(RunDirectoryError, match="server.json is damaged"):
        said_by()


def test_a_server_permits_itself_as_many_open_files_as_the_system_does(said_by):
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        said_by()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_does_not_keep_the_whole_rounds_of_gpipe():
    with pytest.raises(PlanningError, match="gpipe.* a server does not know its rounds"):
        ServerOptions(mesh="pp2", schedule="gpipe")
