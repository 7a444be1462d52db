"""The work folder of a task at its start: from this machine or from the image, and never with a history.

Two dangers live in an image's own copy of a repository, which every box of the image can read: a `.git` with the
commit that fixed it, and intact sources while the work folder's are broken on purpose. The first is covered, or refused
where a backend cannot cover it or it lies deeper; the second is refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError, PolicyFault, SandboxError
from agentrl.protocols import Sandbox
from agentrl_environments.swe.submitted_files import last_words
from agentrl_tools.files import ApplyPatch
from agentrl_tools.patching import ends_mail

_COPY_S: Final = 120.0
_HUNK: Final = re.compile(r"^@@ -(\S+) \+(\S+) @@")
_GIT: Final = re.compile(r"((?:new file|deleted file|old|new) mode|rename (?:from|to)) ")
_BACK = {"new file mode": "deleted file mode", "old mode": "new mode", "rename from": "rename to"}
_BACK |= {back: there for there, back in _BACK.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTree:
    """Laid one over the other: `in_image`, a folder of the image; the host's `folder` and `files`; then diffs."""

    in_image: str | None = None
    folder: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    patches: tuple[str, ...] = ()

    @property
    def covered(self) -> tuple[str, ...]:
        """The folders of the image that no box may show."""
        return () if self.in_image is None else (f"{self.in_image.rstrip('/')}/.git",)

    async def lay(self, box: Sandbox) -> None:
        """Fill an empty work folder. Raises ConfigError where the tree cannot be used, SandboxError."""
        if self.in_image is not None:
            await self._copy(box, self.in_image)
        if self.folder is not None:
            await box.upload(self.folder, ".")
            removed = await box.exec(["find", ".", "-name", ".git", "-prune", "-exec", "rm", "-rf", "{}", "+"])
            if removed.exit_code != 0:
                raise SandboxError(f"a history could not be removed from the work folder: {last_words(removed)}")
        for target, source in self.files.items():
            await box.upload(source, target)
        for patch in self.patches:
            await apply_patch(box, patch)

    async def _copy(self, box: Sandbox, folder: str) -> None:
        copied = await box.exec(["cp", "-R", f"{folder}/.", "."], timeout_s=_COPY_S)
        if copied.timed_out:
            raise SandboxError(f"the tree {folder} of the image was not copied within {_COPY_S:g} s")
        if copied.exit_code != 0:
            raise ConfigError("image", folder, f"its tree cannot be copied: {last_words(copied)}")
        await box.exec(["rmdir", ".git"])  # covered in the box, so copied as an empty folder
        search = await box.exec(["find", ".", "-name", ".git", "-prune", "-print"])
        if search.exit_code != 0:
            raise SandboxError(f"the copied tree cannot be searched for a history: {last_words(search)}")
        if search.stdout:
            at = posixpath.normpath(f"{folder}/{search.stdout.decode(errors='replace').splitlines()[0]}")
            raise ConfigError(
                "image", at, f"the agent could read the solution there: RUN rm -rf {at} in its Dockerfile"
            )


async def apply_patch(box: Sandbox, patch: str) -> None:
    """Apply a diff of the task's author. Raises ConfigError where it does not fit, SandboxError."""
    try:
        await ApplyPatch(box).call({"patch": patch})
    except SandboxError:
        raise
    except PolicyFault as error:  # none of the policy's: nobody has touched these files
        raise ConfigError("patch", patch.partition("\n")[0], str(error)) from error


def reversed_patch(patch: str) -> str:
    """The diff that takes a diff back. Its files come in reverse: a mail of several commits may change one twice."""
    files: list[list[str]] = []
    lines = patch.split("\n")
    inside = headed = False  # within a file's part, not in words between them; after a header of git without its names
    for at, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
        if line.startswith("diff --git "):
            files.append([line])
            inside = headed = True
        elif line.startswith("--- ") and following.startswith("+++ "):
            if not headed:
                files.append([])
            files[-1] += [f"--- {following[4:]}", f"+++ {line[4:]}"]
            inside, headed = True, False
        elif ends_mail(lines, at):
            inside = headed = False
        elif not inside or (line.startswith("+++ ") and files[-1][-1].startswith("+++ ")):
            continue
        elif (match := _HUNK.match(line)) is not None:
            files[-1].append(f"@@ -{match[2]} +{match[1]} @@")
            headed = False
        elif headed and (header := _GIT.match(line)) is not None:
            files[-1].append(_BACK[header[1]] + line[len(header[1]) :])
        elif not headed and line[:1] in ("+", "-"):
            files[-1].append(("-" if line[0] == "+" else "+") + line[1:])
        elif not headed and line[:1] in (" ", "\\", ""):
            files[-1].append(line)
    return "\n".join(line for file in reversed(files) for line in file)
