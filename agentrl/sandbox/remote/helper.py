"""The program that a box elsewhere runs for us; standard library only, sent as text with every call.

`python3 -I -c THIS REQUEST` does one operation and prints one line of JSON. A command is supervised by a process of
its own, which bounds and collects its output, ends it at its deadline with all that it started, and answers on a socket
in the state folder. So a call is short whatever the command does, and may be made again when a connection broke. As
root the command and the file operations run as a user of the box's own, whom the supervisor need not fear.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time

END_S = 10.0  # for killed processes to be gone
DRAIN_S = 1.0  # for pipes that something still holds
KEPT_S = 600.0  # for the answer to be fetched
POLL_S = 0.05
LOOK_S = 5.0  # between two looks at whether the machine starves the command
STARVED_S = 600.0  # no command's deadline is extended by more


def b64(data):
    return base64.b64encode(data).decode()


def raw(text):
    return base64.b64decode(text)


def become(uid):
    """Be the box's user for good, where this is root, and never gain a right again."""
    prctl = ctypes.CDLL(None).prctl
    prctl(38, 1, 0, 0, 0)  # no new privileges
    if uid is not None and os.geteuid() == 0:
        for capability in range(64):
            prctl(24, capability, 0, 0, 0)  # out of the bounding set
        # Groups first, then the user: without root's rights they could not be given up any more.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def inside(work, path):
    """A path below the work folder, its links followed. Raises OSError."""
    real_root = os.path.realpath(work)
    real_path = os.path.realpath(os.path.join(real_root, path))
    if real_path != real_root and not real_path.startswith(real_root + b"/"):
        raise OSError(errno.EPERM, "leads out of the work folder")
    return real_path


def memory_kills():
    """How often the kernel ended a process of this box for want of memory; 0 where it does not count that."""
    for counter_path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError, KeyError), open(counter_path) as counter_file:
            return int(dict(counter_line.split() for counter_line in counter_file)["oom_kill"])
    return 0


# --- a command


