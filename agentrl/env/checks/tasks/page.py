"""A page about a set that its maintainer can be sent: which of its tasks are wrong, what was seen, how to see it again.

One HTML file without scripts, fonts or pictures. Every text of a task is written by others and may hold markup, or what
a model wrote: all of it is escaped, and the page's own policy forbids whatever would load or run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final, cast

from agentrl.config.overrides import apply_override
from agentrl.env.checks.tasks.check_set import SetPlan, SetVerdict, Share, TaskVerdict
from agentrl.env.checks.tasks.verdicts import ORDER, REASONS, Verdict
from agentrl.host.terminal_text import printable

_MEANINGS: Final[Mapping[Verdict, str]] = {
    "flaky": "the same actions got different outcomes",
    "lies": "the reward does not measure the work",
    "impossible": "nobody is known to win it",
    "unknown": "nobody can tell, often through the machine of the checks",
    "ok": "all checks held; there is a remark at most",
}
_HEAD: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  overflow-wrap: anywhere }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.2rem; margin-top: 2rem }} h3 {{ font-size: 1rem; margin: 0 0 .5rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }}
td.number {{ text-align: right }}
section.task {{ border: 1px solid #ddd; border-left: .4rem solid #b3261e; border-radius: 4px; padding: .8rem 1rem;
  margin: 1rem 0 }}
section.unknown {{ border-left-color: #888 }}
code, pre {{ font: 13px/1.45 ui-monospace, monospace; background: #f5f5f5; border-radius: 3px }}
code {{ padding: .1rem .3rem }}
pre {{ padding: .6rem; white-space: pre-wrap; margin: .3rem 0 .6rem }}
.verdict {{ color: #b3261e; font-weight: 600 }} .unknown .verdict {{ color: #555 }}
p.evidence {{ white-space: pre-wrap; margin: .2rem 0 .7rem }}
</style>
</head>
<body>
"""


def page_of(plan: SetPlan, checked: SetVerdict) -> str:
    """The page on a set as HTML."""
    title = f"Checked tasks of {plan.env_id}"
    groups: dict[Verdict, list[TaskVerdict]] = {
        verdict: [task for task in checked.tasks if task.verdict == verdict] for verdict in ORDER
    }
    parts = [_HEAD.format(title=_text(title)), f"<h1>{_text(title)}</h1>", _summary(checked), _verdicts(groups)]
    parts += [f"<p>{line}</p>" for line in _of_the_set(checked)]
    for verdict in ("flaky", "lies", "impossible", "unknown"):
        if groups[verdict]:
            parts.append(f"<h2>{verdict}: {_MEANINGS[verdict]}</h2>")
            parts += [_task(plan, task) for task in groups[verdict]]
    if checked.bad:
        parts.append("<h2>Parts that make no task</h2>")
        parts += [f"<p class=evidence><b>{_text(part.task)}</b>: {_text(part.reason)}</p>" for part in checked.bad]
    if remarks := [task for task in groups["ok"] if task.findings]:
        parts.append("<h2>Remarks on tasks that are right</h2>")
        parts += [_finding(task.task, each.evidence, each.reason) for task in remarks for each in task.findings]
    parts += ["<h2>How it was checked</h2>", f"<p>{_METHOD}</p>", f"<pre>{_text(_command(plan, None))}</pre>"]
    return "\n".join([*parts, "</body>", "</html>", ""])


_METHOD: Final = (
    "Each task was played for real by scripted policies: its known solution and doing nothing several times, and cheap "
    "attacks on its tests once each. A task is wrong only by what was seen; where the machine of the checks failed it "
    "is unknown. The command of each task repeats its checks alone."
)


def _summary(checked: SetVerdict) -> str:
    wrong, count = len(checked.wrong), len(checked.tasks)
    unknown = checked.by_verdict.get("unknown", 0)
    words = f"{wrong} of {count} tasks reward the wrong thing or cannot be won" if wrong else f"All {count} tasks held"
    return f"<p><b>{words}</b>{f'; of {unknown} nobody can tell' if unknown else ''}.</p>"


