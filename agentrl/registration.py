"""Ids of environments, in our registry and in gymnasium's, so that `agentrl.make` and `gymnasium.make` both know them.

An environment's code is imported only when the environment is made. To import this module registers all that installed
packages offer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, parse_env_id
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from agentrl import registry
from agentrl.errors import UsageError

_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "nothing"}
_Kinds = tuple[type, ...]
_JUDGED = WrapperSpec("Judged", "agentrl.env.gymnasium_wrappers:Judged", {})


def register(id: str, entry_point: str | Callable[..., Any], *, nondeterministic: bool = False) -> None:
    """Offer an environment under a versioned id such as `"mine/Guess-v0"`, for this process.

    `entry_point` is a class, a callable that makes one, or `"module:attribute"`, imported when first made. A package
    offers its ids to every process through the entry-point group `agentrl.environments` instead.
    Raises gymnasium.error.Error for an id of another form."""
    parse_env_id(id)
    registry.register("environments", id, entry_point)
    _tell_gymnasium(id, nondeterministic=nondeterministic)


def make(id: str, **kwargs: Any) -> Any:
    """The environment behind an id, a `module:attribute` or a `path/to/file.py:attribute`, without any wrapper, except
    with a `render_mode` (`"ansi"`, `"human"`) that the environment does not take as its own argument.

    Raises UnknownIdError naming the nearest known ids, UsageError for arguments that the constructor does not take: of
    another name, or of another kind where it is annotated as a number, a text or a truth value."""
    env_maker, arguments = registry.resolve("environments", id), dict(kwargs)
    annotated = _plain(env_maker) if isinstance(env_maker, type | FunctionType) else dict[str, _Kinds]()
    for argument_name in arguments.keys() & annotated.keys():
        value, kinds = arguments[argument_name], annotated[argument_name]
        # Checked here, since Python does not: `turns = "8"` in a run file would fail in the middle of an episode, far
        # from the line that said it, and count as the environment's failure.
        if not any(_is(value, kind) for kind in kinds):
            raise UsageError(
                f"{id}: {argument_name} = {value!r}: give {' or '.join(_KIND_NAMES[kind] for kind in kinds)}"
            )
    render_mode = (
        None if "render_mode" in inspect.signature(env_maker).parameters else arguments.pop("render_mode", None)
    )
    try:
        made_env = env_maker(**arguments)
    except TypeError as error:
        raise UsageError(f"{id} cannot be made with {arguments}: {error}{_nearer(env_maker, arguments)}") from error
    if isinstance(made_env, gymnasium.Env) and made_env.spec is None and ":" not in id:  # pyright: ignore[reportUnknownMemberType]
        made_env.spec = EnvSpec(
            id=id,
            entry_point=functools.partial(make, id),
            kwargs=kwargs,
            order_enforce=False,
            disable_env_checker=True,
        )
    return made_env if render_mode is None else _rendered(made_env, render_mode)  # pyright: ignore[reportUnknownVariableType]


def _nearer(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """For each argument that nothing is called, the nearest that there is; all of them if none is near."""
    parameter_names = [
        parameter.name
        for parameter in parameters_of(maker)
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    near_names = [
        (argument_name, registry.nearest(argument_name, parameter_names))
        for argument_name in arguments
        if argument_name not in parameter_names
    ]
    corrections = [
        f"{argument_name!r} is near {nearest_names[0]!r}"
        for argument_name, nearest_names in near_names
        if nearest_names
    ]
    if corrections or not near_names:
        return f"; {', '.join(corrections)}" if corrections else ""
    return f"; it takes {', '.join(parameter_names) or 'none'}"


def parameters_of(maker: Any) -> list[inspect.Parameter]:
    """The constructor's parameters; if it passes arguments on to a base class, that class's parameters too."""
    parameters_by_name: dict[str, inspect.Parameter] = {}
    mro_classes: tuple[type, ...] = maker.__mro__ if inspect.isclass(maker) else ()
    constructors: list[Any] = [
        base_class.__dict__["__init__"]
        for base_class in mro_classes
        if base_class is not object and "__init__" in base_class.__dict__
    ]
    for constructor in constructors if mro_classes else [maker]:
        parameters = [
            parameter for parameter in inspect.signature(constructor).parameters.values() if parameter.name != "self"
        ]
        inherited = bool(parameters_by_name)  # the class itself passes the arguments that a base class requires
        parameters_by_name |= {
            parameter.name: parameter
            for parameter in parameters
            if parameter.name not in parameters_by_name and not (inherited and parameter.default is parameter.empty)
        }
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
        parameters_by_name = {
            parameter_name: parameter
            for parameter_name, parameter in parameters_by_name.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
    return list(parameters_by_name.values())


@functools.lru_cache(256)
def _plain(maker: type | FunctionType) -> dict[str, _Kinds]:
    """The parameters whose annotations name only kinds that a run file can check, with these kinds."""
    try:
        type_hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    except (NameError, TypeError, AttributeError):  # somebody's annotations may be anything
        return {}
    kinds_by_name = {
        parameter_name: get_args(type_hint) if get_origin(type_hint) in (Union, UnionType) else (type_hint,)
        for parameter_name, type_hint in type_hints.items()
    }
    return {
        parameter_name: annotated_kinds
        for parameter_name, annotated_kinds in kinds_by_name.items()
        if all(isinstance(annotated_kind, type) and annotated_kind in _KIND_NAMES for annotated_kind in annotated_kinds)
    }


def _is(value: Any, kind: type) -> bool:
    # A truth value is an integer in Python, and `seed = true` is a slip.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))  # numpy's too


def _rendered(env: Any, mode: str) -> Any:
    if mode not in (render_modes := env.metadata["render_modes"]):
        raise UsageError(f"render_mode = {mode!r}: give one of {', '.join(render_modes)}")
    env.render_mode = mode
    return registry.load_reference("agentrl.env.gymnasium_wrappers:Rendered")(env)  # by name: env is above this module


def make_vec(
    id: str,
    num_envs: int = 1,
    *,
    vectorization_mode: Literal["sync", "async"] = "sync",
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """`num_envs` environments behind an id as one `gymnasium.vector.VectorEnv`: in this process (`sync`) or one process
    each (`async`). Observations and actions are tuples of messages and of texts, which travel by pipe: shared
    memory, which bounds their length, is off. `kwargs` go to the environments, `vector_kwargs` to the vector class.

    Raises UsageError for `num_envs` below 1, for another mode, and if `vector_kwargs` asks for shared memory."""
    if num_envs < 1:
        raise UsageError(f"num_envs = {num_envs}: give 1 or more")
    vector_settings = dict(vector_kwargs or {})
    if vector_settings.pop("shared_memory", False):
        raise UsageError("shared_memory = True: messages go by pipe here, leave it out")
    env_makers = [functools.partial(make, id, **kwargs)] * num_envs
    if vectorization_mode == "sync":
        return SyncVectorEnv(env_makers, **vector_settings)
    if vectorization_mode == "async":
        return AsyncVectorEnv(env_makers, shared_memory=False, **vector_settings)
    raise UsageError(f"vectorization_mode = {vectorization_mode!r}: give 'sync' or 'async'")


def register_all() -> None:
    """Register every environment of installed packages with gymnasium; ids that it knows already stay unchanged."""
    for environment_id in registry.ids("environments"):
        if environment_id not in gymnasium.registry:
            _tell_gymnasium(environment_id)


def _tell_gymnasium(id: str, *, nondeterministic: bool = False) -> None:
    # gymnasium warns when an id is registered again, which a notebook does with every second run of a cell.
    gymnasium.registry.pop(id, None)
    gymnasium.register(  # pyright: ignore[reportUnknownMemberType]
        id,
        functools.partial(make, id),
        nondeterministic=nondeterministic,
        additional_wrappers=(_JUDGED,),
    )


register_all()