class CommandSupervisor:
    """Runs one command to its end and answers on a socket until the end was fetched."""

    def __init__(self, request, listener):
        self.request, self.listener = request, listener
        self.out, self.err = bytearray(), bytearray()
        self.bound = request["output_bytes"]
        self.stdin = bytearray(raw(request["stdin"]))
        self.close_stdin = request["ends_stdin"]
        self.status = None
        self.truncated = self.timed_out = self.ended = False
        self.why, self.answers, self.waiting = "", {}, []
        self.began = time.monotonic()
        self.kills = memory_kills()
        self.starved_s, self.looked = 0.0, (self.began, 0.0, {})

    def run(self):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans of the command come to us, whatever they forked
        child_pid, self.fds = self.spawn()
        with contextlib.suppress(AttributeError, OSError):  # without it the end is seen a moment later
            self.gone = os.pidfd_open(child_pid)
        deadline = self.began + self.request["wall_s"]
        next_look = self.began + LOOK_S
        while self.status is None:
            self.turn(POLL_S)
            current_time = time.monotonic()
            if current_time >= min(deadline, next_look) and self.starved_s < STARVED_S:
                deadline += self.look()  # time without a processor is the host's, as in agentrl.host.cpu_time
                next_look = current_time + LOOK_S
            if current_time >= deadline:
                self.timed_out = True
                os.kill(child_pid, signal.SIGKILL)
                deadline = float("inf")
            ended_pid, wait_status = os.waitpid(child_pid, os.WNOHANG)
            if ended_pid:
                self.status = (
                    128 + os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)
                )
        self.duration = time.monotonic() - self.began
        self.sweep()
        turn_until = time.monotonic() + DRAIN_S
        while {"out", "err"} & set(self.fds) and time.monotonic() < turn_until:
            self.turn(POLL_S)
        for pipe_name in ("out", "err"):
            # What the command left, also where this machine was slow.
            while pipe_name in self.fds and not self.truncated:
                self.take(pipe_name)
        for pipe_name in list(self.fds):
            self.shut(pipe_name)
        self.ended = True
        turn_until = time.monotonic() + KEPT_S
        while time.monotonic() < turn_until:
            self.turn(1.0)
            self.sweep_waiting()
            if self.fetched():
                turn_until = min(turn_until, time.monotonic() + 30.0)  # the answer may not have arrived

    def fetched(self):
        return "wait" in self.answers and self.answers["wait"][1].get("ended")

    def spawn(self):
        pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, what kept it from starting
        child_pid = os.fork()
        if child_pid == 0:
            try:
                self.child(pipes)
            except BaseException as start_error:
                exit_code = 127 if isinstance(start_error, FileNotFoundError) else 126
                error_text = start_error.strerror if isinstance(start_error, OSError) else str(start_error)
                os.write(pipes[3][1], json.dumps([exit_code, error_text or ""]).encode())
            os._exit(126)
        own_ends = {"in": pipes[0][1], "out": pipes[1][0], "err": pipes[2][0]}
        for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]):
            os.close(descriptor)
        for descriptor in own_ends.values():
            os.set_blocking(descriptor, False)
        # This pipe closes by itself at the exec, so its end says that the command runs, and what comes before says why
        # it does not.
        with os.fdopen(pipes[3][0], "rb") as start_report:
            start_failure = start_report.read()
        if start_failure:
            exit_code, error_text = json.loads(start_failure)
            self.refused = exit_code
            self.err += f"sandbox: {error_text}\n".encode()
        return child_pid, own_ends

    def child(self, pipes):
        request, limits = self.request, self.request["limits"]
        os.setsid()
        for standard_stream, descriptor in ((0, pipes[0][0]), (1, pipes[1][1]), (2, pipes[2][1])):
            os.dup2(descriptor, standard_stream)
        report_descriptor = pipes[3][1]
        # The supervisor's own descriptors, its socket above all: a command that held the listener could answer in the
        # supervisor's place.
        for descriptor in range(3, 256):
            if descriptor != report_descriptor:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        for limit_name, soft_limit in limits.items():
            number = getattr(resource, limit_name)
            hard_limit = resource.getrlimit(number)[1]
            soft_limit = soft_limit if hard_limit == resource.RLIM_INFINITY else min(soft_limit, hard_limit)
            resource.setrlimit(number, (soft_limit, soft_limit))
        become(request["uid"])
        try:
            os.chdir(inside(raw(request["work"]), raw(request["cwd"])))
        except OSError:
            raise NotADirectoryError(errno.ENOTDIR, "no such folder in the work folder") from None
        # Python ignores SIGPIPE, and what is ignored stays ignored after an exec: a program whose reader has gone would
        # write on into errors instead of ending.
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
        variables = {raw(variable_name): raw(variable_value) for variable_name, variable_value in request["env"]}
        arguments = [raw(argument) for argument in request["argv"]]
        os.execvpe(arguments[0], arguments, variables)

    refused = gone = None

    def turn(self, seconds):
        """Move what can be moved, and answer what can be answered."""
        reading = [self.listener] + [self.fds[pipe_name] for pipe_name in ("out", "err") if pipe_name in self.fds]
        if self.gone is not None and self.status is None:
            reading.append(self.gone)
        writing = [self.fds["in"]] if "in" in self.fds and self.stdin else []
        if "in" in self.fds and not self.stdin and self.close_stdin:
            self.shut("in")
        readable, writable, _ = select.select(reading, writing, [], seconds)
        for pipe_name in ("out", "err"):
            if self.fds.get(pipe_name) in readable:
                self.take(pipe_name)
        if writable:
            try:
                del self.stdin[: os.write(self.fds["in"], self.stdin[:65536])]
            except BlockingIOError:
                pass
            except OSError:
                self.shut("in")
        if self.listener in readable:
            self.accept()
        self.sweep_waiting()

    def shut(self, name):
        if name in self.fds:
            os.close(self.fds.pop(name))

    def take(self, name):
        try:
            new_bytes = os.read(self.fds[name], 65536)
        except OSError:
            new_bytes = b""
        if not new_bytes:
            self.shut(name)
            return
        output_buffer = self.out if name == "out" else self.err
        free_bytes = self.bound - len(output_buffer)
        self.truncated = self.truncated or len(new_bytes) > free_bytes
        output_buffer += new_bytes[: max(free_bytes, 0)]

    def accept(self):
        connection, _ = self.listener.accept()
        connection.settimeout(5.0)
        try:
            request = json.loads(connection.makefile("rb").readline())
        except (OSError, ValueError):
            connection.close()
            return
        self.waiting.append((connection, request, time.monotonic() + request.get("timeout_s", 0.0)))

    def sweep_waiting(self):
        still_waiting = []
        for connection, request, answer_until in self.waiting:
            channel, request_number = request["channel"], request["number"]
            if channel in self.answers and self.answers[channel][0] == request_number:
                own_answer = self.answers[channel][1]  # a repeated request: the first answer did not arrive
            else:
                own_answer = self.answer(channel, request, time.monotonic() >= answer_until)
                if own_answer is None:
                    still_waiting.append((connection, request, answer_until))
                    continue
                self.answers[channel] = (request_number, own_answer)
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(own_answer).encode() + b"\n")
            connection.close()
        self.waiting = still_waiting

    def answer(self, channel, request, late):
        if channel == "send":
            if "in" in self.fds and not self.close_stdin:
                self.stdin += raw(request["data"])
            return {}
        if channel == "kill":
            if self.status is None:
                for descendant in self.descendants():
                    with contextlib.suppress(OSError):
                        os.kill(descendant, signal.SIGKILL)
            return {}
        if channel == "receive":
            if not (self.out or self.ended or "out" not in self.fds or late):
                return None
            output_bytes, self.out = bytes(self.out), bytearray()
            return {"out": b64(output_bytes)}
        if not (self.ended or late):
            return None
        if not self.ended:
            return {"ended": False}
        exit_code = self.refused if self.refused is not None else self.status
        return {
            "ended": True,
            "out": b64(bytes(self.out)),
            "err": b64(bytes(self.err)),
            "code": 137 if self.timed_out else exit_code,
            "timed_out": self.timed_out,
            "oom": self.status == 137 and not self.timed_out and memory_kills() > self.kills,
            "truncated": self.truncated,
            "duration_s": self.duration,
            "cpu_s": self.cpu_s(),
            "starved_s": self.starved_s,
        }

    def cpu_s(self):
        """CPU seconds of all that has ended so far: every descendant becomes a child of ours."""
        child_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return child_usage.ru_utime + child_usage.ru_stime

    def look(self):
        """The seconds since the last look in which the command could have run and got no processor."""
        current_time, used_s, wait_by_thread = time.monotonic(), self.cpu_s(), {}
        for descendant in self.descendants():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{descendant}/stat", "rb") as proc_file:
                    stat_words = proc_file.read().rpartition(b")")[2].split()
                used_s += sum(map(int, stat_words[11:15])) / os.sysconf("SC_CLK_TCK")
                if int(stat_words[16]) > os.getpriority(os.PRIO_PROCESS, 0):
                    continue  # it lowered its own priority
                for thread_id in os.listdir(f"/proc/{descendant}/task"):
                    with open(f"/proc/{descendant}/task/{thread_id}/schedstat", "rb") as proc_file:
                        wait_by_thread[descendant, thread_id] = int(proc_file.read().split()[1]) / 1e9
        last_look, used_before, waits_before = self.looked
        longest_wait = max(
            (wait_s - waits_before.get(thread_key, 0.0) for thread_key, wait_s in wait_by_thread.items()), default=0.0
        )
        starved_s = max(0.0, min(longest_wait, current_time - last_look - max(0.0, used_s - used_before)))
        self.looked = (current_time, used_s, wait_by_thread)
        self.starved_s += starved_s
        return starved_s

    def descendants(self):
        parent_of = {}
        for proc_name in os.listdir("/proc"):
            if proc_name.isdecimal():
                try:
                    with open(f"/proc/{proc_name}/stat", "rb") as stat_file:
                        stat_words = stat_file.read().rpartition(b")")[2].split()
                except OSError:
                    continue
                parent_of[int(proc_name)] = int(stat_words[1])
        family, has_grown = {os.getpid()}, True
        while has_grown:
            new_members = {process_id for process_id, parent_id in parent_of.items() if parent_id in family} - family
            family, has_grown = family | new_members, bool(new_members)
        return family - {os.getpid()}

    def sweep(self):
        """End all that the command started: every orphan of it is a child of ours."""
        sweep_until = time.monotonic() + END_S
        while time.monotonic() < sweep_until:
            remaining = self.descendants()
            for descendant in remaining:
                with contextlib.suppress(OSError):
                    os.kill(descendant, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                if not remaining:
                    return
            time.sleep(0.002)


def start(request):
    """Start a command: a supervisor that outlives this call."""
    socket_path = os.path.join(request["state"], request["id"])
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(request["state"])
    listener.bind(request["id"])
    listener.listen(64)
    if os.fork():
        return {}
    os.setsid()
    if os.fork():
        os._exit(0)
    null_device = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null_device, descriptor)
    try:
        CommandSupervisor(request, listener).run()
    finally:
        os.unlink(socket_path)
        os._exit(0)