def _verdicts(groups: Mapping[Verdict, Sequence[TaskVerdict]]) -> str:
    rows = ["<table><tr><th>verdict</th><th>tasks</th><th>what it means</th></tr>"]
    rows += [
        f"<tr><td>{verdict}</td><td class=number>{len(tasks)}</td><td>{_MEANINGS[verdict]}</td></tr>"
        for verdict, tasks in groups.items()
    ]
    return "\n".join([*rows, "</table>"])


def _of_the_set(checked: SetVerdict) -> Iterator[str]:
    if checked.flakes is not None:
        yield f"Repeated plays with another outcome: {_share(checked.flakes)}."
    if checked.majority is not None:
        answer, ends = _text(checked.majority_answer[:80]), ": more than chance" if checked.suspicious else ""
        chance = f"chance wins {checked.chance:.1%}"
        yield f"The most frequent answer <code>{answer}</code> wins {_share(checked.majority)}; {chance}{ends}."
    if timed := [task for task in checked.tasks if task.alone_s is not None and task.loaded_s is not None]:
        alone, loaded = (max(getattr(task, name) for task in timed) for name in ("alone_s", "loaded_s"))
        limits = [task.grader_deadline_s for task in timed if task.grader_deadline_s is not None]
        deadline = f"; the closest deadline is {min(limits):g} s" if limits else ""
        yield (
            f"Most seconds of the graders of {len(timed)} tasks: {alone:.1f} s alone, {loaded:.1f} s while all "
            f"processors were busy{deadline}."
        )


def _task(plan: SetPlan, task: TaskVerdict) -> str:
    kind = " unknown" if task.verdict == "unknown" else ""
    lines = [f"<section class='task{kind}'>", f"<h3>{_text(task.task)} <span class=verdict>{task.verdict}</span></h3>"]
    lines += [_finding("", finding.evidence, finding.reason) for finding in task.findings]
    if task.plays:
        lines.append("<table><tr><th>played</th><th>outcomes</th></tr>")
        plays = [*task.plays.items(), *((f"gold, its grader {how}", [won]) for how, won in task.hindered.items())]
        lines += [f"<tr><td>{_text(name)}</td><td>{_outcomes(won)}</td></tr>" for name, won in plays]
        lines.append("</table>")
    return "\n".join([*lines, f"<p>See it again:</p><pre>{_text(_command(plan, task.seed))}</pre>", "</section>"])


def _finding(task: str, evidence: str, reason: str) -> str:
    head = f"<b>{_text(task)}</b>: " if task else ""
    return f"<p class=evidence>{head}<code>{reason}</code> {REASONS[reason][1]}.\n{_text(evidence)}</p>"


def _outcomes(won: Sequence[bool | None]) -> str:
    return ", ".join({True: "won", False: "lost", None: "no verdict"}[each] for each in won)


def _share(share: Share) -> str:
    interval = f"95% interval {share.low:.1%} to {share.high:.1%}"
    return f"{share.count} of {share.n} ({share.share:.1%}, {interval})"


def _command(plan: SetPlan, seed: int | None) -> str:
    """The command that checks a task of the set again, or all of it."""
    which = ["--all"] if seed is None else ["--seed", str(seed), "--n", "1"]
    settings = [word for setting in _settings("", plan.kwargs) for word in ("--set", setting)]
    settings += [word for setting in _settings("", plan.held_out or {}) for word in ("--held-out", setting)]
    words = ["agentrl", "validate", plan.env_id, *which, *settings, "--repeat", str(plan.repeat), "--out", "again"]
    return shlex.join(words)


def _settings(prefix: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Write arguments as the option --set reads them."""
    for name, value in kwargs.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _settings(f"{key}.", cast("Mapping[str, Any]", value))
            continue
        plain: dict[str, Any] = {}
        apply_override(plain, f"value={value}")
        yield f"{key}={value if plain['value'] == value else json.dumps(value)}"


def _text(text: str) -> str:
    """Foreign text as a part of the page."""
    return escape("\n".join(map(printable, text.split("\n"))))
