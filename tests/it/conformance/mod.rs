//! What a lock has to do, shown on every store: one list of behaviours, run on each backend; and, in
//! `broken`, what known designs do instead. docs/conformance.md says which statement each test holds.
//!
//! A behaviour that is in no list below is dead code, which is refused; so none is left out for one
//! store.

mod backend;
mod broken;
mod fencing;
mod grants;
mod losses;
pub mod memory_face;
mod operating;
mod reentry;
mod releases;
mod renewals;
mod serving;
mod validity;
mod waiting;

use backend::{Memory, Redis};

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

/// Every behaviour of a lock, on the backend that is given.
macro_rules! every_behaviour_on {
    ($backend:expr) => {
        shown! { $backend;
            grants:
                a_count_is_right_over_clients_and_threads
                holders_are_inside_one_at_a_time
                locks_of_other_names_are_not_in_the_way
                clients_of_other_prefixes_are_not_in_the_way
                contention_is_no_error
                each_grant_has_an_id_of_its_own
                the_ttl_stands_from_the_first_moment
                who_fails_to_take_it_does_not_prolong_it
                a_holder_that_crashed_keeps_it_for_its_ttl_only;
            validity:
                validity_is_the_ttl_less_the_drift_and_the_time_to_ask
                validity_ends_before_the_lock_does
                validity_goes_on_with_a_renewal_and_with_an_extension
                past_its_validity_a_lock_cannot_be_extended
                extending_beyond_max_hold_is_refused;
            releases:
                a_released_lock_is_free_at_once
                a_dropped_lock_is_free_soon
                a_late_release_leaves_the_next_holders_lock_alone
                a_release_of_an_expired_lock_is_told_to_who_asks
                a_release_of_a_forgotten_lock_is_told
                work_whose_lock_was_lost_has_no_value
                work_is_not_done_without_the_lock
                work_that_panics_lets_go
                letting_go_twice_is_harmless
                a_lock_is_let_go_on_whichever_thread;
            renewals:
                a_lock_outlives_its_ttl_while_it_is_held
                renewal_puts_the_ttl_back_and_never_adds_to_it
                a_ttl_of_ones_own_is_renewed_only_when_asked_for
                renewal_stops_at_the_release
                a_holder_renews_no_lock_but_its_own
                max_hold_ends_a_hold_however_often_it_was_renewed
                many_locks_are_renewed_at_once;
            losses:
                a_loss_is_told_in_every_way
                a_loss_is_told_once_and_for_good
                a_release_is_no_loss
                a_callback_may_take_the_lock_again;
            waiting:
                who_waits_is_let_in_by_a_release
                who_waits_is_let_in_when_the_store_forgets
                a_wait_is_bounded_by_how_long_a_holder_may_hold
                one_of_many_is_let_in_when_a_lock_expires
                who_waits_for_a_while_gives_up_then
                a_deadline_in_the_past_is_one_try
                a_wait_that_is_cancelled_ends
                clients_have_their_turns_in_the_order_they_came
                who_has_gone_is_passed_over
                threads_of_one_client_have_their_turns_in_the_order_they_came
                a_busy_client_leaves_others_their_turn
                a_shutdown_ends_waits_and_holds_and_keeps_what_is_held;
            operating:
                a_lock_says_who_has_it
                a_crashed_holder_can_be_named
                a_client_knows_what_it_holds
                a_lock_taken_away_is_the_next_in_lines
                a_lock_handed_over_stays_held_until_it_is_adopted
                a_ticket_nobody_adopts_ends_with_its_ttl
                an_adopted_lock_is_renewed_by_who_adopted_it;
            reentry:
                a_mutex_is_not_reentrant
                threads_of_one_client_do_not_enter_one_anothers_locks
                a_reentrant_lock_is_free_after_as_many_releases
                a_reentrant_lock_keeps_other_threads_of_its_client_out;
            fencing:
                tokens_rise_with_every_grant
                a_late_holders_write_is_refused
                a_deleted_value_refuses_late_holders
                a_value_with_a_ttl_expires;
        }
    };
}

/// What needs a server: see [`backend::Serving`]. The one list of what a store without one cannot do.
macro_rules! every_behaviour_of_a_server_on {
    ($backend:expr) => {
        shown! { $backend;
            serving:
                a_foreign_value_is_left_alone
                a_lock_without_a_ttl_is_given_one_by_whoever_fails_to_take_it
                a_key_deleted_by_hand_is_told_as_deleted
                a_key_overwritten_is_told_as_taken_over_and_by_whom
                renewal_survives_broken_connections
                a_server_that_stands_still_is_an_error_and_no_hang
                a_grant_that_comes_too_late_to_be_believed_is_asked_for_again
                a_failed_release_is_reported
                a_failed_renewal_is_told_and_then_the_loss
                data_is_not_written_after_a_loss
                no_key_or_connection_is_left_behind;
        }
    };
}

mod memory {
    every_behaviour_on!(super::Memory::start());
}

mod redis {
    every_behaviour_on!(super::Redis::start());
    every_behaviour_of_a_server_on!(super::Redis::start());
}
