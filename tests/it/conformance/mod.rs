//! The behaviours of a lock, as one list that runs on each backend. `counterexamples` has the mistakes of known
//! designs. docs/conformance.md says which requirement each test checks.
//!
//! The compiler refuses a behaviour that no list below names, since it is dead code. So every behaviour runs on the
//! stores of its list.

mod admin;
mod backend;
mod counterexamples;
pub mod election;
mod fencing;
mod grants;
mod losses;
pub mod memory_store;
mod once;
mod reentrant;
mod releases;
mod renewals;
mod rw_lock;
mod server_faults;
mod sets;
mod shares;
mod validity;
mod waiting;

use backend::{
    Memory, Quorum, QuorumInMemory, Redis, RedisCluster, RedisClusterOfMasters, RedisUnderSentinel,
};

macro_rules! shown {
    ($backend:expr; $($subject:ident: $($behaviour:ident)+;)+) => {
        $($(
            #[test]
            fn $behaviour() {
                #[allow(unused_mut)]
                let mut backend = $backend;
                super::$subject::$behaviour(&mut backend);
            }
        )+)+
    };
}

/// Runs every behaviour of a lock on the given backend.
macro_rules! every_behaviour_on {
    ($backend:expr) => {
        every_behaviour_of_servers_that_vote_on!($backend);
        shown! { $backend;
            waiting:
                a_release_admits_a_waiter
                a_flush_admits_a_waiter
                max_hold_bounds_a_wait
                an_expired_lock_admits_one_of_many
                a_wait_ends_at_its_limit
                a_wait_that_is_cancelled_ends
                clients_are_served_in_arrival_order
                departed_waiters_are_skipped
                a_busy_client_starves_no_other
                shutdown_ends_waits_and_keeps_locks_in_redis;
            admin:
                locks_lists_the_locks_of_all_clients
                force_unlock_grants_the_next_waiter
                a_transferred_lock_stays_held_until_adopted
                an_unused_ticket_ends_with_its_ttl
                an_adopted_lock_is_renewed_by_its_adopter
                an_adopted_lock_has_a_greater_token;
            once:
                work_runs_once_for_its_name
                waiters_get_the_record_or_run_the_work
                work_of_a_crashed_process_runs_again_or_is_interrupted
                a_long_run_is_not_taken_over
                a_late_record_is_refused;
            election:
                observers_see_each_leader_and_its_values
                one_candidate_leads_at_a_time
                a_crashed_leader_is_replaced
                a_term_outlives_its_ttl
                a_term_is_handed_over_without_a_vacancy
                elections_of_similar_names_are_independent
                a_cancelled_campaign_leaves_nothing
                a_flush_ends_the_term_and_observers_know;
            shares:
                a_semaphore_admits_its_number_and_no_more
                permits_are_granted_together_or_not_at_all
                small_requests_wait_behind_a_big_one
                the_limit_belongs_to_the_caller
                impossible_permits_are_refused
                permits_are_renewed_each_for_itself
                a_crashed_holders_permit_passes_to_a_waiter
                lost_permits_are_reported
                a_cancelled_wait_for_permits_leaves_nothing
                a_waiter_that_leaves_lets_others_in
                a_mutex_excludes_permits
                force_unlock_takes_the_permits_of_one_holder
                min_hold_limits_how_often_work_starts
                min_hold_outlasts_a_crash;
            rw_lock:
                readers_share_and_writers_exclude
                a_waiting_writer_keeps_new_readers_out
                a_writer_enters_when_the_last_reader_ends
                readers_behind_a_writer_enter_together
                a_writer_that_leaves_lets_readers_in
                readers_are_renewed_each_for_itself
                guards_of_readers_share_a_lease
                force_unlock_takes_one_reader
                a_downgrade_lets_readers_in_and_keeps_writers_out
                a_converted_lock_is_renewed
                an_upgrade_is_refused_beside_another_reader
                two_upgraders_never_both_write
                odd_names_are_locks_of_their_own
                readers_and_permits_do_not_mix;
            sets:
                one_of_ten_gets_the_set;
            fencing:
                a_late_holders_write_is_refused
                a_deleted_value_refuses_late_holders
                a_value_with_a_ttl_expires;
        }
    };
}

/// Runs the behaviours that servers have, too, if they vote at once after they have lost their data, and if time passes
/// for requests as it does for tests: a quorum in memory drops requests that are under way while a test moves its clock.
macro_rules! every_behaviour_of_servers_that_vote_on {
    ($backend:expr) => {
        every_behaviour_of_a_quorum_on!($backend);
        shown! { $backend;
            releases:
                unlock_of_a_deleted_lock_fails;
            renewals:
                a_holder_renews_no_lock_but_its_own;
            losses:
                a_loss_is_reported_in_every_way;
            sets:
                a_lost_key_is_named
                a_fixed_ttl_counts_from_the_last_grant
                a_limit_of_a_hold_counts_from_the_last_grant;
        }
    };
}

