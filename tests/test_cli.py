"""The command line: bad input gets one clear line and its exit code, before anything is started."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from commands import agentrl
from each_case import each_case
from typer.testing import CliRunner

from agentrl.cli import tables
from agentrl.cli.main import app
from agentrl.cli.play import action_of, play
from agentrl.config import parse
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.records import StopReason, Task
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore

ENVS = Path(__file__).parent / "run" / "envs.py"
ROOT = Path(__file__).parent.parent
DEADLINE_S = 500
COMMAND = [sys.executable, "-c", "from agentrl.cli.main import main; main()"]


def run_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def one_line(stderr: str) -> str:
    (line,) = stderr.strip().splitlines()
    return line


@each_case(
    ("document", "says"),
    [
        ('model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/CodeRepiar-v0"\n', "agentrl/CodeRepair-v0"),
        ('model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/CodeRepair-v0"\n[train]\nstep = 3\n', "train.step = 3"),
        ('model = "nowhere/at-all"\n[env]\nid = "agentrl/CodeRepair-v0"\n', "model 'nowhere/at-all'"),
        ("model = \n", "not valid TOML"),
        ('model = "m"\n[env]\nid = "e"\n[train]\nlr = inf\n', "train.lr = inf: "),
        ('name = "../x"\nmodel = "m"\n[env]\nid = "e"\n', "name = '../x': "),
        (
            'model = "m"\n[env]\nid = "e"\n[[tasks]]\nid = "f"\n',
            "env.id = 'e': no [[tasks]] table plays it (they name f)",
        ),
    ],
)
def test_a_wrong_run_file_is_one_line_and_exit_code_2(tmp_path: Path, document: str, says: str) -> None:
    code, _, stderr = agentrl("train", run_file(tmp_path, document), "--out", tmp_path / "run")
    assert code == 2
    assert says in one_line(stderr)
    assert not (tmp_path / "run").exists()


def test_a_model_without_chat_template_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    document = f'model = "{folder}"\n[env]\nid = "{ENVS}:Vowels"\n'
    code, _, stderr = agentrl("train", run_file(tmp_path, document), "--out", tmp_path / "run")
    assert code == 2
    assert "no chat template" in one_line(stderr)


def test_a_store_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    import sqlite3

    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}}))
    with sqlite3.connect(run.store_path) as connection:
        connection.execute("PRAGMA user_version = 999")
    for command in (("audit", run.path), ("train", "--resume", run.path)):
        code, _, stderr = agentrl(*command)
        assert code == 2
        assert "schema 999" in one_line(stderr)


def test_what_is_no_run_file_or_no_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\x8c\x00\xff")
    code, _, stderr = agentrl("train", tmp_path / "run.toml")
    assert (code, one_line(stderr)) == (2, f"agentrl: {tmp_path}/run.toml is no run file: it is not a text in UTF-8")
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}}))
    (run.path / "config.json").write_text("{bad")
    for command in (("train", "--resume", run.path), ("eval", run.path)):
        code, _, stderr = agentrl(*command)
        assert code == 2
        assert "config.json is no configuration" in one_line(stderr)


@pytest.mark.medium
def test_an_evaluation_replaces_no_run_that_trained(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}}))
    words = ("eval", "agentrl/tiny-coder", "--env", "agentrl/Calculator-v0", "--n", 2, "--out", run.path)
    checkpoint = run.checkpoints / "step-00000001"
    checkpoint.mkdir()
    assert agentrl(*words)[::2] == (2, f"agentrl: {run.path} holds a run that trained: give another --out\n")
    checkpoint.rmdir()
    with RunStore.open(run.store_path) as store:
        store.set_meta("train_started_s", "1.0")
    assert agentrl(*words)[0] == 2
    assert run.store_path.exists()


@pytest.mark.slow
def test_an_evaluation_shows_episodes_word_for_word() -> None:
    words = ("eval", "agentrl/tiny-coder", "--env", "agentrl/Calculator-v0", "--set", "rollout.max_turns=2")
    code, stdout, stderr = agentrl(*words, "--n", 3, "--show", 2)
    assert code == 0, stderr
    titles = [line for line in stdout.splitlines() if line.startswith("tasks, task ")]
    assert len(titles) == 2 and all(": not solved in " in title for title in titles)
    assert stdout.count("Use the calculator, then submit the result.") == 2


@pytest.mark.medium
def test_a_module_of_the_working_folder_is_found_as_its_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_world.py").write_text(
        f"from agentrl.registry import load_reference\nWorld = load_reference({f'{ENVS}:Vowels'!r})\n"
    )
    monkeypatch.chdir(tmp_path)
    for reference in ("my_world:World", "my_world.py:World"):
        command = [*COMMAND, "play", reference]
        done = subprocess.run(command, input="/quit\n", capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stderr) == (0, "")
        assert "[user]" in done.stdout
    code, _, stderr = agentrl("play", "his_world:World")
    assert (code, one_line(stderr)) == (
        2,
        "agentrl: cannot import 'his_world' of 'his_world:World': No module named 'his_world' "
        "(for a file write path/to/his_world.py:World)",
    )


@pytest.mark.medium
def test_version_and_help_have_their_usual_names() -> None:
    from importlib.metadata import version

    assert agentrl("--version") == (0, f"agentrl {version('agentrl-kit')}\n", "")
    for arguments in (["-h"], ["train", "-h"], ["bench", "-h"], ["bench", "--help"]):
        code, stdout, stderr = agentrl(*arguments)
        assert (code, stderr) == (0, "")
        assert "Usage: " in stdout


def test_what_goes_to_a_pipe_is_not_wrapped(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / ("long" * 50), parse({"model": "m", "env": {"id": "e"}}))
    code, stdout, _ = agentrl("audit", run.path)
    assert code == 0
    widths = {len(line) for line in stdout.strip().splitlines()}
    assert len(widths) == 1, "a row of the table is a line"
    assert max(widths) < 60 and "trained_twice: 0 " in stdout and "violations      │ none" in stdout


@each_case("arguments", [["train"], ["train", "a.toml", "--resume", "b"]])
def test_train_wants_either_a_file_or_a_run(arguments: list[str]) -> None:
    code, _, stderr = agentrl(*arguments)
    assert (code, one_line(stderr)) == (2, "agentrl: give either a run file or --resume RUN_DIR")


def test_audit_exits_1_where_a_law_is_broken(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}}))
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.groups.add_groups([Task(index=0, env="e", seed=0)], size=1, purpose="train")
        (claim,) = store.leases.claim("w", 1, lease_s=10, now=0)
        store.journal.begin(claim.episode_id, claim.fence, ())
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        store.buffer.take(1, 1, max_lag=0)
    code, out, _ = agentrl("audit", run.path, "--json")
    assert code == 0, out
    import sqlite3

    with sqlite3.connect(run.store_path) as connection:
        connection.execute("DROP INDEX trained_exactly_once")
        connection.execute(
            "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s)"
            " SELECT episode_id, step + 1, attempt, max_lag, taken_s FROM lineage"
        )
    code, out, _ = agentrl("audit", run.path, "--json")
    assert code == 1
    assert "twice" in out


def test_doctor_says_what_to_do_about_what_is_missing() -> None:
    code, out, _ = agentrl("doctor")
    assert code in (0, 1)
    for part in ("python", "torch", "bubblewrap", "docker", "vllm"):
        assert part in out


@each_case(
    ("command", "names"),
    [("doctor", {"part", "works", "seen", "hint", "needed"}), ("list", {"kind", "id", "summary"})],
)
def test_a_program_reads_what_a_person_reads(command: str, names: set[str]) -> None:
    code, out, _ = agentrl(command, "--json")
    rows = json.loads(out)
    assert code in (0, 1) and rows and set(rows[0]) == names


def test_a_benchmark_gives_its_own_help_and_an_unknown_one_names_those_there_are() -> None:
    done = subprocess.run([*COMMAND, "bench", "sandbox", "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0 and "--rounds" in done.stdout
    code, _, stderr = agentrl("bench", "sandbocks")
    assert code == 2
    assert all(name in one_line(stderr).partition("known: ")[2] for name in ("compaction", "sandbox", "weights"))


@pytest.mark.bubblewrap
def test_law_4_a_benchmark_is_the_command_itself_and_cannot_outlive_it() -> None:
    with subprocess.Popen(
        [*COMMAND, "bench", "sandbox"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + DEADLINE_S
        while "benchmarks/sandbox.py" not in Path(f"/proc/{process.pid}/cmdline").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()


def test_a_typed_tool_call_is_what_a_model_would_write() -> None:
    assert action_of("hello\\nthere") == "hello\nthere"
    call = action_of("/replace_line line=3 text='return a'")
    assert json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")) == {
        "name": "replace_line",
        "arguments": {"line": 3, "text": "return a"},
    }
    with pytest.raises(ValueError, match="not key=value"):
        action_of("/submit now")
    with pytest.raises(ValueError, match="name a tool"):
        action_of("/")
    assert action_of("/submit at=3", "react") == get_format("react").write(ToolCall("submit", {"at": 3}))


def test_a_person_plays_an_episode() -> None:
    lines, shown = iter(["aaa", "eee", "iii"]), list[str]()
    assert play(f"{ENVS}:Vowels", seed=5, kwargs={}, read=lambda _: next(lines), write=shown.append)
    assert shown[-1].startswith("episode over: outcome 1.0, success True")
    assert any("task 5" in line for line in shown)


def test_play_of_an_environment_that_raises_is_one_line() -> None:
    code, _, stderr = agentrl("play", f"{ENVS}:Raising", stdin="x\n")
    assert code == 1
    line = 1 + ENVS.read_text().splitlines().index('        raise KeyError("no such tool")')
    assert one_line(stderr) == f"agentrl: {ENVS}:Raising: step raised KeyError: 'no such tool' ({ENVS}:{line})"


def test_play_that_is_left_says_no_outcome() -> None:
    for stdin in ("", "/quit\n"):
        code, stdout, stderr = agentrl("play", f"{ENVS}:Vowels", stdin=stdin)
        assert (code, stderr) == (0, "")
        assert stdout.count("[user]") == 1 and "episode over" not in stdout


@pytest.mark.medium
@each_case(
    ("arguments", "says"),
    [
        (["agentrl/Calculator-v0", "--set", "term=3"], "agentrl/Calculator-v0 cannot be made with {'term': 3}: "),
        (["agentrl/Calculator-v0", "--set", "limits.turn=3"], "limits = {'turn': 3}: give fields of EpisodeLimits"),
        (["agentrl/Calculator-v0", "--set", "tools=python"], "tools = 'python': give a list of tools"),
        (["agentrl/CodeRepair-v0", "--set", "sandbox=nope"], "sandbox = 'nope': no sandboxes id 'nope' is registered"),
        (["json:loads"], "json:loads cannot be made with {}: loads() missing 1 required positional argument"),
    ],
)
@each_case("command", ["play", "validate"])
def test_what_an_environment_does_not_take_is_one_line(command: str, arguments: list[str], says: str) -> None:
    code, _, stderr = agentrl(command, *arguments)
    assert code == 2
    assert one_line(stderr).startswith(f"agentrl: {says}")


SLOW_IMPORT = """
import sys
print("importing", flush=True)
sys.stdin.read()
"""


def entry_point() -> str:
    """What the installed command `agentrl` calls, as its package says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["scripts"]["agentrl"]


