# SPDX-License-Identifier: Apache-2.0
"""Rules of the sampler registry: what may be named, what may be imported, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue import sampler as package
from transfer_queue.errors import SamplerError
from transfer_queue.sampler.registry import BUILT_IN, as_sampler, resolve


class Own(SequentialSampler):
    """A user's sampler."""

    class Nested(SequentialSampler):
        """One inside another class."""


class Abstract(BaseSampler):
    """Lacks sample()."""


class Broken(SequentialSampler):
    """Raises for reasons of its own."""

    def __init__(self) -> None:
        raise ValueError("own reason")


def weigh(tags: dict[str, Any]) -> float:
    return float(len(tags))


def test_built_in_names_need_no_permission() -> None:
    assert list(BUILT_IN) == [
        "SequentialSampler",
        "GRPOGroupNSampler",
        "GroupSampler",
        "RankAwareSampler",
        "SeqlenBalancedSampler",
        "TokenBudgetSampler",
    ]
    assert type(resolve("RankAwareSampler")) is RankAwareSampler
    assert type(resolve(SequentialSampler().spec())) is SequentialSampler
    assert all(getattr(package, name) is kind for name, kind in BUILT_IN.items())


@pytest.mark.parametrize(
    ("sampler", "attributes"),
    [
        (GRPOGroupNSampler(4), {"n_samples_per_prompt": 4}),
        (RankAwareSampler(max_buffered_batches=3), {"max_buffered_batches": 3}),
        (SeqlenBalancedSampler(2, 4), {"n_samples_per_prompt": 2, "dp_size": 4, "weight": "total_lengths"}),
        (TokenBudgetSampler(100, dp_size=2), {"max_tokens": 100, "dp_size": 2}),
    ],
)
def test_a_spec_rebuilds_the_sampler(sampler: BaseSampler, attributes: dict[str, Any]) -> None:
    rebuilt = resolve(sampler.spec())
    assert type(rebuilt) is type(sampler)
    assert {name: getattr(rebuilt, name) for name in attributes} == attributes
    assert rebuilt.spec() == sampler.spec()


def test_a_short_class_name_does_in_a_spec() -> None:
    built = resolve({"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": 8}})
    assert isinstance(built, GRPOGroupNSampler)
    assert built.n_samples_per_prompt == 8


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"Could not find sampler 'GRPOSampler'. Did you mean 'GRPOGroupNSampler'\?"):
        resolve("GRPOSampler")
    with pytest.raises(SamplerError, match="Could not find sampler 'TransferQueueClient'"):
        resolve("TransferQueueClient")


def test_own_samplers_come_from_allowed_modules_only() -> None:
    assert type(resolve(f"{__name__}:Own", [__name__])) is Own
    assert type(resolve(f"{__name__}:Own.Nested", [__name__])) is Own.Nested
    with pytest.raises(SamplerError, match=rf"module '{__name__}' may not be .*controller\.sampler_modules"):
        resolve(f"{__name__}:Own", ["other"])
    with pytest.raises(SamplerError, match="may not be imported"):
        resolve(Own().spec())


def test_permission_covers_submodules_but_no_namesakes() -> None:
    with pytest.raises(SamplerError, match="no subclass of BaseSampler"):
        resolve("json.decoder:JSONDecoder", ["json"])
    with pytest.raises(SamplerError, match="may not be imported"):
        resolve("json.decoder:JSONDecoder", ["json.dec", "jso"])


@pytest.mark.parametrize("name", ["Missing", "Own.Missing", "weigh.x"])
def test_a_missing_class_is_told_by_its_path(name: str) -> None:
    with pytest.raises(SamplerError, match=f"can't import {__name__}:{name} here"):
        resolve(f"{__name__}:{name}", [__name__])


def test_a_missing_module_is_told_by_its_path() -> None:
    with pytest.raises(SamplerError, match="can't import no_such_module_of_ours:X here: No module"):
        resolve("no_such_module_of_ours:X", ["no_such_module_of_ours"])


@pytest.mark.parametrize("name", ["weigh", "BUILT_IN", "pytest"])
def test_what_is_no_sampler_class_is_refused(name: str) -> None:
    with pytest.raises(SamplerError, match="no subclass of BaseSampler"):
        resolve(f"{__name__}:{name}", [__name__])


def test_wrong_constructor_arguments_show_the_signature() -> None:
    with pytest.raises(SamplerError, match=r"can't build GRPOGroupNSampler\(n_samples_per_prompt: .*= 1\).*'n'"):
        resolve({"class": "GRPOGroupNSampler", "kwargs": {"n": 4}})
    with pytest.raises(SamplerError, match=r"can't build TokenBudgetSampler\(max_tokens.*missing"):
        resolve("TokenBudgetSampler")
    with pytest.raises(SamplerError, match="n_samples_per_prompt must be positive"):
        resolve({"class": "GRPOGroupNSampler", "args": [0]})
    with pytest.raises(ValueError, match="own reason"):
        resolve(f"{__name__}:Broken", [__name__])
    with pytest.raises(SamplerError, match="Abstract is abstract: implement sample"):
        resolve(f"{__name__}:Abstract", [__name__])


@pytest.mark.parametrize(
    "spec", [{}, {"class": 3}, {"class": "SequentialSampler", "args": "x"}, {"class": "SequentialSampler", "more": 1}]
)
def test_a_malformed_spec_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(SamplerError, match="a sampler spec looks like"):
        resolve(spec)


def test_functions_come_from_allowed_modules_only_and_must_be_their_own() -> None:
    spec = SeqlenBalancedSampler(weight=weigh).spec()
    assert spec["kwargs"] == {"weight": {"$callable": f"{__name__}:weigh"}}
    built = resolve(spec, [__name__])
    assert isinstance(built, SeqlenBalancedSampler)
    assert built.weight is weigh
    with pytest.raises(SamplerError, match="may not be imported"):
        resolve(spec)
    for path in ("os:abort", f"{__name__}:resolve", f"{__name__}:pytest.exit", f"{__name__}:BUILT_IN"):
        with pytest.raises(SamplerError, match=r"may not be imported|no function defined in an allowed module"):
            resolve({"class": "SeqlenBalancedSampler", "kwargs": {"weight": {"$callable": path}}}, [__name__])


def test_instances_and_classes_are_samplers_and_nothing_else_is() -> None:
    own = Own()
    assert as_sampler(own) is resolve(own) is own
    assert type(as_sampler(Own)) is type(resolve(Own)) is Own
    for other in (3, None, int, object()):
        with pytest.raises(TypeError, match="an instance or subclass of BaseSampler"):
            resolve(other)
    with pytest.raises(TypeError, match="an instance or subclass of BaseSampler, got 'SequentialSampler'"):
        as_sampler("SequentialSampler")
