"""A store on a server, with no more trust than it needs: TLS, a role of few rights, no word of the password."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from sandbox.certificates import Authority

from agentrl.config import parse
from agentrl.errors import StoreError
from agentrl.host.ports import free_port
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.databases.open_store import ADDRESS, remove

from .play import admit, play_all, serve
from .server import Server

psycopg = pytest.importorskip("psycopg")  # an extra

pytestmark = pytest.mark.postgres

PASSWORD = "c0rrect-horse"


@pytest.fixture(scope="module")
def server() -> Generator[tuple[Server, str]]:
    """A server with the role of docs/how-to/postgresql.md that takes nothing but TLS and a password; its URL."""
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as name:
        folder = Path(name)
        server = Server(folder)
        server.make()
        try:
            server.stop()
            Authority("right").issue(folder / "data", "127.0.0.1")
            shutil.copy(folder / "data" / "ca.pem", folder / "ca.pem")
            (folder / "ca.pem").chmod(0o644)
            (folder / "data" / "key.pem").chmod(0o600)
            rules = "local all agentrl trust\nhostssl runs agentrl_run 127.0.0.1/32 scram-sha-256\n"
            (folder / "data" / "pg_hba.conf").write_text(rules)
            if os.geteuid() == 0:
                folder.chmod(0o755)
                for file in ("key.pem", "cert.pem", "pg_hba.conf"):
                    shutil.chown(folder / "data" / file, "postgres", "postgres")
            port = free_port()
            at = (f"port={port}", "listen_addresses=127.0.0.1", "password_encryption=scram-sha-256")
            server.start(*at, "ssl=on", "ssl_cert_file=cert.pem", "ssl_key_file=key.pem")
            with psycopg.connect(f"{server.url}&port={port}", autocommit=True) as admin:
                for statement in _documented("CREATE ROLE agentrl_run"):
                    admin.execute(statement.replace("'…'", f"'{PASSWORD}'"))
            yield server, f"postgresql://agentrl_run@127.0.0.1:{port}/runs?sslmode=verify-full"
        finally:
            server.stop("immediate")


def _documented(begins: str) -> list[str]:
    """The statements of a block in docs/how-to/postgresql.md."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "postgresql.md").read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```text\n")[1:] if part.startswith(begins)]
    return [line for line in block.split("```")[0].splitlines() if line]


@pytest.fixture
def url(server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setenv("PGSSLROOTCERT", f"{server[0].folder}/ca.pem")
    return server[1]


@pytest.mark.medium
def test_a_run_needs_no_more_rights_than_those_that_the_page_grants(tmp_path: Path, url: str) -> None:
    path = tmp_path / ADDRESS
    with RunStore.create(path, "{}", url=url) as store:
        serve(store, 0)
        admit(store, limit=2)
        play_all(store)
        assert store.buffer.take(1, 2, max_lag=1) and audit(store).violations == []
        with store._db.read():  # pyright: ignore[reportPrivateUsage]
            (encrypted,) = store._db.rows("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")  # pyright: ignore[reportPrivateUsage]
        assert encrypted == (True,)
    with psycopg.connect(url, autocommit=True) as role:
        for refused in ("CREATE TABLE public.mine ()", "CREATE ROLE other", "COPY (SELECT 1) TO PROGRAM 'true'"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                role.execute(refused)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url.replace("/runs?", "/agentrl?"))
    remove(path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"PGSSLROOTCERT": "other.pem"}, "certificate verify failed"),
        ({"host": "localhost"}, "does not match host name"),
        ({"sslmode": "disable"}, "no encryption"),
        ({"PGPASSWORD": "wrong-horse"}, "password authentication failed"),
    ],
    ids=["authority", "name", "plain", "password"],
)
def test_a_server_or_a_user_that_is_not_who_it_should_be_is_refused_in_one_line(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], says: str
) -> None:
    Authority("other").issue(tmp_path)
    (tmp_path / "ca.pem").rename(tmp_path / "other.pem")
    monkeypatch.chdir(tmp_path)
    for name, value in wrong.items():
        if name.startswith("PG"):
            monkeypatch.setenv(name, value)
    url = url.replace("127.0.0.1", wrong.get("host", "127.0.0.1"))
    url = url.replace("verify-full", wrong.get("sslmode", "verify-full"))
    with pytest.raises(StoreError, match=says) as error:
        RunStore.create(tmp_path / ADDRESS, "{}", url=url)
    assert "\n" not in str(error.value) and "horse" not in str(error.value)


def test_the_password_is_in_no_file_of_the_run(tmp_path: Path, url: str) -> None:
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}, "cluster": {"store": url}}))
    files = [file for file in run.path.rglob("*") if file.is_file()]
    assert run.store_path in files
    assert not [file for file in files if PASSWORD.encode() in file.read_bytes()]
    with RunStore.open(run.store_path) as store, store._db.read():  # pyright: ignore[reportPrivateUsage]
        assert PASSWORD not in (store.meta("config") or "")
    remove(run.store_path)
