//! Integration tests: one binary, real servers, injected faults.
#![allow(missing_docs, clippy::unwrap_used)]

mod bad_input;
mod cancelling;
mod child;
mod contention_faults;
mod drop_order;
mod early_loss;
mod events;
mod examples;
mod exclusion;
mod expiry;
mod fakes;
mod faults_acquire;
mod faults_hold;
mod faults_proxy;
mod faults_rare;
mod faults_release;
#[cfg(unix)]
mod forked;
mod guards;
mod hand_offs;
mod leftovers;
mod order;
mod reentrant;
mod release_events;
mod renewal_checks;
mod scale;
mod scripts;
mod shutdown;
mod steady;
mod support;
mod waiting;
mod wake_ups;
mod watchdog;
