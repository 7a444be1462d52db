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
    page_title = f"Checked tasks of {plan.env_id}"
    tasks_by_verdict: dict[Verdict, list[TaskVerdict]] = {
        verdict: [task_verdict for task_verdict in checked.tasks if task_verdict.verdict == verdict]
        for verdict in ORDER
    }
    page_parts = [
        _HEAD.format(title=_text(page_title)),
        f"<h1>{_text(page_title)}</h1>",
        _summary(checked),
        _verdicts(tasks_by_verdict),
    ]
    page_parts += [f"<p>{set_line}</p>" for set_line in _of_the_set(checked)]
    for verdict in ("flaky", "lies", "impossible", "unknown"):
        if tasks_by_verdict[verdict]:
            page_parts.append(f"<h2>{verdict}: {_MEANINGS[verdict]}</h2>")
            page_parts += [_task(plan, task_verdict) for task_verdict in tasks_by_verdict[verdict]]
    if checked.bad:
        page_parts.append("<h2>Parts that make no task</h2>")
        page_parts += [
            f"<p class=evidence><b>{_text(bad_part.task)}</b>: {_text(bad_part.reason)}</p>" for bad_part in checked.bad
        ]
    if remarked_tasks := [task_verdict for task_verdict in tasks_by_verdict["ok"] if task_verdict.findings]:
        page_parts.append("<h2>Remarks on tasks that are right</h2>")
        page_parts += [
            _finding(task_verdict.task, remark.evidence, remark.reason)
            for task_verdict in remarked_tasks
            for remark in task_verdict.findings
        ]
    page_parts += ["<h2>How it was checked</h2>", f"<p>{_METHOD}</p>", f"<pre>{_text(_command(plan, None))}</pre>"]
    return "\n".join([*page_parts, "</body>", "</html>", ""])


_METHOD: Final = (
    "Each task was played for real by scripted policies: its known solution and doing nothing several times, and cheap "
    "attacks on its tests once each. A task is wrong only by what was seen; where the machine of the checks failed it "
    "is unknown. The command of each task repeats its checks alone."
)


def _summary(checked: SetVerdict) -> str:
    wrong_count, task_count = len(checked.wrong), len(checked.tasks)
    unknown_count = checked.by_verdict.get("unknown", 0)
    summary_text = (
        f"{wrong_count} of {task_count} tasks reward the wrong thing or cannot be won"
        if wrong_count
        else f"All {task_count} tasks held"
    )
    return f"<p><b>{summary_text}</b>{f'; of {unknown_count} nobody can tell' if unknown_count else ''}.</p>"


def _verdicts(groups: Mapping[Verdict, Sequence[TaskVerdict]]) -> str:
    table_rows = ["<table><tr><th>verdict</th><th>tasks</th><th>what it means</th></tr>"]
    table_rows += [
        f"<tr><td>{verdict}</td><td class=number>{len(verdict_tasks)}</td><td>{_MEANINGS[verdict]}</td></tr>"
        for verdict, verdict_tasks in groups.items()
    ]
    return "\n".join([*table_rows, "</table>"])


def _of_the_set(checked: SetVerdict) -> Iterator[str]:
    if checked.flakes is not None:
        yield f"Repeated plays with another outcome: {_share(checked.flakes)}."
    if checked.majority is not None:
        answer_text = _text(checked.majority_answer[:80])
        suspicion_text = ": more than chance" if checked.suspicious else ""
        chance_text = f"chance wins {checked.chance:.1%}"
        share_text = f"The most frequent answer <code>{answer_text}</code> wins {_share(checked.majority)}"
        yield f"{share_text}; {chance_text}{suspicion_text}."
    if timed_tasks := [
        timed_task for timed_task in checked.tasks if timed_task.alone_s is not None and timed_task.loaded_s is not None
    ]:
        seconds_alone, seconds_loaded = (
            max(getattr(timed_task, seconds_name) for timed_task in timed_tasks)
            for seconds_name in ("alone_s", "loaded_s")
        )
        deadlines = [
            timed_task.grader_deadline_s for timed_task in timed_tasks if timed_task.grader_deadline_s is not None
        ]
        deadline = f"; the closest deadline is {min(deadlines):g} s" if deadlines else ""
        yield (
            f"Most seconds of the graders of {len(timed_tasks)} tasks: {seconds_alone:.1f} s alone, "
            f"{seconds_loaded:.1f} s while all processors were busy{deadline}."
        )


def _task(plan: SetPlan, task: TaskVerdict) -> str:
    section_class = " unknown" if task.verdict == "unknown" else ""
    section_lines = [
        f"<section class='task{section_class}'>",
        f"<h3>{_text(task.task)} <span class=verdict>{task.verdict}</span></h3>",
    ]
    section_lines += [_finding("", finding.evidence, finding.reason) for finding in task.findings]
    if task.plays:
        section_lines.append("<table><tr><th>played</th><th>outcomes</th></tr>")
        named_plays = [
            *task.plays.items(),
            *((f"gold, its grader {hindrance}", [won]) for hindrance, won in task.hindered.items()),
        ]
        section_lines += [
            f"<tr><td>{_text(play_name)}</td><td>{_outcomes(won)}</td></tr>" for play_name, won in named_plays
        ]
        section_lines.append("</table>")
    return "\n".join(
        [*section_lines, f"<p>See it again:</p><pre>{_text(_command(plan, task.seed))}</pre>", "</section>"]
    )


def _finding(task: str, evidence: str, reason: str) -> str:
    task_heading = f"<b>{_text(task)}</b>: " if task else ""
    return f"<p class=evidence>{task_heading}<code>{reason}</code> {REASONS[reason][1]}.\n{_text(evidence)}</p>"


def _outcomes(won: Sequence[bool | None]) -> str:
    return ", ".join({True: "won", False: "lost", None: "no verdict"}[is_won] for is_won in won)


def _share(share: Share) -> str:
    interval = f"95% interval {share.low:.1%} to {share.high:.1%}"
    return f"{share.count} of {share.n} ({share.share:.1%}, {interval})"


def _command(plan: SetPlan, seed: int | None) -> str:
    """The command that checks a task of the set again, or all of it."""
    task_options = ["--all"] if seed is None else ["--seed", str(seed), "--n", "1"]
    settings = [option_word for setting in _settings("", plan.kwargs) for option_word in ("--set", setting)]
    settings += [
        option_word for setting in _settings("", plan.held_out or {}) for option_word in ("--held-out", setting)
    ]
    command_words = ["agentrl", "validate", plan.env_id, *task_options, *settings]
    command_words += ["--repeat", str(plan.repeat), "--out", "again"]
    return shlex.join(command_words)


def _settings(prefix: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Write arguments as the option --set reads them."""
    for argument_name, argument_value in kwargs.items():
        setting_key = f"{prefix}{argument_name}"
        if isinstance(argument_value, Mapping):
            yield from _settings(f"{setting_key}.", cast("Mapping[str, Any]", argument_value))
            continue
        parsed_setting: dict[str, Any] = {}
        apply_override(parsed_setting, f"value={argument_value}")
        is_read_back = parsed_setting["value"] == argument_value
        yield f"{setting_key}={argument_value if is_read_back else json.dumps(argument_value)}"


def _text(text: str) -> str:
    """Foreign text as a part of the page."""
    return escape("\n".join(map(printable, text.split("\n"))))