def ask(request):
    """Pass a request on to a supervisor."""
    os.chdir(request["state"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(request.get("timeout_s", 0.0) + 30.0)
        try:
            connection.connect(request["id"])
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer_line = connection.makefile("rb").readline()
        except OSError as socket_error:
            return {"gone": f"{socket_error}"}
    return json.loads(answer_line) if answer_line else {"gone": "the supervisor has ended"}


# --- files


def setup(request):
    os.makedirs(request["state"], mode=0o700, exist_ok=True)
    work_folder = raw(request["work"])
    os.makedirs(work_folder, exist_ok=True)
    user_id = request["uid"] if os.geteuid() == 0 else None
    if user_id is not None:
        os.chown(work_folder, user_id, user_id)
    if len(os.listdir(work_folder)) and request["empty"]:
        return {"error": "the work folder is not empty"}
    return {"pid_namespace": os.readlink("/proc/self/ns/pid"), "root": os.geteuid() == 0}


def read(request):
    """A piece of a file."""
    become(request["uid"])
    file_path = inside(raw(request["work"]), raw(request["path"]))
    if os.path.isdir(file_path):
        return {"folder": True}
    descriptor = os.open(file_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as open_file:
        file_status = os.fstat(descriptor)
        if not stat.S_ISREG(file_status.st_mode):
            raise OSError(errno.EPERM, "not a regular file")
        if file_status.st_size > request["most"]:
            raise OSError(errno.EFBIG, f"larger than {request['most']} bytes")
        open_file.seek(request["at"])
        return {"data": b64(open_file.read(request["size"])), "size": file_status.st_size}


def write(request):
    """Write a file, or add to one that an earlier call began."""
    become(request["uid"])
    work_folder, file_path = raw(request["work"]), raw(request["path"])
    folder_path, _, file_name = file_path.rpartition(b"/")
    if file_name in (b"", b".", b".."):
        raise OSError(errno.EISDIR, "is a folder")
    parent_path = os.path.realpath(work_folder)
    for folder_name in folder_path.split(b"/"):  # each part looked at before the next is made: none leads out
        parent_path = inside(work_folder, os.path.join(parent_path, folder_name))
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent_path)
    full_path = inside(work_folder, os.path.join(parent_path, file_name))
    open_flags = (
        os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_APPEND if request["more"] else os.O_TRUNC)
    )
    descriptor = os.open(full_path, open_flags, 0o644)
    with os.fdopen(descriptor, "wb") as open_file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPERM, "not a regular file")
        open_file.write(raw(request["data"]))
        if request["mode"] is not None:
            os.fchmod(descriptor, request["mode"])
    return {}


