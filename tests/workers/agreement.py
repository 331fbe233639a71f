"""What one rank alone knows, hangs nobody: torchrun agreement.py <directory> <seconds> <case> ..., on three ranks.

Every rank writes to <directory>/<case>.rank<n> "ok", or what was wrong.
"""

from __future__ import annotations

from agreement_replicas import (
    another_default_device,
    batch_norm_by_rank,
    experts_by_rank,
    meshes_that_hold_the_same,
    one_slot,
    replicas_once,
    silent_corruption,
    weights_by_rank,
)
from agreement_saves import (
    a_last_save_that_one_rank_cannot_take,
    a_part_of_the_world,
    a_save_of_a_step_that_one_rank_has_given_up,
    a_slot_that_one_rank_cannot_write,
    a_state_dict_that_raises_behind_a_save,
    a_state_dict_that_raises_on_one_rank,
    a_state_dict_that_raises_where_ranks_compare,
    a_state_that_one_rank_cannot_save,
    a_step_that_one_rank_does_again,
    a_store_that_fails_one_rank,
    alone,
    clocks_that_differ,
    impatient,
    memory_that_one_rank_lacks_for_a_snapshot,
    no_room_on_one_rank,
    openings_that_fail,
    saved_again_after_one_rank_failed,
    saves_of_steps_that_differ,
    sigterm_at_different_steps,
    sigterm_in_a_loop_that_does_not_ask,
    steps_that_differ,
)
from agreement_state import (
    going_back,
    half_a_tensor,
    late_expert,
    late_sharded_expert,
    more_ranks,
    replicas_of_a_state_that_changes,
    values_of_one_rank,
    values_of_other_stages,
)
from rank_cases import run_cases

CASES = [
    going_back,
    late_expert,
    late_sharded_expert,
    half_a_tensor,
    clocks_that_differ,
    sigterm_at_different_steps,
    sigterm_in_a_loop_that_does_not_ask,
    steps_that_differ,
    saves_of_steps_that_differ,
    a_store_that_fails_one_rank,
    no_room_on_one_rank,
    a_last_save_that_one_rank_cannot_take,
    a_save_of_a_step_that_one_rank_has_given_up,
    a_state_dict_that_raises_where_ranks_compare,
    a_slot_that_one_rank_cannot_write,
    memory_that_one_rank_lacks_for_a_snapshot,
    a_state_dict_that_raises_on_one_rank,
    a_state_dict_that_raises_behind_a_save,
    a_step_that_one_rank_does_again,
    a_state_that_one_rank_cannot_save,
    alone,
    a_part_of_the_world,
    openings_that_fail,
    batch_norm_by_rank,
    weights_by_rank,
    experts_by_rank,
    replicas_once,
    one_slot,
    meshes_that_hold_the_same,
    silent_corruption,
    another_default_device,
    replicas_of_a_state_that_changes,
    impatient,
    saved_again_after_one_rank_failed,
    more_ranks,
    values_of_one_rank,
    values_of_other_stages,
]


if __name__ == "__main__":
    run_cases(CASES)
