//! The process: whether it was forked, and the threads of a client.

pub mod fork;
pub mod threads;