/// Runs the behaviours that a quorum has, too. It has no fenced values and no tickets; its waiters are in no queue of
/// Redis, where a test could see them; and if all nodes lose their data, nobody votes until its locks have
/// ended.
macro_rules! every_behaviour_of_a_quorum_on {
    ($backend:expr) => {
        shown! { $backend;
            grants:
                clients_and_threads_lose_no_update
                holders_exclude_each_other
                locks_of_other_names_are_independent
                clients_of_other_prefixes_are_independent
                contention_is_no_error
                each_grant_has_its_own_id
                a_grant_has_its_ttl_at_once
                a_failed_attempt_does_not_prolong_the_lock
                a_crashed_holder_blocks_for_its_ttl_only;
            validity:
                validity_is_ttl_minus_drift_and_request_time
                validity_ends_before_the_lock_does
                renewals_and_extensions_prolong_validity
                a_lock_past_validity_cannot_be_extended
                extending_beyond_max_hold_is_refused;
            releases:
                a_released_lock_is_free_at_once
                a_dropped_lock_is_free_soon
                a_late_release_leaves_the_next_holders_lock_alone
                unlock_of_an_expired_lock_is_an_error
                closures_whose_lock_was_lost_return_no_value
                a_closure_never_runs_without_the_lock
                a_panicking_closure_releases_the_lock
                releasing_twice_is_harmless
                a_lock_can_be_released_on_any_thread;
            renewals:
                a_held_lock_outlives_its_ttl
                renewal_resets_the_ttl_and_adds_nothing
                a_ttl_is_renewed_unless_fixed
                renewal_stops_at_the_release
                max_hold_ends_a_renewed_hold
                many_locks_are_renewed_at_once;
            losses:
                a_loss_is_reported_once_and_final
                a_release_is_no_loss
                a_callback_may_take_the_lock_again;
            waiting:
                a_deadline_in_the_past_is_one_try
                threads_of_one_client_served_in_arrival_order;
            admin:
                inspect_names_the_holder
                inspect_names_a_crashed_holder
                held_locks_lists_the_clients_locks;
            reentrant:
                a_mutex_is_not_reentrant
                threads_of_one_client_exclude_each_other
                reentrant_locks_are_free_after_the_last_release
                a_reentrant_lock_excludes_other_threads;
            fencing:
                tokens_rise_with_every_grant;
            sets:
                a_set_has_all_keys_or_none
                a_set_needs_different_keys
                sets_in_opposite_order_finish
                a_waiting_set_holds_the_keys_before
                a_set_that_gives_up_leaves_nothing
                sets_and_single_locks_exclude_each_other
                a_set_is_renewed_and_extended;
        }
    };
}

/// Runs the behaviours that need a server: see [`backend::Serving`]. This is the one list of what a store
/// without a server cannot do.
macro_rules! every_behaviour_of_a_server_on {
    ($backend:expr) => {
        shown! { $backend;
            server_faults:
                a_foreign_value_is_left_alone
                failed_attempts_give_an_immortal_lock_a_ttl
                a_deleted_key_is_reported_as_deleted
                overwritten_keys_are_reported_with_their_new_holder
                renewal_survives_broken_connections
                a_stopped_server_is_an_error
                a_grant_beyond_its_validity_is_requested_again
                a_restart_with_all_data_costs_nothing
                a_restart_without_data_ends_holds_only
                a_failed_release_is_reported
                a_failed_renewal_is_reported_before_the_loss
                data_is_not_written_after_a_loss
                nothing_is_left_in_redis;
        }
    };
}

mod memory {
    every_behaviour_on!(super::Memory::start());
}

mod quorum_of_three_in_memory {
    every_behaviour_of_a_quorum_on!(super::QuorumInMemory::start(3));
    shown! { super::QuorumInMemory::start(3);
        shares:
            a_quorum_has_no_shares;
    }
}

mod quorum_of_five_in_memory {
    every_behaviour_of_a_quorum_on!(super::QuorumInMemory::start(5));
}

mod quorum_of_three {
    every_behaviour_of_servers_that_vote_on!(super::Quorum::start(3));
}

mod redis {
    every_behaviour_on!(super::Redis::start());
    every_behaviour_of_a_server_on!(super::Redis::start());
}

mod redis_cluster {
    every_behaviour_on!(super::RedisCluster::start());
    every_behaviour_of_a_server_on!(super::RedisClusterOfMasters::start());
}

mod redis_under_a_sentinel {
    every_behaviour_on!(super::RedisUnderSentinel::start());
    every_behaviour_of_a_server_on!(super::RedisUnderSentinel::start());
}
