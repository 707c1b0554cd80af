//! Mistakes of known designs, each written as that design does it, on a real Redis: the check that leasehold
//! passes finds each mistake.

mod callers;
mod owners;
mod raw;
mod transactions;
mod ttls;