def tar(request):
    """A folder as an archive in the state folder, or one of there into a folder; `clear` empties it first."""
    work_folder = raw(request["work"])
    archive_path = os.path.join(request["state"], request["id"])
    is_packing = request["packs"]
    archive_descriptor = os.open(archive_path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if is_packing else 0), 0o600)
    child_pid = os.fork()
    if child_pid == 0:
        try:
            become(request["uid"])
            folder_path = raw(request["path"])
            if not is_packing:
                for folder_name in folder_path.split(b"/"):
                    work_folder = inside(work_folder, os.path.join(work_folder, folder_name))
                    os.makedirs(work_folder, exist_ok=True)
                os.chdir(work_folder)
            else:
                os.chdir(inside(work_folder, folder_path))
            if request["clear"]:
                subprocess.run(["chmod", "-R", "u+rwX", "."], stderr=subprocess.DEVNULL, check=False)
                find_command = ["find", ".", "-mindepth", "1", "-maxdepth", "1", "-exec", "rm", "-rf", "--", "{}", "+"]
                subprocess.run(find_command, stderr=subprocess.DEVNULL, check=False)
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["most"], request["most"]))
            tar_command = ["tar", "-cf", "-", "."] if is_packing else ["tar", "-xpf", "-", "--no-same-owner"]
            os.dup2(archive_descriptor, 1 if is_packing else 0)
            os._exit(min(subprocess.run(tar_command, stderr=subprocess.DEVNULL, check=False).returncode & 127, 100))
        except BaseException:
            os._exit(101)
    wait_status = os.waitpid(child_pid, 0)[1]
    if wait_status:
        return {
            "error": "the tree cannot be packed: too large, or not readable"
            if is_packing
            else "no space, or in the way"
        }
    return {"size": os.fstat(archive_descriptor).st_size}


