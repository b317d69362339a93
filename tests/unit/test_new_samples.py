# SPDX-License-Identifier: Apache-2.0
"""NewSamples and Aside: what is known of a put while it is on its way, and work for the time that it takes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.verbs.new_samples import Aside, NewSamples

from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.metadata_wire import to_specs


def new(tags=None) -> NewSamples:
    rows = TensorDict({"a": torch.zeros(3, 2), "b": torch.arange(3)}, batch_size=[3])
    schema = extract_field_schema(rows)
    return NewSamples("p", rows, to_specs(schema), schema, tags)


# ---- new samples ----


def test_tags_go_by_index_and_those_without_any_are_left_out():
    assert new([{"lr": 1}, {}, {"lr": 2}]).tags_of([7, 8, 9]) == {7: {"lr": 1}, 9: {"lr": 2}}
    assert new([{}, {}, {}]).tags_of([7, 8, 9]) == {}
    assert new().tags_of([7, 8, 9]) == {}


def test_tags_are_copies_that_the_caller_may_change_again():
    tags = [{"of": ["x"]}, {}, {}]
    told = new(tags).tags_of([7, 8, 9])
    tags[0]["of"].append("y")
    assert told == {7: {"of": ["x"]}}


@pytest.mark.parametrize("tags", [None, [{"lr": 1}, {}, {"lr": 2}]], ids=["bare", "tagged"])
def test_their_metadata_is_what_the_rows_and_tags_say_and_ready(tags):
    samples = new(tags)
    meta = samples.described([7, 8, 9])
    by_hand = BatchMeta([7, 8, 9], ["p"] * 3)
    by_hand.add_fields(samples.rows)
    by_hand.update_custom_meta(tags)
    assert (meta, meta.is_ready, meta.field_names) == (by_hand, True, ["a", "b"])
    assert meta.custom_meta == (tags or [{}, {}, {}])


def test_tags_that_were_published_with_the_rows_are_not_published_again():
    meta = new([{"lr": 1}, {}, {"lr": 2}]).described([7, 8, 9])
    assert meta.changed_custom_meta() == {}
    meta.update_custom_meta([{}, {"lr": 3}, {}])
    assert meta.changed_custom_meta() == {8: {"lr": 3}}


def test_two_puts_of_the_same_rows_share_no_metadata():
    samples = new([{"lr": 1}, {}, {}])
    one, other = samples.described([1, 2, 3]), samples.described([4, 5, 6])
    one.update_custom_meta([{"lr": 9}, {}, {}])
    one.production_status[:] = 0
    assert (other.custom_meta[0], other.is_ready) == ({"lr": 1}, True)


# ---- aside ----


class Work:
    """Returns how often it was done, and fails where it should."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        if self.error is not None:
            raise self.error
        return self.times


def test_work_that_found_time_is_not_done_again():
    work = Work()
    aside = Aside(work)
    aside()
    assert (aside.result(), aside.result(), work.times) == (1, 1, 1)


def test_work_that_found_no_time_is_done_when_its_result_is_needed():
    work = Work()
    aside = Aside(work)
    assert (work.times, aside.result(), aside.result()) == (0, 1, 1)


def test_what_the_work_raises_comes_up_where_the_result_is_needed():
    error = ValueError("no")
    aside = Aside(Work(error))
    aside()
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            aside.result()
        assert caught.value is error


def test_work_that_found_no_time_raises_where_the_result_is_needed():
    with pytest.raises(ValueError, match="no"):
        Aside(Work(ValueError("no"))).result()


def test_an_interrupt_is_not_kept_for_later():
    with pytest.raises(KeyboardInterrupt):
        Aside(Work(KeyboardInterrupt()))()


def test_a_result_of_none_is_a_result():
    done: list[None] = []
    aside = Aside(lambda: done.append(None))
    aside()
    assert (aside.result(), done) == (None, [None])
