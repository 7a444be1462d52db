"""Which secrets each kind of child gets, and which variables of the supervisor are withheld from it.

An engine needs neither the database nor the judges, the learner no judges. A worker runs the user's own code, which may
need any variable: nothing is withheld from it.
"""

from __future__ import annotations

from agentrl.config import RunConfig
from agentrl.host.child_environment import Withheld

_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of Hugging Face: the learner looks up the models of roles there


def withheld_from_engine(config: RunConfig) -> Withheld:
    """The secrets that an engine does not get."""
    return _withheld(config, frozenset(config.engine.secret_env), database=True)


def withheld_from_learner(config: RunConfig) -> Withheld:
    """The secrets that the learner does not get."""
    needed_names = {*config.engine.secret_env, config.engine.api_key_env or "", *_HUB}
    return _withheld(config, frozenset(needed_names), database=False)


def _withheld(config: RunConfig, needed: frozenset[str], *, database: bool) -> Withheld:
    judge_keys = frozenset(source.api_key_env for source in config.rewards if source.api_key_env)
    uses_object_store = config.engine.weights_url is not None  # whose package names its credentials as it likes
    # Withheld by default and handed out by name, not the other way round: a list of what to hide is always one variable
    # behind. The exception is an object store, whose client library reads variables that only its package knows.
    return Withheld(names=judge_keys - needed, database=database, others=not uses_object_store, needed=needed)


def engine_key_variables(config: RunConfig, *, signs: bool) -> dict[str, str]:
    """The variables of a process that asks the run's own engines, and with `signs` changes them."""
    engine_key = config.engine.own_key
    return {} if engine_key is None else engine_key.variables(signs=signs)
