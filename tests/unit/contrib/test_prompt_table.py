# SPDX-License-Identifier: Apache-2.0
"""The table of verl's prompts: after any changes it is what a new list of the same keys would make."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.client.key_watch import KeyChanges
from transfer_queue.contrib.prompt_table import STATUSES, PromptTable

PROMPT = st.fixed_dictionaries(
    {"is_prompt": st.just(True), "status": st.sampled_from(STATUSES), "global_steps": st.integers(0, 3)}
)
TRAJECTORY = st.fixed_dictionaries({"seq_len": st.integers(1, 3)}, optional={"is_prompt": st.just(False)})
KEYS = st.sampled_from(["p", "q", "r", "p_0_0", "p_1_0", "q_0_0"])
CHANGES = st.lists(st.tuples(st.dictionaries(KEYS, PROMPT | TRAJECTORY), st.lists(KEYS)), max_size=8)


def contents(table: PromptTable) -> tuple[Any, ...]:
    return table.trajectories, table.prompts, table.steps


def prompt(status: str, step: int = 0) -> dict[str, Any]:
    return {"is_prompt": True, "status": status, "global_steps": step}


def test_prompts_are_kept_by_status_and_everything_else_is_a_trajectory():
    table = PromptTable()
    table.apply(KeyChanges({"p": prompt("running", 3), "p_0_0": {"seq_len": 2}}, [], fresh=True))
    table.apply(KeyChanges({"p": prompt("finished", 3), "q": prompt("failure", 4), "r": prompt("pending", 5)}, []))
    table.apply(KeyChanges({}, ["r"]))
    assert table.trajectories == {"p_0_0": {"seq_len": 2}}
    assert table.prompts == {"pending": set(), "running": set(), "finished": {"p"}, "failure": {"q"}}
    assert table.steps == {"p": 3, "q": 4}
    assert table.num_ended() == 2


@given(CHANGES, st.lists(KEYS))
def test_the_changes_make_what_one_list_makes(history, cleared_by_verl):
    table, keys = PromptTable(), {}
    kinds: dict[str, bool] = {}
    for changed, removed in history:
        # A key stays a prompt or a trajectory as long as it is there.
        changed = {
            key: tags for key, tags in changed.items() if kinds.setdefault(key, "status" in tags) == ("status" in tags)
        }
        keys = {key: tags for key, tags in keys.items() if key not in removed} | changed
        table.apply(KeyChanges(changed, removed))
    for key in cleared_by_verl:  # it removes them from the containers, and hears of it later
        table.trajectories.pop(key, None)
        table.steps.pop(key, None)
        for members in table.prompts.values():
            members.discard(key)
    table.apply(KeyChanges({}, cleared_by_verl))
    listed = PromptTable()
    listed.apply(KeyChanges({key: tags for key, tags in keys.items() if key not in cleared_by_verl}, [], fresh=True))
    assert contents(table) == contents(listed)


def test_the_containers_stay_the_same_objects():
    table = PromptTable()
    before = [id(each) for each in (*contents(table), *table.prompts.values())]
    table.apply(KeyChanges({"p": prompt("running"), "p_0_0": {}}, []))
    table.apply(KeyChanges({"p": prompt("finished")}, ["p_0_0"]))
    assert before == [id(each) for each in (*contents(table), *table.prompts.values())]


def test_an_unknown_status_is_named():
    with pytest.raises(ValueError, match=r"prompt 'p' has status 'done', which is none of pending, running, finished"):
        PromptTable().apply(KeyChanges({"p": prompt("done")}, []))


def test_without_verl_its_sampler_says_what_is_missing():
    program = "import sys; sys.modules['verl'] = None; import transfer_queue.contrib.verl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: transfer_queue.contrib.verl needs verl with its V1 trainers" in done.stderr
