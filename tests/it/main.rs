//! Integration tests: one binary, real servers, injected faults.
#![allow(missing_docs, clippy::unwrap_used)]

mod admin;
mod bad_input;
mod broken_pipe;
mod busy_cores;
mod cancellation;
mod child;
mod closures;
mod cluster;
mod conformance;
mod connecting;
mod contention_cost;
mod contention_faults;
mod contention_recovery;
mod conversions;
mod drop_order;
mod election;
mod encryption;
mod environment;
mod events;
mod examples;
mod exclusion;
mod expiry;
mod fairness;
mod fakes;
mod faults_acquire;
pub mod faults_hold;
mod faults_proxy;
mod faults_rare;
mod faults_release;
mod fenced;
mod forked;
mod guards;
mod hand_offs;
mod health;
mod hostile;
mod idle_connections;
mod leaks;
mod least_privilege;
mod loss_events;
mod loss_notification;
mod mass_releases;
mod memory_outages;
mod migration;
mod mutexes;
mod notifications;
mod once;
mod other_libraries;
mod permits;
mod public_reports;
mod quorum;
mod redisson;
mod reentrant;
mod refusals;
mod release_events;
mod renewal_checks;
mod replicas;
mod scale;
mod scripts;
mod sentinel;
mod share_costs;
mod shares;
mod shutdown;
mod steady;
mod support;
mod switch_over;
mod thread_limit;
mod threads;
#[cfg(feature = "tls")]
mod tls;
mod transactions;
mod transfer;
mod types;
mod waiting;
mod watchdog;

/// In a child process this is not a test: it runs the body that the parent test named.
#[test]
fn a_child_process_runs_the_named_body() {
    let bodies = child::bodies![
        share_costs::hold_a_permit,
        shares::wait_to_write,
        shares::read_until_stopped,
        mutexes::wait_for_a_set,
        broken_pipe::write_on_closed_connections,
        cancellation::leaks::count_threads,
        child::echo,
        child::panic,
        election::lead_until_killed,
        election::observe_and_tell,
        conformance::memory_store::use_and_count_what_is_left,
        contention_faults::crashes::enter_once,
        contention_faults::crashes::hold_until_killed,
        contention_faults::crashes::wait_once,
        exclusion::raise_in_a_process_of_its_own,
        expiry::hold_until_killed,
        fenced::write_tokens_in_a_process_of_its_own,
        forked::a_busy_parent,
        forked::a_parent,
        forked::a_parent_in_a_transaction,
        forked::a_parent_with_a_memory,
        forked::two_sides,
        guards::signals::ask_for_many_signals,
        leaks::count_threads,
        once::run_until_killed,
        once::run_with_another_clock,
        permits::start_until_killed,
        public_reports::exit_in_on_lost,
        leaks::use_a_cluster,
        thread_limit::lock_on_many_servers_without_threads,
        thread_limit::lock_without_threads,
        threads::count_threads_of_clients,
        threads::count_threads_on_a_cluster,
        threads::count_threads_on_a_quorum,
        renewal_checks::count_threads,
        scale::hold_ten_thousand,
        scale::wait_by_the_hundred,
        sentinel::sentinels::count_threads_of_clients,
        transactions::money::move_money_in_a_process_of_its_own,
        transfer::processes::adopt_and_hand_over,
        transfer::processes::adopt_and_hold,
    ];
    #[cfg(feature = "tls")]
    let bodies = {
        let of_tls = child::bodies![tls::trust::lock_with_the_systems_authorities];
        [&bodies[..], &of_tls].concat()
    };
    if !child::run_body(&bodies) {
        let child = child::Child::start(child::echo, "memory://echo");
        assert_eq!(child.receive::<String>(6 * support::SOON), "memory://echo");
        child.finish(6 * support::SOON);
    }
}

#[test]
fn the_panic_of_a_child_process_is_the_parents_error() {
    let child = child::Child::start(child::panic, "memory://panic");
    let receive = std::panic::AssertUnwindSafe(|| child.receive::<String>(6 * support::SOON));
    let panicked = std::panic::catch_unwind(receive).unwrap_err();
    let error = panicked.downcast_ref::<String>().unwrap();
    assert!(error.contains("tests/it/child.rs"), "{error}");
    assert!(error.contains("no luck with memory://panic"), "{error}");
}
