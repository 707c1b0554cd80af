//! The ways in which known designs break, each written down as they do it, on a real Redis: the check
//! that ours passes finds it.

mod callers;
mod owners;
mod raw;
mod ttls;
mod watching;
