//! Integration tests: one binary, real servers, injected faults.
#![allow(missing_docs, clippy::unwrap_used)]

mod bad_input;
mod child;
mod drop_order;
mod events;
mod exclusion;
mod expiry;
mod fakes;
mod faults_acquire;
mod faults_hold;
mod faults_proxy;
mod faults_rare;
mod faults_release;
mod guards;
mod leftovers;
mod scale;
mod scripts;
mod shutdown;
mod steady;
mod support;
mod waiting;
mod watchdog;
