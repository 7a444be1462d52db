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
    algorithm_kind = str(settings.get("kind", "grpo"))
    try:
        algorithm_class = algorithm(algorithm_kind)
    except UsageError as class_error:
        raise ConfigError(f"{field}.kind", algorithm_kind, str(class_error)) from None
    # A class knows its own kind at most.
    settings = {
        setting_name: setting_value for setting_name, setting_value in settings.items() if setting_name != "kind"
    }
    try:
        read_algorithm = algorithm_class.model_validate(switched_off(settings, algorithm_class))
    except ValidationError as class_error:
        raise config_error(class_error, algorithm_class, tuple(field.split("."))) from None
    # The kind is put back after the reading: the other processes of the run read kind and settings from a file, and
    # have to find the class again. One derived from GRPO would be GRPO there.
    return read_algorithm.model_copy(update={"kind": algorithm_kind})


def by_reference(document: dict[str, Any], reference_of: Callable[[type], str]) -> dict[str, Any]:
    """The document of a run file in which each algorithm that is an object of an unregistered class has the reference
    of its class as its kind. The processes of a run read kind and settings from a file: under its inherited kind a
    subclass of GRPO would train as plain GRPO without a word. Raises UsageError for a class that no other process can
    import."""

    def named(table: Any) -> Any:
        is_dict = isinstance(table, dict)
        own_algorithm: Any = cast("dict[str, Any]", table).get("algo") if is_dict else getattr(table, "algo", None)
        if not isinstance(own_algorithm, Algorithm) or _class_of(own_algorithm) is type(own_algorithm):
            return table
        kind_update = {"algo": own_algorithm.model_copy(update={"kind": reference_of(type(own_algorithm))})}
        return cast("dict[str, Any]", table) | kind_update if is_dict else table.model_copy(update=kind_update)

    named_tables = {
        table_name: [named(entry_table) for entry_table in document[table_name]]
        for table_name in ("tasks", "roles")
        if document.get(table_name)
    }
    return cast("dict[str, Any]", named(document)) | named_tables


def _class_of(algo: Algorithm) -> type | None:
    """The class that other processes would read for this object; None if they know none."""
    try:
        return algorithm(str(algo.kind))
    except UsageError:
        return None


def leave(table: dict[str, Any], kind: str) -> None:
    """Take out of `[algo]` what only the algorithm of the run file has: another one is chosen on the command line."""
    try:
        old_class, new_class = algorithm(str(table.get("kind", "grpo"))), algorithm(kind)
    except UsageError:
        return  # reported where the table is read
    # Only what the new one has no use for: a clip that both of them know is the user's choice and stays.
    used_names = new_class.model_fields.keys() - new_class.unused
    for setting_name in [
        setting_name
        for setting_name in table
        if setting_name in old_class.model_fields and setting_name not in used_names
    ]:
        del table[setting_name]


def read_tables(document: dict[str, Any]) -> dict[str, Any]:
    """A run file's document with the algorithms of its `[[tasks]]` and `[[roles]]` read. Raises ConfigError naming the
    entry."""

    def read_one(table: Any, field: str) -> Any:
        if not isinstance(table, dict) or "algo" not in table:
            return cast("Any", table)
        return {**cast("dict[str, Any]", table), "algo": read(table["algo"], f"{field}.algo")}

    tables_of = {
        section_name: document[section_name]
        for section_name in ("tasks", "roles")
        if isinstance(document.get(section_name), list)
    }
    return document | {
        section_name: [
            read_one(entry_table, f"{section_name}.{entry_index}")
            for entry_index, entry_table in enumerate(cast("list[Any]", entry_tables))
        ]
        for section_name, entry_tables in tables_of.items()
    }


def distinct(algorithms: Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    """Return the algorithms that differ, each under the first of its fields: equal entries are one algorithm."""
    by_field: dict[str, Algorithm] = {}
    for field_name, algo in algorithms.items():
        if algo not in by_field.values():
            by_field[field_name] = algo
    return by_field


def slots(algorithms: Mapping[str, Algorithm]) -> Slots:
    """The models that algorithms need together, by the fields that name them. There is one critic, and one other model
    of a name: raises ConfigError if two algorithms mean different ones."""
    other_models: dict[str, Any] = {}
    critic, critic_of = Slots(), ""
    for field_name, algo in algorithms.items():
        needed_slots = algo.slots
        for slot_name, slot_model in {**needed_slots.frozen, **needed_slots.moving}.items():
            if other_models.setdefault(slot_name, slot_model) != slot_model:
                other_model = other_models[slot_name]
                hint = f"a run has one model of this name, and another entry {other_model!r}: give both the same"
                raise ConfigError(f"{field_name}.{slot_name}", slot_model, hint)
        if needed_slots.critic is None:
            continue
        if critic.critic is None:
            critic, critic_of = needed_slots, field_name
        # One critic for all, because its values are compared across groups in one step: two that differ in their rate
        # would be two scales.
        elif (needed_slots.critic, needed_slots.critic_lr) != (critic.critic, critic.critic_lr):
            hint = f"a run has one critic, and {critic_of} another: give both the same critic and critic_lr"
            raise ConfigError(f"{field_name}.critic", needed_slots.critic, hint)
    return Slots(
        frozen={
            slot_name: folder
            for judge_slots in algorithms.values()
            for slot_name, folder in judge_slots.slots.frozen.items()
        },
        moving={
            slot_name: follows
            for judge_slots in algorithms.values()
            for slot_name, follows in judge_slots.slots.moving.items()
        },
        critic=critic.critic,
        critic_lr=critic.critic_lr,
    )


def check(algorithms: Mapping[str, Algorithm], buffer: BufferSettings, *, group_size: int, quorum: int | None) -> None:
    """Raises ConfigError for an algorithm that does not fit groups or buffer, or for two that do not fit each other.
    The keys of `algorithms` are the fields that name them, such as `algo`."""
    slots(algorithms)  # raises if two algorithms mean different models by one name
    if buffer.skip_without_signal is True and not any(algo.judges_returns for algo in algorithms.values()):
        kind_line = ", ".join(f"{field_name}.kind = {algo.kind!r}" for field_name, algo in algorithms.items())
        hint = (
            f"{kind_line} learns from a group whose returns are equal (a critic, a teacher, no siblings): leave it out"
        )
        raise ConfigError("buffer.skip_without_signal", True, hint)
    for field_name, algo in algorithms.items():
        kind_line = f"{field_name}.kind = {algo.kind!r}"
        # The penalty compares the policy with the reference on tokens that an older policy sampled. Without the
        # correction its expectation is that of other weights, and its gradient points elsewhere.
        if not buffer.synchronous and not algo.corrects and algo.diverges:
            raise ConfigError(
                f"{field_name}.importance", "none", "a KL penalty on stale tokens needs importance = 'token'"
            )
        if group_size < (least_members := algo.least_members):
            hint = f"{kind_line} compares siblings: give at least {least_members}, or another algorithm"
            raise ConfigError("rollout.group_size", group_size, hint)
        if quorum is not None and quorum < least_members:
            problem = f"{kind_line} learns nothing from fewer than {least_members} members"
            hint = f"{problem}: give buffer.close = {least_members}"
            raise ConfigError("buffer.close", quorum, hint)
