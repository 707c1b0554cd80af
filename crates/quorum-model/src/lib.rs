//! A model of the protocol of a quorum's lock. A model checker visits every state that the model can reach.
//! `cargo test -p leasehold-quorum-model -- --nocapture` shows the ways in which a promise is broken without one of
//! the rules.

#![cfg(test)]

mod check;
mod lock;

const NODES: usize = 3;
/// The time at which a model begins. The quarantines of all nodes are over by then.
const START: Tick = 3;

type Tick = u8;
