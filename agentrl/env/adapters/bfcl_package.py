"""The package `bfcl-eval` in a child process: its tasks, its simulated APIs and its checkers.

Nothing of the package runs anywhere else. Its multi-turn executor evaluates calls as Python: here it gets a reader in
the place of `eval` that knows method calls with literals alone. Each request, a line of JSON, stands for itself: an
episode's calls come with it and are run again, so that no request sees what another has left behind.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import decimal
import functools
import importlib
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast

from agentrl.env.child_processes import serve
from agentrl.env.optional_imports import require

MODEL: Final = "agentrl"
"""The name of the policy in the package's table of models."""
_MEMORY_BYTES: Final = 2 << 30  # beyond what the imports take
_RESULT_CHARACTERS: Final = 1 << 20  # a root of ten million digits is a result, too
_NOT_PLAYED: Final = {
    "memory": "it needs sentence-transformers, faiss and files that one task leaves for the next",
    "web_search": "it searches the web, whose answers change",
    "format_sensitivity": "it is for models that write calls as text, in 26 ways",
}
_COMMAND: Final = "pip install --no-deps bfcl-eval, and filelock, mpmath and tenacity, which its checkers import"


class Package:
    """The modules of the package, imported without the clients of all the models that it lists."""

    def __init__(self) -> None:
        parsers = "bfcl_eval.model_handler.parser"
        # The checkers want one flag of a table whose module imports the clients of some twenty vendors. The two parsers
        # are for models that write Java or JavaScript as text, and a policy here writes JSON.
        _stand_in(
            "bfcl_eval.constants.model_config", MODEL_CONFIG_MAPPING={MODEL: SimpleNamespace(underscore_to_dot=True)}
        )
        _stand_in(f"{parsers}.java_parser", parse_java_function_call=None)
        _stand_in(f"{parsers}.js_parser", parse_javascript_function_call=None)
        # Its import makes three folders beside the installed package, or where this variable says.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BFCL_PROJECT_ROOT"] = folder
            self.data = _module("utils")
            self.tools = _module("model_handler.utils")
            self.types = _module("constants.type_mappings")
            self.enums = _module("constants.enums")
            self.prompts = _module("constants.default_prompts")
            self.ast = _module("eval_checker.ast_eval.ast_checker")
            self.multi_turn = _module("eval_checker.multi_turn_eval.multi_turn_checker")
            self.executor = _module("eval_checker.multi_turn_eval.multi_turn_utils")
            self.mpmath = importlib.import_module("mpmath")
            long_context = _module("eval_checker.multi_turn_eval.func_source_code.long_context")
        self.data._get_file_lock = contextlib.nullcontext  # it only reads, and the folder of the locks is gone
        variables = cast("dict[str, Any]", vars(long_context))
        self.tables = {name: table for name, table in variables.items() if name.isupper() and hasattr(table, "items")}
        self.first_tables = copy.deepcopy(self.tables)
        self.executor.eval = functools.partial(call_of_methods, names=vars(self.executor))

    @functools.cache  # noqa: B019  (one object lives as long as its process)
    def entries(self, category: str) -> list[dict[str, Any]]:
        """The tasks of a category as the checkers take them."""
        return self.data.load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)

    @functools.cache  # noqa: B019
    def shown_entries(self, category: str) -> list[dict[str, Any]]:
        """The tasks of a category as a model reads them."""
        return self.data.load_dataset_entry(category, include_prereq=False)

    @functools.cache  # noqa: B019
    def right_answers(self, category: str) -> list[Any]:
        """The right answers to the tasks of a category, in the order of the tasks."""
        return [entry["ground_truth"] for entry in self.data.load_ground_truth_entry(category)]

    # --- requests

    def counts(self, names: list[Any]) -> dict[str, Any]:
        """How many tasks each of the named categories has; a name may also be a group of the package's."""
        groups = importlib.import_module("bfcl_eval.constants.category_mapping").TEST_COLLECTION_MAPPING
        categories = [category for name in names for category in groups.get(name, [name])]
        for category in categories:
            if reason := next((reason for word, reason in _NOT_PLAYED.items() if word in str(category)), ""):
                return {"error": f"categories: {category!r} is not played here: {reason}", "usage": True}
            if category not in groups["single_turn"] + groups["multi_turn"]:
                category_names = ", ".join([*groups["single_turn"], *groups["multi_turn"]])
                return {
                    "error": f"categories: {category!r} is none of bfcl-eval's: give {category_names}",
                    "usage": True,
                }
        if not categories:
            return {"error": "categories is empty: name a category, as simple_python", "usage": True}
        return {"counts": {category: self._count(category) for category in categories}}

    def load(self, category: str) -> dict[str, Any]:
        """Read a category, so that the requests for its tasks are quick."""
        self.shown_entries(category)
        if "relevance" not in category:
            self.right_answers(category)
            if not category.startswith("multi_turn"):
                self.entries(category)
        return {}

    def task(self, category: str, index: int) -> dict[str, Any]:
        """One task: its id, the messages of each of its turns, its tools in OpenAI's schema, and the tools that are
        added at the beginning of a turn."""
        entry = self.shown_entries(category)[index]
        later_functions = cast("Mapping[str, Any]", entry.get("missed_function", {}))
        return {
            "id": entry["id"],
            "turns": entry["question"],
            "tools": self._as_tools(entry["function"]),
            "later_tools": {turn: self._as_tools(functions) for turn, functions in later_functions.items()},
            "notice": self.prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC,
        }

    def judge(self, category: str, index: int, answer: Any) -> dict[str, Any]:
        """Whether an answer is right: of one turn what the policy wrote, of several a list of turns with a list of such
        answers each. A list of calls is `[{name: arguments}, …]`, anything else is text."""
        if category.startswith("multi_turn"):
            return self._judge_turns(category, index, answer)
        calls = cast("list[Any]", answer) if isinstance(answer, list) else None
        if "relevance" in category:
            is_valid = bool(calls) is ("irrelevance" not in category)
            return {"valid": is_valid, "error_type": "" if is_valid else f"{category}:{'call' if calls else 'no call'}"}
        if calls is None:
            return {"valid": False, "error_type": "ast_decoder:decoder_failed"}
        languages = self.enums.Language
        language = {"simple_java": languages.JAVA, "simple_javascript": languages.JAVASCRIPT}.get(category)
        functions, right_answer = self.entries(category)[index]["function"], self.right_answers(category)[index]
        return _verdict(
            functools.partial(
                self.ast.ast_checker, functions, calls, right_answer, language or languages.PYTHON, category, MODEL
            )
        )

    def execute(self, category: str, index: int, steps: list[Any]) -> dict[str, Any]:
        """The results of the last of the steps, once those before it were run."""
        entry, results = self.shown_entries(category)[index], list[str]()
        for step in self._calls(steps):
            results, _ = self.executor.execute_multi_turn_func_call(
                step,
                entry["initial_config"],
                entry["involved_classes"],
                MODEL,
                entry["id"],
                long_context="long_context" in category,
            )
        return {"results": [result[:_RESULT_CHARACTERS] for result in results]}

    def forget(self) -> None:
        """Remove what requests leave behind: the objects of an episode, changes to the tables that every object of a
        long context shares (the balances of credit cards), and the precision that a call of the mathematical API has
        set for the whole process."""
        variables = cast("dict[str, Any]", vars(self.executor))
        for instance_name in [variable for variable in list(variables) if variable.endswith("_instance")]:
            del variables[instance_name]
        for name, table in self.tables.items():  # in place, as the APIs have imported these very objects
            table.clear()
            table.update(copy.deepcopy(self.first_tables[name]))
        decimal.setcontext(decimal.Context())
        self.mpmath.mp.dps = 15

    # --- inside

    def _count(self, category: str) -> int:
        data_file = Path(self.data.PROMPT_PATH) / self.data.get_file_name_by_category(category)
        with data_file.open(encoding="utf-8") as lines:
            return sum(1 for line in lines if line.strip())

    def _as_tools(self, functions: Any) -> Any:
        return self.tools.convert_to_tool(
            functions, self.types.GORILLA_TO_OPENAPI, self.enums.ModelStyle.OPENAI_COMPLETIONS
        )

    def _calls(self, steps: list[list[dict[str, Any]] | str]) -> list[list[str]]:
        """Steps as the executor takes them; those that hold no calls are left out, as the package does."""
        return [
            self.tools.convert_to_function_call([{_name(name): call[name]} for call in step for name in call])
            for step in steps
            if isinstance(step, list) and step
        ]

    def _judge_turns(self, category: str, index: int, turns: list[list[Any]]) -> dict[str, Any]:
        entry, right_turns = self.shown_entries(category)[index], self.right_answers(category)[index]
        if len(turns) != len(right_turns):
            return {"valid": False, "error_type": "multi_turn:force_terminated"}
        decoded_turns = [self._calls(steps) for steps in turns]
        return _verdict(
            functools.partial(self.multi_turn.multi_turn_checker, decoded_turns, right_turns, entry, category, MODEL)
        )


