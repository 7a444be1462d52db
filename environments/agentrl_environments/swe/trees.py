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
            find_result = await box.exec(["find", ".", "-name", ".git", "-prune", "-exec", "rm", "-rf", "{}", "+"])
            if find_result.exit_code != 0:
                raise SandboxError(f"a history could not be removed from the work folder: {last_words(find_result)}")
        for target_path, source_path in self.files.items():
            await box.upload(source_path, target_path)
        for author_patch in self.patches:
            await apply_patch(box, author_patch)

    async def _copy(self, box: Sandbox, folder: str) -> None:
        copy_result = await box.exec(["cp", "-R", f"{folder}/.", "."], timeout_s=_COPY_S)
        if copy_result.timed_out:
            raise SandboxError(f"the tree {folder} of the image was not copied within {_COPY_S:g} s")
        if copy_result.exit_code != 0:
            raise ConfigError("image", folder, f"its tree cannot be copied: {last_words(copy_result)}")
        await box.exec(["rmdir", ".git"])  # covered in the box, so copied as an empty folder
        search_result = await box.exec(["find", ".", "-name", ".git", "-prune", "-print"])
        if search_result.exit_code != 0:
            raise SandboxError(f"the copied tree cannot be searched for a history: {last_words(search_result)}")
        if search_result.stdout:
            history_path = posixpath.normpath(
                f"{folder}/{search_result.stdout.decode(errors='replace').splitlines()[0]}"
            )
            raise ConfigError(
                "image",
                history_path,
                f"the agent could read the solution there: RUN rm -rf {history_path} in its Dockerfile",
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
    file_parts: list[list[str]] = []
    patch_lines = patch.split("\n")
    # Within a file's part, not in words between them; after a header of git without its names.
    is_inside = is_headed = False
    for line_index, (patch_line, following) in enumerate(zip(patch_lines, [*patch_lines[1:], ""], strict=True)):
        if patch_line.startswith("diff --git "):
            file_parts.append([patch_line])
            is_inside = is_headed = True
        elif patch_line.startswith("--- ") and following.startswith("+++ "):
            if not is_headed:
                file_parts.append([])
            file_parts[-1] += [f"--- {following[4:]}", f"+++ {patch_line[4:]}"]
            is_inside, is_headed = True, False
        elif ends_mail(patch_lines, line_index):
            is_inside = is_headed = False
        elif not is_inside or (patch_line.startswith("+++ ") and file_parts[-1][-1].startswith("+++ ")):
            continue
        elif (hunk_match := _HUNK.match(patch_line)) is not None:
            file_parts[-1].append(f"@@ -{hunk_match[2]} +{hunk_match[1]} @@")
            is_headed = False
        elif is_headed and (header_match := _GIT.match(patch_line)) is not None:
            file_parts[-1].append(_BACK[header_match[1]] + patch_line[len(header_match[1]) :])
        elif not is_headed and patch_line[:1] in ("+", "-"):
            file_parts[-1].append(("-" if patch_line[0] == "+" else "+") + patch_line[1:])
        elif not is_headed and patch_line[:1] in (" ", "\\", ""):
            file_parts[-1].append(patch_line)
    return "\n".join(patch_line for file_part in reversed(file_parts) for patch_line in file_part)
