"""Ids of environments, in our registry and in gymnasium's, so that `agentrl.make` and `gymnasium.make` both know them.

An environment's code is imported only when the environment is made.
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
    maker, arguments = registry.resolve("environments", id), dict(kwargs)
    annotated = _plain(maker) if isinstance(maker, type | FunctionType) else dict[str, _Kinds]()
    for name in arguments.keys() & annotated.keys():
        value, kinds = arguments[name], annotated[name]
        # Checked here, since Python does not: `turns = "8"` in a run file would fail in the middle of an episode, far
        # from the line that said it, and count as the environment's failure.
        if not any(_is(value, kind) for kind in kinds):
            raise UsageError(f"{id}: {name} = {value!r}: give {' or '.join(_KIND_NAMES[kind] for kind in kinds)}")
    mode = None if "render_mode" in inspect.signature(maker).parameters else arguments.pop("render_mode", None)
    try:
        env = maker(**arguments)
    except TypeError as error:
        raise UsageError(f"{id} cannot be made with {arguments}: {error}{_nearer(maker, arguments)}") from error
    if isinstance(env, gymnasium.Env) and env.spec is None and ":" not in id:  # pyright: ignore[reportUnknownMemberType]
        env.spec = EnvSpec(
            id=id,
            entry_point=functools.partial(make, id),
            kwargs=kwargs,
            order_enforce=False,
            disable_env_checker=True,
        )
    return env if mode is None else _rendered(env, mode)  # pyright: ignore[reportUnknownVariableType]


def _nearer(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """For each argument that nothing is called, the nearest that there is; all of them if none is near."""
    names = [
        parameter.name
        for parameter in parameters_of(maker)
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    near_names = [(name, registry.nearest(name, names)) for name in arguments if name not in names]
    hints = [f"{name!r} is near {near[0]!r}" for name, near in near_names if near]
    if hints or not near_names:
        return f"; {', '.join(hints)}" if hints else ""
    return f"; it takes {', '.join(names) or 'none'}"


def parameters_of(maker: Any) -> list[inspect.Parameter]:
    """The constructor's parameters; if it passes arguments on to a base class, that class's parameters too."""
    by_name: dict[str, inspect.Parameter] = {}
    classes: tuple[type, ...] = maker.__mro__ if inspect.isclass(maker) else ()
    constructors: list[Any] = [c.__dict__["__init__"] for c in classes if c is not object and "__init__" in c.__dict__]
    for function in constructors if classes else [maker]:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        inherited = bool(by_name)  # the class itself passes the arguments that a base class requires
        by_name |= {p.name: p for p in parameters if p.name not in by_name and not (inherited and p.default is p.empty)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
        by_name = {name: p for name, p in by_name.items() if p.kind is not p.VAR_KEYWORD}
    return list(by_name.values())


@functools.lru_cache(256)
def _plain(maker: type | FunctionType) -> dict[str, _Kinds]:
    """The parameters whose annotations name only kinds that a run file can check, with these kinds."""
    try:
        hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    except (NameError, TypeError, AttributeError):  # somebody's annotations may be anything
        return {}
    kinds_of = {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints.items()
    }
    return {
        name: kinds
        for name, kinds in kinds_of.items()
        if all(isinstance(kind, type) and kind in _KIND_NAMES for kind in kinds)
    }


def _is(value: Any, kind: type) -> bool:
    # A truth value is an integer in Python, and `seed = true` is a slip.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))  # numpy's too


def _rendered(env: Any, mode: str) -> Any:
    if mode not in (modes := env.metadata["render_modes"]):
        raise UsageError(f"render_mode = {mode!r}: give one of {', '.join(modes)}")
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
    settings = dict(vector_kwargs or {})
    if settings.pop("shared_memory", False):
        raise UsageError("shared_memory = True: messages go by pipe here, leave it out")
    each = [functools.partial(make, id, **kwargs)] * num_envs
    if vectorization_mode == "sync":
        return SyncVectorEnv(each, **settings)
    if vectorization_mode == "async":
        return AsyncVectorEnv(each, shared_memory=False, **settings)
    raise UsageError(f"vectorization_mode = {vectorization_mode!r}: give 'sync' or 'async'")


def register_all() -> None:
    """Register every environment of installed packages with gymnasium; ids that it knows already stay unchanged."""
    for id in registry.ids("environments"):
        if id not in gymnasium.registry:
            _tell_gymnasium(id)


def _tell_gymnasium(id: str, *, nondeterministic: bool = False) -> None:
    # gymnasium warns when an id is registered again, which a notebook does with every second run of a cell.
    gymnasium.registry.pop(id, None)
    gymnasium.register(  # pyright: ignore[reportUnknownMemberType]
        id,
        functools.partial(make, id),
        nondeterministic=nondeterministic,
        additional_wrappers=(_JUDGED,),
    )
