"""Models by their name on the hub: here a server of two files, as the hub's own client asks it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from tests.models.transformers_models import tiny_model
from titan_sparse.commands import prepare_data
from titan_sparse.config import ConfigError, load
from titan_sparse.models.huggingface_files import local_folder

NAME = "owner/tiny"
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("LlamaConfig").save_pretrained(folder)
    (folder / "consolidated.safetensors").write_text("the same weights again")
    return folder


@pytest.fixture
def hub(model) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the files that were fetched from it."""
    fetched: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.partition(f"/{NAME}/resolve/{COMMIT}/")[2]
            body = b""
            if name:
                body = (model / name).read_bytes()
                if self.command == "GET":
                    fetched.append(name)
            elif self.path.startswith(f"/api/models/{NAME}/tree/"):
                files = [
                    {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0"}
                    for path in sorted(model.iterdir())
                ]
                body = json.dumps(files).encode()
            elif self.path.startswith(f"/api/models/{NAME}"):
                files = [{"rfilename": path.name} for path in sorted(model.iterdir())]
                body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": files}).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", fetched
    server.shutdown()
    server.server_close()


def _print_config(
    cache: Path, endpoint: str, name: str = NAME, **variables
) -> tuple[int, str, str]:
    """Status, output, and errors of a start. The client reads its variables when it is imported."""
    words = ["-m", "titan_sparse.train", "--print-config", "--model.initial_hf", name]
    environment = os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint} | variables
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_a_name_is_downloaded_once_and_read_from_the_cache(tmp_path, hub):
    endpoint, fetched = hub
    status, printed, errors = _print_config(tmp_path, endpoint)
    folder = tmp_path / f"hub/models--owner--tiny/snapshots/{COMMIT}"
    assert status == 0 and f'initial_hf = "{folder}"' in printed, errors
    assert sorted(fetched) == ["config.json", "generation_config.json", "model.safetensors"]
    assert "%" in errors  # the progress
    # Without the hub, on every rank.
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1", "LOCAL_RANK": "1"}):
        assert _print_config(tmp_path, "http://127.0.0.1:9", **variables)[1] == printed
    assert len(fetched) == 3
    # A download that was interrupted is completed, by another rank without a progress bar.
    (folder / "model.safetensors").unlink()
    status, again, errors = _print_config(tmp_path, endpoint, LOCAL_RANK="1")
    assert status == 0 and again == printed and "%" not in errors
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["no network", "offline"])
def test_without_a_network_one_line_says_what_to_do(tmp_path, variables):
    status, _, errors = _print_config(tmp_path, "http://127.0.0.1:9", **variables)
    assert status == 2 and errors.count("\n") == 1
    assert errors.startswith(f'error: model.initial_hf = "{NAME}" is not a folder here, and')
    assert f"write the path of a folder, for example that of `hf download {NAME} --local" in errors


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    (tmp_path / NAME).mkdir(parents=True)
    for name in (NAME, "bytes", "", "/a/b", "./a/b", "a/b/c", "~/a", "a b/c"):
        assert local_folder(name, "model.initial_hf", weights=True) == name


def test_a_tokenizer_needs_no_weights(monkeypatch):
    asked = []

    def download(name, allow_patterns, **options):
        asked.append(allow_patterns)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match='data.tokenizer = "owner/tiny" is not a folder here'):
        load(["--data.tokenizer", NAME])
    assert not any("*.safetensors" in patterns for patterns in asked)


def test_prepare_data_takes_a_tokenizer_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    words = [str(tmp_path), str(tmp_path / "out"), "--tokenizer", NAME]
    assert prepare_data.main(words) == 2
    assert f'--tokenizer = "{NAME}" is not a folder here, and' in capsys.readouterr().err