def call_of_methods(source: str, *, names: Mapping[str, Any]) -> Any:
    """Call the method that `source` names, `object.method(literals)`, of an object in `names`. Stands for the
    executor's `eval`: names of anything else are not defined, and arguments are literals. Raises as `eval` would."""
    expression = compile(source, "<string>", "eval", ast.PyCF_ONLY_AST, dont_inherit=True)
    call = cast("ast.Expression", expression).body
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=method)) if owner.endswith("_instance"):
            positional = [ast.literal_eval(argument) for argument in call.args]
            by_name = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return getattr(names[owner], method)(*positional, **by_name)
        case ast.Call(func=ast.Name(id=name) | ast.Constant(value=name)):
            raise NameError(f"name {name!r} is not defined")
        case _:
            raise ValueError("not a call of one function")


def _name(name: str) -> str:
    """The name of a call as the executor may have it. With a dot in it, a name could reach the objects that hold the
    right answer: it becomes a text, which no method has for its name."""
    return name if name.isidentifier() else repr(name)


def _verdict(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        result = check()
    # The task and its right answer are the package's own, and pass its checker: what makes it raise is in the answer.
    # A package that is broken altogether has failed at its import.
    except Exception as check_error:
        traceback.print_exc()
        return {"valid": False, "error_type": f"the checker raised {type(check_error).__name__}"}
    if result["valid"]:
        return {"valid": True, "error_type": ""}
    return {"valid": False, "error_type": str(result.get("error_type", ""))}


def _module(name: str) -> Any:
    return require(f"bfcl_eval.{name}", what="BFCL", package="bfcl-eval", command=_COMMAND)


def _stand_in(name: str, **variables: Any) -> None:
    module = ModuleType(name)
    vars(module).update(variables)
    sys.modules[name] = module


def main() -> None:
    """Answer requests until standard input ends. `do` names the request, the rest are its arguments."""

    def start() -> Callable[[dict[str, Any]], dict[str, Any]]:
        package = Package()
        requests: dict[str, Callable[..., dict[str, Any]]] = {
            "counts": package.counts,
            "load": package.load,
            "task": package.task,
            "judge": package.judge,
            "execute": package.execute,
        }
        _bound_memory()

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            package.forget()
            return requests[request.pop("do")](**request)

        return answer

    serve(start)


def _bound_memory() -> None:
    """Let calls that ask for too much memory fail by themselves. Without a bound the kernel ends the process, or
    another one of this machine, and a policy's failure would look like the host's."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or no such limit, on other systems
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most_bytes = used_bytes + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


if __name__ == "__main__":
    main()
