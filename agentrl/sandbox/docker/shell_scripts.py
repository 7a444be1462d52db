"""The shell scripts with which a container's files and processes are reached; POSIX sh, hostile paths quoted.

Not here: who runs them. A path that must be refused ends a script with `REFUSED` and says why on stderr.
"""

from __future__ import annotations

import os
import posixpath
import shlex

from agentrl.errors import SandboxPathError
from agentrl.sandbox.work_folder import WORKSPACE

MARK = "AGENTRL_RUN"
"""The variable that marks the processes of a command."""

REFUSED = 91

PROGRAMS = "cat chmod find grep head ls mkdir readlink rm tar"
"""Programs that an image must have beside `sh`: POSIX ones, and `readlink -f`. coreutils, findutils, grep and tar have
them, and so has busybox. The scripts below use no flag that one of these lacks."""

CHECK = f"""
missing=
for program in {PROGRAMS}; do command -v $program >/dev/null 2>&1 || missing="$missing $program"; done
[ -z "$missing" ] || {{ echo "$missing" >&2; exit 1; }}
[ -w /tmp ] || {{ echo "its /tmp cannot be written: RUN chmod 1777 /tmp" >&2; exit 2; }}
"""
BOUND = "ulimit -u {pids} 2>/dev/null || ulimit -p {pids}; "  # bash's name, dash's name
ENTER = """cd {workspace} && cd -- {cwd} 2>/dev/null && case "$(pwd -P)/" in {workspace}/*) ;; *) false ;; esac || {{
echo "sandbox: no such folder in the work folder" >&2; exit 126; }}; """
SWEEP_ALL = "kill -KILL -1"
SWEEP_OTHERS = """
for pass in 1 2 3; do
  before=$(echo /proc/[0-9]*)
  marked=$(grep -laE '{pattern}' /proc/[0-9]*/environ 2>/dev/null)
  marked="$marked $(grep -laE '{pattern}' /proc/[0-9]*/environ 2>/dev/null)"
  for process in $before; do
    pid=${{process#/proc/}}
    [ "$pid" = $$ ] && continue
    case "$marked" in *"/proc/$pid/"*) continue ;; esac
    words=; {{ read -r words <"/proc/$pid/cmdline"; }} 2>/dev/null
    [ -z "$words" ] && [ $pass -lt 3 ] && continue
    kill -KILL "$pid" 2>/dev/null
  done
done; true
"""
"""Listed before looked at, so that a child born meanwhile is spared; looked at twice, since a process in the middle of
`execve` has no environment for a moment. It has no arguments then either, and a busy host may stop it there: such a one
is spared until the last pass."""

RESOLVE = f"""
no() {{ echo "$1" >&2; exit {REFUSED}; }}
p=$(readlink -f -- "$1" && printf _) || no "No such file or directory"
p=${{p%?_}}
case "$p/" in {WORKSPACE}/*) ;; *) no "leads out of the work folder" ;; esac
[ -e "$p" ] || no "No such file or directory"
"""
READ = RESOLVE + '[ -f "$p" ] || no "not a regular file"; head -c "$2" -- "$p"'
PACK = (
    RESOLVE
    + """
[ -d "$p" ] || exit 92
cd -- "$p" || exit 1
exec 4>&1
exit "$({ { tar -cf - .; echo $? >&3; } | head -c "$2" >&4; } 3>&1)"
"""
)
"""Packs one folder. It fails if tar left a file out."""
WRITE = f"""
no() {{ echo "$1" >&2; exit {REFUSED}; }}
mkdir -p -- "$1" && d=$(cd -- "$1" && pwd -P && printf _) || exit {REFUSED}
d=${{d%?_}}
case "$d/" in {WORKSPACE}/*) ;; *) no "leads out of the work folder" ;; esac
"""
WRITE_FILE = (
    WRITE
    + """
p=$d/$2
if [ -h "$p" ]; then
  p=$(readlink -f -- "$p" && printf _) || no "a link to nowhere"
  p=${p%?_}
  case "$p" in WORKSPACE/*) ;; *) no "leads out of the work folder" ;; esac
fi
[ ! -e "$p" ] || [ -f "$p" ] || no "not a regular file"
cat > "$p" || exit REFUSED
[ -z "$3" ] || chmod "$3" "$p"
""".replace("WORKSPACE", WORKSPACE).replace("REFUSED", str(REFUSED))
)
UNPACK = WRITE + f'tar -xpf - -C "$d" || exit {REFUSED}'
PACK_FOLDER = """
cd "$1" || exit 1
exec 4>&1
code=$({ { tar -cf - . 2>/dev/null; echo $? >&3; } | head -c "$2" >&4; } 3>&1)
shift 2
for folder do [ -z "$(ls -A "$folder" 2>/dev/null)" ] || echo "$folder" >&2; done
exit "$code"
"""
"""Packs the first folder; says on stderr which of the others hold something. It fails if tar left a file out."""
UNPACK_FOLDER = f'tar -xpf - -C "$1" || exit {REFUSED}'
CLEAR = """
for folder in /workspace /tmp /dev/shm; do
  cd "$folder" && chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {} + ; done
[ -z "$(ls -A /workspace)" ]
"""


def checked_path(path: str) -> str:
    """A path as the box shall see it: below the work folder by its letters. Raises SandboxPathError."""
    try:
        path_bytes = os.fsencode(path)
    except UnicodeEncodeError as encode_error:
        raise SandboxPathError(f"{path!r} is no path: {encode_error.reason}") from None
    if b"\0" in path_bytes or len(path_bytes) > 4000:
        raise SandboxPathError(f"{path[:100]!r} is no path: a NUL byte, or too long")
    if path.startswith("/"):
        if not (path + "/").startswith(WORKSPACE + "/"):
            raise SandboxPathError(f"{path!r} leads out of the work folder {WORKSPACE}")
        path = path[len(WORKSPACE) :].lstrip("/")
    if posixpath.normpath(path).split("/")[0] == "..":
        raise SandboxPathError(f"{path!r} leads out of the work folder {WORKSPACE}")
    return path


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def shell_word(data: bytes, number: int = 0) -> tuple[str, str]:
    """Return what a script must do before, and the word to write, to have `data` as one argument. The engine's API
    carries text only, so other bytes are spelled out in octal."""
    if is_text(data):
        return "", shlex.quote(data.decode())
    octal_escapes = "".join(f"\\0{data_byte:03o}" for data_byte in data)
    return f"w{number}=$(printf '%b_' '{octal_escapes}'); w{number}=${{w{number}%_}}; ", f'"$w{number}"'