def spool(request):
    """A piece of an archive in the state folder: read, or added."""
    archive_path = os.path.join(request["state"], request["id"])
    if request["data"] is None:
        with open(archive_path, "rb") as archive_file:
            archive_file.seek(request["at"])
            return {"data": b64(archive_file.read(request["size"]))}
    with open(archive_path, "ab") as archive_file:
        archive_file.write(raw(request["data"]))
    return {}


def drop(request):
    """Remove archives and what else is left of an id."""
    os.unlink(os.path.join(request["state"], request["id"]))
    return {}


def touch(request):
    """Note that the owner lives. The first call starts a process that ends the box once the owner is silent (`watch`);
    not without root, nor in the owner's own pid namespace, since it kills all that it can. Says whether it did so."""
    owner_path = os.path.join(request["state"], "owner")
    is_first = not os.path.exists(owner_path)
    with open(owner_path, "a"):
        os.utime(owner_path)
    if is_first and os.geteuid() == 0 and os.readlink("/proc/self/ns/pid") != request["not_in"]:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                watch(owner_path, request["seconds"])
            os._exit(0)
        return {"watched": True}
    return {"watched": False}


def watch(path, seconds):
    """End all of the box once its owner has shown no life for `seconds`."""
    null_device = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null_device, descriptor)
    while time.time() - os.stat(path).st_mtime < seconds:
        time.sleep(min(seconds / 4, 10.0))
    # Process 1 too: in a container its end is the container's. Where it is not ours to signal, the rest ends all the
    # same.
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.kill(1, signal_number)
            os.kill(-1, signal_number)
        time.sleep(1.0)


def stop(request):
    """End what the box's own processes are, and remove its folders: for a box whose machine stays."""
    for state_entry in os.listdir(request["state"]):
        if not state_entry.endswith(".tar"):
            ask({"state": request["state"], "id": state_entry, "channel": "kill", "number": -1})
    subprocess.run(["chmod", "-R", "u+rwX", raw(request["work"])], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--", raw(request["work"]), request["state"]], check=False)
    return {}


def main():
    argument = sys.argv[1]
    if argument.startswith("@"):
        with open(argument[1:]) as request_file:
            argument = request_file.read()
        os.unlink(sys.argv[1][1:])
    request = json.loads(base64.b64decode(argument))
    try:
        reply = globals()[request["do"]](request)
    except OSError as request_error:
        reply = {"error": request_error.strerror or str(request_error), "errno": request_error.errno}
    except ValueError as request_error:
        reply = {"error": str(request_error)}
    print("agentrl " + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
