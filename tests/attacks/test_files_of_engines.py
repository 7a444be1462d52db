"""Another user asks an engine of ours to read, write or remove files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from engine.conftest import Server, make_model
from safetensors.numpy import save_file

from attacks.other_user import OtherUser

pytestmark = pytest.mark.other_user

# Makes what its second argument lists (KIND, PLACE, TARGET), posts the others (PATH BODY …), prints the answers.
ATTACK = """if True:
    import json, os, pathlib, sys, urllib.request
    url, made, *posts = sys.argv[1:]
    for kind, place, target in json.loads(made):
        place = pathlib.Path(place)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o777)
        place.symlink_to(target) if kind == "link" else place.write_bytes(bytes.fromhex(target))
        if kind == "file":
            place.chmod(0o644)
    answers = []
    for path, body in zip(posts[::2], posts[1::2]):
        try:
            post = urllib.request.Request(url + path, body.encode(), method="POST")
            with urllib.request.urlopen(post, timeout=60) as answer:
                answers.append(answer.read().decode())
        except urllib.error.HTTPError as error:
            answers.append(error.read().decode())
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A temporary folder as `/tmp` is: everybody may write, and remove what is theirs."""
    with tempfile.TemporaryDirectory(prefix="agentrl-shared-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name).resolve()


@pytest.fixture(scope="module")
def server(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    model = make_model(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(shared))
        running = Server(model, tmp_path_factory.mktemp("server"))
    yield running
    running.close()


def attack(
    user: OtherUser, url: str, made: list[tuple[str, Path, object]], *posts: tuple[str, dict[str, object]]
) -> list[str]:
    flat = [word for path, body in posts for word in (path, json.dumps(body))]
    done = user.run(ATTACK, url, json.dumps([(kind, str(place), str(target)) for kind, place, target in made]), *flat)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def adapter(folder: Path) -> Path:
    """One that changes nothing, which an engine loads."""
    folder.mkdir(parents=True)
    save_file({}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    return folder


def load(name: str, path: Path) -> tuple[str, dict[str, object]]:
    return "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}


@pytest.mark.medium
def test_an_engine_does_not_remove_what_somebody_names(server: Server, other_user: OtherUser, shared: Path) -> None:
    """By a folder of the attacker's with the name of an inbox, and in one that leads elsewhere."""
    mine = adapter(shared / "home" / "final")
    inbox = shared / "evil" / "agentrl-inbox-0"
    said = attack(other_user, server.url, [("link", inbox, mine.parent)], load("a", inbox / "final"))
    assert (mine / "adapter_config.json").exists(), said
    assert "cannot load the adapter" in said[0]
    other = adapter(shared / "more" / "agentrl-inbox-0" / "final")  # what an owner might have named so
    attack(other_user, server.url, [], load("b", other))
    assert (other / "adapter_config.json").exists()


@pytest.mark.medium
def test_an_engine_does_not_write_through_a_link(server: Server, other_user: OtherUser, shared: Path) -> None:
    victim = shared / "victim"
    victim.mkdir()
    (victim / "x").mkdir()
    message = {"folder": "x", "file": "authorized_keys", "start": 0, "data": "AAAA"}
    posts = [("/collective_rpc", {"method": "agentrl_receive", "args": [json.dumps(message)]})]
    posts += [("/collective_rpc", {"method": "agentrl_receive", "args": [json.dumps({"folder": "x", "drop": True})]})]
    said = attack(other_user, server.url, [("link", shared / "agentrl-inbox-0", victim)], *posts)
    assert [path.name for path in victim.rglob("*")] == ["x"], said
    assert said == ['{"results":[{}]}'] * 2, "it went into a folder that nobody else reaches"


def test_only_files_of_the_engines_own_user_are_read_and_no_answer_says_which_exist(
    server: Server, other_user: OtherUser, shared: Path
) -> None:
    private = shared / "private"
    private.mkdir(mode=0o700)
    (private / "there").write_bytes(b"secret" * 100)
    adapter(private / "adapter")
    theirs, link = shared / "theirs.safetensors", shared / "link.safetensors"
    save_file({}, private / "empty.safetensors")
    made = [("file", theirs, (private / "empty.safetensors").read_bytes().hex()), ("link", link, private / "there")]
    paths = [
        *(f"{private}/{name}" for name in ("there", "gone", "there/..", "../private/there")),
        *(str(path) for path in (theirs, link, "/etc/shadow", "/etc/gone", shared / "evil3" / "fifo")),
        *(f"file://{private}/{name}" for name in ("there", "gone")),
        "file:///etc/shadow",
        "memory://x/y.json",
    ]
    posts = [("/start_weight_update", dict[str, object]())]
    posts += [("/update_weights", {"update_info": {"path": path, "sha256": "0" * 64}}) for path in paths]
    said = attack(other_user, server.url, made, *posts)[1:]
    texts = {json.loads(one)["error"]["message"].replace(path, "PATH") for one, path in zip(said, paths, strict=True)}
    assert len(texts) == 2 and {text[:40] for text in texts} == {
        "update_info.path: cannot read weight fil",
        "update_info.path: cannot read weights at",
    }

    adapters = [private / name for name in ("gone", "there", "nothing/at/all")]
    said = attack(other_user, server.url, [], *(load(f"o{number}", path) for number, path in enumerate(adapters)))
    assert len({one.replace(str(path), "PATH") for one, path in zip(said, adapters, strict=True)}) == 1
