//! Models of the protocols of locks. A model checker visits every state that a model can reach.
//! `cargo test -p leasehold-models -- --nocapture` shows the steps that break a promise without one of the rules, and
//! the time that the checker needs to find them.

#![cfg(test)]

mod check;
mod quorum;
mod shares;

type Tick = u8;
type Token = u8;
