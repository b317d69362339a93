# SPDX-License-Identifier: Apache-2.0
"""The sampler registry makes samplers from names, paths or specs. It alone imports users' samplers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import CALLABLE_KEY, BaseSampler
from transfer_queue.sampler.group_sampler import GroupSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.token_budget_sampler import TokenBudgetSampler

BUILT_IN: dict[str, type[BaseSampler]] = {
    cls.__name__: cls
    for cls in (
        SequentialSampler,
        GRPOGroupNSampler,
        GroupSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        TokenBudgetSampler,
    )
}
_BY_PATH = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in BUILT_IN.values()}


def resolve(spec: object, allowed_modules: Iterable[str] = ()) -> BaseSampler:
    """Build a sampler.

    Args:
        spec: A built-in's name, ``"module:Class"``, the dict of ``BaseSampler.spec()``, an instance or a class.
        allowed_modules: Modules or packages that may be imported for it. Built-ins need none.
    Raises:
        SamplerError: Unknown or forbidden class, or arguments that don't fit; is a ValueError.
        TypeError: Any other kind of object.
    """
    allowed = tuple(allowed_modules)
    if isinstance(spec, str):
        return _construct(_find_class(spec, allowed), [], {})
    if isinstance(spec, dict):
        return _from_dict(spec, allowed)
    return as_sampler(spec)


def as_sampler(obj: object) -> BaseSampler:
    """Return a sampler instance unchanged, and build a class without arguments; TypeError for anything else."""
    if isinstance(obj, BaseSampler):
        return obj
    if isinstance(obj, type) and issubclass(obj, BaseSampler):
        return _construct(obj, [], {})
    raise TypeError(f"a sampler is an instance or subclass of BaseSampler, got {obj!r}.")


def _from_dict(spec: dict[Any, Any], allowed: tuple[str, ...]) -> BaseSampler:
    path, args, kwargs = spec.get("class"), spec.get("args", []), spec.get("kwargs", {})
    well_formed = isinstance(path, str) and isinstance(args, (list, tuple)) and isinstance(kwargs, dict)
    if not well_formed or not set(spec) <= {"class", "args", "kwargs"}:
        raise SamplerError(
            f'a sampler spec looks like {{"class": "module:Class", "args": [...], "kwargs": {{...}}}}, got {spec!r}.'
        )
    cls = _find_class(str(path), allowed)
    return _construct(
        cls, [_decode(value, allowed) for value in args], {name: _decode(kwargs[name], allowed) for name in kwargs}
    )


def _find_class(path: str, allowed: tuple[str, ...]) -> type[BaseSampler]:
    built_in = BUILT_IN.get(path) or _BY_PATH.get(path)
    if built_in is not None:
        return built_in
    module, colon, name = path.partition(":")
    if not colon:
        nearest = difflib.get_close_matches(path, BUILT_IN, n=1, cutoff=0.0)[0]
        raise SamplerError(
            f"Could not find sampler {path!r}. Did you mean {nearest!r}? Built in: {', '.join(BUILT_IN)}. "
            f'A sampler of your own is named "module:Class".'
        )
    found = _import(module, name, allowed)
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise SamplerError(f"{path!r} is {found!r}, no subclass of BaseSampler.")
    return found


def _import(module: str, name: str, allowed: tuple[str, ...]) -> Any:
    if not _is_allowed(module, allowed):
        raise SamplerError(
            f"module {module!r} may not be imported for a sampler (allowed: {', '.join(allowed) or 'none'}). "
            f"Add it, or a package above it, to controller.sampler_modules (a TQDataModule: queue.sampler_modules)."
        )
    try:
        return resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        hint = " Move it from the script into a module of its own." if module == "__main__" else ""
        raise SamplerError(f"can't import {module}:{name} here: {error}.{hint}") from error


def _is_allowed(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in allowed)


def _decode(value: Any, allowed: tuple[str, ...]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_decode(item, allowed) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {CALLABLE_KEY}:
        return {key: _decode(item, allowed) for key, item in value.items()}
    path = str(value[CALLABLE_KEY])
    module, _, name = path.partition(":")
    function = _import(module, name, allowed)
    # An allowed module may have imported other functions (say, os.system), which are not its own code.
    if not callable(function) or not _is_allowed(getattr(function, "__module__", None) or "", allowed):
        raise SamplerError(f"{path!r} is {function!r}, no function defined in an allowed module.")
    return function


def _construct(cls: type[BaseSampler], args: list[Any], kwargs: dict[str, Any]) -> BaseSampler:
    if inspect.isabstract(cls):
        raise SamplerError(f"{cls.__qualname__} is abstract: implement {', '.join(sorted(cls.__abstractmethods__))}.")
    try:
        return cls(*args, **kwargs)
    except TypeError as error:
        # The signature of __init__: inspect prefers __new__, which takes anything.
        parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
        signature = inspect.Signature(parameters)
        raise SamplerError(f"can't build {cls.__qualname__}{signature}: {error}.") from error
