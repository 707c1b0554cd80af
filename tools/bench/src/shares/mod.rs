//! Measures read-write locks, semaphores and sets of keys beside raw commands and Redisson. In each round, all ways of
//! a case run in turn, on one server.

pub mod cases;
pub mod load;
mod peer;
mod plot;
pub mod report;
mod run;

pub use peer::Redisson;
pub use plot::all as plots;
pub use run::case;
