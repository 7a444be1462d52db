"""The algorithms of a run: read from the tables of its run file, and what must hold between several of them.

Owns their kinds, and the models that they need together. Never knows what they train, nor a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import ValidationError

from agentrl import registry
from agentrl.algos.algorithm import Algorithm, Slots
from agentrl.config.sections import BufferSettings, config_error, switched_off
from agentrl.errors import ConfigError, UsageError


def algorithm(kind: str) -> type[Algorithm]:
    """The class of an algorithm: ours, one that a package offers, or one behind a reference `module:Class` or
    `file.py:Class`. Raises UsageError, and UnknownIdError for a kind that nobody offers."""
    resolved = registry.resolve("algorithms", kind)
    if not (isinstance(resolved, type) and issubclass(resolved, Algorithm)):
        raise UsageError("it is no subclass of agentrl.algos.algorithm.Algorithm")
    return resolved


def read(table: Any, field: str) -> Any:
    """The algorithm that the table at `field` of the run file names by its `kind`: GRPO, if it names none. A value that
    is no table stays as it is. Raises ConfigError."""
    if not isinstance(table, dict):
        return table
    settings = cast("dict[str, Any]", table)
    kind = str(settings.get("kind", "grpo"))
    try:
        algorithm_class = algorithm(kind)
    except UsageError as error:
        raise ConfigError(f"{field}.kind", kind, str(error)) from None
    settings = {key: value for key, value in settings.items() if key != "kind"}  # a class knows its own kind at most
    try:
        algo = algorithm_class.model_validate(switched_off(settings, algorithm_class))
    except ValidationError as error:
        raise config_error(error, algorithm_class, tuple(field.split("."))) from None
    # The kind is put back after the reading: the other processes of the run read kind and settings from a file, and
    # have to find the class again. One derived from GRPO would be GRPO there.
    return algo.model_copy(update={"kind": kind})


def by_reference(document: dict[str, Any], reference_of: Callable[[type], str]) -> dict[str, Any]:
    """The document of a run file in which each algorithm that is an object of an unregistered class has the reference
    of its class as its kind. The processes of a run read kind and settings from a file: under its inherited kind a
    subclass of GRPO would train as plain GRPO without a word. Raises UsageError for a class that no other process can
    import."""

    def named(table: Any) -> Any:
        is_dict = isinstance(table, dict)
        algo: Any = cast("dict[str, Any]", table).get("algo") if is_dict else getattr(table, "algo", None)
        if not isinstance(algo, Algorithm) or _class_of(algo) is type(algo):
            return table
        update = {"algo": algo.model_copy(update={"kind": reference_of(type(algo))})}
        return cast("dict[str, Any]", table) | update if is_dict else table.model_copy(update=update)

    tables = {key: [named(table) for table in document[key]] for key in ("tasks", "roles") if document.get(key)}
    return cast("dict[str, Any]", named(document)) | tables


def _class_of(algo: Algorithm) -> type | None:
    """The class that other processes would read for this object; None if they know none."""
    try:
        return algorithm(str(algo.kind))
    except UsageError:
        return None


def leave(table: dict[str, Any], kind: str) -> None:
    """Take out of `[algo]` what only the algorithm of the run file has: another one is chosen on the command line."""
    try:
        old, new = algorithm(str(table.get("kind", "grpo"))), algorithm(kind)
    except UsageError:
        return  # reported where the table is read
    # Only what the new one has no use for: a clip that both of them know is the user's choice and stays.
    used = new.model_fields.keys() - new.unused
    for name in [name for name in table if name in old.model_fields and name not in used]:
        del table[name]


def read_tables(document: dict[str, Any]) -> dict[str, Any]:
    """A run file's document with the algorithms of its `[[tasks]]` and `[[roles]]` read. Raises ConfigError naming the
    entry."""

    def read_one(table: Any, field: str) -> Any:
        if not isinstance(table, dict) or "algo" not in table:
            return cast("Any", table)
        return {**cast("dict[str, Any]", table), "algo": read(table["algo"], f"{field}.algo")}

    tables_of = {name: document[name] for name in ("tasks", "roles") if isinstance(document.get(name), list)}
    return document | {
        name: [read_one(table, f"{name}.{number}") for number, table in enumerate(cast("list[Any]", tables))]
        for name, tables in tables_of.items()
    }


def distinct(algorithms: Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    """Return the algorithms that differ, each under the first of its fields: equal entries are one algorithm."""
    by_field: dict[str, Algorithm] = {}
    for field, algo in algorithms.items():
        if algo not in by_field.values():
            by_field[field] = algo
    return by_field


def slots(algorithms: Mapping[str, Algorithm]) -> Slots:
    """The models that algorithms need together, by the fields that name them. There is one critic, and one other model
    of a name: raises ConfigError if two algorithms mean different ones."""
    others: dict[str, Any] = {}
    critic, critic_of = Slots(), ""
    for field, algo in algorithms.items():
        needed = algo.slots
        for name, model in {**needed.frozen, **needed.moving}.items():
            if others.setdefault(name, model) != model:
                hint = f"a run has one model of this name, and another entry {others[name]!r}: give both the same"
                raise ConfigError(f"{field}.{name}", model, hint)
        if needed.critic is None:
            continue
        if critic.critic is None:
            critic, critic_of = needed, field
        # One critic for all, because its values are compared across groups in one step: two that differ in their rate
        # would be two scales.
        elif (needed.critic, needed.critic_lr) != (critic.critic, critic.critic_lr):
            hint = f"a run has one critic, and {critic_of} another: give both the same critic and critic_lr"
            raise ConfigError(f"{field}.critic", needed.critic, hint)
    return Slots(
        frozen={name: folder for judge in algorithms.values() for name, folder in judge.slots.frozen.items()},
        moving={name: follows for judge in algorithms.values() for name, follows in judge.slots.moving.items()},
        critic=critic.critic,
        critic_lr=critic.critic_lr,
    )


def check(algorithms: Mapping[str, Algorithm], buffer: BufferSettings, *, group_size: int, quorum: int | None) -> None:
    """Raises ConfigError for an algorithm that does not fit groups or buffer, or for two that do not fit each other.
    The keys of `algorithms` are the fields that name them, such as `algo`."""
    slots(algorithms)  # raises if two algorithms mean different models by one name
    if buffer.skip_without_signal is True and not any(algo.judges_returns for algo in algorithms.values()):
        names = ", ".join(f"{field}.kind = {algo.kind!r}" for field, algo in algorithms.items())
        hint = f"{names} learns from a group whose returns are equal (a critic, a teacher, no siblings): leave it out"
        raise ConfigError("buffer.skip_without_signal", True, hint)
    for field, algo in algorithms.items():
        names = f"{field}.kind = {algo.kind!r}"
        # The penalty compares the policy with the reference on tokens that an older policy sampled. Without the
        # correction its expectation is that of other weights, and its gradient points elsewhere.
        if not buffer.synchronous and not algo.corrects and algo.diverges:
            raise ConfigError(f"{field}.importance", "none", "a KL penalty on stale tokens needs importance = 'token'")
        if group_size < (least := algo.least_members):
            hint = f"{names} compares siblings: give at least {least}, or another algorithm"
            raise ConfigError("rollout.group_size", group_size, hint)
        if quorum is not None and quorum < least:
            hint = f"{names} learns nothing from fewer than {least} members: give buffer.close = {least}"
            raise ConfigError("buffer.close", quorum, hint)