def test_ctrl_c_while_python_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW_IMPORT)  # the first large package that the command imports
    module, _, function = entry_point().partition(":")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {module} import {function}; {function}()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "list"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"importing\n"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=CTRL_C_S)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, b"agentrl: stopped by Ctrl-C\n")


def test_the_command_imports_next_to_nothing_before_it_answers_ctrl_c() -> None:
    module = entry_point().partition(":")[0]
    script = f"import sys; before = set(sys.modules); import {module}; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert not {"gymnasium", "numpy", "typer", "agentrl"} & set(re.findall(r"\w+", done.stdout))


def test_a_command_in_the_background_of_a_shell_goes_on_at_ctrl_c() -> None:
    module, _, function = entry_point().partition(":")
    script = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f" import {module} as command; os.kill(os.getpid(), signal.SIGINT);"
        f" sys.argv[1:] = ['--version']; command.{function}()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.startswith("agentrl ") and not done.stderr


CTRL_C_S = 300.0
WAITS = """
import agentrl, trio

class Waits(agentrl.Env):
    async def areset(self, *, seed=None, options=None):
        print("waiting", flush=True)
        await trio.sleep_forever()
"""


def test_ctrl_c_in_validate_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = ["-c", "from agentrl.cli.main import main; main()", "validate", f"{tmp_path}/waits.py:Waits", "--n", "4"]
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=CTRL_C_S)
            assert (process.returncode, stderr) == (130, "")
        except subprocess.TimeoutExpired:
            status = Path(f"/proc/{process.pid}/status").read_text()
            pytest.fail(f"SIGINT did not end the command; its signals: {re.findall('Sig.*', status)}")
        finally:
            process.kill()


def test_ctrl_c_is_one_line_from_the_commands_first_import_on() -> None:
    folder = Path(__file__).parent.parent
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import agentrl_command, _signal; "
        "print(_signal.getsignal(2).__name__, *sorted({'enum', 'signal', 'agentrl'} & sys.modules.keys())); "
        "sys.stdout.flush(); _signal.raise_signal(2); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "_leave\n", "agentrl: stopped by Ctrl-C\n")


def test_a_line_of_foreign_words_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_line("ends \x1b[31m[red]so[/red]\n[0]")
    assert capsys.readouterr().out == "ends \\x1b[31m[red]so[/red]\\x0a[0]\n"


@pytest.mark.parametrize(
    "line", ["canary http://127.0.0.1:1 --model m", "eval --endpoint http://127.0.0.1:1 --model m"]
)
def test_a_key_that_is_named_and_not_there_is_said(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    monkeypatch.setattr("agentrl.models.resolve.model_dir", Path)
    done = CliRunner().invoke(app, [*line.split(), "--key-variable", "MY_KEY"])
    assert str(done.exception) == "--key-variable MY_KEY: it is not set here; export it, or leave the option out"
