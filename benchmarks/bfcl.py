"""`agentrl bench bfcl`: does `agentrl/BFCL-v0` score as the package's own runner does?

    make adapters
    python benchmarks/bfcl.py

Answers to every category, right and wrong ones, are played in our environment and given to the runner of `bfcl-eval` as
recorded answers of a model. It writes the table of benchmarks/bfcl.md, and names each answer that the two score
differently.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the answers of the tests

from _page import write_between

from tests.parts.bfcl_answers import MULTI, SINGLE, Oracle, lines_of, played, sample

PAGE = Path(__file__).with_suffix(".md")
HEAD = "| category | tasks | answers | right ones, accepted | other ones, accepted | scored differently |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=500, help="of each category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--categories", nargs="*", default=[*SINGLE, *MULTI])
    given = parser.parse_args()
    answers = {category: sample(category, given.answers, given.seed) for category in given.categories}
    began, ours = time.perf_counter(), {}
    for category in given.categories:
        ours[category] = played(category, answers[category])
        print(f"{category}: played, {time.perf_counter() - began:.0f} s so far", file=sys.stderr)
    theirs = Oracle(answers).scores(answers, 3600)
    lines, differing = [HEAD, "| --- | --- | --- | --- | --- | --- |"], []
    for category in given.categories:
        scored = list(zip(answers[category], ours[category], theirs[category], strict=True))
        right = [score for answer, _, score in scored if answer.kind == "right"]
        other = [score for answer, _, score in scored if answer.kind != "right"]
        different = [(answer, own, score) for answer, own, score in scored if own != score]
        accepted = f"{sum(right):.0f} of {len(right)} | {sum(other):.0f} of {len(other)}"
        tasks = len(lines_of(f"BFCL_v4_{category}.json"))
        lines.append(f"| `{category}` | {tasks} | {len(scored)} | {accepted} | {len(different)} |")
        differing += [f"{answer.id} ({answer.kind}): {own:g} here, {score:g} there" for answer, own, score in different]
    print("\n".join([*lines, *differing]))
    if given.categories == [*SINGLE, *MULTI]:
        write_between(PAGE, "<!-- table -->", "<!-- end -->", lines)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
